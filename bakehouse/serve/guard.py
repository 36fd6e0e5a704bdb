"""The memory guard: when the machine is about to run out of memory, and who says so.

Going over does not kill a process on unified memory, it stalls the machine for good. So the keeper
samples what the kernel knows, several times a second, and acts while there is memory left to act
with. Judging is pure (`Guard`); reading is `Sensor`. Standard library only: the keeper runs this.
"""

from __future__ import annotations

import os
import re
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bakehouse.serve.oom import kernel_messages, open_ring
from bakehouse.serve.room import limited_groups
from bakehouse.util.text import size_text as amount

GIB, MIB = 2**30, 2**20
SLOW_S, FAST_S = 0.2, 0.1
"""Between two samples: 5 Hz where there is plenty, 10 Hz near the bounds."""
NEAR = 1.5
"""Below so many times the warning level the samples come fast."""
WINDOW_S = 1.0
"""Rates are taken over so long, in seconds."""
SHORTEST_S = 0.09
"""A rate over less than this would be noise."""
AHEAD_S = 1.0
"""Memory that falls from the warning level to the stopping level within this is stopped at once."""
URGENT_S = 0.3
"""Memory that falls to the stopping level within this, by its last two steps alike, is stopped
whatever is left: a steep fall leaves no time to see whether it ends by itself."""
IN_A_ROW = 2
"""So many samples must agree before a server is stopped."""
PATIENCE = 0.25
"""Of the time until nothing is left, what a server gets between TERM and KILL."""
RECOVERED = 1.25
"""A new warning needs memory to have come back to so many times the warning level."""
LINES = re.compile(r"out of memory|oom-kill|killed process|NV_ERR_NO_MEMORY", re.IGNORECASE)
DRIVER = re.compile(r"NV_ERR_NO_MEMORY|NVRM: .*out of memory", re.IGNORECASE)


@dataclass(frozen=True)
class Bounds:
    """Where the guard acts. Bytes; `stall` is a share of time, `swap` bytes a second."""

    warn: int
    stop: int
    stall: float
    swap: int
    driver: bool = False
    """Whether the server ends when the GPU's driver reports that it has no memory left: on unified
    memory a hard reset of the machine is what follows. Elsewhere that is worth a warning."""

    @classmethod
    def usual(cls, total: int, *, unified: bool) -> Bounds:
        """Bounds for a machine with `total` bytes of memory.

        On unified memory going over stalls the machine for good: 1% and at least 1 GiB must be
        left, 3% and 2 GiB are worth a warning. Elsewhere the kernel can still end a process, and
        the guard only forestalls that.
        """
        if unified:
            return cls(max(2 * GIB, total * 3 // 100), max(GIB, total // 100), 0.25, 64 * MIB, True)
        stop = min(256 * MIB, total // 16)
        return cls(2 * stop, stop, 0.5, 256 * MIB)

    def changed(
        self, warn: int | None, stop: int | None, stall: float | None, swap: int | None
    ) -> Bounds:
        """Put in what a recipe says; the level that it leaves out gives way to the other."""
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
    """What the kernel says at one moment. Seconds and bytes; counters run since boot."""

    at: float
    available: int
    """What can be had without swapping, in the machine or in our control group."""
    swapped: int = 0
    """Swapped in and out, together."""
    stalled: float = 0.0
    """Seconds in which every task waited for memory (PSI, `full`)."""
    kills: int = 0
    """Processes that the kernel ended for want of memory."""
    messages: tuple[str, ...] = ()
    """What the kernel logged about that since the last reading."""


@dataclass(frozen=True)
class Alarm:
    """A warning, or the order to stop. `figures` are those of the moment."""

    kind: str
    """`warn` or `stop`."""
    reason: str
    figures: dict[str, float]
    messages: tuple[str, ...] = ()

    def patience(self, most: float) -> float:
        """Seconds between TERM and KILL, `most` at most: while it falls, it goes on falling."""
        falling = self.figures.get("falling_per_second", 0.0)
        left = self.figures.get("available", 0.0) / falling if falling > 0 else most / PATIENCE
        return min(most, PATIENCE * left)

    def to_data(self) -> dict[str, Any]:
        """Plain data for the state file and the record."""
        return asdict(self)


@dataclass(frozen=True)
class Rates:
    """How things move. Bytes and seconds a second."""

    falling: float = 0.0
    """What is lost a second, over the window and over the last step alike; never negative."""
    steep: float = 0.0
    """What is lost a second over each of the last two steps; never negative."""
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
        """Seconds until the next sample is wanted."""
        if not self.seen:
            return SLOW_S
        soon = self.seen[-1].available - max(self.last.falling, self.last.steep)
        return FAST_S if soon < NEAR * self.bounds.warn else SLOW_S

    def look(self, reading: Reading) -> Alarm | None:
        """Take a reading in; give an alarm where it raises one."""
        rates = self.last = self._rates(reading)
        self.seen.append(reading)
        while len(self.seen) > 2 and self.seen[1].at < reading.at - WINDOW_S:
            self.seen.popleft()
        driver = any(DRIVER.search(message) for message in reading.messages)
        if driver and self.bounds.driver:
            why = "the GPU's driver reports that it has none"
            return self._alarm("stop", why, reading, rates)
        urgent = rates.steep * URGENT_S > max(0, reading.available - self.bounds.stop)
        stop = self._stops(reading, rates)
        if urgent:
            stop = stop or f"falling by {amount(rates.steep)} a second"
        self.bad = self.bad + 1 if stop else 0
        if stop and (self.bad >= IN_A_ROW or rates.kills or urgent):
            return self._alarm("stop", stop, reading, rates)
        if driver and not self.driver:
            self.driver = True
            return self._alarm("warn", "the GPU's driver reports that it has none", reading, rates)
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
        # The last step is long enough to mean something: a single burst is over by then.
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
        """Why the server has to be stopped, if it has to."""
        bounds = self.bounds
        if now.available < bounds.stop:
            return f"below {amount(bounds.stop)}"
        if now.available >= bounds.warn:
            return None  # whatever stalls or swaps, it is not for want of memory
        soon = now.available - rates.falling * AHEAD_S
        reasons = (
            (rates.kills > 0, "the kernel has begun to end processes"),
            (soon < bounds.stop, f"falling by {amount(rates.falling)} a second"),
            (rates.stall > bounds.stall, f"every task waited for it {rates.stall:.0%} of the time"),
            (rates.swap > bounds.swap > 0, f"{amount(rates.swap)} a second were swapped"),
        )
        return next((reason for holds, reason in reasons if holds), None)

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
    """Reads the kernel's figures through files that stay open, so that a sample costs little.

    `proc`, `groups` and `ring` are replaced in tests. What the kernel does not offer reads as 0.
    """

    def __init__(
        self,
        proc: Path = Path("/proc"),
        groups: Path = Path("/sys/fs/cgroup"),
        *,
        ring: bool = True,
    ) -> None:
        self._memory = _open(proc / "meminfo")
        self._counters = _open(proc / "vmstat")
        self._pressure = _open(proc / "pressure" / "memory")
        self._ring = open_ring() if ring else None
        self._groups = limited_groups(proc / "self" / "cgroup", groups)
        self.page = os.sysconf("SC_PAGE_SIZE")

    def read(self, at: float) -> Reading | None:
        """Sample at `at` (seconds of a monotonic clock); None where the kernel does not say."""
        found = re.search(rb"MemAvailable:\s+(\d+)", _read(self._memory))
        if not found:
            return None
        available = int(found[1]) * 1024
        for group in self._groups:
            room = group.room()
            available = available if room is None else min(available, room)
        counters = _read(self._counters)
        swapped = _counter(counters, b"pswpin") + _counter(counters, b"pswpout")
        stalled = re.search(rb"full .*total=(\d+)", _read(self._pressure))
        return Reading(
            at=at,
            available=available,
            swapped=swapped * self.page,
            stalled=int(stalled[1]) / 1e6 if stalled else 0.0,
            kills=_counter(counters, b"oom_kill"),
            messages=self._new_messages(),
        )

    def _new_messages(self) -> tuple[str, ...]:
        if self._ring is None or not (raw := kernel_messages(self._ring)):
            return ()
        lines = raw.decode(errors="replace").splitlines()
        return tuple(line.partition(";")[2][:300] for line in lines if LINES.search(line))[:20]


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
