"""The task `plan`: every step that `build` and `serve` would run, printed; nothing run."""

from __future__ import annotations

from dataclasses import dataclass

from bakehouse.checks import Check, check
from bakehouse.commands.planned import build_lines, is_built, serve_lines, step_lines
from bakehouse.context import Context
from bakehouse.errors import CheckpointError
from bakehouse.lock import Lock
from bakehouse.memory.advice import table
from bakehouse.memory.recipe import find_machine, locked_weights, recipe_budget
from bakehouse.memory.types import Budget
from bakehouse.outcome import Outcome
from bakehouse.plan.types import Plan
from bakehouse.plan.whole import make_plan, survey
from bakehouse.recipe.load import Loaded, find, load
from bakehouse.resolve import ensure_lock
from bakehouse.sources.weights import locate


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
    memory, checks = _memory(ctx, loaded, lock, plan)
    lines += ["", *(table(memory).splitlines() if memory else ["memory: the weights are damaged"])]
    result = {**plan.to_data(), "built": is_built(plan.build), "memory": memory}
    return Outcome(result=result, text="\n".join(lines), checks=checks)


def _memory(
    ctx: Context, loaded: Loaded, lock: Lock, plan: Plan
) -> tuple[Budget | None, tuple[Check, ...]]:
    """The budget on this machine: from headers of weights that are here, else from pinned sizes."""
    files = {
        role: paths.files
        for role, paths in locate(ctx.places, loaded.folder, loaded.recipe, lock).items()
    }
    try:
        weights = locked_weights(lock, files)
    except CheckpointError as error:
        whole = "whole weight files"
        return None, (check("weights", whole, error.what, error.where or "", ok=False),)
    machine = find_machine(ctx.processes)
    budget = recipe_budget(machine, loaded.recipe, weights, plan.serve.argv)
    return budget, budget.checks()
