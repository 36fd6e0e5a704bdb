"""What a command's template may name: `server`, `name`, `serve`, `weights`, `vars`, `host`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from bakehouse.recipe.model import Recipe

NOT_SHOWN = frozenset({"command", "env", "api_key", "vars"})
"""Keys of `serve` that have no place in a command."""


class Paths(Protocol):
    """Where one role's weights lie, as the engine sees them."""

    @property
    def first(self) -> str:
        """The file to name: the only one, or the first shard."""

    @property
    def path(self) -> str:
        """The folder, or the single file."""

    @property
    def files(self) -> tuple[str, ...]:
        """All files, in order."""


@dataclass(frozen=True)
class StandIn:
    """Weights that are not there yet, so that a template can be tried."""

    first: str
    path: str
    files: tuple[str, ...]


def template_variables(
    recipe: Recipe, *, server: str, weights: Mapping[str, Paths]
) -> dict[str, Any]:
    """Give the variables for `argv.render`.

    Keys that a recipe leaves out, and roles that it has no weights for, are None: a template may
    ask for them with `{% if … %}`. Durations are seconds, sizes bytes; whole ones are integers.
    """
    serve = {k: v for k, v in recipe.serve.model_dump().items() if k not in NOT_SHOWN}
    roles = ("model", "drafter", "projector")
    return {
        "server": server,
        "name": recipe.name,
        "serve": {k: _whole(v) for k, v in serve.items()},
        "weights": {role: _paths(weights.get(role)) for role in roles},
        "vars": dict(recipe.serve.vars),
        "host": recipe.host.model_dump(),
    }


def trial_variables(recipe: Recipe) -> dict[str, Any]:
    """Give variables of the same shape before anything is built or fetched."""
    server = "vllm" if recipe.engine == "vllm" else "/build/bin/llama-server"
    weights = {}
    for role, _ in recipe.weights.items():
        folder = f"/weights/{role}"
        first = f"{folder}/{role}.gguf"
        weights[role] = StandIn(first, folder, (first,))
    return template_variables(recipe, server=server, weights=weights)


def _paths(paths: Paths | None) -> dict[str, Any] | None:
    if paths is None:
        return None
    return {"first": paths.first, "path": paths.path, "files": list(paths.files)}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value
