"""Run a build plan: steps, work folder, result.

Every build of a home works in `builds/.work/0`; a second one at the same time in `1`, and so on.
A lock, which ends with its process, marks a folder as in use: a folder whose lock is free was left
by a killed build, and is removed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from bakehouse.build import cmake_file_api
from bakehouse.build.artifact import (
    FOLDER_MODE,
    Artifact,
    BuildRecord,
    Damaged,
    StepTime,
    content_digest,
    disk_full,
    explained,
    install,
    list_files,
    says_full,
    starved,
    verify,
)
from bakehouse.build.error_parser import (
    FirstError,
    NinjaWatch,
    first_build_error,
    first_cmake_error,
)
from bakehouse.context import Context
from bakehouse.cuda.elf import read_cuda_file
from bakehouse.cuda.verify import accept_artifact, accept_devices, covers, find_cuda_file
from bakehouse.engines.base import Configured, Expected
from bakehouse.engines.llamacpp.cmake import check_configured, decisive, git_stand_in, refuse_cuda
from bakehouse.errors import BakehouseError, BuildFailed, HostError
from bakehouse.host import read_gpus
from bakehouse.lock import Lock
from bakehouse.models import Check, check, not_passed, to_json
from bakehouse.patches.source_tree import ensure_tree, materialise
from bakehouse.plan.types import ARTIFACT_RECORD, BuildPlan
from bakehouse.redact import clean
from bakehouse.runs.store import Run
from bakehouse.system.process import Captured, Finished, environment
from bakehouse.util.files import file_lock, fsync_folder

PLACES = 64
"""Maximum number of builds at the same time."""


@contextmanager
def digest_lock(ctx: Context, builds: Path, digest: str) -> Iterator[None]:
    """Hold the one lock of an artifact; wait, and say so, while another build holds it."""
    lock = builds / ".locks" / f"{digest}.lock"
    with file_lock(lock, "the same build", ctx.progress.say):
        yield


@contextmanager
def work_folder(ctx: Context, plan: BuildPlan) -> Iterator[Path]:
    """Take the first free work folder, make it empty, and remove it afterwards.

    Raises HostError if PLACES builds run already.
    """
    root = Path(plan.work).parent
    with ExitStack() as stack:
        folder = _take(stack, root)
        for left in filter(Path.is_dir, root.iterdir()):  # of killed builds, in the other places
            with suppress(_InUse), _lock(root / f"{left.name.partition('-')[0]}.lock"):
                ctx.progress.say("removing what a build that was killed left behind")
                shutil.rmtree(left, ignore_errors=True)
        for name in ("src", "build", "home", "tmp", "tools", "stage"):
            (folder / name).mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class _InUse(BakehouseError):
    """Another build works in this folder."""


def _lock(lock: Path) -> AbstractContextManager[None]:
    return file_lock(lock, lock.stem, lambda _: None, busy=_InUse(lock.stem))


def _take(stack: ExitStack, root: Path) -> Path:
    for number in range(PLACES):
        with suppress(_InUse):
            stack.enter_context(_lock(root / f"{number}.lock"))
            break
    else:
        raise HostError(
            f"{PLACES} builds are running on this machine already",
            where=str(root),
            hint="wait until one of them ends",
        )
    folder = root / str(number)
    if folder.exists():  # moved away first, as its last children may still write to it
        folder.rename(root / f"{number}-left-{os.getpid()}")
    for left in root.glob(f"{number}-left-*"):
        shutil.rmtree(left, ignore_errors=True)
    return folder


def moved(plan: BuildPlan, work: Path) -> BuildPlan:
    """Give the same plan for another work folder."""
    if str(work) == plan.work:
        return plan
    pattern = re.compile(re.escape(plan.work) + r'(?=[/="]|$)')

    def text(value: str) -> str:
        return pattern.sub(lambda _: str(work), value)

    steps = tuple(
        step.model_copy(
            update={
                "argv": tuple(map(text, step.argv)),
                "env": {name: text(value) for name, value in step.env.items()},
                "cwd": step.cwd and text(step.cwd),
            }
        )
        for step in plan.steps
    )
    asked = {name: text(value) for name, value in plan.expected.asked.items()}
    expected = plan.expected.model_copy(update={"asked": asked})
    return plan.model_copy(update={"steps": steps, "work": str(work), "expected": expected})


RECORD_MODE = 0o644
DRIVER = "libcuda.so.1"
"""The driver's library: the Docker Engine adds the machine's own to a container with a GPU."""
VERSION_S = 60.0
"""Seconds within which a finished server has to say its version."""


def configure(ctx: Context, lock: Lock, plan: BuildPlan, run: Run) -> Configured:
    """Run CMake and read its answers. Raises BuildFailed with its first error."""
    work = Path(plan.work)
    step = plan.step("configure")
    git = work / "tools" / "git"
    git.write_text(git_stand_in(lock))
    git.chmod(0o755)
    cmake_file_api.ask(work / "build")
    ctx.progress.say("configure")
    with run.step(step.id, step.argv) as taken:
        done = ctx.processes.run(
            step.argv, env=environment(step.env), cwd=work, log=taken.log, keep_lines=20_000
        )
        taken.ended(done)
    if not done.ok:
        error = first_cmake_error(done.lines, plan.roots())
        raise _failure("configure", done, error, taken.log, work)
    try:
        return cmake_file_api.read(work / "build", taken.log)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # CMake exits with 0 even if it could not write its answers.
        if starved(work):
            raise disk_full(str(work)) from error
        raise BuildFailed(
            f"CMake's answers about the build cannot be read: {error}",
            where=str(work / "build" / ".cmake"),
            hint=f"see the output of CMake: {taken.log}",
        ) from error


def accept(run: Run, configured: Configured, expected: Expected) -> tuple[Check, ...]:
    """Check a configured build, here or in a container. Raises BuildFailed unless all pass."""
    with run.step("accept"):
        checks = check_configured(configured, expected)
    run.checks(checks)
    refuse_cuda(configured, expected, checks)
    all_passed("CMake did not configure what was asked for", decisive(checks))
    return checks


_FIXES = {
    "configure.used": "correct the name in the recipe's build.cmake, or leave it out",
    "configure.asked": "correct the value in the recipe's build.cmake; if it is right, the "
    "project overrides it: see the log of configure",
    "configure.targets": "correct the name in the recipe's build.targets",
}
"""How to fix what a recipe can cause."""


def all_passed(what: str, checks: tuple[Check, ...]) -> None:
    """Raise BuildFailed unless there are checks and every one passed."""
    missing = not_passed(checks)
    if checks and not missing:
        return
    says = "; ".join(f"{c.id} {c.verdict}: {c.observed}" for c in missing) or "no evidence"
    where = hint = None
    if missing:
        where = missing[0].where
        hint = _FIXES.get(missing[0].id, f"expected: {missing[0].expected}")
    raise BuildFailed(f"{what}: {says}", where=where, hint=hint, id="not-accepted", checks=checks)


def _recorded(run: Run, what: str, checks: tuple[Check, ...]) -> tuple[Check, ...]:
    """Record checks, then raise BuildFailed unless all passed."""
    run.checks(checks)
    all_passed(what, checks)
    return checks


def compile_targets(ctx: Context, plan: BuildPlan, run: Run) -> None:
    """Run Ninja and show its progress. Raises BuildFailed with the first error."""
    work = Path(plan.work)
    step = plan.step("compile")
    (work / "tmp").mkdir(exist_ok=True)
    with run.step(step.id, step.argv) as taken, ctx.progress.bar("compile", "steps") as bar:
        watch = NinjaWatch(bar)
        done = ctx.processes.run(
            step.argv,
            env=environment(step.env),
            cwd=work,
            log=taken.log,
            on_line=watch.line,
            keep_lines=1,
        )
        taken.ended(done)
    if not done.ok:
        lines = taken.log.read_text(errors="replace").splitlines()
        error = first_build_error(lines, plan.roots())
        raise _failure("compile", done, error, taken.log, work)


def _failure(
    what: str, done: Finished, first: FirstError | None, log: Path, work: Path
) -> BakehouseError:
    """Explain why a step failed: its first error, or a lack of disk or memory."""
    if done.signal:
        hint = "perhaps the kernel did that: look for 'Out of memory' in its log"
        return BuildFailed(f"{what} was ended by {done.signal}", where=str(log), hint=hint)
    text = first.message if first else f"{what} ended with code {done.code}"
    where = first.place(str(log)) if first else str(log)
    # Many programs that cannot write die without a reason; a compiler that names a line does not.
    named = what == "compile" and first and first.line
    lines = log.read_text(errors="replace").splitlines()
    if says_full(lines) or (starved(work) and not named):
        return disk_full(str(log))
    if "Killed signal terminated program" in text:
        hint = "compile fewer files at once: --jobs 1"
        return HostError(f"memory ran out while compiling: {text}", where=where, hint=hint)
    return BuildFailed(f"{what} failed: {text}", where=where, hint=f"full log: {log}")


def check_server(ctx: Context, plan: BuildPlan, run: Run) -> tuple[Check, ...]:
    """Run the installed server for its version. Raises BuildFailed unless it shows the pin."""
    step, cuda = plan.step("verify"), plan.expected.cuda
    with run.step(step.id, step.argv) as taken:
        env = environment(step.env)
        cwd = Path(step.cwd) if step.cwd else None
        answer = ctx.processes.capture(step.argv, env=env, cwd=cwd, timeout=VERSION_S)
        stub = cuda.toolkit.libraries.get("cuda") if cuda else None
        if stub and not answer.ok and f"{DRIVER}: cannot open shared object file" in answer.err:
            run.fact("driver", "none on this machine: --version ran with its stub")
            folder = Path(plan.work) / "driver-stub"  # outside of the artifact
            folder.mkdir(exist_ok=True)
            (folder / DRIVER).symlink_to(stub)
            env["LD_LIBRARY_PATH"] = str(folder)
            answer = ctx.processes.capture(step.argv, env=env, cwd=cwd, timeout=VERSION_S)
        taken.log.write_text(answer.out + answer.err)
        taken.ended(answer)
    where = f"llama-server --version, answer in {taken.log}"
    checks = check_version(answer, plan.inputs.stamp, plan.inputs.number, where)
    return _recorded(run, "the built server does not run, or is another version", checks)


def check_devices(
    ctx: Context, run: Run, folder: Path, list_devices: Callable[[], str]
) -> tuple[Check, ...]:
    """Check the devices that a CUDA server lists, if it has code for a GPU of this machine.

    `folder` has the built files, `list_devices` runs the server. A build for another machine's GPU
    is not checked here.
    """
    gpus = read_gpus(ctx.processes)
    file = find_cuda_file(folder) if gpus else None
    if file is None:
        return ()
    embedded = read_cuda_file(file).embedded
    if not any(covers(embedded, gpu.compute_capability) for gpu in gpus):
        run.fact("devices", "built for another GPU than this machine's")
        return ()
    listed = list_devices()
    run.fact("devices", {"listed": clean(listed), "driver": [gpu.to_data() for gpu in gpus]})
    return accept_devices(listed, gpus, embedded)


def check_version(answer: Captured, stamp: str, number: int, where: str) -> tuple[Check, ...]:
    """Check the output of `llama-server --version`: it runs, and it is the pinned source."""
    ended = Finished(answer.argv, answer.code, 0.0, ())
    how = f"exit code {answer.code}" if ended.signal is None else f"ended by {ended.signal}"
    if ended.signal == "SIGILL":
        how += " (it contains instructions that this CPU does not have)"
    if not answer.ok and (first := (answer.err.strip() or answer.out.strip()).partition("\n")[0]):
        how += f": {clean(first)}"
    lines = [ln for ln in (answer.err + answer.out).splitlines() if ln.startswith("version: ")]
    words = lines[0].replace("(", " ").replace(")", " ").replace(",", " ").split() if lines else []
    return (
        check("artifact.runs", "exit code 0", how, where, ok=answer.ok),
        check(
            "artifact.stamp",
            f"build {number}, commit {stamp}",
            clean(lines[0]) if lines else None,
            where,
            ok=stamp in words and str(number) in words,
        ),
    )


def ensure(ctx: Context, lock: Lock, plan: BuildPlan, run: Run) -> Artifact:
    """Build the plan's artifact unless it exists and is intact.

    Raises BuildFailed (6) if a step fails or is not accepted, HostError (9) if this machine lacks
    a tool, memory or disk, LockError (4) if the source does not match its pin.
    """
    started = ctx.clock.monotonic()
    folder = Path(plan.artifact)
    run.pin(build=plan.digest)
    with explained(folder.parent):
        if isinstance(found := _look(folder), BuildRecord):
            return _artifact(ctx, plan, run, found, started, reused=True)
        with digest_lock(ctx, folder.parent, plan.digest):
            if isinstance(found := _look(folder), BuildRecord):
                return _artifact(ctx, plan, run, found, started, reused=True)
            if isinstance(found, Damaged):
                _set_aside(ctx, run, folder, found)
            with work_folder(ctx, plan) as work:
                record = _build(ctx, lock, moved(plan, work), run)
    return _artifact(ctx, plan, run, record, started, reused=False)


def _look(folder: Path) -> BuildRecord | Damaged | None:
    """Verify what is in an artifact's place; None if nothing is."""
    if not os.path.lexists(folder):
        return None
    try:
        return verify(folder)
    except Damaged as error:
        return error


def _set_aside(ctx: Context, run: Run, folder: Path, why: Damaged) -> None:
    """Move a damaged artifact out of the way; only the latest of each digest is kept."""
    aside = folder.parent / ".damaged" / folder.name
    ctx.progress.say(f"the artifact is damaged ({why}); set aside in {aside}, building it again")
    run.fact("damaged", {"why": str(why), "aside": str(aside)})
    aside.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)


def _build(ctx: Context, lock: Lock, plan: BuildPlan, run: Run) -> BuildRecord:
    """Run every step, then rename the finished folder into place."""
    started = began = ctx.clock.monotonic()
    times: list[StepTime] = []

    def took(name: str) -> None:
        nonlocal began
        now = ctx.clock.monotonic()
        times.append(StepTime(id=name, seconds=round(now - began, 3)))
        began = now

    work = Path(plan.work)
    for name, tool in (("cmake", "cmake"), ("C compiler", "cc"), ("C++ compiler", "cxx")):
        run.version(name, plan.inputs.tools[tool])
    with run.step("source"):
        write_source(ctx, lock, work / "src")
    took("source")
    configured = configure(ctx, lock, plan, run)
    took("configure")
    checks = accept(run, configured, plan.expected)
    took("accept")
    compile_targets(ctx, plan, run)
    took("compile")
    step = plan.step("install")
    with run.step(step.id, step.argv) as taken:
        installed = install(ctx, plan, step, configured, taken.log)
    took("install")
    stage, cuda = work / "stage", plan.expected.cuda
    of_files = installed.checks
    if cuda:
        of_files += accept_artifact(stage, cuda.toolkit, cuda.requested)
    checks += _recorded(run, "the built files are not what was asked for", of_files)
    checks += check_server(ctx, plan, run)
    if cuda:
        last = plan.step("verify")
        argv, env = (last.argv[0], "--list-devices"), environment(last.env)
        of_gpus = check_devices(
            ctx, run, stage, lambda: ctx.processes.capture(argv, env=env, timeout=VERSION_S).out
        )
        if of_gpus:
            _recorded(run, "the server does not see this machine's GPU", of_gpus)
        checks += of_gpus
    took("verify")
    listed = list_files(stage)
    record = BuildRecord(
        digest=plan.digest,
        content=content_digest(listed),
        inputs=plan.inputs,
        tools={
            "cmake": plan.bare("configure")[0],
            "ninja": plan.bare("compile")[0],
            "strip": step.argv[0],
            **{name: c.path for name, c in plan.expected.compilers.items()},
        },
        files=listed,
        system_libraries=installed.system,
        checks=checks,
        steps=tuple(times),
        seconds=round(ctx.clock.monotonic() - started, 3),
        built=ctx.clock.now().isoformat(timespec="seconds"),
        run=run.id,
        not_reproducible=plan.not_reproducible,
    )
    _place(stage, Path(plan.artifact), record)
    return record


def write_source(ctx: Context, lock: Lock, target: Path) -> None:
    """Fetch the locked source if it is not in the cache, and write its tree."""
    ensure_tree(ctx, lock)
    materialise(ctx, lock, target)


def _place(stage: Path, artifact: Path, record: BuildRecord) -> None:
    """Write the record, flush all files to disk, and rename: the artifact is complete or absent."""
    path = stage / ARTIFACT_RECORD
    path.write_text(to_json(record))
    path.chmod(RECORD_MODE)
    stage.chmod(FOLDER_MODE)
    for name in (ARTIFACT_RECORD, *(file.path for file in record.files)):
        with (stage / name).open("rb") as file:
            os.fsync(file.fileno())
    stage.rename(artifact)
    fsync_folder(artifact.parent)


def _artifact(
    ctx: Context, plan: BuildPlan, run: Run, record: BuildRecord, started: float, *, reused: bool
) -> Artifact:
    """Make the artifact from its record, and record it in the run."""
    if reused:
        run.checks(record.checks)
    else:
        verify(Path(plan.artifact))
    artifact = Artifact(
        folder=plan.artifact,
        server=plan.server,
        digest=plan.digest,
        content=record.content,
        files=record.files,
        checks=record.checks,
        reused=reused,
        seconds=round(ctx.clock.monotonic() - started, 3),
        build_seconds=record.seconds,
    )
    run.fact("artifact", artifact.to_data())
    why_not = record.not_reproducible
    run.fact("reproducible", f"not reproducible: {why_not}" if why_not else "reproducible")
    return artifact
