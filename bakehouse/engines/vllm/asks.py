"""What a vLLM recipe needs its image to be able of, read from the recipe's own command. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from bakehouse.engines.vllm.flags import read
from bakehouse.plan.types import Asks
from bakehouse.recipe.model import Recipe


def asks_of(recipe: Recipe, argv: Sequence[str]) -> Asks:
    """What the image is asked for this recipe, whose rendered command is `argv`."""
    command = read(argv)
    roles = [role for role, _ in recipe.weights.items() if role in ("model", "drafter")]
    return Asks(
        roles=tuple(roles),
        overridden=_overridden(command.flags),
        reasoning_parser=command.parsers.get("reasoning"),
        tool_parser=command.parsers.get("tool"),
        speculation=command.method or ("draft_model" if command.drafter else None),
        compute_capability=recipe.host.compute_capability,
    )


def _overridden(flags: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Architectures that --hf-overrides names in the place of the config.json's own."""
    words = flags.get("--hf-overrides", ())
    try:
        told = json.loads(words[0]).get("architectures") if words else None
    except (ValueError, AttributeError):
        return {}
    names = tuple(name for name in told if isinstance(name, str)) if isinstance(told, list) else ()
    return {"model": names} if names else {}
