"""The task `plan`: print every step of `build` and `serve`; run none."""

from __future__ import annotations

from bakehouse import flags
from bakehouse.checks import Check, check
from bakehouse.commands.planned import build_lines, is_built, serve_lines, step_lines
from bakehouse.context import Context
from bakehouse.errors import CheckpointError
from bakehouse.lock import Lock
from bakehouse.memory.advice import table
from bakehouse.memory.recipe import find_machine, locked_weights, recipe_budget
from bakehouse.memory.weight import Weight
from bakehouse.outcome import Outcome
from bakehouse.patches import for_run
from bakehouse.plan.types import ImagePlan
from bakehouse.plan.whole import make_plan, survey
from bakehouse.preflight import combinations
from bakehouse.recipe.load import Loaded, find
from bakehouse.sources.weights import locate

Options = flags.Plan


def run(ctx: Context, options: Options) -> Outcome:
    """Plan a recipe. Needs its lock, but no network."""
    asked = for_run.asked(options)
    path = find(options.recipe, ctx.recipes)
    loaded = combinations.load_good(path, options.set_, asked.change(ctx))
    lock = for_run.ensure(ctx, loaded, asked, options.set_, locked=True, fetch=False)
    plan, _ = make_plan(loaded, lock, survey(ctx, loaded.recipe, lock), ctx.places)
    lines = [f"recipe {plan.recipe}, lock {plan.lock}", "", *step_lines(plan.fetch)]
    lines += ["", *build_lines(plan.build), "", *serve_lines(plan.serve)]
    weights, checks = _weights(ctx, loaded, lock)
    toolkit = None if isinstance(plan.build, ImagePlan) else plan.build.expected.cuda
    bad = combinations.known_bad(
        loaded,
        lock=lock,
        toolkit=toolkit.toolkit.version if toolkit else None,
        capabilities=combinations.meant_for(ctx, loaded),
        types=combinations.types_in(w.checkpoint for w in weights.values()),
    )
    combinations.refuse(loaded, bad)
    memory = None
    if weights:
        machine = find_machine(ctx.processes)
        memory = recipe_budget(machine, loaded.recipe, weights, plan.serve.argv)
    checks = (*checks, *(memory.checks() if memory else ()), *bad)
    lines += ["", *(table(memory).splitlines() if memory else ["memory: the weights are damaged"])]
    lines += ["", *warned] if (warned := combinations.warnings(bad)) else []
    result = {**plan.to_data(), "built": is_built(plan.build), "memory": memory}
    return Outcome(result=result, text="\n".join(lines), checks=checks)


def _weights(
    ctx: Context, loaded: Loaded, lock: Lock
) -> tuple[dict[str, Weight], tuple[Check, ...]]:
    """The weights, by their headers if they are here; for damaged ones a failed check instead."""
    files = {
        role: paths.files
        for role, paths in locate(ctx.places, loaded.folder, loaded.recipe, lock).items()
    }
    try:
        return locked_weights(lock, files), ()
    except CheckpointError as error:
        expected = "complete weight files"
        return {}, (check("weights", expected, error.what, error.where or "", ok=False),)
