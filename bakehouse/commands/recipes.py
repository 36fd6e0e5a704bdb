"""The task `recipes`: list the recipes, and whether they load."""

from __future__ import annotations

from typing import Any

from bakehouse import flags
from bakehouse.context import Context, Outcome
from bakehouse.errors import RecipeError
from bakehouse.recipe.loader import find, load, names
from bakehouse.recipe.types import shown
from bakehouse.redact import clean

Options = flags.Recipes


def run(ctx: Context, options: Options) -> Outcome:  # noqa: ARG001
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
        lines.append(f"{row['name']:<{width}}  {row['engine'] or '-':<9}  {_lock(row)}  {state}")
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


def _lock(row: dict[str, Any]) -> str:
    return "locked  " if row["locked"] else "unlocked"
