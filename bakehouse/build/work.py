"""Where builds happen: locks, and a folder that is empty at first and gone at the end.

Every build of a home works in `builds/.work/0`; a second one at the same time in `1`, and so on.
A lock (held by the process, so that it ends with it) says whether a folder is in use: what lies in
a folder whose lock is free was left by a build that was killed, and goes.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bakehouse.context import Context
from bakehouse.errors import HostError
from bakehouse.plan.types import BuildPlan

if TYPE_CHECKING:
    from filelock import BaseFileLock

PLACES = 64
"""Builds at the same time, at most."""


def _lock(path: Path) -> BaseFileLock:
    # Imported here because `plan` passes through and must stay fast.
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path, thread_local=False)


@contextmanager
def digest_lock(ctx: Context, builds: Path, digest: str) -> Iterator[None]:
    """Hold the one lock of an artifact; wait, and say so, while another build holds it."""
    from filelock import Timeout

    lock = _lock(builds / ".locks" / f"{digest}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        ctx.progress.say("another process builds the same; waiting for it")
        lock.acquire(poll_interval=0.1)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def work_folder(ctx: Context, plan: BuildPlan) -> Iterator[Path]:
    """Take the first free work folder, made empty; leave nothing of it afterwards."""
    root = Path(plan.work).parent
    with ExitStack() as stack:
        folder = _take(stack, root)
        _clear_left(ctx, root)
        for name in ("src", "build", "home", "tmp", "tools", "stage"):
            (folder / name).mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _take(stack: ExitStack, root: Path) -> Path:
    from filelock import Timeout

    for number in range(PLACES):
        lock = _lock(root / f"{number}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        stack.callback(lock.release)
        folder = root / str(number)
        _remove(folder)
        for left in root.glob(f"{number}-left-*"):
            shutil.rmtree(left, ignore_errors=True)
        return folder
    raise HostError(
        f"{PLACES} builds are under way on this machine already",
        where=str(root),
        hint="wait until one of them ends",
    )


def _clear_left(ctx: Context, root: Path) -> None:
    """Remove what killed builds left in the other places."""
    from filelock import Timeout

    for folder in root.iterdir():
        if not folder.is_dir():
            continue
        lock = _lock(root / f"{folder.name.partition('-')[0]}.lock")
        try:
            with lock.acquire(timeout=0):
                ctx.progress.say("removing what a build that was killed left behind")
                shutil.rmtree(folder, ignore_errors=True)
        except Timeout:
            continue


def _remove(folder: Path) -> None:
    """Remove a left folder, first moving it away from where its last children may still write."""
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
