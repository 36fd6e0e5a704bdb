"""Processes and their sockets, read from /proc: identity that survives reuse of ids, and sure ends.

Standard library only: the supervisor imports this and stays small. psutil is not used: its start
times come from the wall clock, which can be set (ours are stored, in ticks since boot), and its
socket list reads every process's files and keeps one owner per socket.

A process is known by its id *and* its start time. Each process of a server also carries the
server's folder in its environment, so one that left its session, or lost its parent, is found too.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bakehouse.system.child_guard import descendants

MARK = "BAKEHOUSE_SERVER"
"""Environment variable that names the server's folder in each of its processes."""
TCP_LISTEN = "0A"
_SOCKET = re.compile(r"socket:\[(\d+)\]")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def boot_id() -> str:
    """Return the id of this boot of this machine; process ids of another boot mean nothing."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it ended or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = text.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


@dataclass(frozen=True)
class Process:
    """One process, not just one id."""

    pid: int
    start: int
    """Clock ticks since boot."""

    @classmethod
    def of(cls, pid: int) -> Process | None:
        """Return the identity of a live process."""
        start = start_time(pid)
        return None if start is None else cls(pid, start)

    @property
    def alive(self) -> bool:
        """Whether this very process runs, and not another one with its id."""
        return start_time(self.pid) == self.start

    def send(self, number: int) -> bool:
        """Signal this very process, never another one; False if it is gone."""
        try:
            handle = os.pidfd_open(self.pid)
        except OSError as error:
            if error.errno != errno.ENOSYS or not self.alive:
                return False
            os.kill(self.pid, number)  # kernels before 5.3 have no better way
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
        """Its arguments, as `command_of` returns them."""
        return command_of(self.pid)


def command_of(pid: int) -> tuple[str, ...]:
    """Return a process's arguments, or `[name]` if it hides them; empty if it is gone."""
    with contextlib.suppress(OSError):
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
        if raw:
            return tuple(a.decode(errors="replace") for a in raw.rstrip(b"\0").split(b"\0"))
        return (f"[{Path(f'/proc/{pid}/comm').read_text().strip()}]",)
    return ()


def all_pids() -> list[int]:
    """Return the ids of all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def marked(folder: Path) -> tuple[Process, ...]:
    """Return all live processes whose environment names this server's folder."""
    pids = (pid for pid, named in _marks() if named == str(folder))
    return tuple(process for pid in pids if (process := Process.of(pid)))


def marked_folders(servers: Path) -> set[Path]:
    """Return the folders below `servers` that environments of live processes name."""
    named = {Path(text) for pid, text in _marks() if Process.of(pid)}
    return {folder for folder in named if folder.parent == servers}


def _marks() -> Iterator[tuple[int, str]]:
    """Yield id and mark of every marked process that this user may inspect."""
    for pid in all_pids():
        with contextlib.suppress(OSError):
            for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, _, value = variable.partition(b"=")
                if name == MARK.encode():
                    yield pid, os.fsdecode(value)


def is_in(pid: int, container: str) -> bool:
    """Return whether a process of this machine is in that container.

    With cgroup v2 and a namespace of its own, only its mounts still name the container. The engine
    may be on another machine: then the id belongs to some other process, or to none.
    """
    with contextlib.suppress(OSError):
        if container in Path(f"/proc/{pid}/cgroup").read_text():
            return True
        return container in Path(f"/proc/{pid}/mountinfo").read_text()
    return False


def tree(root: int) -> tuple[int, ...]:
    """Return the ids of a process and all its live descendants."""
    return (root, *descendants(root))


def end(
    find: Callable[[], Iterable[Process]],
    *,
    grace: float,
    tick: Callable[[], None] = lambda: None,
    wait: float = 0.02,
) -> bool:
    """End all that `find` returns: TERM once, KILL after `grace` seconds; True if KILL was needed.

    `find` is called again and again, since ending a process may reparent others. A process gets
    TERM once: many servers take a second one as "at once, without cleaning up".
    """
    deadline = time.monotonic() + grace
    signalled: set[Process] = set()
    killed = False
    while found := [p for p in find() if p.pid not in {os.getpid(), 1}]:
        late = time.monotonic() >= deadline
        for process in found:
            if late:
                killed = process.send(signal.SIGKILL) or killed
            elif process not in signalled:
                process.send(signal.SIGTERM)
                signalled.add(process)
        tick()
        time.sleep(wait)
    return killed


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket."""

    address: Address
    port: int
    inode: int

    def __str__(self) -> str:
        """As in a URL."""
        host = f"[{self.address}]" if self.address.version == 6 else str(self.address)
        return f"{host}:{self.port}"


def parse_listeners(table: str) -> tuple[Listener, ...]:
    """Read the listening sockets of /proc/net/tcp or tcp6; other lines are skipped.

    Addresses there are 32-bit words in hex, in the machine's byte order.
    """
    found: list[Listener] = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] != TCP_LISTEN:
            continue
        words, _, port = fields[1].partition(":")
        with contextlib.suppress(ValueError):
            numbers = (int(words[at : at + 8], 16) for at in range(0, len(words), 8))
            raw = b"".join(number.to_bytes(4, sys.byteorder) for number in numbers)
            found.append(Listener(ipaddress.ip_address(raw), int(port, 16), int(fields[9])))
    return tuple(found)


def listeners() -> tuple[Listener, ...]:
    """Return all listening TCP sockets of this network namespace."""
    found: tuple[Listener, ...] = ()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            found += parse_listeners(Path("/proc/net", name).read_text())
    return found


def overlapping(found: Iterable[Listener], host: str, port: int) -> tuple[Listener, ...]:
    """Return those that a new listener at host and port may collide with.

    These are the same address, any-addresses of the same family on either side, and the IPv6
    any-address with IPv4, which it includes unless told otherwise.
    """
    wanted = ipaddress.ip_address(host)
    return tuple(one for one in found if one.port == port and _collide(one.address, wanted))


def _collide(one: Address, other: Address) -> bool:
    one, other = (getattr(address, "ipv4_mapped", None) or address for address in (one, other))
    if one.version != other.version:
        return one.is_unspecified if one.version == 6 else other.is_unspecified
    return one == other or one.is_unspecified or other.is_unspecified


def sockets(pids: Iterable[int]) -> dict[int, int]:
    """Map socket inodes to process ids, for all sockets of these processes that we may see."""
    found: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if held := _SOCKET.fullmatch(os.readlink(entry.path)):
                        found.setdefault(int(held[1]), pid)
    return found


def owned(pids: Iterable[int]) -> tuple[Listener, ...]:
    """Return the listening sockets that one of these processes holds."""
    mine = sockets(pids)
    return tuple(one for one in listeners() if one.inode in mine)


@dataclass(frozen=True)
class Reading:
    """Bytes that a server's processes have read so far."""

    calls: int = 0
    """By read calls, sockets included."""
    disk: int = 0
    mapped: int = 0
    """Resident pages of files: mapped weights that were touched."""

    @property
    def loaded(self) -> int:
        """The best guess at how much of the weights is loaded."""
        return max(self.calls, self.disk, self.mapped)


def read_activity(pids: Iterable[int], proc: Path = Path("/proc")) -> Reading:
    """Add up what the processes have read; one that is gone adds nothing."""
    total = {"rchar": 0, "read_bytes": 0, "RssFile": 0}
    for pid in pids:
        for name in ("io", "status"):
            with contextlib.suppress(OSError, ValueError):
                text = (proc / str(pid) / name).read_text()
                for key, number in re.findall(r"^(\w+):\s+(\d+)\b", text, re.MULTILINE):
                    if key in total:
                        total[key] += int(number)
    return Reading(total["rchar"], total["read_bytes"], total["RssFile"] * 1024)
