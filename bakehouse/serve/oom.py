"""Whether the kernel's out-of-memory killer took a server, and how an end is put into words."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

KILLED = re.compile(rb"[Kk]illed process (\d+)[, ]")
RECORD = 8192
CGROUP_FILES = ("memory.events", "memory.oom_control")


def cgroup_kills(
    proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int:
    """How many processes of our control group the kernel has killed; 0 where it does not say."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in {"", "memory"}:
            continue
        base = root / controllers / path.lstrip("/")
        for name in CGROUP_FILES:
            try:
                text = (base / name).read_text()
            except OSError:
                continue
            for entry in text.splitlines():
                if entry.startswith("oom_kill "):
                    return int(entry.split()[1])
    return 0


def open_ring(*, from_now: bool = True) -> int | None:
    """Open the kernel's ring of messages, where that is allowed; the past ones passed over."""
    try:
        ring = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if from_now:
        os.lseek(ring, 0, os.SEEK_END)
    return ring


def kernel_messages(ring: int) -> bytes:
    """Read what the ring has not given yet; never waits."""
    found = b""
    try:
        while len(found) < 1 << 22:
            try:
                record = os.read(ring, RECORD)
            except BrokenPipeError:
                continue
            if not record:
                break
            found += record
    except OSError:
        return found
    return found


class Watch:
    """Remembers how things stood, so that a later look tells what happened in between."""

    def __init__(self) -> None:
        self.before = cgroup_kills()

    def killed(self, pid: int) -> bool | None:
        """Whether the kernel killed a process; None where nothing can be read about it."""
        if cgroup_kills() > self.before:
            return True
        ring = open_ring(from_now=False)
        if ring is None:
            return None
        messages = kernel_messages(ring)
        os.close(ring)
        if any(int(found) == pid for found in KILLED.findall(messages)):
            return True
        return None


def explain(code: int | None, why: str, oom: bool | None, reason: str = "") -> str:
    """Say in one sentence how a server ended; `code` as in `Ended`, `reason` the guard's."""
    if why == "stopped":
        return "stopped as asked"
    if why == "unproven":
        return "stopped: whoever was proving it went away before the proof was complete"
    if why == "memory":
        return f"stopped by the memory guard, before the machine stalls: {reason}"
    if code is None:
        return "ended, and nobody saw how"
    if code >= 0:
        return f"exited by itself with {code}" + (
            " (not found or not permitted)" * (code in (126, 127))
        )
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"died of {name}" + _meaning(-code, oom)


def _meaning(number: int, oom: bool | None) -> str:
    if number == signal.SIGILL:
        return ": an instruction that this CPU does not have, so it was built for another CPU"
    if number == signal.SIGKILL:
        if oom:
            return ": the kernel ended it because memory had run out"
        return ": somebody ended it, or the kernel did because memory had run out"
    if number == signal.SIGABRT:
        return ": it gave up by itself, on a failed assertion"
    if number in (signal.SIGSEGV, signal.SIGBUS):
        return ": a memory fault inside the server, or a model file that changed or vanished"
    return ""
