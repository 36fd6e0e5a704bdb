"""The tasks `recipes`, `show` and `check`: list, print and validate recipes."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from bakehouse import flags
from bakehouse.context import Context, Outcome
from bakehouse.errors import Fault, LockError, NotFound, RecipeError
from bakehouse.models import Check, check
from bakehouse.patches import pin
from bakehouse.preflight import rules
from bakehouse.recipe.export import resolved, sources, to_yaml
from bakehouse.recipe.loader import LoadedRecipe, find, load, names
from bakehouse.recipe.types import shown
from bakehouse.redact import Redactor, clean, secret_values
from bakehouse.resolver import drift, lock_path, read_lock
from bakehouse.sources.weights import locate


def run_recipes(ctx: Context, options: flags.Recipes) -> Outcome:  # noqa: ARG001
    """List the recipes in the recipe folder."""
    rows = [_row(ctx, name) for name in names(ctx.recipes)]
    if not rows:
        return Outcome({"recipes": []}, f"no recipes in {shown(ctx.recipes)}")
    width = max(len(row["name"]) for row in rows)
    lines = []
    for row in rows:
        state = f"{'experimental: ' if row['experimental'] else ''}{row['description']}"
        if row["faults"]:
            state = f"does not load: {row['faults']} (see `invoke check --recipe {row['name']}`)"
        lock = "locked  " if row["locked"] else "unlocked"
        lines.append(f"{row['name']:<{width}}  {row['engine'] or '-':<9}  {lock}  {state}")
    return Outcome({"recipes": rows}, "\n".join(lines))


def _row(ctx: Context, name: str) -> dict[str, Any]:
    path = find(name, ctx.recipes)
    row: dict[str, Any] = {
        "name": name,
        "file": shown(path),
        "engine": None,
        "description": "",
        "experimental": False,
        "loads": False,
        "locked": path.with_name(f"{name}.lock.json").is_file(),
        "faults": None,
    }
    try:
        recipe = load(path).recipe
    except RecipeError as error:
        return {**row, "faults": f"{len(error.faults)} fault{'s' * (len(error.faults) != 1)}"}
    return {
        **row,
        "engine": recipe.engine,
        "description": clean(recipe.description, one_line=True),
        "experimental": recipe.experimental,
        "loads": True,
    }


def run_show(ctx: Context, options: flags.Show) -> Outcome:
    """Print the recipe and where its values come from. Raises NotFound, RecipeError."""
    loaded = load(find(options.recipe, ctx.recipes), options.set_)
    recipe = loaded.recipe
    variables = {**(recipe.container.env if recipe.container else {}), **recipe.serve.env}
    secrets = (secret_values(env, recipe.secrets) for env in (ctx.environment, variables))
    data = Redactor(chain.from_iterable(secrets)).data(resolved(loaded))
    result = {
        "recipe": data,
        "files": [shown(path) for path in loaded.files],
        "set": [f"--set {text.partition('=')[0].strip()}" for text in options.set_],
        "sources": sources(loaded, data),
    }
    return Outcome(result, to_yaml(loaded, data))


@dataclass
class _Judged:
    path: Path
    loaded: LoadedRecipe | None = None
    faults: list[Fault] = field(default_factory=list)
    bad: tuple[Check, ...] = ()
    """Known-bad combinations, including acknowledged ones."""
    notes: tuple[str, ...] = ()
    """What is still to do, without being a fault."""


def run_check(ctx: Context, options: flags.Check) -> Outcome:
    """Check; exit 2 if any recipe has a fault. Raises NotFound if there is no recipe."""
    wanted = [options.recipe] if options.recipe is not None else names(ctx.recipes)
    if not wanted:
        raise NotFound("no recipes found", where=shown(ctx.recipes), hint="write one there")
    judged = [_judge(ctx, find(name, ctx.recipes), options.set_) for name in wanted]
    first: dict[str, Path] = {}
    for one in judged:  # two recipes of one name would share their servers
        if one.loaded:
            name = one.loaded.recipe.name
            path = first.setdefault(name, one.path)
            if one.path != path:
                place = one.loaded.origin("name")
                one.faults.append(place.fault(f"name: {shown(path)} has the same name '{name}'"))
    faults = [fault for one in judged for fault in one.faults]
    lines = list(dict.fromkeys(str(fault) for fault in faults))
    count = f"{len(lines)} fault{'s' * (len(lines) != 1)}" if lines else "no faults"
    lines.append(f"{len(judged)} recipe{'s' * (len(judged) != 1)}, {count}")
    lines[:0] = [
        f"{shown(one.path)}: {line}"
        for one in judged
        for line in (*rules.warnings(one.bad), *one.notes)
    ]
    rows, checks = [], []
    for one in judged:
        many = len(one.faults)
        observed = f"{many} fault{'s' * (many != 1)}" if many else "no faults"
        name = f"recipe.{one.path.name.removesuffix('.yaml')}"
        checks.append(check(name, "no faults", observed, shown(one.path), ok=not many))
        rows.append({
            "file": shown(one.path),
            "name": one.loaded.recipe.name if one.loaded else None,
            "ok": not many,
            "faults": [vars(fault) for fault in one.faults],
            "known_bad": [bad.to_data() for bad in one.bad],
            "notes": list(one.notes),
        })  # fmt: skip
    return Outcome({"recipes": rows}, "\n".join(lines), tuple(checks), 2 if faults else 0)


def _judge(ctx: Context, path: Path, overrides: tuple[str, ...]) -> _Judged:
    """Load a recipe; check it against the rules across keys and known-bad rules."""
    try:
        loaded = load(path, overrides)
    except RecipeError as error:
        return _Judged(path, None, list(error.faults))
    try:
        lock = read_lock(lock_path(loaded.path))
    except LockError:
        lock = None
    types: frozenset[str] = frozenset()  # of the tensors, if locked and on this machine
    if lock is not None and not drift(loaded.recipe, lock):
        located = locate(ctx.places, loaded.folder, loaded.recipe, lock)
        types = rules.types_on_disk(paths.files for paths in located.values())
    bad = rules.known_bad(loaded, types=types)
    found = [
        *rules.faults(loaded),
        *rules.combination_faults(loaded, bad),
        *pin.faults(ctx, loaded),
    ]
    return _Judged(path, loaded, found, bad, pin.notes(ctx, loaded))
