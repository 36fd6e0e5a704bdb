"""Whether a server that loads is still at work: judged by silence, not by a fixed clock.

Signs of life are new log lines, and bytes that its processes read: through system calls, from the
disk, or as pages of mapped files. What our own questions cause does not count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

POLL_BYTES = 4096
"""A question of ours makes a server read no more than this."""
OWN_TRACES = ("/health",)
"""A log line with one of these is the echo of our own polling."""


@dataclass(frozen=True)
class Reading:
    """Bytes that a server's processes have taken in up to now."""

    calls: int = 0
    """By read calls, sockets included."""
    disk: int = 0
    mapped: int = 0
    """Resident pages of files: mapped weights that were touched."""

    @property
    def loaded(self) -> int:
        """The best guess at how much of the weights is in."""
        return max(self.calls, self.disk, self.mapped)


def read_activity(pids: Iterable[int], proc: Path = Path("/proc")) -> Reading:
    """Add up what the processes have read; one that is gone adds nothing."""
    calls = disk = mapped = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            io = _table(proc / str(pid) / "io")
            calls += io.get("rchar", 0)
            disk += io.get("read_bytes", 0)
        with contextlib.suppress(OSError, ValueError):
            mapped += _table(proc / str(pid) / "status").get("RssFile", 0) * 1024
    return Reading(calls, disk, mapped)


def _table(path: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        number = value.split()[0] if value.split() else ""
        if number.isdigit():
            found[name] = int(number)
    return found


def tells(line: str) -> bool:
    """Whether a log line is the server's own doing and not the echo of our polling."""
    return bool(line.strip()) and not any(trace in line for trace in OWN_TRACES)


@dataclass
class Silence:
    """How long a server has shown no sign of life. Times in seconds of a monotonic clock."""

    since: float
    last: Reading = field(default_factory=Reading)

    def look(self, now: float, reading: Reading, lines: Iterable[str], polls: int) -> float:
        """Take in what was seen since the last look; give the seconds of silence so far."""
        grown = (
            reading.calls - self.last.calls > polls * POLL_BYTES
            or reading.disk > self.last.disk
            or reading.mapped > self.last.mapped
        )
        if grown or any(tells(line) for line in lines):
            self.since = now
        self.last = reading
        return now - self.since
