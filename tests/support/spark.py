"""A DGX Spark that is played: what its kernel would say while memory runs out, and when we act.

The figures are those of one such machine: 121.7 GiB in all, 117.7 GiB available when idle, 13.5 GiB
once GLM-5.3-Flash UD-Q2_K_XL is loaded, which takes 85 s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bakehouse.memory.machines import PROFILES
from bakehouse.server.memory_guard import GIB, MIB, Alarm, Bounds, Guard, Reading, Sensor

TOTAL = PROFILES["gb10"].total
IDLE, LOADED, LOADING_S = 117.7, 13.5, 85.0


@dataclass(frozen=True)
class Event:
    """An alarm, and when it was raised: seconds from the start, GiB that were left."""

    at: float
    left: float
    alarm: Alarm


@dataclass(frozen=True)
class Course:
    """Memory in GiB, swap in MiB and stalls in seconds since the start, at a moment."""

    level: Callable[[float], float]
    seconds: float
    swapped: Callable[[float], float] = lambda _: 0.0
    stalled: Callable[[float], float] = lambda _: 0.0


def falling(start: float, rate: float, *, after: float = 2.0, floor: float = 0.0) -> Course:
    """Memory that falls by `rate` GiB a second from `start` GiB down to `floor`."""
    return Course(
        lambda t: max(floor, start - rate * max(0.0, t - after)), after + (start - floor) / rate + 5
    )


COURSES: dict[str, Course] = {
    "UD-Q2_K_XL is loaded and served": falling(IDLE, (IDLE - LOADED) / LOADING_S, floor=LOADED),
    "UD-IQ3_XXS is loaded": falling(IDLE, 1.3),
    "a cache of 9 GiB is taken at once": falling(LOADED, 9.0, floor=4.5),
    "a cache too large, 2 GiB/s": falling(LOADED, 2.0),
    "a cache too large, 5 GiB/s": falling(LOADED, 5.0),
    "a cache too large, 10 GiB/s": falling(LOADED, 10.0),
    "a cache too large, 20 GiB/s": falling(LOADED, 20.0),
    "memory that creeps away, 50 MiB/s": falling(6.0, 0.05),
    "swapping at 2.5 GiB left": Course(lambda t: 13.5 if t < 2 else 2.5, 20,
                                       swapped=lambda t: 300 * max(0.0, t - 2)),
    "waiting for memory at 2.5 GiB left": Course(lambda t: 13.5 if t < 2 else 2.5, 20,
                                                 stalled=lambda t: 0.6 * max(0.0, t - 2)),
    "swapping with 13 GiB left": Course(lambda _: 13.0, 20, swapped=lambda t: 300 * t),
}  # fmt: skip
"""By what happens."""


def play(course: Course, folder: Path, bounds: Bounds | None = None) -> list[Event]:
    """Let the real sensor read the course out of files, and the guard judge, until it stops."""
    (folder / "pressure").mkdir(parents=True, exist_ok=True)
    there = write(folder, course, 0.0, {})
    sensor = Sensor(folder, folder / "cgroup", ring=False)
    guard = Guard(bounds or Bounds.usual(TOTAL, unified=True))
    events, at = [], 0.0
    while at < course.seconds:
        there = write(folder, course, at, there)
        reading = sensor.read(at)
        assert isinstance(reading, Reading)
        if alarm := guard.look(reading):
            events.append(Event(at, course.level(at), alarm))
            if alarm.kind == "stop":
                break
        at += guard.interval
    return events


def write(folder: Path, course: Course, at: float, there: dict[str, str]) -> dict[str, str]:
    """What /proc says at a moment, given what is there already; gives what is there then.

    Written in place, since the sensor keeps its files open.
    """
    swapped = int(course.swapped(at) * MIB) // 4096
    texts = {
        "meminfo": f"MemTotal: {TOTAL // 1024} kB\nMemFree: 2000000 kB\n"
        f"MemAvailable: {int(course.level(at) * GIB) // 1024} kB\n",
        "vmstat": f"nr_free_pages 5\npswpin {swapped // 2}\npswpout {swapped - swapped // 2}\n"
        "oom_kill 0\n",
        "pressure/memory": "some avg10=0.00 total=9\n"
        f"full avg10=0.00 total={int(course.stalled(at) * 1e6)}\n",
    }
    for name, text in texts.items():
        if there.get(name) != text:
            (folder / name).write_text(text)
    return texts
