"""The task `plan`, and how a plan is printed."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from bakehouse import flags
from bakehouse.context import Context, Outcome
from bakehouse.errors import CheckpointError, UsageError
from bakehouse.memory.budget import Weight
from bakehouse.memory.fit import find_machine, locked_weights, recipe_budget, table
from bakehouse.models import Check, check
from bakehouse.patch_review import overrides
from bakehouse.plan.planner import inspect_host, make_plan
from bakehouse.plan.serve import described
from bakehouse.plan.types import ARTIFACT_RECORD, BuildPlan, ImagePlan, ServePlan, Step
from bakehouse.preflight import rules
from bakehouse.recipe.loader import find
from bakehouse.redact import clean
from bakehouse.sources.weights import locate


def step_lines(steps: Iterable[Step]) -> list[str]:
    """Each step with its folder, environment, arguments and expected results."""
    lines = []
    for step in steps:
        lines.append(f"{step.id}: {step.title}")
        if step.cwd:
            lines.append(f"    in {step.cwd}")
        lines += [f"    {name}={shlex.quote(value)}" for name, value in step.env.items()]
        lines += _command(step.argv)
        lines += [f"    expect {text}" for text in step.expects]
    return [clean(line, one_line=True) for line in lines]


def _command(argv: tuple[str, ...]) -> list[str]:
    """The arguments, quoted for a shell; one per line if they are long."""
    quoted = [shlex.quote(argument) for argument in argv]
    if not quoted:
        return []
    one_line = f"    $ {' '.join(quoted)}"
    if len(one_line) <= 100:
        return [one_line]
    return [f"    $ {quoted[0]}", *(f"        {argument}" for argument in quoted[1:])]


def build_lines(plan: BuildPlan | ImagePlan) -> list[str]:
    """The build: whether it is done, and its steps."""
    if isinstance(plan, ImagePlan):
        return [f"image {plan.image} (linux on {plan.arch})", *step_lines(plan.steps)]
    there = "already built" if is_built(plan) else "not built yet"
    return [f"build {plan.digest} ({there})", f"    {plan.artifact}", *step_lines(plan.steps)]


def serve_lines(plan: ServePlan) -> list[str]:
    """The server's command and what it has to show."""
    lines = [
        f"serve {plan.name} at {plan.host}, port {plan.port or 'any that is free'}",
        *(f"    {name}={shlex.quote(value)}" for name, value in plan.env.items()),
        *(["    in a container:"] if plan.container else []),
        *(f"        {line}" for line in (described(plan.container) if plan.container else ())),
        *_command(plan.argv),
        *(f"    expect {text}" for text in plan.expects),
        f"    then the suites: {', '.join(plan.suites)}",
    ]
    return [clean(line, one_line=True) for line in lines]


def is_built(plan: BuildPlan | ImagePlan) -> bool | None:
    """Return whether the artifact exists; `build` verifies it.

    None for an image: only the Docker Engine knows, and a plan does not ask it.
    """
    if isinstance(plan, ImagePlan):
        return None
    return (Path(plan.artifact) / ARTIFACT_RECORD).is_file()


def parse_jobs(text: str) -> int | None:
    """Parse --jobs; None if it is empty. Raises UsageError."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1024):
        raise UsageError(f"--jobs takes a number from 1 to 1024, not '{clean(text)}'")
    return int(text)


Options = flags.Plan


def run(ctx: Context, options: Options) -> Outcome:
    """Plan a recipe. Needs its lock, but no network."""
    asked = overrides.parse_overrides(options)
    path = find(options.recipe, ctx.recipes)
    loaded = rules.load_and_check(path, options.set_, asked.change(ctx))
    lock = overrides.ensure(ctx, loaded, asked, options.set_, locked=True, fetch=False)
    plan, _ = make_plan(loaded, lock, inspect_host(ctx, loaded.recipe, lock), ctx.places)
    lines = [f"recipe {plan.recipe}, lock {plan.lock}", "", *step_lines(plan.fetch)]
    lines += ["", *build_lines(plan.build), "", *serve_lines(plan.serve)]
    located = locate(ctx.places, loaded.folder, loaded.recipe, lock)
    weights: dict[str, Weight] = {}
    checks: tuple[Check, ...] = ()
    try:  # by their headers, if they are here
        weights = locked_weights(lock, {role: paths.files for role, paths in located.items()})
    except CheckpointError as error:
        where = error.where or ""
        checks = (check("weights", "complete weight files", error.what, where, ok=False),)
    toolkit = None if isinstance(plan.build, ImagePlan) else plan.build.expected.cuda
    bad = rules.known_bad(
        loaded,
        lock=lock,
        toolkit=toolkit.toolkit.version if toolkit else None,
        capabilities=rules.meant_for(ctx, loaded),
        types=rules.types_in(w.checkpoint for w in weights.values()),
    )
    rules.refuse(loaded, bad)
    memory = None
    if weights:
        machine = find_machine(ctx.processes)
        memory = recipe_budget(machine, loaded.recipe, weights, plan.serve.argv)
    checks = (*checks, *(memory.checks() if memory else ()), *bad)
    lines += ["", *(table(memory).splitlines() if memory else ["memory: the weights are damaged"])]
    lines += ["", *warned] if (warned := rules.warnings(bad)) else []
    result = {**plan.to_data(), "built": is_built(plan.build), "memory": memory}
    return Outcome(result=result, text="\n".join(lines), checks=checks)
