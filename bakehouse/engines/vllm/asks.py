"""What a vLLM recipe needs its image to be able of, read from the recipe's own command. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from bakehouse.engines.vllm.flags import read
from bakehouse.plan.types import Asks
from bakehouse.recipe.model import Recipe


def asks_of(recipe: Recipe, argv: Sequence[str]) -> Asks:
    """What the image is asked for this recipe, whose rendered command is `argv`."""
    command = read(argv)
    roles = [role for role, _ in recipe.weights.items() if role in ("model", "drafter")]
    return Asks(
        roles=tuple(roles),
        reasoning_parser=command.parsers.get("reasoning"),
        tool_parser=command.parsers.get("tool"),
        speculation=command.method or ("draft_model" if command.drafter else None),
        compute_capability=recipe.host.compute_capability,
    )
