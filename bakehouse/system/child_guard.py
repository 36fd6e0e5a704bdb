"""Runs one child and ends all its descendants when the parent dies. Standard library only.

Started as `python -I -S child_guard.py LIFELINE_FD -- ARGV…` by `system.process`. The guard is the
child's subreaper and holds the reading end of a pipe whose writing end only Bakehouse has: when
Bakehouse dies, however it dies, the pipe closes and the guard ends the child and every descendant,
also those that moved to a session of their own. Killing the guard itself takes the child with it
(PDEATHSIG).

The child's exit is reported on the guard's own: 0 to 255 as it is; a signal by raising the same
signal here, so that whoever waits for the guard sees what the child died of.
"""

from __future__ import annotations

import ctypes
import os
import resource
import selectors
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 3.0


def descendants(root: int) -> list[int]:
    """Ids of all live processes below `root`, from /proc, parents first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] != b"Z":
            children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def end_all(root: int) -> None:
    """Send TERM to all descendants of `root`, and KILL to the rest after the grace period."""
    deadline = time.monotonic() + GRACE_S
    number = int(signal.SIGTERM)
    while pids := descendants(root):
        if time.monotonic() > deadline:
            number = int(signal.SIGKILL)
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        reap()
        time.sleep(0.02)
    reap()


def reap() -> None:
    """Reap all children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def start(argv: list[str], prctl: ctypes._NamedFuncPointer) -> int:
    """Fork the child into its own session, tied to this guard; give its id."""
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard:
            os._exit(137)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        os.execvpe(  # noqa: S606 - this is where the argv becomes a process
            argv[0], argv, os.environ
        )
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode(errors="replace"))
        os._exit(126 if isinstance(error, PermissionError) else 127)


def main() -> None:
    """Run the child named on the command line and leave as it leaves."""
    lifeline = int(sys.argv[1])
    argv = sys.argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    asked_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: asked_to_end.append(number))
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    os.set_inheritable(lifeline, False)
    child = start(argv, libc.prctl)
    status = None
    with selectors.DefaultSelector() as selector:
        selector.register(lifeline, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while status is None:
            ready = [key.fd for key, _ in selector.select()]
            if wake_read in ready:
                os.read(wake_read, 512)
            if asked_to_end or (lifeline in ready and not os.read(lifeline, 1)):
                end_all(os.getpid())
                sys.exit(143)
            pid = 1
            while pid:
                try:
                    pid, ended = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    break
                if pid == child:
                    status = ended
    end_all(os.getpid())
    if os.WIFSIGNALED(status):
        ended_by = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if ended_by != signal.SIGKILL:
            signal.signal(ended_by, signal.SIG_DFL)
        os.kill(os.getpid(), ended_by)
    sys.exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
