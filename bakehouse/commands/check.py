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
class _Checked:
    path: Path
    loaded: LoadedRecipe | None = None
    faults: list[Fault] = field(default_factory=list)
    bad: tuple[Check, ...] = ()
    """Known-bad combinations, including acknowledged ones."""
    notes: tuple[str, ...] = ()
    """What is still to do, without being a fault."""


def run(ctx: Context, options: Options) -> Outcome:
    """Check; exit 2 if any recipe has a fault. Raises NotFound if there is no recipe."""
    chosen = [options.recipe] if options.recipe is not None else names(ctx.recipes)
    if not chosen:
        raise NotFound("no recipes found", where=shown(ctx.recipes), hint="write one there")
    results = [_check_recipe(ctx, find(name, ctx.recipes), options.set_) for name in chosen]
    _one_name_each(results)
    faults = [fault for one in results for fault in one.faults]
    lines = list(dict.fromkeys(str(fault) for fault in faults))
    recipes = _count(len(results), "recipe")
    lines.append(f"{recipes}, {_count(len(lines), 'fault') if lines else 'no faults'}")
    lines[:0] = [
        f"{shown(one.path)}: {line}"
        for one in results
        for line in (*rules.warnings(one.bad), *one.notes)
    ]
    result = {"recipes": [_data(one) for one in results]}
    return Outcome(result, "\n".join(lines), tuple(map(_check, results)), 2 if faults else 0)


def _check_recipe(ctx: Context, path: Path, overrides: tuple[str, ...]) -> _Checked:
    """Load a recipe; check it against the rules across keys and known-bad combinations."""
    try:
        loaded = load(path, overrides)
    except RecipeError as error:
        return _Checked(path, None, list(error.faults))
    bad = rules.known_bad(loaded, types=_types(ctx, loaded))
    found = [
        *rules.faults(loaded),
        *rules.combination_faults(loaded, bad),
        *pin.faults(ctx, loaded),
    ]
    return _Checked(path, loaded, found, bad, pin.notes(ctx, loaded))


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


def _one_name_each(results: list[_Checked]) -> None:
    """Refuse two recipes of one name: they would share their servers."""
    by_name = defaultdict(list)
    for one in results:
        if one.loaded:
            by_name[one.loaded.recipe.name].append(one)
    for name, ones in by_name.items():
        for one in ones[1:]:
            if one.loaded:
                place = one.loaded.origin("name")
                first = shown(ones[0].path)
                one.faults.append(place.fault(f"name: {first} has the same name '{name}'"))


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _check(one: _Checked) -> Check:
    count = len(one.faults)
    observed = _count(count, "fault") if count else "no faults"
    name = one.path.name.removesuffix(".yaml")
    return check(f"recipe.{name}", "no faults", observed, shown(one.path), ok=not count)


def _data(one: _Checked) -> dict[str, Any]:
    return {
        "file": shown(one.path),
        "name": one.loaded.recipe.name if one.loaded else None,
        "ok": not one.faults,
        "faults": [vars(fault) for fault in one.faults],
        "known_bad": [found.to_data() for found in one.bad],
        "notes": list(one.notes),
    }
