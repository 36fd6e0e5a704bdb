"""What a killed guard leaves behind comes to us, and is ended.

A guard (`ports/guard.py`) ends its child's descendants; when the guard itself is killed, only the
child ends with it, and the compilers below a killed Ninja would go on for minutes. So while a guard
runs we are the next subreaper above it: what it leaves becomes our own child, and is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bakehouse.ports.guard import PR_SET_CHILD_SUBREAPER, descendants

LONGEST_S = 5.0
_lock = threading.Lock()
_running: list[None] = []
"""One entry for each guard that runs or is about to."""
_guards: set[int] = set()


def _adopt(wanted: bool) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


@contextmanager
def adopting() -> Iterator[None]:
    """Be the one to whom orphans below us go; enter before a guard starts."""
    with _lock:
        _adopt(True)
        _running.append(None)
    try:
        yield
    finally:
        with _lock:
            _running.pop()
            _adopt(bool(_running))


def start_guard(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Start a guard so that nobody takes it for an orphan; `watched` has to follow."""
    with _lock:
        guard = start()
        _guards.add(guard.pid)
    return guard


@contextmanager
def watched(guard: int) -> Iterator[None]:
    """End what the guard leaves, as soon as it is killed; it is to be reaped within the context.

    At once and not when it is reaped: what is left may hold the pipe from which its output is read.
    """
    watch = threading.Thread(target=_wait, args=(guard,), name=f"guard-{guard}", daemon=True)
    watch.start()
    try:
        yield
    finally:
        watch.join(2 * LONGEST_S)
        with _lock:
            _guards.discard(guard)


def _wait(guard: int) -> None:
    """Wait for the guard's end and leave it to be reaped by whoever started it."""
    try:
        ended = os.waitid(os.P_PID, guard, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return
    if ended and ended.si_code != os.CLD_EXITED:
        end_orphans()


def end_orphans() -> None:
    """Kill what a guard left to us, and all below it, until a look finds nothing more.

    Whoever dies here leaves its own children to us before it can be reaped, so none is missed.
    """
    deadline = time.monotonic() + LONGEST_S
    while (found := _orphans()) and time.monotonic() < deadline:
        for pid in [*found, *(below for top in found for below in descendants(top))]:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def _orphans() -> list[int]:
    """Give our children that are in another session, and are no guards.

    What else we start ourselves runs in our session; what ran below a guard does not.
    """
    ours, session = os.getpid(), os.getsid(0)
    found = []
    with _lock:
        for name in os.listdir("/proc"):
            with suppress(OSError, IndexError, ValueError):
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
                parent, of = int(fields[1]), int(fields[3])
                if parent == ours and of != session and int(name) not in _guards:
                    found.append(int(name))
    return found
