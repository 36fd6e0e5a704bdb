"""What a vLLM recipe needs its image to be able of, read from the recipe's own command. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from bakehouse.plan.types import Asks
from bakehouse.recipe.model import Recipe


def flag(argv: Sequence[str], *names: str) -> str | None:
    """Give a flag's value, written as `--name value` or `--name=value`; the last one counts."""
    found = None
    for place, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") not in names:
            continue
        if equals:
            found = value
        elif place + 1 < len(argv):
            found = argv[place + 1]
    return found


def speculative_method(argv: Sequence[str]) -> str | None:
    """The method in `--speculative-config`; `draft_model` where there is only a model."""
    text = flag(argv, "--speculative-config", "-sc")
    if text is None:
        return flag(argv, "--speculative-config.method")
    try:
        config = json.loads(text)
    except ValueError:
        return None
    if not isinstance(config, dict):
        return None
    method = config.get("method")
    return str(method) if method else ("draft_model" if config.get("model") else None)


def asks_of(recipe: Recipe, argv: Sequence[str]) -> Asks:
    """What the image is asked for this recipe, whose rendered command is `argv`."""
    roles = [role for role, _ in recipe.weights.items() if role in ("model", "drafter")]
    return Asks(
        roles=tuple(roles),
        reasoning_parser=flag(argv, "--reasoning-parser"),
        tool_parser=flag(argv, "--tool-call-parser"),
        speculation=speculative_method(argv),
    )
