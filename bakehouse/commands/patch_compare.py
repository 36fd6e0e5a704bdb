"""Judge a patch: run two servers in turn, without it and with it, and send both the same."""

from __future__ import annotations

import glob
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bakehouse.build.image import ImageArtifact
from bakehouse.commands import serve
from bakehouse.context import Context, Outcome
from bakehouse.engines.base import engine_of
from bakehouse.errors import (
    BakehouseError,
    BuildFailed,
    NotCorrect,
    NotHealthy,
    PatchError,
    RecipeError,
)
from bakehouse.lock import Lock, PatchPin
from bakehouse.models import digest, not_passed
from bakehouse.patch_review import overrides as for_run
from bakehouse.patch_review.benchmark import (
    Measure,
    Workload,
    read_log,
    side_of,
    with_more_rounds,
    workload_of,
)
from bakehouse.patch_review.verdict import (
    Conclusion,
    LogReport,
    Side,
    conclude_verdict,
    evidence_of,
    faster,
    report_lines,
    slower,
)
from bakehouse.patches.manifest import Expect, Fit, PatchVerdict, read_manifest, write_manifest
from bakehouse.patches.pin import Pinned
from bakehouse.plan.types import ImagePlan
from bakehouse.preflight import rules
from bakehouse.recipe.loader import LoadedRecipe
from bakehouse.recipe.types import shown
from bakehouse.runs.store import Run
from bakehouse.server.status import get_status, stop

BUILD_ERRORS = (NotHealthy, NotCorrect, BuildFailed)
"""Errors that say something about the build, not about this machine."""
INSTANCE = "judge"
"""First part of the servers' names, so that users' servers are left alone."""
SETTLE_S = 0.5
"""Seconds to wait for log lines, which engines write from threads of their own."""
LEFT_S = 3600.0
"""Age in seconds after which the folder of a server that is not running is deleted."""


@dataclass(frozen=True)
class JudgeOptions:
    """The flags for judging."""

    allow: Fit = "exact"
    overrides: tuple[str, ...] = ()
    """Of the recipe, as given to `--set`: for both servers, and kept with the verdict."""
    risk: str = ""
    """Why both may start although they do not fit into this machine's memory."""


@dataclass(frozen=True)
class Case:
    """One patch to judge with one recipe; the recipe and its lock with it and without it."""

    loaded: LoadedRecipe
    bare: LoadedRecipe
    """The recipe without the patch."""
    pin: PatchPin
    patched: Lock
    without: Lock
    name: str
    expect: Expect = field(default_factory=Expect)
    options: JudgeOptions = field(default_factory=JudgeOptions)

    @property
    def speculates(self) -> bool:
        """Whether the recipe asks for drafts."""
        return self.loaded.recipe.serve.speculation not in (None, "none")


@dataclass(frozen=True)
class Judgement:
    """The verdict and all it is based on; `record` is the run's."""

    judged: Conclusion
    sides: tuple[Side, Side]
    """Without, with."""
    evidence: dict[str, Any]
    record: Path
    date: str
    text: str

    def outcome(self, extra: Mapping[str, Any] | None = None, text: str = "") -> Outcome:
        """Return the task's result: exit 0, 5 for a harmful patch, 7 if there is no verdict."""
        word, reasons = self.judged.word, self.judged.reasons
        result: dict[str, Any] = {
            **(extra or {}), "verdict": word, "reasons": list(reasons),
            "evidence": self.evidence, "record": str(self.record),
            "changes": [c.to_data() for c in self.judged.changes],
        }  # fmt: skip
        error: BakehouseError | None = None
        if word is None:
            error = NotHealthy(
                "the patch cannot be judged: neither server works",
                where="; ".join(reasons), hint="fix the recipe without the patch first",
                id="patch-not-judged",
            )  # fmt: skip
        elif word == "harmful":
            error = PatchError(
                f"the patch is harmful: {reasons[0]}", where=str(self.record), id="patch-harmful",
                hint="drop it, or report it to its author with this record",
            )  # fmt: skip
        return Outcome(result, text or self.text, self.judged.checks, error=error)


def judge_case(ctx: Context, case: Case) -> Judgement:
    """Build, run and compare both servers. Leaves no server behind, however it ends.

    Raises errors of this machine, lock, patch or recipe: HostError, LockError, PatchError,
    RecipeError, UsageError.
    """
    recipe, overrides = case.loaded.recipe, case.options.overrides
    workload = workload_of(recipe, case.expect)
    _delete_old_folders(ctx, recipe.name)
    with Run.start(ctx, "patch", recipe.name, secrets=recipe.secrets) as record:
        record.pin(lock=digest(case.patched))
        record.fact("patch", case.pin.to_data())
        if overrides:
            record.fact("overrides", overrides)
        servers = [_Server(ctx, case, workload, n, record.id[-4:]) for n in ("without", "with")]
        for server in servers:
            server.prepare()
        without, patched = (server.measure() for server in servers)
        judged = conclude_verdict(without, patched, case.expect, speculates=case.speculates)
        if slower(judged.speed, case.expect) or faster(judged.speed):
            ctx.progress.say(f"speed {judged.speed}: running both again to be sure")
            patched = with_more_rounds(patched, servers[1].measure_speed())
            without = with_more_rounds(without, servers[0].measure_speed())
            judged = conclude_verdict(without, patched, case.expect, speculates=case.speculates)
        found = {**evidence_of(judged, without, patched), "run": record.id}
        if overrides:
            found["set"] = list(overrides)
        record.check(*judged.checks)
        record.fact("verdict", {"word": judged.word, "reasons": judged.reasons, **found})
        record.fact("changes", [c.to_data() for c in judged.changes])
        # The kinds of lines are in the changes and the log; here their number is enough.
        record.fact("sides", [{**s.to_data(), "kinds": len(s.kinds)} for s in (without, patched)])
        word = judged.word or "not judged"
        code = {"harmful": PatchError.exit_code, "not judged": NotHealthy.exit_code}.get(word, 0)
        record.finish(f"{word}: {judged.reasons[0]}", exit_code=code)
    rows = report_lines(case.name, case.pin, case.patched, judged, (without, patched))
    text = "\n".join((*rows, *(f"set         {override}" for override in overrides)))
    date = ctx.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")
    return Judgement(judged, (without, patched), found, record.record, date, text)


def judge_pinned(
    ctx: Context, loaded: LoadedRecipe, made: Pinned, options: JudgeOptions, before: Outcome
) -> Outcome:
    """Judge a pinned patch with a recipe, and write the verdict into its manifest.

    A patch of the recipe's own is dropped for the one server, another one is added for the other;
    patches beside it stay. `before` is the outcome so far. Raises as `judge_case` does.
    """
    manifest, path, engine = made.manifest, loaded.path, loaded.recipe.engine
    own = any(p.key(engine) == manifest.name for p in loaded.recipe.patches)
    add = (
        for_run.PatchOverrides()
        if own
        else for_run.PatchOverrides(add=(manifest.name,), allow=options.allow)
    )
    drop = for_run.PatchOverrides(drop=(manifest.name,)) if own else for_run.PatchOverrides()
    changed = rules.load_and_check(path, options.overrides, add.change(ctx))
    bare = drop.change(ctx)(loaded)
    patched = for_run.ensure(ctx, changed, add, options.overrides)
    without = for_run.ensure(ctx, bare, drop, options.overrides)
    pin = next(p for p in patched.patches if p.file.path == manifest.name)
    case = Case(changed, bare, pin, patched, without, manifest.name, manifest.expect, options)
    found = judge_case(ctx, case)
    kept = _write_verdict(made, found, case)
    outcome = found.outcome(before.result, f"{found.text}\n{kept}")
    return Outcome(
        outcome.result, f"{before.text}\n\n{outcome.text}\nrecord      {found.record}",
        (*before.checks, *outcome.checks), error=outcome.error,
    )  # fmt: skip


def _write_verdict(made: Pinned, found: Judgement, case: Case) -> str:
    """Write a verdict into the manifest as it is now; return a line that says so."""
    if found.judged.word is None:
        return "manifest    not changed: no verdict"
    manifest = read_manifest(made.path)
    if manifest.sha256 != case.pin.file.sha256:
        return f"manifest    not changed: {shown(made.path)} now pins another diff"
    verdict = PatchVerdict(
        recipe=case.loaded.recipe.name, base=case.patched.base or "unknown",
        sha256=case.pin.file.sha256, word=found.judged.word, reasons=found.judged.reasons,
        evidence=found.evidence, date=found.date,
    )  # fmt: skip
    write_manifest(made.path, manifest.with_verdict(verdict))
    return f"manifest    {shown(made.path)}"


def _delete_old_folders(ctx: Context, recipe: str) -> None:
    """Delete folders of servers that killed runs left behind."""
    for folder in ctx.places.servers.glob(f"{glob.escape(recipe)}@{INSTANCE}-*"):
        with suppress(OSError):
            age = ctx.clock.now().timestamp() - folder.stat().st_mtime
            if age > LEFT_S and not get_status(folder).alive:
                shutil.rmtree(folder)


class _Server:
    """One of the two servers: prepared once, run as often as needed."""

    def __init__(self, ctx: Context, case: Case, workload: Workload, name: str, id_: str) -> None:
        self._ctx = ctx
        self._case = case
        self._workload = workload
        self._name = name
        self._loaded, self._lock = (
            (case.loaded, case.patched) if name == "with" else (case.bare, case.without)
        )
        self._problem: str | None = None
        self._options = serve.Options(
            recipe=str(case.loaded.path), set_=case.options.overrides, port="0", foreground=True,
            accept_memory_risk=case.options.risk, instance=f"{INSTANCE}-{id_}-{name}",
        )  # fmt: skip
        self._build = ""
        self._image: ImageArtifact | None = None
        self._log = Path("server.log")

    def prepare(self) -> None:
        """Build it, unless it is built already; a failed build is evidence as well."""
        ctx = self._ctx
        ctx.progress.say(f"== {self._case.name}: the server {self._name} the patch")
        with self._run() as record:
            wanted = self._wanted()
            self._build = wanted.build.digest
            try:
                self._image = serve.prepare(ctx, wanted, self._options, record).image
            except BUILD_ERRORS as error:
                word = "build" if isinstance(error, BuildFailed) else "serve"
                self._problem = f"it does not {word}: {error.what}"
                record.finish(self._problem, exit_code=error.exit_code)
            except RecipeError as error:
                if self._name == "with" or error.id != "flag-unknown":
                    raise
                # The flag comes with the patch: the recipe is right, this server is too old.
                self._problem = f"it does not accept the command: {error.faults[0].message}"
                record.finish(self._problem, exit_code=error.exit_code)
            else:
                record.finish("prepared")

    def measure(self) -> Side:
        """Run it, measure it, stop it, and read its log."""
        measured, report, problem = Measure(self._ctx, self._workload), LogReport(), self._problem
        if not problem:
            problem, self._log, report = self._serve(measured)
        return side_of(self._name, self._build, measured, self._log, report, problem)

    def measure_speed(self) -> Measure:
        """Run it once more, for the benchmark alone."""
        measured = Measure(self._ctx, self._workload, speed_only=True)
        self._serve(measured)
        return measured

    def _serve(self, measured: Measure) -> tuple[str | None, Path, LogReport]:
        ctx, problem = self._ctx, None
        ctx.progress.say(f"== {self._case.name}: serving {self._name} the patch")
        with self._run() as record:
            wanted, log = self._wanted(), record.folder / "server.log"
            wanted = wanted.of(self._image) if self._image else wanted
            try:
                ready = serve.bring(ctx, wanted, self._options, record, measured)
                record.finish(f"measured: {ready.evidence.summary}")
                # The log up to here: errors while an engine is stopped are not the patch's.
                ctx.clock.sleep(SETTLE_S)
                _copy_log(wanted.folder, log)
                if ready.connection:
                    ready.connection.close()
            except BUILD_ERRORS as error:
                problem = _problem(error, measured)
                record.finish(f"measured: {error.what}", exit_code=error.exit_code)
                stop(wanted.folder)
                _copy_log(wanted.folder, log)
            finally:
                stop(wanted.folder)
                shutil.rmtree(wanted.folder, ignore_errors=True)
            engine, built = wanted.recipe.engine, wanted.build
            made = built.image if isinstance(built, ImagePlan) else built.artifact
            own = (str(wanted.folder), made, built.digest, wanted.lock.stamp)
            expected = engine_of(engine).expected_signatures(wanted.asked)
            return problem, log, read_log(log, engine, self._workload.patterns, own, expected)

    def _wanted(self) -> serve.Wanted:
        key = serve.api_key(self._ctx, self._case.loaded)
        if key:
            self._ctx.redactor.add(key)
        return serve.wanted_server(self._ctx, self._loaded, self._lock, self._options, key)

    @contextmanager
    def _run(self) -> Iterator[Run]:
        """Open a run record for this server."""
        recipe = self._case.loaded.recipe
        with Run.start(self._ctx, "judge", recipe.name, secrets=recipe.secrets) as record:
            record.pin(lock=digest(self._lock))
            record.fact("side", f"{self._name} patch {self._case.name}")
            yield record


def _copy_log(folder: Path, log: Path) -> None:
    with suppress(OSError):
        shutil.copyfile(folder / "server.log", log)


def _problem(error: BakehouseError, measured: Measure) -> str | None:
    """Why a server could not be measured; None if its suites and its log are complete.

    They are if every request was sent and the same server still ran afterwards, whatever it
    answered.
    """
    missing = not_passed(error.checks)
    gone = [c for c in missing if c.id.endswith("-after") and c.id != "log-after"]
    return None if measured.asked and missing and not gone else error.what
