"""The task `check`: print every fault of one recipe, or of all."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bakehouse import flags
from bakehouse.context import Context, Outcome
from bakehouse.errors import Fault, LockError, NotFound, RecipeError
from bakehouse.models import Check, check
from bakehouse.patches import pin
from bakehouse.preflight import rules
from bakehouse.recipe.loader import LoadedRecipe, find, load, names
from bakehouse.recipe.types import shown
from bakehouse.resolver import drift, lock_path, read_lock
from bakehouse.sources.weights import locate

Options = flags.Check


@dataclass
class _Judged:
    path: Path
    loaded: LoadedRecipe | None = None
    faults: list[Fault] = field(default_factory=list)
    bad: tuple[Check, ...] = ()
    """Known-bad combinations, including acknowledged ones."""
    notes: tuple[str, ...] = ()
    """What is still to do, without being a fault."""


def run(ctx: Context, options: Options) -> Outcome:
    """Check; exit 2 if any recipe has a fault. Raises NotFound if there is no recipe."""
    wanted = [options.recipe] if options.recipe is not None else names(ctx.recipes)
    if not wanted:
        raise NotFound("no recipes found", where=shown(ctx.recipes), hint="write one there")
    judged = [_judge(ctx, find(name, ctx.recipes), options.set_) for name in wanted]
    _one_name_each(judged)
    faults = [fault for one in judged for fault in one.faults]
    lines = list(dict.fromkeys(str(fault) for fault in faults))
    lines.append(_summary(len(judged), len(lines)))
    lines[:0] = [
        f"{shown(one.path)}: {line}"
        for one in judged
        for line in (*rules.warnings(one.bad), *one.notes)
    ]
    result = {"recipes": [_data(one) for one in judged]}
    return Outcome(result, "\n".join(lines), tuple(map(_check, judged)), 2 if faults else 0)


def _judge(ctx: Context, path: Path, overrides: tuple[str, ...]) -> _Judged:
    """Load a recipe; check it against the rules across keys and known-bad combinations."""
    try:
        loaded = load(path, overrides)
    except RecipeError as error:
        return _Judged(path, None, list(error.faults))
    bad = rules.known_bad(loaded, types=_types(ctx, loaded))
    found = [
        *rules.faults(loaded),
        *rules.combination_faults(loaded, bad),
        *pin.faults(ctx, loaded),
    ]
    return _Judged(path, loaded, found, bad, pin.notes(ctx, loaded))


def _types(ctx: Context, loaded: LoadedRecipe) -> frozenset[str]:
    """Return the tensor types of the weights, if they are locked and on this machine."""
    try:
        lock = read_lock(lock_path(loaded.path))
    except LockError:
        lock = None
    if lock is None or drift(loaded.recipe, lock):
        return frozenset()
    located = locate(ctx.places, loaded.folder, loaded.recipe, lock)
    return rules.types_on_disk(paths.files for paths in located.values())


def _one_name_each(judged: list[_Judged]) -> None:
    """Refuse two recipes of one name: they would share their servers."""
    by_name = defaultdict(list)
    for one in judged:
        if one.loaded:
            by_name[one.loaded.recipe.name].append(one)
    for name, ones in by_name.items():
        for one in ones[1:]:
            if one.loaded:
                place = one.loaded.origin("name")
                first = shown(ones[0].path)
                one.faults.append(place.fault(f"name: {first} has the same name '{name}'"))


def _summary(recipes: int, faults: int) -> str:
    what = f"{recipes} recipe{'s' * (recipes != 1)}"
    return f"{what}, {faults} fault{'s' * (faults != 1)}" if faults else f"{what}, no faults"


def _check(one: _Judged) -> Check:
    count = len(one.faults)
    observed = f"{count} fault{'s' * (count != 1)}" if count else "no faults"
    name = one.path.name.removesuffix(".yaml")
    return check(f"recipe.{name}", "no faults", observed, shown(one.path), ok=not count)


def _data(one: _Judged) -> dict[str, Any]:
    return {
        "file": shown(one.path),
        "name": one.loaded.recipe.name if one.loaded else None,
        "ok": not one.faults,
        "faults": [vars(fault) for fault in one.faults],
        "known_bad": [found.to_data() for found in one.bad],
        "notes": list(one.notes),
    }
