"""Whether a recipe is a combination that is known to be bad, by all that is known when it is asked.

`check` knows the recipe; `plan` and `build` know the toolkit as well; `serve` knows the weights'
headers and this machine's GPUs.
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
from bakehouse.host import read_gpus
from bakehouse.lock import Lock
from bakehouse.preflight.known_bad import PREFIX, Row, judge, rows, situation_of
from bakehouse.preflight.rules import load_sound
from bakehouse.recipe.faults import shown
from bakehouse.recipe.load import Loaded
from bakehouse.recipe.model import Recipe
from bakehouse.toolkit.force import ARCHITECTURES


class Facts(Protocol):
    """What a record takes in."""

    def fact(self, name: str, value: object) -> None:
        """Record something seen."""


_ORDER = ("toolkit", "environment", "flags", "quantisation", "compute_capability")
"""Which condition of a row tells what is to blame: the first that a row has."""


def known_bad(
    loaded: Loaded,
    *,
    lock: Lock | None = None,
    toolkit: str | None = None,
    capabilities: Iterable[str] = (),
    types: Iterable[str] = (),
) -> tuple[Check, ...]:
    """Judge a recipe by the data file; nothing is given back where no row matches.

    `toolkit` is nvcc's full version, `types` the tensor types that the weights' headers show. A
    check is failed for what must not be built or served, unknown for what is warned of, passed for
    what the recipe acknowledges, with its reason.
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
    """Load a recipe that neither contradicts itself nor is, by its own words, known to be bad.

    `change` makes of it what one run is to have, which is then what gets judged.
    """
    loaded = load_sound(path, overrides, change)
    refuse(loaded, known_bad(loaded))
    return loaded


def meant_for(ctx: Context, loaded: Loaded) -> tuple[str, ...]:
    """Compute capabilities that a build is for: the recipe's, else those of this machine's GPUs."""
    if named := loaded.recipe.host.compute_capability:
        return (named,)
    build = loaded.recipe.build
    if build is None or build.cuda is None or build.cmake.get(ARCHITECTURES) != "native":
        return ()
    return tuple(gpu.compute_capability for gpu in read_gpus(ctx.processes))


def types_in(checkpoints: Iterable[Checkpoint | None]) -> frozenset[str]:
    """Formats of weights, of checkpoints whose headers were read."""
    return frozenset(name for one in checkpoints if one for name in one.formats)


def types_on_disk(files: Iterable[Sequence[str]]) -> frozenset[str]:
    """Tensor types of those weights that are on this machine; damaged ones say nothing here."""
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
    """What is refused, each at its key in the recipe."""
    by_id = {PREFIX + row.id: row for row in rows()}
    found = []
    for one in checks:
        if one.verdict is Verdict.FAILED and (row := by_id.get(one.id)):
            hint = f"{row.mend}; or accept it: acknowledge: {{{row.id}: why}}"
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
    """Record what was found, acknowledgements with their reasons included; then refuse, or warn."""
    if checks:
        record.fact("known_bad", [one.to_data() for one in checks])
    refuse(loaded, checks)
    for line in warnings(checks):
        ctx.progress.say(line)


def warnings(checks: Iterable[Check]) -> list[str]:
    """What to say of the rest, a line each: what is warned of, and what was acknowledged."""
    words = {Verdict.UNKNOWN: "warning", Verdict.PASSED: "acknowledged"}
    return [
        f"{words[one.verdict]}: {one.id.removeprefix(PREFIX)}: {one.observed} ({one.expected})"
        for one in checks
        if one.verdict in words
    ]


def _place(row: Row, recipe: Recipe) -> tuple[str, ...]:
    """Give the key to blame: what the recipe itself writes that a condition of the row meets."""
    conditions = {name: getattr(row.when, name) for name in _ORDER}
    names = [c.partition("=")[0] for c in conditions["environment"] or () if c[0] != "!"]
    if not names:  # that something is not set stands nowhere
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
