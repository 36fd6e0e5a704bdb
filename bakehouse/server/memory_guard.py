"""The memory guard: notices that memory is about to run out, and explains how a server ended.

Running out of memory does not kill a process on unified memory, it stalls the machine for good. So
the supervisor samples the kernel's figures several times a second and acts while some memory is
left. Judging is pure (`Guard`), reading is `Sensor`. Standard library only: the supervisor runs it.
"""

from __future__ import annotations

import os
import re
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bakehouse.util.text import size_text as amount

GIB, MIB = 2**30, 2**20
SLOW_S, FAST_S = 0.2, 0.1
"""Seconds between two samples: 5 Hz with plenty of memory, 10 Hz near the limits."""
NEAR = 1.5
"""Samples come fast below this multiple of the warning level."""
WINDOW_S = 1.0
"""Rates are averaged over this many seconds."""
SHORTEST_S = 0.09
"""Rates over fewer seconds are noise."""
AHEAD_S = 1.0
"""Below the warning level: stop if memory reaches the stop level within this many seconds."""
URGENT_S = 0.3
"""At any level: stop at once if the last two steps both reach the stop level within this many
seconds. A fall this steep leaves no time to wait for its end."""
IN_A_ROW = 2
"""Samples that have to agree before a server is stopped."""
PATIENCE = 0.25
"""Share of the time until no memory is left that a server gets between TERM and KILL."""
RECOVERED = 1.25
"""A new warning needs memory to return to this multiple of the warning level."""
UNLIMITED = 2**60
"""Bytes; cgroup v1 writes a huge number if there is no limit."""
LINES = re.compile(r"out of memory|oom-kill|killed process|NV_ERR_NO_MEMORY", re.IGNORECASE)
DRIVER = re.compile(r"NV_ERR_NO_MEMORY|NVRM: .*out of memory", re.IGNORECASE)
KILLED = re.compile(rb"[Kk]illed process (\d+)[, ]")
KMSG_RECORD = 8192
"""Bytes; no record of /dev/kmsg is longer."""
NO_GPU_MEMORY = "the GPU driver reports that it ran out"
_FILE_STATS = (b"inactive_file", b"active_file", b"total_inactive_file", b"total_active_file")


@dataclass(frozen=True)
class Bounds:
    """When the guard acts. Bytes; `stall` is a share of time, `swap` bytes per second."""

    warn: int
    stop: int
    stall: float
    swap: int
    driver: bool = False
    """Whether to stop the server when the GPU driver reports that memory ran out: on unified memory
    the machine needs a hard reset next. Elsewhere the guard only warns."""

    @classmethod
    def usual(cls, total: int, *, unified: bool) -> Bounds:
        """Return the defaults for a machine with `total` bytes of memory.

        Running out of unified memory stalls the machine for good: at least 1% and 1 GiB must stay
        free, the guard warns below 3% and 2 GiB. Elsewhere the kernel can still kill a process,
        and the guard only acts before it does.
        """
        if unified:
            return cls(max(2 * GIB, total * 3 // 100), max(GIB, total // 100), 0.25, 64 * MIB, True)
        stop = min(256 * MIB, total // 16)
        return cls(2 * stop, stop, 0.5, 256 * MIB)

    def changed(
        self, warn: int | None, stop: int | None, stall: float | None, swap: int | None
    ) -> Bounds:
        """Apply a recipe's values; a level that it does not set follows the one that it sets."""
        if stop is None:
            stop = self.stop if warn is None else min(self.stop, warn)
        return Bounds(
            warn=max(self.warn, stop) if warn is None else warn,
            stop=stop,
            stall=self.stall if stall is None else stall,
            swap=self.swap if swap is None else swap,
            driver=self.driver,
        )


@dataclass(frozen=True)
class Reading:
    """The kernel's figures at one moment. Seconds and bytes; counters run since boot."""

    at: float
    available: int
    """Memory available without swapping, in the machine or in our cgroup."""
    swapped: int = 0
    """Swapped in and out, together."""
    stalled: float = 0.0
    """Seconds in which all tasks waited for memory (PSI, `full`)."""
    kills: int = 0
    """Processes that the kernel killed because memory ran out."""
    messages: tuple[str, ...] = ()
    """Kernel messages about that since the last reading."""


@dataclass(frozen=True)
class Alarm:
    """A warning, or an order to stop, with the figures of that moment."""

    kind: str
    """`warn` or `stop`."""
    reason: str
    figures: dict[str, float]
    messages: tuple[str, ...] = ()

    def patience(self, most: float) -> float:
        """Return the seconds between TERM and KILL, at most `most`: less if memory falls fast."""
        falling = self.figures.get("falling_per_second", 0.0)
        left = self.figures.get("available", 0.0) / falling if falling > 0 else most / PATIENCE
        return min(most, PATIENCE * left)

    def to_data(self) -> dict[str, Any]:
        """Plain data for the state file and the record."""
        return asdict(self)


@dataclass(frozen=True)
class Rates:
    """Rates of change, in bytes or seconds per second; never negative."""

    falling: float = 0.0
    """Memory lost, both over the window and over the last step."""
    steep: float = 0.0
    """Memory lost over each of the last two steps."""
    swap: float = 0.0
    stall: float = 0.0
    kills: int = 0


class Guard:
    """Judges one reading after the other by level and slope."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.seen: deque[Reading] = deque()
        self.bad = 0
        self.warned = False
        self.driver = False
        self.last = Rates()

    @property
    def interval(self) -> float:
        """Seconds until the next sample."""
        if not self.seen:
            return SLOW_S
        soon = self.seen[-1].available - max(self.last.falling, self.last.steep)
        return FAST_S if soon < NEAR * self.bounds.warn else SLOW_S

    def look(self, reading: Reading) -> Alarm | None:
        """Judge one more reading; return an alarm, or None."""
        rates = self.last = self._rates(reading)
        self.seen.append(reading)
        while len(self.seen) > 2 and self.seen[1].at < reading.at - WINDOW_S:
            self.seen.popleft()
        driver = any(DRIVER.search(message) for message in reading.messages)
        if driver and self.bounds.driver:
            return self._alarm("stop", NO_GPU_MEMORY, reading, rates)
        urgent = rates.steep * URGENT_S > max(0, reading.available - self.bounds.stop)
        stop = self._stops(reading, rates)
        if urgent:
            stop = stop or f"falling by {amount(rates.steep)} per second"
        self.bad = self.bad + 1 if stop else 0
        if stop and (self.bad >= IN_A_ROW or rates.kills or urgent):
            return self._alarm("stop", stop, reading, rates)
        if driver and not self.driver:
            self.driver = True
            return self._alarm("warn", NO_GPU_MEMORY, reading, rates)
        if reading.available > RECOVERED * self.bounds.warn:
            self.warned = False
        if self.warned or reading.available >= self.bounds.warn:
            return None
        self.warned = True
        return self._alarm("warn", f"below {amount(self.bounds.warn)}", reading, rates)

    def _rates(self, now: Reading) -> Rates:
        if not self.seen:
            return Rates()
        first = self.seen[0]
        # The last step is long enough for a single burst to be over.
        step = next((r for r in reversed(self.seen) if now.at - r.at >= SHORTEST_S), first)
        span, last = now.at - first.at, now.at - step.at
        kills = max(0, now.kills - self.seen[-1].kills)
        if span < SHORTEST_S:
            return Rates(kills=kills)
        falls = ((first.available - now.available) / span, (step.available - now.available) / last)
        before = next((r for r in reversed(self.seen) if step.at - r.at >= SHORTEST_S), None)
        steps = [falls[1]]
        if before is not None:
            steps.append((before.available - step.available) / (step.at - before.at))
        return Rates(
            falling=max(0.0, min(falls)),
            steep=max(0.0, min(steps)) if before is not None else 0.0,
            swap=max(0.0, (now.swapped - first.swapped) / span),
            stall=max(0.0, (now.stalled - first.stalled) / span),
            kills=kills,
        )

    def _stops(self, now: Reading, rates: Rates) -> str | None:
        """Return why the server has to be stopped, or None."""
        bounds = self.bounds
        if now.available < bounds.stop:
            return f"below {amount(bounds.stop)}"
        if now.available >= bounds.warn:
            return None  # there is memory left, so stalls and swapping have another cause
        soon = now.available - rates.falling * AHEAD_S
        if rates.kills:
            return "the kernel has started to kill processes"
        if soon < bounds.stop:
            return f"falling by {amount(rates.falling)} per second"
        if rates.stall > bounds.stall:
            return f"all tasks stalled on memory {rates.stall:.0%} of the time (PSI full)"
        swapping = rates.swap > bounds.swap > 0
        return f"swapping {amount(rates.swap)} per second" if swapping else None

    def _alarm(self, kind: str, why: str, now: Reading, rates: Rates) -> Alarm:
        figures = {
            "available": now.available,
            "falling_per_second": round(max(rates.falling, rates.steep)),
            "swapped_per_second": round(rates.swap),
            "stalled_share": round(rates.stall, 4),
            "kills": rates.kills,
            "warn": self.bounds.warn,
            "stop": self.bounds.stop,
        }
        return Alarm(kind, f"{amount(now.available)} of memory left: {why}", figures, now.messages)


class Sensor:
    """Reads the kernel's figures from files that stay open, so that a sample is cheap.

    Tests replace `proc`, `groups` and `ring`. Figures that the kernel does not offer are 0.
    """

    def __init__(
        self,
        proc: Path = Path("/proc"),
        groups: Path = Path("/sys/fs/cgroup"),
        *,
        ring: bool = True,
    ) -> None:
        self._memory, self._counters, self._pressure = (
            _open(proc / name) for name in ("meminfo", "vmstat", "pressure/memory")
        )
        self._ring = open_kmsg() if ring else None
        self._groups = limited_cgroups(proc / "self" / "cgroup", groups)
        self.page = os.sysconf("SC_PAGE_SIZE")

    def read(self, at: float) -> Reading | None:
        """Take a sample at `at`, in seconds of a monotonic clock; None if /proc gives none."""
        found = re.search(rb"MemAvailable:\s+(\d+)", _read(self._memory))
        if not found:
            return None
        available = int(found[1]) * 1024
        for group in self._groups:
            left = group.available()
            available = available if left is None else min(available, left)
        counters = _read(self._counters)
        swapped = _counter(counters, b"pswpin") + _counter(counters, b"pswpout")
        raw = b"" if self._ring is None else read_kmsg(self._ring)
        lines = filter(LINES.search, raw.decode(errors="replace").splitlines())
        stalled = re.search(rb"full .*total=(\d+)", _read(self._pressure))
        return Reading(
            at=at,
            available=available,
            swapped=swapped * self.page,
            stalled=int(stalled[1]) / 1e6 if stalled else 0.0,
            kills=_counter(counters, b"oom_kill"),
            messages=tuple(line.partition(";")[2][:300] for line in lines)[:20],
        )


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _read(file: int | None) -> bytes:
    try:
        return os.pread(file, 65536, 0) if file is not None else b""
    except OSError:
        return b""


def _counter(text: bytes, name: bytes) -> int:
    _, found, rest = text.partition(b"\n" + name + b" ")
    return int(rest.partition(b"\n")[0]) if found else 0


def memory_cgroups(membership: Path, root: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield `controllers, hierarchy, folder` of each memory cgroup that we are in, v1 or v2."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers in {"", "memory"}:
            yield controllers, root / controllers, root / controllers / path.lstrip("/")


@dataclass(frozen=True)
class CgroupMemory:
    """One cgroup with a memory limit: of a container, or a systemd slice."""

    folder: Path
    limit: str
    usage: str

    def available(self) -> int | None:
        """Return bytes up to the limit, page cache counted as free; None if there is no limit."""
        try:
            limit = int((self.folder / self.limit).read_bytes())  # cgroup v2 writes `max` for none
            used = int((self.folder / self.usage).read_bytes())
            stat = (self.folder / "memory.stat").read_bytes()
        except (OSError, ValueError):
            return None
        if limit >= UNLIMITED:
            return None
        counts = dict(re.findall(rb"^(\w+) (\d+)$", stat, re.MULTILINE))
        files = [int(counts.get(name, 0)) for name in _FILE_STATS]
        return max(0, limit - used + max(sum(files[:2]), sum(files[2:])))


def limited_cgroups(membership: Path, root: Path) -> tuple[CgroupMemory, ...]:
    """Return our cgroup and those above it that have a memory limit."""
    found = []
    for controllers, base, folder in memory_cgroups(membership, root):
        names = ("memory.max", "memory.current")
        if controllers:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        for each in (folder, *folder.parents):
            if not each.is_relative_to(base):
                break
            group = CgroupMemory(each, *names)
            if group.available() is not None:
                found.append(group)
    return tuple(found)


def cgroup_kills(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return how many processes of our cgroup the kernel has killed; 0 if it is not known."""
    for _, _, folder in memory_cgroups(membership, root):
        for name in ("memory.events", "memory.oom_control"):
            with suppress(OSError):
                text = (folder / name).read_bytes()
                if found := re.search(rb"^oom_kill (\d+)", text, re.MULTILINE):
                    return int(found[1])
    return 0


def open_kmsg(*, from_now: bool = True) -> int | None:
    """Open the kernel's log if we may; `from_now` skips the messages so far."""
    try:
        kmsg = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if from_now:
        os.lseek(kmsg, 0, os.SEEK_END)
    return kmsg


def read_kmsg(kmsg: int) -> bytes:
    """Read the new messages of the kernel's log; never blocks."""
    found = b""
    while len(found) < 1 << 22:
        try:
            record = os.read(kmsg, KMSG_RECORD)
        except BrokenPipeError:  # the kernel has overwritten a record
            continue
        except OSError:
            break
        if not record:
            break
        found += record
    return found


class OomWatch:
    """Counts kernel OOM kills from its creation on."""

    def __init__(self) -> None:
        self.before = cgroup_kills()

    def killed(self, pid: int) -> bool | None:
        """Return True if the kernel killed a process for memory; None if that is not known."""
        if cgroup_kills() > self.before:
            return True
        kmsg = open_kmsg(from_now=False)
        if kmsg is None:
            return None
        messages = read_kmsg(kmsg)
        os.close(kmsg)
        return True if any(int(found) == pid for found in KILLED.findall(messages)) else None


def describe_end(code: int | None, why: str, oom: bool | None, reason: str = "") -> str:
    """Describe in one sentence how a server ended; `code` as in `Ended`, `reason` the guard's."""
    if why == "stopped":
        return "stopped as asked"
    if why == "unproven":
        return "stopped: the `serve` that was verifying it went away first"
    if why == "memory":
        return f"stopped by the memory guard, before the machine stalls: {reason}"
    if code is None:
        return "ended, and the cause is not known"
    if code >= 0:
        missing = " (not found or not permitted)" * (code in (126, 127))
        return f"exited by itself with {code}{missing}"
    memory_fault = ": a memory fault in the server, or a model file changed or vanished"
    killed = ": somebody killed it, or the kernel did because memory ran out"
    meanings: dict[int, str] = {
        signal.SIGKILL: ": the kernel killed it because memory ran out" if oom else killed,
        signal.SIGILL: ": an instruction that this CPU does not have, so it was built for another "
        "CPU",
        signal.SIGABRT: ": it aborted, on a failed assertion",
        signal.SIGSEGV: memory_fault,
        signal.SIGBUS: memory_fault,
    }
    return f"died of {signal_name(-code)}{meanings.get(-code, '')}"


def signal_name(number: int) -> str:
    """Return `SIGTERM` for 15."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
