"""Work folders of builds, and their locks.

Every build of a home works in `builds/.work/0`; a second one at the same time in `1`, and so on.
A lock, which ends with its process, marks a folder as in use: a folder whose lock is free was left
by a killed build, and is removed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bakehouse.context import Context
from bakehouse.errors import HostError
from bakehouse.plan.types import BuildPlan

if TYPE_CHECKING:
    from filelock import BaseFileLock

PLACES = 64
"""Maximum number of builds at the same time."""


def _lock(path: Path) -> BaseFileLock:
    # Imported here because `plan` passes through and must stay fast.
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path, thread_local=False)


def _taken(lock: BaseFileLock) -> bool:
    """Take a lock unless another process holds it."""
    from filelock import Timeout

    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    return True


@contextmanager
def digest_lock(ctx: Context, builds: Path, digest: str) -> Iterator[None]:
    """Hold the lock of an artifact; wait, and say so, while another build holds it."""
    lock = _lock(builds / ".locks" / f"{digest}.lock")
    if not _taken(lock):
        ctx.progress.say("another process builds the same; waiting for it")
        lock.acquire(poll_interval=0.1)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def work_folder(ctx: Context, plan: BuildPlan) -> Iterator[Path]:
    """Take the first free work folder, make it empty, and remove it afterwards.

    Raises HostError if PLACES builds run already.
    """
    root = Path(plan.work).parent
    for number in range(PLACES):
        lock = _lock(root / f"{number}.lock")
        if _taken(lock):
            break
    else:
        raise HostError(
            f"{PLACES} builds are running on this machine already",
            where=str(root),
            hint="wait until one of them ends",
        )
    folder = root / str(number)
    try:
        _remove(folder)
        for left in root.glob(f"{number}-left-*"):
            shutil.rmtree(left, ignore_errors=True)
        _clear_left(ctx, root)
        for name in ("src", "build", "home", "tmp", "tools", "stage"):
            (folder / name).mkdir(parents=True)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _clear_left(ctx: Context, root: Path) -> None:
    """Remove what killed builds left in the other places."""
    for folder in filter(Path.is_dir, list(root.iterdir())):
        lock = _lock(root / f"{folder.name.partition('-')[0]}.lock")
        if not _taken(lock):
            continue
        ctx.progress.say("removing leftovers of a killed build")
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _remove(folder: Path) -> None:
    """Remove a leftover folder; moved away first, as its last children may still write to it."""
    if folder.exists():
        aside = folder.with_name(f"{folder.name}-left-{os.getpid()}")
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


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
