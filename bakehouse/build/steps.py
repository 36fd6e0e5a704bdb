"""The steps of a build, each with its own log in the run's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from bakehouse.build import configure as file_api
from bakehouse.build.disk import disk_full, says_full, starved
from bakehouse.build.first import FirstError, first_build_error, first_cmake_error
from bakehouse.build.ninja import NinjaWatch
from bakehouse.checks import Check, check, not_passed
from bakehouse.context import Context
from bakehouse.engines.configured import Configured
from bakehouse.engines.llamacpp.accept import RULES
from bakehouse.engines.llamacpp.cmake import git_stand_in
from bakehouse.engines.llamacpp.cuda import decisive, refuse_cuda
from bakehouse.errors import BakehouseError, BuildFailed, HostError
from bakehouse.host import read_gpus
from bakehouse.lock import Lock
from bakehouse.plan.types import BuildPlan
from bakehouse.ports.process import Captured, Finished, environment
from bakehouse.records.store import Run
from bakehouse.redact import clean
from bakehouse.toolkit.artifact import accept_artifact, accept_devices, covers, find_cuda_file
from bakehouse.toolkit.embedded import read_cuda_file

VERSION_S = 60.0
"""Seconds within which a finished server has to say its version."""


def configure(ctx: Context, lock: Lock, plan: BuildPlan, run: Run) -> Configured:
    """Run CMake and read its answers. Raises BuildFailed with its first error."""
    work = Path(plan.work)
    step = plan.step("configure")
    git = work / "tools" / "git"
    git.write_text(git_stand_in(lock))
    git.chmod(0o755)
    file_api.ask(work / "build")
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
        return file_api.read(work / "build", taken.log)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # CMake exits with 0 even if it could not write its answers.
        if starved(work):
            raise disk_full(str(work)) from error
        raise BuildFailed(
            f"CMake's answers about the build cannot be read: {error}",
            where=str(work / "build" / ".cmake"),
            hint=f"see the output of CMake: {taken.log}",
        ) from error


def accept(plan: BuildPlan, run: Run, configured: Configured) -> tuple[Check, ...]:
    """Check a configured build by every rule. Raises BuildFailed unless all pass."""
    with run.step("accept"):
        checks = tuple(c for rule in RULES for c in rule(configured, plan.expected))
    run.checks(checks)
    refuse_cuda(configured, plan.expected, checks)
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


def accept_files(plan: BuildPlan, run: Run, checks: tuple[Check, ...]) -> tuple[Check, ...]:
    """Check the installed files, GPU code included. Raises BuildFailed unless all pass."""
    if cuda := plan.expected.cuda:
        checks += accept_artifact(Path(plan.work) / "stage", cuda.toolkit, cuda.requested)
    return _recorded(run, "the built files are not what was asked for", checks)


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


def verify(ctx: Context, plan: BuildPlan, run: Run) -> tuple[Check, ...]:
    """Run the installed server for its version. Raises BuildFailed unless it shows the pin."""
    step = plan.step("verify")
    with run.step(step.id, step.argv) as taken:
        env = environment(step.env)
        cwd = Path(step.cwd) if step.cwd else None
        said = ctx.processes.capture(step.argv, env=env, cwd=cwd, timeout=VERSION_S)
        if _lacks_driver(said) and (stub := _driver_stub(plan)):
            run.fact("driver", "none on this machine: --version ran with its stub")
            env["LD_LIBRARY_PATH"] = str(stub)
            said = ctx.processes.capture(step.argv, env=env, cwd=cwd, timeout=VERSION_S)
        taken.log.write_text(said.out + said.err)
        taken.ended(said)
    where = f"llama-server --version, answer in {taken.log}"
    checks = judge_version(said, plan.inputs.stamp, plan.inputs.number, where)
    return _recorded(run, "the built server does not run, or is another version", checks)


def devices(ctx: Context, plan: BuildPlan, run: Run) -> tuple[Check, ...]:
    """Check the devices that a CUDA server lists, on a machine whose GPU it has code for.

    A build for another machine's GPU is not checked here. Raises BuildFailed.
    """
    gpus = read_gpus(ctx.processes) if plan.expected.cuda else ()
    file = find_cuda_file(Path(plan.work) / "stage") if gpus else None
    if file is None:
        return ()
    embedded = read_cuda_file(file).embedded
    if not any(covers(embedded, gpu.compute_capability) for gpu in gpus):
        run.fact("devices", "built for another GPU than this machine's")
        return ()
    step = plan.step("verify")
    argv = (step.argv[0], "--list-devices")
    said = ctx.processes.capture(argv, env=environment(step.env), timeout=VERSION_S)
    run.fact("devices", {"listed": clean(said.out), "driver": [gpu.to_data() for gpu in gpus]})
    checks = accept_devices(said.out, gpus, embedded)
    return _recorded(run, "the server does not see this machine's GPU", checks)


def _lacks_driver(said: Captured) -> bool:
    return not said.ok and "libcuda.so.1: cannot open shared object file" in said.err


def _driver_stub(plan: BuildPlan) -> Path | None:
    """Make a folder with the toolkit's stub under the driver's name, outside of the artifact."""
    stub = plan.expected.cuda.toolkit.libraries.get("cuda") if plan.expected.cuda else None
    if stub is None:
        return None
    folder = Path(plan.work) / "driver-stub"
    folder.mkdir(exist_ok=True)
    (folder / "libcuda.so.1").symlink_to(stub)
    return folder


def judge_version(said: Captured, stamp: str, number: int, where: str) -> tuple[Check, ...]:
    """Check the output of `llama-server --version`: it runs, and it is the pinned source."""
    ended = Finished(said.argv, said.code, 0.0, ())
    how = f"exit code {said.code}" if ended.signal is None else f"ended by {ended.signal}"
    if ended.signal == "SIGILL":
        how += " (it contains instructions that this CPU does not have)"
    if not said.ok and (first := (said.err.strip() or said.out.strip()).partition("\n")[0]):
        how += f": {clean(first)}"
    lines = [ln for ln in (said.err + said.out).splitlines() if ln.startswith("version: ")]
    words = lines[0].replace("(", " ").replace(")", " ").replace(",", " ").split() if lines else []
    return (
        check("artifact.runs", "exit code 0", how, where, ok=said.ok),
        check(
            "artifact.stamp",
            f"build {number}, commit {stamp}",
            clean(lines[0]) if lines else None,
            where,
            ok=stamp in words and str(number) in words,
        ),
    )


def clear(folder: Path) -> None:
    """Remove a folder if it exists."""
    shutil.rmtree(folder, ignore_errors=True)
