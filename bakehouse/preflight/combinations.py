"""Check a recipe for known-bad combinations.

`check` knows the recipe; `plan` and `build` also know the toolkit; `serve` also knows the headers
of the weights and this machine's GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from bakehouse.checkpoints.files import read_paths
from bakehouse.checkpoints.whole import Checkpoint
from bakehouse.checks import Check, Verdict
from bakehouse.context import Context
from bakehouse.errors import BakehouseError, Fault, RecipeError
from bakehouse.host import compute_capabilities
from bakehouse.lock import Lock
from bakehouse.preflight.known_bad import PREFIX, Row, judge, rows, situation_of
from bakehouse.preflight.rules import load_sound
from bakehouse.recipe.faults import shown
from bakehouse.recipe.load import Loaded
from bakehouse.recipe.model import Recipe
from bakehouse.toolkit.force import ARCHITECTURES


class Facts(Protocol):
    """A record that facts are added to."""

    def fact(self, name: str, value: object) -> None:
        """Record a fact."""


_ORDER = ("toolkit", "environment", "flags", "quantisation", "compute_capability")
"""The first of these conditions in a row decides which key to blame."""


def known_bad(
    loaded: Loaded,
    *,
    lock: Lock | None = None,
    toolkit: str | None = None,
    capabilities: Iterable[str] = (),
    types: Iterable[str] = (),
) -> tuple[Check, ...]:
    """Return a check for each known-bad combination that matches.

    `toolkit` is nvcc's full version, `types` are the tensor types in the headers of the weights. A
    check is failed if it refuses, unknown if it warns, passed if the recipe acknowledges it.
    """
    number = lock.build_number if lock and loaded.recipe.engine == "llama.cpp" else 0
    situation = situation_of(
        loaded.recipe,
        loaded.command,
        toolkit=toolkit,
        capabilities=capabilities,
        tensor_types=types,
        engine_version=str(number) if number else None,
    )
    return judge(loaded.recipe, situation, shown(loaded.path))


def load_good(
    path: Path,
    overrides: Sequence[str] = (),
    change: Callable[[Loaded], Loaded] | None = None,
) -> Loaded:
    """Load a recipe without contradictions and known-bad combinations, `change` applied first.

    Raises RecipeError.
    """
    loaded = load_sound(path, overrides, change)
    refuse(loaded, known_bad(loaded))
    return loaded


def meant_for(ctx: Context, loaded: Loaded) -> tuple[str, ...]:
    """Return the compute capabilities of a build: the recipe's, else those of this machine."""
    if named := loaded.recipe.host.compute_capability:
        return (named,)
    build = loaded.recipe.build
    if build is None or build.cuda is None or build.cmake.get(ARCHITECTURES) != "native":
        return ()
    return compute_capabilities(ctx.processes)


def types_in(checkpoints: Iterable[Checkpoint | None]) -> frozenset[str]:
    """Return the tensor formats of checkpoints."""
    return frozenset(name for one in checkpoints if one for name in one.formats)


def types_on_disk(files: Iterable[Sequence[str]]) -> frozenset[str]:
    """Return the tensor types of weights that are on this machine; damaged ones are skipped."""
    found: set[str] = set()
    for names in files:
        paths = [Path(name) for name in names]
        if paths and all(path.is_file() for path in paths):
            try:
                found |= read_paths(paths).formats
            except BakehouseError:
                continue
    return frozenset(found)


def faults(loaded: Loaded, checks: Iterable[Check]) -> tuple[Fault, ...]:
    """Return the refused combinations, each at its key in the recipe."""
    by_id = {PREFIX + row.id: row for row in rows()}
    found = []
    for one in checks:
        if one.verdict is Verdict.FAILED and (row := by_id.get(one.id)):
            hint = f"{row.fix}; or accept it: acknowledge: {{{row.id}: why}}"
            message = f"known to be bad, {row.id}: {row.what}"
            found.append(loaded.origin(*_place(row, loaded.recipe)).fault(message, hint))
    return tuple(found)


def refuse(loaded: Loaded, checks: tuple[Check, ...]) -> None:
    """Raise RecipeError (exit 2) for a combination that must not be built or served."""
    if found := faults(loaded, checks):
        error = RecipeError(f"the recipe {loaded.recipe.name} is known to be bad", found)
        error.id = "known-bad"
        error.checks = checks
        raise error


def note(ctx: Context, loaded: Loaded, checks: tuple[Check, ...], record: Facts) -> None:
    """Record what matched, with the reasons of acknowledgements; then refuse or warn."""
    if checks:
        record.fact("known_bad", [one.to_data() for one in checks])
    refuse(loaded, checks)
    for line in warnings(checks):
        ctx.progress.say(line)


def warnings(checks: Iterable[Check]) -> list[str]:
    """Return one line for each warning and each acknowledged combination."""
    words = {Verdict.UNKNOWN: "warning", Verdict.PASSED: "acknowledged"}
    return [
        f"{words[one.verdict]}: {one.id.removeprefix(PREFIX)}: {one.observed} ({one.expected})"
        for one in checks
        if one.verdict in words
    ]


def _place(row: Row, recipe: Recipe) -> tuple[str, ...]:
    """Return the key to blame: one that meets a condition of the row."""
    conditions = {name: getattr(row.when, name) for name in _ORDER}
    names = [c.partition("=")[0] for c in conditions["environment"] or () if c[0] != "!"]
    if not names:  # a variable that is not set has no place
        conditions["environment"] = None
    first = next((name for name, values in conditions.items() if values), None)
    if first == "environment":
        room = "serve" if any(name in recipe.serve.env for name in names) else "container"
        return (room, "env", names[0])
    if first == "flags":
        return ("build", "cmake") if recipe.build and recipe.build.cmake else ("serve", "command")
    if first == "quantisation":
        model = recipe.weights.model
        key = next((key for key in ("hub", "path", "url") if getattr(model, key)), "hub")
        return ("weights", "model", key)
    places = {
        "toolkit": ("build", "cuda", "version"),
        "compute_capability": ("host", "compute_capability"),
    }
    return places.get(first or "", ("name",))
