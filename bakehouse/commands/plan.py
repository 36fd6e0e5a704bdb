"""The task `plan`: every step that `build` and `serve` would run, printed; nothing run."""

from __future__ import annotations

from dataclasses import dataclass

from bakehouse.commands.planned import build_lines, is_built, serve_lines, step_lines
from bakehouse.context import Context
from bakehouse.outcome import Outcome
from bakehouse.plan.whole import make_plan, survey
from bakehouse.recipe.load import find, load
from bakehouse.resolve import ensure_lock


@dataclass(frozen=True)
class Options:
    """The task's flags."""

    recipe: str
    set: tuple[str, ...] = ()


def run(ctx: Context, options: Options) -> Outcome:
    """Plan; needs the lock, no network, and runs no step."""
    loaded = load(find(options.recipe, ctx.recipes), options.set)
    lock = ensure_lock(ctx, loaded, locked=True)
    plan, _ = make_plan(loaded, lock, survey(ctx, loaded.recipe, lock), ctx.places)
    lines = [f"recipe {plan.recipe}, lock {plan.lock}", ""]
    lines += step_lines(plan.fetch)
    lines += ["", *build_lines(plan.build)]
    lines += ["", *serve_lines(plan.serve)]
    result = {**plan.to_data(), "built": is_built(plan.build)}
    return Outcome(result=result, text="\n".join(lines))
