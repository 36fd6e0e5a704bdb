"""The task `patch`: pin a patch, try it on sources, compare a server with and without it."""

from __future__ import annotations

import glob
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bakehouse import flags, resolver
from bakehouse.build.image import ImageArtifact
from bakehouse.commands import serve
from bakehouse.context import Context, Outcome
from bakehouse.engines.base import engine_of
from bakehouse.errors import (
    BakehouseError,
    BuildFailed,
    HostError,
    NotCorrect,
    NotHealthy,
    PatchError,
    RecipeError,
    UsageError,
)
from bakehouse.lock import ArchivePin, GitPin, Lock, PatchPin
from bakehouse.models import Check, check, digest, not_passed
from bakehouse.patch_review.benchmark import Measure, Workload, read_log, workload_of
from bakehouse.patch_review.overrides import PatchOverrides, ensure, parse_allow
from bakehouse.patch_review.verdict import (
    Conclusion,
    LogReport,
    Side,
    conclude_verdict,
    evidence_of,
    report_lines,
)
from bakehouse.patches.apply import (
    ApplyResult,
    apply_patches,
    fit_hint,
    fit_id,
    loose_fit,
    pin_patches,
    try_apply,
)
from bakehouse.patches.diff import counts, read_diff
from bakehouse.patches.fetch import host_of
from bakehouse.patches.manifest import Expect, Fit, PatchVerdict, read_manifest, write_manifest
from bakehouse.patches.pin import Kind, PatchRef, Pinned, pin
from bakehouse.patches.source_tree import ensure_source, repository_of, source_is_here
from bakehouse.plan.types import ImagePlan
from bakehouse.preflight import rules
from bakehouse.recipe.loader import LoadedRecipe, find, load, names
from bakehouse.recipe.models import FULL_COMMIT, UPSTREAM
from bakehouse.recipe.types import matches_repo, shown
from bakehouse.redact import clean
from bakehouse.resolver import lock_path, read_lock, source_drift
from bakehouse.runs.store import Run
from bakehouse.server.status import get_status, stop
from bakehouse.sources import archives
from bakehouse.sources.git_mirror import commit_is_ready, mirror_folder
from bakehouse.system.git import Git

Options = flags.Patch

BUILD_ERRORS = (NotHealthy, NotCorrect, BuildFailed)
"""Errors that say something about the build, not about this machine."""
INSTANCE = "judge"
"""First part of the servers' names, so that users' servers are left alone."""
SETTLE_S = 0.5
"""Seconds to wait for log lines, which engines write from threads of their own."""
LEFT_S = 3600.0
"""Age in seconds after which the folder of a server that is not running is deleted."""


def run(ctx: Context, options: Options) -> Outcome:
    """Pin a patch, or compare it with its pin; then try it on one recipe, or on all of its engine.

    With a recipe, a patch that does not apply is exit 5; with `judge` a harmful one as well.
    """
    allow = parse_allow(options.allow)
    if options.judge and (not options.recipe or options.dry_run):
        raise UsageError(
            "--judge cannot be combined with --dry-run" if options.dry_run
            else "--judge needs a --recipe to compare servers with",
            hint="invoke patch --pr N --recipe NAME --judge builds, serves and compares",
        )  # fmt: skip
    if options.set_ and not options.recipe:
        raise UsageError("--set needs --recipe")
    if options.accept_memory_risk and not options.judge:
        raise UsageError("--accept-memory-risk needs --judge, which starts servers")
    loaded = load(find(options.recipe, ctx.recipes), options.set_) if options.recipe else None
    ref = read_ref(ctx, options, loaded)
    made = pin(ctx, ref, update=options.update, vendor=options.vendor, write=not options.dry_run)
    trial = _Trial(ctx, made.manifest.name, made.data, allow)
    if loaded:
        rows = [trial.on(loaded, fetch=True)]
    else:
        rows = list(_try_all(ctx, trial, made.manifest.repo))
    lines = [*_pin_lines(made, dry=options.dry_run), "", *_table(rows)]
    # A patch of an image is first tried when the derived image is built, for the comparison.
    later = options.judge and loaded is not None and loaded.recipe.tree is None
    failed = loaded and not rows[0].good and not later
    error = rows[0].error(made.manifest.name) if failed else None
    checks = tuple(row.check() for row in rows)
    outcome = Outcome(_result(made, rows), "\n".join(lines), checks, error=error, told=True)
    if loaded and options.judge and error is None:
        return compare_pinned(ctx, loaded, made, allow, options, outcome)
    return outcome


def read_ref(ctx: Context, options: Options, loaded: LoadedRecipe | None = None) -> PatchRef:
    """Read from the flags which patch is meant. Raises UsageError."""
    kinds: tuple[Kind, ...] = ("pr", "url", "file", "commit")
    named: list[tuple[Kind, str]] = [(k, v) for k in kinds if (v := str(getattr(options, k)))]
    if len(named) != 1:
        what = "several patches are named" if named else "no patch is named"
        raise UsageError(what, hint="exactly one of --pr N, --url, --commit and --file PATH")
    kind, what = named[0]
    if kind == "pr" and not (what.isascii() and what.isdigit() and 0 < int(what) < 2**31):
        raise UsageError(f"--pr takes a number, not '{clean(what, one_line=True)}'")
    if kind == "commit" and not FULL_COMMIT.fullmatch(what):
        raise UsageError(
            f"--commit takes all 40 hex digits, not '{clean(what, one_line=True)}'",
            hint="a short id can become ambiguous",
        )
    repo = options.repo or UPSTREAM[loaded.recipe.engine if loaded else "llama.cpp"]
    if not matches_repo(repo):
        raise UsageError(f"--repo takes OWNER/NAME, not '{clean(repo, one_line=True)}'")
    number = str(int(what)) if kind == "pr" else what
    return PatchRef(kind, number, repo).resolved(host_of(ctx.environment))


@dataclass(frozen=True)
class TrialResult:
    """How a patch fits one recipe; `fit` is None if that is unknown, and `why` says why."""

    recipe: str
    base: str = ""
    """The commit (or, of an archive, the tree) it was tried on; empty if unknown."""
    fit: ApplyResult | None = None
    why: str = ""
    allow: Fit = "exact"

    @property
    def word(self) -> str:
        """The result in a word."""
        return self.fit.word if self.fit else "unknown"

    @property
    def good(self) -> bool:
        """Whether it applies as loosely as is allowed."""
        return self.fit is not None and self.fit.good(self.allow)

    def check(self) -> Check:
        """Return the result as a check."""
        found = "; ".join((self.fit.word, *self.fit.notes[:1])) if self.fit else None
        where = f"{self.recipe} at {self.base[:12]}" if self.base else self.recipe
        where += "" if self.fit else f": {self.why}"
        expected = "applies" if self.allow == "exact" else f"applies, {self.allow} allowed"
        return check(f"patch.{self.recipe}", expected, found, where, ok=self.good)

    def error(self, key: str) -> BakehouseError:
        """The error for a patch that does not apply to the one recipe that was named."""
        if self.fit is None:
            return HostError(
                f"cannot tell whether patch {key} applies to recipe {self.recipe}: {self.why}",
                where=self.recipe, id="patch-not-tried",
                hint=f"run 'invoke fetch --recipe {self.recipe}' first; for an image, --judge "
                "builds the derived one and thereby tries the patch",
            )  # fmt: skip
        return PatchError(
            f"patch {key} on recipe {self.recipe}: {self.word}",
            where="\n".join((f"at {self.base}", *self.fit.notes)),
            hint=fit_hint(self.fit), id=fit_id(self.fit),
        )  # fmt: skip


class _Trial:
    """One patch, tried on the sources of any number of recipes; the same source is tried once.

    `key` is its name in a lock, `OWNER/NAME#ID`.
    """

    def __init__(self, ctx: Context, key: str, data: bytes, allow: Fit) -> None:
        self._ctx, self._git = ctx, Git(ctx.processes, ctx.environment)
        self._key, self._data, self._allow = key, data, allow
        self._fits: dict[tuple[str, ...], ApplyResult] = {}

    def on(self, loaded: LoadedRecipe, *, fetch: bool = False) -> TrialResult:
        """Try it on a recipe's source, after the patches before it in the recipe.

        Unknown, with the reason, if the source is not on this machine and not to be fetched, if the
        patches before it do not apply, or if the patch is invalid.
        """
        ctx, recipe, base = self._ctx, loaded.recipe, ""
        keys = [patch.key(recipe.engine) for patch in recipe.patches]
        place = keys.index(self._key) if self._key in keys else None
        allow = self._allow
        if place is not None and allow == "exact":
            allow = recipe.patches[place].allow
        try:
            source = self._source(loaded, fetch=fetch)
            if isinstance(source, str):
                return TrialResult(recipe.name, why=source, allow=allow)
            base = source.commit if isinstance(source, GitPin) else source.tree
            pins = pin_patches(ctx, loaded.folder, recipe.patches[:place], recipe.engine)
            case = (base, *(f"{pin.file.sha256} {pin.allow}" for pin in pins))
            if case not in self._fits:
                repository = repository_of(ctx.places, source)
                tree = apply_patches(ctx, self._git, repository, source.tree, pins)
                self._fits[case] = try_apply(self._git, repository, tree, self._data, self._key)
        except BakehouseError as error:
            return TrialResult(recipe.name, base, None, error.what, allow)
        return TrialResult(recipe.name, base, self._fits[case], allow=allow)

    def _source(self, loaded: LoadedRecipe, *, fetch: bool) -> GitPin | ArchivePin | str:
        """The recipe's source at its pinned commit, on this machine; or why it is not there."""
        ctx, git, tree = self._ctx, self._git, loaded.recipe.tree
        if tree is None:
            return "it runs an image: a patch becomes a layer of a derived one"
        lock = read_lock(lock_path(loaded.path))
        source = lock.source if lock and not source_drift(loaded.recipe, lock) else None
        if source and fetch:
            ensure_source(ctx, git, source)
            return source
        if source:
            here = source_is_here(ctx, git, source)
            return source if here else "its source is not on this machine"
        if fetch:
            file = tree.archive
            return (
                archives.pin_archive(ctx, git, file, loaded.folder) if file
                else resolver.pin_git(ctx, git, tree)
            )  # fmt: skip
        if tree.git and tree.commit and FULL_COMMIT.fullmatch(tree.commit):
            mirror = mirror_folder(ctx.places, tree.git)
            if commit_is_ready(git, mirror, tree.commit):
                object_id = git.object_id(mirror, f"{tree.commit}^{{tree}}")
                return GitPin(url=tree.git, commit=tree.commit, tree=object_id, date=0)
        return "its source is not on this machine, and it has no lock"


def _try_all(ctx: Context, trial: _Trial, repo: str) -> Iterator[TrialResult]:
    """Try a patch on every recipe of an engine; invalid ones are unknown, never left out.

    The engine is the one whose upstream repository, or a fork of the same name, `repo` is.
    """
    name = repo.rpartition("/")[2]
    engine = next((e for e, up in UPSTREAM.items() if up.endswith(f"/{name}")), "llama.cpp")
    for recipe in names(ctx.recipes):
        try:
            loaded = load(find(recipe, ctx.recipes))
        except RecipeError as error:
            yield TrialResult(recipe, why=error.what)
            continue
        if loaded.recipe.engine == engine:
            yield trial.on(loaded)


def _table(rows: Sequence[TrialResult]) -> list[str]:
    """Return the results of several recipes as a table, each with its notes."""
    name_width = max((len(row.recipe) for row in rows), default=0)
    word_width = max((len(row.word) for row in rows), default=0)
    lines = []
    for row in rows:
        tail = f"at {row.base[:12]}" if row.fit else row.why
        refused = "  (refused unless allowed)" if loose_fit(row.word) and not row.good else ""
        lines.append(f"{row.recipe:{name_width}}  {row.word:{word_width}}  {tail}{refused}")
        lines += [f"    {note}" for note in (row.fit.notes if row.fit else ())]
    return lines


_HOW = {
    "new": "pinned",
    "same": "pinned before, unchanged",
    "moved": "pinned again, changed",
    "offline": "pinned before, not compared with the host",
}


def _pin_lines(made: Pinned, *, dry: bool) -> list[str]:
    manifest = made.manifest
    parts = read_diff(made.data, manifest.name)
    beside: dict[str, list[str]] = {}
    for part in parts:
        moved = [f"renamed from {part.moved_from}"] if part.moved_from else []
        beside.setdefault(part.path, []).extend(moved + ([part.mode] if part.mode else []))
    how = _HOW[made.how]
    how = f"would be {how}" if dry and made.how in ("new", "moved") else how
    lines = [
        f"{manifest.name}  {how}",
        *([f"title     {manifest.title}"] if manifest.title else []),
        f"source    {manifest.source}",
        f"head      {manifest.head or 'unknown'}",
        f"base      {manifest.base or 'unknown'}",
        f"diff      {counts(parts)}, {len(made.data):,} bytes",
        f"sha256    {manifest.sha256}",
        *(", ".join((f"file      {f.path} +{f.added} -{f.removed}", *beside.get(f.path, ())))
          for f in manifest.files),
        *([f"upstream  {manifest.upstream}"] if manifest.upstream else []),
        *(["status    experimental"] if manifest.experimental else []),
        *(f"verdict   {v.word}: {v.recipe} at {v.base[:12]}, {v.date}" for v in manifest.verdicts
          if v.sha256 == manifest.sha256),
        *(f"moved     {change}" for change in made.changes),
        *(f"note      {note}" for note in made.notes),
        f"manifest  {shown(made.path)}",
    ]  # fmt: skip
    if not dry and "://" not in manifest.source and not manifest.vendored:
        note = "the diff is only in this machine's cache; --vendor stores it here as well"
        lines.append(f"note      {note}")
    return lines


def _result(made: Pinned, rows: Sequence[TrialResult]) -> dict[str, Any]:
    return {
        "manifest": made.manifest.to_data(),
        "path": str(made.path),
        "how": made.how,
        "modes": {part.path: part.mode for part in read_diff(made.data, made.manifest.name)
                  if part.mode},
        "changes": list(made.changes),
        "notes": list(made.notes),
        "tried": [
            {"recipe": row.recipe, "base": row.base or None, "result": row.word,
             "applies": row.good if row.fit else None, "allow": row.allow,
             "tree": row.fit.tree if row.fit else None,
             "notes": list(row.fit.notes) if row.fit else [row.why]}
            for row in rows
        ],
    }  # fmt: skip


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
    overrides: tuple[str, ...] = ()
    """Of the recipe, from `--set`: for both servers, and kept with the verdict."""
    risk: str = ""
    """Why both may start although they do not fit into this machine's memory."""


@dataclass(frozen=True)
class Comparison:
    """The verdict and all it is based on; `record` is the run's."""

    conclusion: Conclusion
    sides: tuple[Side, Side]
    """Without, with."""
    evidence: dict[str, Any]
    record: Path
    date: str
    text: str

    def outcome(self, extra: Mapping[str, Any] | None = None) -> Outcome:
        """Return the task's result: exit 0, 5 for a harmful patch, 7 if there is no verdict."""
        word, reasons = self.conclusion.word, self.conclusion.reasons
        result: dict[str, Any] = {
            **(extra or {}), "verdict": word, "reasons": list(reasons),
            "evidence": self.evidence, "record": str(self.record),
            "changes": [c.to_data() for c in self.conclusion.changes],
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
        return Outcome(result, self.text, self.conclusion.checks, error=error)


def compare_pinned(
    ctx: Context, loaded: LoadedRecipe, made: Pinned, allow: Fit, options: Options, before: Outcome
) -> Outcome:
    """Judge a pinned patch with a recipe, and write the verdict into its manifest.

    A patch of the recipe's own is dropped for the one server, another one is added for the other;
    patches beside it stay. `before` is the outcome so far. Raises as `compare_servers` does.
    """
    manifest, engine = made.manifest, loaded.recipe.engine
    add, drop = PatchOverrides(add=(manifest.name,), allow=allow), PatchOverrides()
    if any(p.key(engine) == manifest.name for p in loaded.recipe.patches):
        add, drop = PatchOverrides(), PatchOverrides(drop=(manifest.name,))
    changed = rules.load_and_check(loaded.path, options.set_, add.change(ctx))
    bare = drop.change(ctx)(loaded)
    patched = ensure(ctx, changed, add, options.set_)
    without = ensure(ctx, bare, drop, options.set_)
    pin = next(p for p in patched.patches if p.file.path == manifest.name)
    case = Case(changed, bare, pin, patched, without, manifest.name, manifest.expect,
                options.set_, options.accept_memory_risk)  # fmt: skip
    found = compare_servers(ctx, case)
    outcome = found.outcome(before.result)
    text = (before.text, "", found.text, _write_verdict(made, found, case),
            f"record      {found.record}")  # fmt: skip
    checks = (*before.checks, *outcome.checks)
    return Outcome(outcome.result, "\n".join(text), checks, error=outcome.error)


def compare_servers(ctx: Context, case: Case) -> Comparison:
    """Build, run and compare both servers. Leaves no server behind, however it ends.

    Raises errors of this machine, lock, patch or recipe: HostError, LockError, PatchError,
    RecipeError, UsageError.
    """
    recipe, overrides = case.loaded.recipe, case.overrides
    workload = workload_of(recipe, case.expect)
    speculates = recipe.serve.speculation not in (None, "none")
    for folder in ctx.places.servers.glob(f"{glob.escape(recipe.name)}@{INSTANCE}-*"):
        with suppress(OSError):  # a killed run left it behind
            age = ctx.clock.now().timestamp() - folder.stat().st_mtime
            if age > LEFT_S and not get_status(folder).alive:
                shutil.rmtree(folder)
    with Run.start(ctx, "patch", recipe.name, secrets=recipe.secrets) as record:
        record.pin(lock=digest(case.patched))
        record.fact("patch", case.pin.to_data())
        if overrides:
            record.fact("overrides", overrides)
        servers = [_Server(ctx, case, workload, n, record.id[-4:]) for n in ("without", "with")]
        for server in servers:
            server.prepare()
        without, patched = (server.measure() for server in servers)
        judged = conclude_verdict(without, patched, case.expect, speculates=speculates)
        if judged.speed and (judged.speed.slower(case.expect) or judged.speed.faster):
            ctx.progress.say(f"speed {judged.speed}: running both again to be sure")
            patched, without = servers[1].measure_again(patched), servers[0].measure_again(without)
            judged = conclude_verdict(without, patched, case.expect, speculates=speculates)
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
    return Comparison(judged, (without, patched), found, record.record, date, text)


def _write_verdict(made: Pinned, found: Comparison, case: Case) -> str:
    """Write a verdict into the manifest as it is now; return a line that says so."""
    if found.conclusion.word is None:
        return "manifest    not changed: no verdict"
    manifest = read_manifest(made.path)
    if manifest.sha256 != case.pin.file.sha256:
        return f"manifest    not changed: {shown(made.path)} now pins another diff"
    verdict = PatchVerdict(
        recipe=case.loaded.recipe.name, base=case.patched.base or "unknown",
        sha256=case.pin.file.sha256, word=found.conclusion.word, reasons=found.conclusion.reasons,
        evidence=found.evidence, date=found.date,
    )  # fmt: skip
    write_manifest(made.path, manifest.with_verdict(verdict))
    return f"manifest    {shown(made.path)}"


class _Server:
    """One of the two servers: prepared once, run as often as needed."""

    def __init__(self, ctx: Context, case: Case, workload: Workload, name: str, id_: str) -> None:
        self._ctx, self._case, self._workload, self._name = ctx, case, workload, name
        with_it = name == "with"
        self._loaded = case.loaded if with_it else case.bare
        self._lock = case.patched if with_it else case.without
        self._problem: str | None = None
        self._options = serve.Options(
            recipe=str(case.loaded.path), set_=case.overrides, port="0", foreground=True,
            accept_memory_risk=case.risk, instance=f"{INSTANCE}-{id_}-{name}",
        )  # fmt: skip
        self._build = ""
        self._image: ImageArtifact | None = None

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
        log = Path("server.log")
        if not problem:
            problem, log, report = self._serve(measured)
        return measured.side(self._name, self._build, log, report, problem)

    def measure_again(self, side: Side) -> Side:
        """Run it once more, and add the benchmark's rounds: speed and texts, nothing else."""
        measured = Measure(self._ctx, self._workload, speed_only=True)
        self._serve(measured)
        return side.model_copy(update={"rounds": (*side.rounds, *measured.rounds)})

    def _serve(self, measured: Measure) -> tuple[str | None, Path, LogReport]:
        """Run it; return why it could not be measured (None if it was), and its log."""
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
            expected = engine_of(engine).asked_for(wanted.asked)
            return problem, log, read_log(log, engine, self._workload.patterns, own, expected)

    def _wanted(self) -> serve.PlannedServer:
        key = serve.api_key(self._ctx, self._case.loaded)
        if key:
            self._ctx.redactor.add(key)
        return serve.plan_server(self._ctx, self._loaded, self._lock, self._options, key)

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
