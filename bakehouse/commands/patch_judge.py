"""The verdict of a patch: two servers, one without it and one with it, asked the same in turn."""

from __future__ import annotations

import glob
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bakehouse.base import digest
from bakehouse.build.image import ImageArtifact
from bakehouse.checks import not_passed
from bakehouse.commands import serve
from bakehouse.context import Context
from bakehouse.engines.engine import engine_of
from bakehouse.errors import (
    BakehouseError,
    BuildFailed,
    NotCorrect,
    NotHealthy,
    PatchError,
    RecipeError,
)
from bakehouse.lock import Lock, PatchPin
from bakehouse.outcome import Outcome
from bakehouse.patches import for_run
from bakehouse.patches.evidence import Side
from bakehouse.patches.judge import Judged, faster, judge, slower
from bakehouse.patches.manifest import Expect, Fit, PatchVerdict
from bakehouse.patches.measure import Measure, Read, Wants, longer, read_log, side, wants
from bakehouse.patches.pin import Pinned
from bakehouse.patches.tell import evidence, lines
from bakehouse.plan.types import ImagePlan
from bakehouse.preflight import combinations
from bakehouse.recipe.faults import shown
from bakehouse.recipe.load import Loaded
from bakehouse.records.store import Run
from bakehouse.serve.control import look, stop
from bakehouse.sources.manifests import read_manifest, write_manifest

SERVES = (NotHealthy, NotCorrect, BuildFailed)
"""What says something about the build that was served, not about this machine."""


INSTANCE = "judge"
"""Begins the names of the servers, so that those that people use are left alone."""
SETTLE_S = 0.5
"""Engines write their logs from threads of their own; so long a line may be late, in seconds."""
LEFT_S = 3600.0
"""After so many seconds a server's folder that nothing runs in has been left behind."""


@dataclass(frozen=True)
class How:
    """What the flags say of the judging, beside the patch and the recipe."""

    allow: Fit = "exact"
    overrides: tuple[str, ...] = ()
    """Of the recipe, as `--set` gave them: for both servers, and kept with the verdict."""
    risk: str = ""
    """Why both are started although they do not fit this machine's memory."""


@dataclass(frozen=True)
class Case:
    """What is to be judged: one patch, with one recipe."""

    loaded: Loaded
    """The recipe with the patch."""
    bare: Loaded
    """The recipe without it."""
    pin: PatchPin
    patched: Lock
    """With the patch."""
    without: Lock
    """The same without it, other patches in place."""
    name: str
    expect: Expect = field(default_factory=Expect)
    how: How = field(default_factory=How)

    def lock(self, name: str) -> Lock:
        """Give the lock of a side."""
        return self.patched if name == "with" else self.without


@dataclass(frozen=True)
class Verdict:
    """What came of it; `record` is the run's."""

    judged: Judged
    sides: tuple[Side, Side]
    """Without, with."""
    evidence: dict[str, Any]
    record: Path
    date: str
    text: str

    def outcome(self, extra: Mapping[str, Any] | None = None, text: str = "") -> Outcome:
        """Give the task's result: 0, or 5 for a patch that harms, or 7 where nothing is judged."""
        word, reasons = self.judged.word, self.judged.reasons
        result: dict[str, Any] = {
            **(extra or {}), "verdict": word, "reasons": list(reasons),
            "evidence": self.evidence, "record": str(self.record),
            "changes": [c.to_data() for c in self.judged.changes],
        }  # fmt: skip
        error: BakehouseError | None = None
        if word is None:
            error = NotHealthy(
                "the patch cannot be judged: neither server could be asked",
                where="; ".join(reasons), hint="get the recipe to serve without the patch first",
                id="patch-not-judged",
            )  # fmt: skip
        elif word == "harmful":
            error = PatchError(
                f"the patch harms: {reasons[0]}", where=str(self.record), id="patch-harmful",
                hint="leave it out, or take it to whoever wrote it with this record",
            )  # fmt: skip
        return Outcome(result, text or self.text, self.judged.checks, error=error)


def judge_case(ctx: Context, case: Case) -> Verdict:
    """Build and serve both, and judge. Nothing of either server is left, however it ends.

    Raises what stands in the way here: HostError, LockError, PatchError, RecipeError, UsageError.
    """
    recipe = case.loaded.recipe
    what = wants(recipe, case.expect)
    _tidy(ctx, recipe.name)
    with Run.start(ctx, "patch", recipe.name, secrets=recipe.secrets) as record:
        record.pin(lock=digest(case.patched))
        record.fact("patch", case.pin.to_data())
        if case.how.overrides:
            record.fact("overrides", case.how.overrides)
        servers = {n: _Server(ctx, case, what, n, record.id[-4:]) for n in ("without", "with")}
        for server in servers.values():
            server.prepare()
        without, patched = (server.measure() for server in servers.values())
        judged = judge(without, patched, case.expect, speculates=_speculates(case))
        if slower(judged.speed, case.expect) or faster(judged.speed):
            ctx.progress.say(f"speed {judged.speed}: both are served again, to be sure")
            patched = longer(patched, servers["with"].speed())
            without = longer(without, servers["without"].speed())
            judged = judge(without, patched, case.expect, speculates=_speculates(case))
        found = {**evidence(judged, without, patched), "run": record.id}
        if case.how.overrides:
            found["set"] = list(case.how.overrides)
        record.check(*judged.checks)
        record.fact("verdict", {"word": judged.word, "reasons": judged.reasons, **found})
        record.fact("changes", [c.to_data() for c in judged.changes])
        record.fact("sides", [_slim(without), _slim(patched)])
        word = judged.word or "not judged"
        code = {"harmful": PatchError.exit_code, "not judged": NotHealthy.exit_code}.get(word, 0)
        record.finish(f"{word}: {judged.reasons[0]}", exit_code=code)
    told = lines(case.name, case.pin, case.patched, judged, (without, patched))
    told += [f"set         {override}" for override in case.how.overrides]
    text = "\n".join(told)
    date = ctx.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ")
    return Verdict(judged, (without, patched), found, record.record, date, text)


def judge_pinned(ctx: Context, loaded: Loaded, made: Pinned, how: How, before: Outcome) -> Outcome:
    """Judge a pinned patch with a recipe, and write the verdict into its manifest.

    A patch of the recipe's own is left out for the comparison, another one is added; patches beside
    it stay. `before` is what was said so far. Raises as `judge_case` does.
    """
    manifest, path, engine = made.manifest, loaded.path, loaded.recipe.engine
    own = any(p.key(engine) == manifest.name for p in loaded.recipe.patches)
    add = for_run.Asked() if own else for_run.Asked(add=(manifest.name,), allow=how.allow)
    drop = for_run.Asked(drop=(manifest.name,)) if own else for_run.Asked()
    changed = combinations.load_good(path, how.overrides, add.change(ctx))
    bare = drop.change(ctx)(loaded)
    patched = for_run.ensure(ctx, changed, add, how.overrides)
    without = for_run.ensure(ctx, bare, drop, how.overrides)
    pin = next(p for p in patched.patches if p.file.path == manifest.name)
    case = Case(changed, bare, pin, patched, without, manifest.name, manifest.expect, how)
    found = judge_case(ctx, case)
    kept = keep(made, found, loaded.recipe.name, pin, patched)
    outcome = found.outcome(before.result, f"{found.text}\n{kept}")
    return Outcome(
        outcome.result, f"{before.text}\n\n{outcome.text}\nrecord      {found.record}",
        (*before.checks, *outcome.checks), error=outcome.error,
    )  # fmt: skip


def keep(made: Pinned, found: Verdict, recipe: str, pin: PatchPin, lock: Lock) -> str:
    """Write a verdict into the manifest, as it is by now; say where it stands."""
    if found.judged.word is None:
        return "manifest    not changed: nothing was judged"
    manifest = read_manifest(made.path)
    if manifest.sha256 != pin.file.sha256:
        return f"manifest    not changed: {shown(made.path)} pins another diff by now"
    verdict = PatchVerdict(
        recipe=recipe, base=lock.base or "unknown", sha256=pin.file.sha256,
        word=found.judged.word, reasons=found.judged.reasons, evidence=found.evidence,
        date=found.date,
    )  # fmt: skip
    write_manifest(made.path, manifest.with_verdict(verdict))
    return f"manifest    {shown(made.path)}"


def _tidy(ctx: Context, recipe: str) -> None:
    """Remove what runs that were killed left of their servers; their ends are on record."""
    for folder in ctx.places.servers.glob(f"{glob.escape(recipe)}@{INSTANCE}-*"):
        with suppress(OSError):
            age = ctx.clock.now().timestamp() - folder.stat().st_mtime
            if age > LEFT_S and not look(folder).alive:
                shutil.rmtree(folder)


def _speculates(case: Case) -> bool:
    return case.loaded.recipe.serve.speculation not in (None, "none")


def _slim(one: Side) -> dict[str, Any]:
    """What the record keeps of a side; its kinds of lines stand in the changes, and in the log."""
    return {**one.to_data(), "kinds": len(one.kinds)}


class _Server:
    """One of the two servers: prepared once, served as often as it takes."""

    def __init__(self, ctx: Context, case: Case, what: Wants, name: str, id_: str) -> None:
        self._ctx = ctx
        self._case = case
        self._what = what
        self._name = name
        self._problem: str | None = None
        self._options = serve.Options(
            recipe=str(case.loaded.path), set_=case.how.overrides, port="0", foreground=True,
            accept_memory_risk=case.how.risk, instance=f"{INSTANCE}-{id_}-{name}",
        )  # fmt: skip
        self._build = ""
        self._image: ImageArtifact | None = None
        self._log = Path("server.log")

    def prepare(self) -> None:
        """Build it, unless it is there; what does not build is evidence as well."""
        ctx, case = self._ctx, self._case
        ctx.progress.say(f"== {case.name}: the server {self._name} the patch")
        with self._run() as record:
            wanted = self._wanted()
            self._build = wanted.build.digest
            try:
                self._image = serve.prepare(ctx, wanted, self._options, record).image
            except SERVES as error:
                word = "build" if isinstance(error, BuildFailed) else "serve"
                self._problem = f"it does not {word}: {error.what}"
                record.finish(self._problem, exit_code=error.exit_code)
            except RecipeError as error:
                if self._name == "with" or error.id != "flag-unknown":
                    raise
                # A flag that the patch brings: the recipe is right, and this server is too old.
                self._problem = f"it does not take the command: {error.faults[0].message}"
                record.finish(self._problem, exit_code=error.exit_code)
            else:
                record.finish("prepared")

    def measure(self) -> Side:
        """Serve it, ask it everything, end it, and read its log."""
        heard = Measure(self._ctx, self._what)
        if self._problem:
            return side(self._name, self._build, heard, self._log, Read(), self._problem)
        problem, read = self._serve(heard)
        return side(self._name, self._build, heard, self._log, read, problem)

    def speed(self) -> Measure:
        """Serve it once more, for the generation alone."""
        heard = Measure(self._ctx, self._what, speed_only=True)
        self._serve(heard)
        return heard

    def _serve(self, heard: Measure) -> tuple[str | None, Read]:
        ctx, problem = self._ctx, None
        ctx.progress.say(f"== {self._case.name}: serving {self._name} the patch")
        with self._run() as record:
            wanted, log = self._wanted(), record.folder / "server.log"
            wanted = wanted.of(self._image) if self._image else wanted
            try:
                ready = serve.bring(ctx, wanted, self._options, record, heard)
                record.finish(f"measured: {ready.evidence.summary}")
                # Up to here: what an engine says while it is stopped is no fault of the patch.
                ctx.clock.sleep(SETTLE_S)
                _copy(wanted.folder, log)
                if ready.connection:
                    ready.connection.close()
            except SERVES as error:
                problem = _problem(error, heard)
                record.finish(f"measured: {error.what}", exit_code=error.exit_code)
                stop(wanted.folder)
                _copy(wanted.folder, log)
            finally:
                stop(wanted.folder)
                shutil.rmtree(wanted.folder, ignore_errors=True)
            if not heard.speed_only:
                self._log = log
            return problem, self._read(wanted, log)

    def _read(self, wanted: serve.Wanted, log: Path) -> Read:
        engine = wanted.recipe.engine
        built = wanted.build
        made = built.image if isinstance(built, ImagePlan) else built.artifact
        own = (str(wanted.folder), made, built.digest, wanted.lock.stamp)
        asked_for = engine_of(engine).asked_for(wanted.asked)
        return read_log(log, engine, self._what.patterns, own, asked_for)

    def _wanted(self) -> serve.Wanted:
        case, key = self._case, serve.api_key(self._ctx, self._case.loaded)
        if key:
            self._ctx.redactor.add(key)
        loaded = case.loaded if self._name == "with" else case.bare
        return serve.wanted_server(self._ctx, loaded, case.lock(self._name), self._options, key)

    @contextmanager
    def _run(self) -> Iterator[Run]:
        """Open a record of its own for this server."""
        recipe = self._case.loaded.recipe
        with Run.start(self._ctx, "judge", recipe.name, secrets=recipe.secrets) as record:
            record.pin(lock=digest(self._case.lock(self._name)))
            record.fact("side", f"{self._name} patch {self._case.name}")
            yield record


def _copy(folder: Path, log: Path) -> None:
    with suppress(OSError):
        shutil.copyfile(folder / "server.log", log)


def _problem(error: BakehouseError, heard: Measure) -> str | None:
    """Why a server could not be measured; None where its suites and its log tell all there is.

    A server that was asked everything, and is still the same one afterwards, was measured, whatever
    it answered.
    """
    missing = not_passed(error.checks)
    gone = [c for c in missing if c.id.endswith("-after") and c.id != "log-after"]
    return None if heard.asked and missing and not gone else error.what
