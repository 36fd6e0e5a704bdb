"""The artifact of a build plan: the existing one if its files verify, else a new one."""

from __future__ import annotations

import os
from pathlib import Path

from bakehouse.atomic import fsync_folder
from bakehouse.base import to_json
from bakehouse.build import artifact as files
from bakehouse.build import steps
from bakehouse.build.artifact import Artifact, BuildRecord, Damaged, StepTime
from bakehouse.build.disk import explained
from bakehouse.build.install import FOLDER_MODE, install
from bakehouse.build.work import digest_lock, moved, work_folder
from bakehouse.checks import Check
from bakehouse.context import Context
from bakehouse.lock import Lock
from bakehouse.plan.types import ARTIFACT_RECORD, BuildPlan
from bakehouse.records.store import Run
from bakehouse.sources.tree import ensure_tree, materialise

RECORD_MODE = 0o644


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
            return _given(ctx, plan, run, found, started, reused=True)
        with digest_lock(ctx, folder.parent, plan.digest):
            if isinstance(found := _look(folder), BuildRecord):
                return _given(ctx, plan, run, found, started, reused=True)
            if isinstance(found, Damaged):
                _set_aside(ctx, run, folder, found)
            with work_folder(ctx, plan) as work:
                record = _build(ctx, lock, moved(plan, work), run)
    return _given(ctx, plan, run, record, started, reused=False)


def _look(folder: Path) -> BuildRecord | Damaged | None:
    """Verify what is in an artifact's place; None if nothing is."""
    if not os.path.lexists(folder):
        return None
    try:
        return files.verify(folder)
    except Damaged as error:
        return error


def _set_aside(ctx: Context, run: Run, folder: Path, why: Damaged) -> None:
    """Move a damaged artifact out of the way; only the latest of each digest is kept."""
    aside = folder.parent / ".damaged" / folder.name
    ctx.progress.say(f"the artifact is damaged ({why}); set aside in {aside}, building it again")
    run.fact("damaged", {"why": str(why), "aside": str(aside)})
    aside.parent.mkdir(parents=True, exist_ok=True)
    steps.clear(aside)
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
    configured = steps.configure(ctx, lock, plan, run)
    took("configure")
    checks = steps.accept(plan, run, configured)
    took("accept")
    steps.compile_targets(ctx, plan, run)
    took("compile")
    step = plan.step("install")
    with run.step(step.id, step.argv) as taken:
        installed = install(ctx, plan, step, configured, taken.log)
    took("install")
    checks += steps.accept_files(plan, run, installed.checks)
    checks += steps.verify(ctx, plan, run) + steps.devices(ctx, plan, run)
    took("verify")
    record = _record(ctx, plan, run, checks, installed.system, times, started)
    _place(work / "stage", Path(plan.artifact), record)
    return record


def write_source(ctx: Context, lock: Lock, target: Path) -> None:
    """Fetch the locked source if it is not in the cache, and write its tree."""
    ensure_tree(ctx, lock)
    materialise(ctx, lock, target)


def _record(
    ctx: Context,
    plan: BuildPlan,
    run: Run,
    checks: tuple[Check, ...],
    system: tuple[str, ...],
    times: list[StepTime],
    started: float,
) -> BuildRecord:
    listed = files.list_files(Path(plan.work) / "stage")
    return BuildRecord(
        digest=plan.digest,
        content=files.content_digest(listed),
        inputs=plan.inputs,
        tools={
            "cmake": plan.bare("configure")[0],
            "ninja": plan.bare("compile")[0],
            "strip": plan.step("install").argv[0],
            **{name: c.path for name, c in plan.expected.compilers.items()},
        },
        files=listed,
        system_libraries=system,
        checks=checks,
        steps=tuple(times),
        seconds=round(ctx.clock.monotonic() - started, 3),
        built=ctx.clock.now().isoformat(timespec="seconds"),
        run=run.id,
        not_reproducible=plan.not_reproducible,
    )


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


def _given(
    ctx: Context, plan: BuildPlan, run: Run, record: BuildRecord, started: float, *, reused: bool
) -> Artifact:
    """Make the artifact from its record, and record it in the run."""
    if reused:
        run.checks(record.checks)
    else:
        files.verify(Path(plan.artifact))
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
