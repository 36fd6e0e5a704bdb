"""The task `nightly`: each recipe's lock checked, built, served on a free port, proven, stopped."""

from __future__ import annotations

from typing import Any

from bakehouse import flags
from bakehouse.base import to_json
from bakehouse.commands import build, serve
from bakehouse.context import Context
from bakehouse.errors import HostError, UsageError
from bakehouse.nightly import RecipeResult, Stage, run_recipe, table, worst
from bakehouse.outcome import Outcome
from bakehouse.patches import for_run
from bakehouse.recipe.load import find, load
from bakehouse.resolve import ensure_lock
from bakehouse.serve.control import stop

INSTANCE = "nightly"
"""Its servers have a name of their own, so that those that people use are left alone."""


Options = flags.Nightly


def run(ctx: Context, options: Options) -> Outcome:
    """Run all recipes; the exit code is that of the worst. One failure stops none of the others."""
    if not options.recipe:
        raise UsageError("no recipe is named", hint="--recipe NAME, once for each recipe")
    for_run.asked(options)
    from filelock import FileLock, Timeout  # only this task needs it

    ctx.places.state.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(ctx.places.state / ".nightly.lock", timeout=0):
            return _night(ctx, options)
    except Timeout as error:
        raise HostError(
            "another nightly run is under way",
            where=str(ctx.places.state / ".nightly.lock"),
            hint="wait for it; two at once would compete for the same memory",
            id="nightly-busy",
        ) from error


def _night(ctx: Context, options: Options) -> Outcome:
    started = ctx.clock.now()
    results = []
    for recipe in dict.fromkeys(options.recipe):
        ctx.progress.say(f"== {recipe}")
        results.append(_recipe(ctx, recipe, options))
        ctx.progress.say(f"== {recipe}: {results[-1].says}")
    result: dict[str, Any] = {
        "started": started.isoformat(timespec="seconds"),
        "ended": ctx.clock.now().isoformat(timespec="seconds"),
        "recipes": [one.to_data() for one in results],
    }
    path = ctx.places.state / "nightly" / f"{started:%Y%m%dT%H%M%SZ}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(result))
    exit_code = worst([one.exit for one in results])
    text = f"{table(results)}\n\nwritten to {path}"
    return Outcome({**result, "path": str(path)}, text, exit=exit_code)


def _recipe(ctx: Context, recipe: str, options: Options) -> RecipeResult:
    served: list[str] = []
    patch, no_patch, allow = options.patch, options.no_patch, options.allow

    def lock_stage(name: str) -> str:
        loaded = load(find(name, ctx.recipes))
        ensure_lock(ctx, loaded, locked=True)
        served.append(loaded.recipe.name)
        return "recipe and lock agree"

    def build_stage(name: str) -> str:
        wish = build.Options(name, locked=True, patch=patch, no_patch=no_patch, allow=allow)
        made = build.run(ctx, wish).result
        return "reused" if made["reused"] else f"built in {made['seconds']:.0f} s"

    def serve_stage(name: str) -> str:
        asked = serve.Options(
            recipe=name, locked=True, port="0", instance=INSTANCE,
            patch=patch, no_patch=no_patch, allow=allow,
        )  # fmt: skip
        ready = serve.run(ctx, asked)
        return f"READY, {ready.result['summary']}"

    def stop_stage(_: str) -> str:
        says = [stop(ctx.places.servers / f"{name}@{INSTANCE}").says for name in served]
        return says[0] if says else "nothing ran"

    stages: dict[str, Stage] = {"lock": lock_stage, "build": build_stage, "serve": serve_stage}
    return run_recipe(recipe, stages, {"stop": stop_stage}, ctx.clock.monotonic)
