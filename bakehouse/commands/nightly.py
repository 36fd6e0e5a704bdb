"""The task `nightly`: check, build, serve on a free port, verify and stop each recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bakehouse import flags
from bakehouse.commands import build, serve
from bakehouse.context import Context, Outcome
from bakehouse.errors import BakehouseError, HostError, Interrupted, UsageError
from bakehouse.models import Frozen, to_json
from bakehouse.patch_review import overrides
from bakehouse.recipe.loader import find, load
from bakehouse.resolver import ensure_lock
from bakehouse.server.status import stop
from bakehouse.util.files import file_lock

INSTANCE = "nightly"
"""Instance name of its servers, which leaves the servers in use alone."""
WORST_FIRST = (8, 7, 6, 5, 4, 9, 3, 2, 1)
"""Exit codes, worst first: wrong answers are worse than anything that does not run."""

Options = flags.Nightly
Stage = Callable[[str], str]
"""Runs one stage of a recipe, given its name; returns a short result, or raises."""


class StageResult(Frozen):
    """One stage of one recipe. `seconds` of wall time; `exit` is 0 if it succeeded."""

    stage: str
    exit: int
    seconds: float
    says: str
    where: str | None = None
    hint: str | None = None


class RecipeResult(Frozen):
    """All stages of one recipe."""

    recipe: str
    exit: int
    stages: tuple[StageResult, ...]

    @property
    def summary(self) -> str:
        """The first failure, or the result of `serve`."""
        failed = next((s for s in self.stages if s.exit), None)
        if failed:
            return f"{failed.stage}: {failed.says}"
        return next((s.says for s in self.stages if s.stage == "serve"), "done")


def run(ctx: Context, options: Options) -> Outcome:
    """Run all recipes, whatever fails; return the worst exit code.

    Raises UsageError, and HostError if another nightly run holds the lock.
    """
    if not options.recipe:
        raise UsageError("no recipe given", hint="--recipe NAME, once for each recipe")
    overrides.parse_overrides(options)
    lock = ctx.places.state / ".nightly.lock"
    busy = HostError(
        "another nightly run is in progress",
        where=str(lock),
        hint="wait for it to finish: two runs would compete for the same memory",
        id="nightly-busy",
    )
    with file_lock(lock, "a nightly run", ctx.progress.say, busy=busy):
        started = ctx.clock.now()
        results = []
        for recipe in dict.fromkeys(options.recipe):
            ctx.progress.say(f"== {recipe}")
            results.append(_run_one(ctx, recipe, options))
            ctx.progress.say(f"== {recipe}: {results[-1].summary}")
        result: dict[str, Any] = {
            "started": started.isoformat(timespec="seconds"),
            "ended": ctx.clock.now().isoformat(timespec="seconds"),
            "recipes": [one.to_data() for one in results],
        }
        path = ctx.places.state / "nightly" / f"{started:%Y%m%dT%H%M%SZ}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_json(result))
        text = f"{table(results)}\n\nwritten to {path}"
        return Outcome({**result, "path": str(path)}, text, exit=worst([r.exit for r in results]))


def _run_one(ctx: Context, recipe: str, options: Options) -> RecipeResult:
    served: list[str] = []
    patch, no_patch, allow = options.patch, options.no_patch, options.allow

    def lock_stage(name: str) -> str:
        loaded = load(find(name, ctx.recipes))
        ensure_lock(ctx, loaded, locked=True)
        served.append(loaded.recipe.name)
        return "recipe and lock agree"

    def build_stage(name: str) -> str:
        given = build.Options(name, locked=True, patch=patch, no_patch=no_patch, allow=allow)
        result = build.run(ctx, given).result
        return "reused" if result["reused"] else f"built in {result['seconds']:.0f} s"

    def serve_stage(name: str) -> str:
        given = serve.Options(
            recipe=name, locked=True, port="0", instance=INSTANCE,
            patch=patch, no_patch=no_patch, allow=allow,
        )  # fmt: skip
        return f"READY, {serve.run(ctx, given).result['summary']}"

    def stop_stage(_: str) -> str:
        says = [stop(ctx.places.servers / f"{name}@{INSTANCE}").says for name in served]
        return says[0] if says else "nothing ran"

    stages: dict[str, Stage] = {"lock": lock_stage, "build": build_stage, "serve": serve_stage}
    return run_stages(recipe, stages, {"stop": stop_stage}, ctx.clock.monotonic)


def run_stages(
    recipe: str,
    stages: Mapping[str, Stage],
    always: Mapping[str, Stage],
    clock: Callable[[], float],
) -> RecipeResult:
    """Run the stages until one fails, then those in `always`.

    `clock` gives seconds. Raises only for an interrupt, after running `always`.
    """
    done: list[StageResult] = []
    try:
        for name, stage in stages.items():
            done.append(_run_stage(name, stage, recipe, clock))
            if done[-1].exit:
                break
    finally:
        done += [_run_stage(name, stage, recipe, clock) for name, stage in always.items()]
    return RecipeResult(recipe=recipe, exit=worst([s.exit for s in done]), stages=tuple(done))


def _run_stage(name: str, stage: Stage, recipe: str, clock: Callable[[], float]) -> StageResult:
    started = clock()
    error: BakehouseError | None = None
    try:
        code, says = 0, stage(recipe)
    except Interrupted:
        raise
    except BakehouseError as known:
        error, code, says = known, known.exit_code, known.what
    except Exception as bug:  # must not cost the other recipes their run
        code, says = 1, f"unexpected {type(bug).__name__}: {bug}"
    return StageResult(
        stage=name,
        exit=code,
        seconds=round(clock() - started, 3),
        says=says,
        where=error.where if error else None,
        hint=error.hint if error else None,
    )


def worst(exits: Sequence[int]) -> int:
    """Return the worst exit code; 0 if all are 0 or there is none."""
    order = {code: rank for rank, code in enumerate(WORST_FIRST)}
    return min((code for code in exits if code), key=lambda c: order.get(c, 99), default=0)


def table(results: Sequence[RecipeResult]) -> str:
    """Return the summary: a line for each recipe with exit code, seconds per stage and result."""
    names = list(dict.fromkeys(s.stage for r in results for s in r.stages))
    rows = [["recipe", "exit", *names, "result"]]
    for one in results:
        seconds = {s.stage: f"{s.seconds:.1f}" + ("!" if s.exit else "") for s in one.stages}
        rows.append([one.recipe, str(one.exit), *(seconds.get(n, "-") for n in names), one.summary])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
