"""Who is who in the process table: identity that survives reuse of ids, and certain ends.

Standard library only: the keeper imports this and stays small. A process is known by its id *and*
its start time; every process of a server also carries the server's folder in its environment, so
that what escaped its session, or lost its parent, is found again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bakehouse.ports.guard import descendants

MARK = "BAKEHOUSE_SERVER"
"""Environment variable that names the server's folder in each of its processes."""
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def boot_id() -> str:
    """Name this boot of this machine; process ids of another boot mean nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _stat(pid: int) -> tuple[str, int] | None:
    """State letter and start time, in clock ticks since boot; None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = text.rpartition(b")")[2].split()
    return fields[0].decode(), int(fields[19])


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which a live process began; None for a dead or ended one."""
    found = _stat(pid)
    return None if found is None or found[0] in "ZX" else found[1]


@dataclass(frozen=True)
class Process:
    """One process, not merely one id."""

    pid: int
    start: int
    """Clock ticks since boot."""

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Take the identity of a live process."""
        start = start_time(pid)
        return None if start is None else cls(pid, start)

    @property
    def alive(self) -> bool:
        """Whether this very process runs; an id that was given to another one is not it."""
        return start_time(self.pid) == self.start

    def send(self, number: int) -> bool:
        """Signal this very process; False where it is gone. No other process is ever hit."""
        try:
            handle = os.pidfd_open(self.pid)
        except OSError as error:
            if error.errno != errno.ENOSYS or not self.alive:
                return False
            os.kill(self.pid, number)  # a kernel before 5.3: as good as it gets
            return True
        try:
            if not self.alive:
                return False
            signal.pidfd_send_signal(handle, number)
        except OSError:
            return False
        finally:
            os.close(handle)
        return True

    @property
    def command(self) -> tuple[str, ...]:
        """Its argument list, or its short name in brackets; empty where it is gone."""
        return command_of(self.pid)


def command_of(pid: int) -> tuple[str, ...]:
    """Argument list of a process, or `[name]` where it hides it; empty where it is gone."""
    with contextlib.suppress(OSError):
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
        if raw:
            return tuple(a.decode(errors="replace") for a in raw.rstrip(b"\0").split(b"\0"))
        return (f"[{Path(f'/proc/{pid}/comm').read_text().strip()}]",)
    return ()


def marked(folder: Path) -> tuple[Process, ...]:
    """Give all live processes whose environment names this server's folder."""
    pids = (pid for pid, named in _marks() if named == str(folder))
    return tuple(process for pid in pids if (process := Process.of(pid)))


def marked_folders(servers: Path) -> set[Path]:
    """Give the folders below `servers` that the environments of live processes name."""
    named = {Path(text) for pid, text in _marks() if Process.of(pid)}
    return {folder for folder in named if folder.parent == servers}


def _marks() -> Iterator[tuple[int, str]]:
    """Give id and mark of every process that carries one and that this user may look into."""
    prefix = f"{MARK}=".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            environ = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:
            continue
        for variable in environ.split(b"\0"):
            if variable.startswith(prefix):
                yield int(entry), os.fsdecode(variable.removeprefix(prefix))


def is_in(pid: int, container: str) -> bool:
    """Whether a process of this machine is in that container: ids of another machine mislead."""
    with contextlib.suppress(OSError):
        return container in Path(f"/proc/{pid}/cgroup").read_text() or _mounts(pid, container)
    return False


def _mounts(pid: int, container: str) -> bool:
    """With cgroup v2 and a namespace of its own, only its mounts still name the container."""
    with contextlib.suppress(OSError):
        return container in Path(f"/proc/{pid}/mountinfo").read_text()
    return False


def tree(root: int) -> tuple[int, ...]:
    """Give a process and all its live descendants."""
    return (root, *descendants(root))


def end(
    find: Callable[[], Iterable[Process]],
    *,
    grace: float,
    tick: Callable[[], None] = lambda: None,
    wait: float = 0.02,
) -> bool:
    """End all that `find` gives: one TERM each, KILL after `grace` seconds; True where KILLed.

    `find` is asked again and again, since ending a process may lay others bare. A process gets TERM
    once: many servers take a second one as "at once, without cleaning up".
    """
    deadline = time.monotonic() + grace
    told: set[Process] = set()
    killed = False
    while found := [p for p in find() if p.pid not in {os.getpid(), 1}]:
        late = time.monotonic() >= deadline
        for process in found:
            if late:
                killed = process.send(signal.SIGKILL) or killed
            elif process not in told:
                process.send(signal.SIGTERM)
                told.add(process)
        tick()
        time.sleep(wait)
    return killed
