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
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from bakehouse.context import Context
from bakehouse.errors import BakehouseError, HostError
from bakehouse.plan.types import BuildPlan
from bakehouse.util.files import file_lock

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
        _clear_left(ctx, root)
        for name in ("src", "build", "home", "tmp", "tools", "stage"):
            (folder / name).mkdir(parents=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class _InUse(BakehouseError):
    """Another build works in this folder."""


def _take(stack: ExitStack, root: Path) -> Path:
    for number in range(PLACES):
        try:
            stack.enter_context(_held(root / f"{number}.lock"))
        except _InUse:
            continue
        folder = root / str(number)
        _remove(folder)
        for left in root.glob(f"{number}-left-*"):
            shutil.rmtree(left, ignore_errors=True)
        return folder
    raise HostError(
        f"{PLACES} builds are running on this machine already",
        where=str(root),
        hint="wait until one of them ends",
    )


def _held(lock: Path) -> AbstractContextManager[None]:
    return file_lock(lock, lock.stem, lambda _: None, busy=_InUse(lock.stem))


def _clear_left(ctx: Context, root: Path) -> None:
    """Remove what killed builds left in the other places."""
    for folder in root.iterdir():
        if not folder.is_dir():
            continue
        with suppress(_InUse), _held(root / f"{folder.name.partition('-')[0]}.lock"):
            ctx.progress.say("removing what a build that was killed left behind")
            shutil.rmtree(folder, ignore_errors=True)


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
