"""The memory guard: it judges level and slope of the kernel's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from bakehouse.commands.serve import guard_bounds
from bakehouse.memory.machines import PROFILES, named_machine
from bakehouse.recipe.models import MemoryGuard
from bakehouse.server.memory_guard import (
    FAST_S,
    GIB,
    MIB,
    SLOW_S,
    Alarm,
    Bounds,
    Guard,
    Reading,
    Sensor,
)
from tests.support.checkpoints import write

BOUNDS = Bounds(warn=4 * GIB, stop=GIB, stall=0.25, swap=64 * MIB)


def watch(readings: Iterable[Reading], bounds: Bounds = BOUNDS) -> tuple[list[Alarm], int]:
    """All alarms up to the order to stop, and how many readings were taken in."""
    guard, alarms, taken = Guard(bounds), [], 0
    for reading in readings:
        taken += 1
        if alarm := guard.look(reading):
            alarms.append(alarm)
            if alarm.kind == "stop":
                break
    return alarms, taken


def course(
    level: Callable[[float], float], seconds: float = 20, every: float = 0.2
) -> list[Reading]:
    """Readings of memory that is `level(t)` GiB at t seconds."""
    count = int(seconds / every)
    return [Reading(i * every, int(level(i * every) * GIB)) for i in range(count)]


def kinds(readings: Iterable[Reading], bounds: Bounds = BOUNDS) -> list[str]:
    return [alarm.kind for alarm in watch(readings, bounds)[0]]


def test_guard_judges_level_and_slope() -> None:
    rows: list[tuple[Callable[[float], float], list[str]]] = [
        (lambda t: 13.0, []),
        (lambda t: 3.0, ["warn"]),  # little, and it stays
        (lambda t: 100 - 2 * t if t < 43 else 14.0, []),  # a model is loaded, and then all is well
        (lambda t: 15.0 if t < 5 else 3.0, ["warn"]),  # a cache taken at once, and nothing more
        (lambda t: 15.0 if t < 5 else 0.5, ["warn", "stop"]),
        (lambda t: 6 - 0.12 * t, ["warn"]),
        (lambda t: 6 - 0.3 * t, ["warn", "stop"]),
        (lambda t: 5 if t % 4 < 2 else 3, ["warn"]),  # no warning again and again
        (lambda t: 8 if t % 4 < 2 else 3, ["warn"] * 5),
        (lambda t: 0.9 if 5 < t < 5.3 else 8, ["warn"]),  # one single reading
    ]
    assert [kinds(course(level)) for level, _ in rows] == [expected for _, expected in rows]


def test_guard_stops_a_steep_fall_above_the_limit() -> None:
    alarms, _ = watch(course(lambda t: max(0.0, 10 - 2.5 * t), every=0.1))
    assert [alarm.kind for alarm in alarms] == ["warn", "stop"]
    stop = alarms[-1]
    assert GIB < stop.figures["available"] < 4 * GIB
    assert stop.figures["falling_per_second"] == pytest.approx(2.5 * GIB, rel=0.01)
    assert "falling by 2.50 GiB per second" in stop.reason


def test_guard_samples_faster_near_the_limits() -> None:
    guard = Guard(BOUNDS)
    assert guard.interval == SLOW_S <= 0.25
    guard.look(Reading(0, 20 * GIB))
    assert guard.interval == SLOW_S
    guard.look(Reading(1, 5 * GIB))
    assert guard.interval == FAST_S


def changing(level: float, **each_second: float) -> list[Reading]:
    """A steady level with counters that grow so much a second."""
    base = Reading(0.0, int(level * GIB))
    return [
        replace(base, at=i / 5, **{k: type(getattr(base, k))(v * i / 5)
                                   for k, v in each_second.items()})
        for i in range(20)
    ]  # fmt: skip


def test_guard_stops_for_pressure_only_if_memory_is_short() -> None:
    rows: list[tuple[dict[str, float], str]] = [
        ({"stalled": 0.5}, "all tasks stalled on memory 50% of the time"),
        ({"swapped": 100 * MIB}, "swapping 100.0 MiB per second"),
        ({"kills": 1}, "started to kill processes"),
    ]
    for each_second, words in rows:
        alarms, _ = watch(changing(2.0, **each_second))
        assert alarms[-1].kind == "stop"
        assert words in alarms[-1].reason
        assert kinds(changing(13.0, **each_second)) == []  # a slow disk, or a neighbour's limit
        mild = {name: value / 4 for name, value in each_second.items() if name != "kills"}
        assert kinds(changing(2.0, **mild)) == ["warn"], each_second


def test_guard_ignores_swap_without_a_limit() -> None:
    assert kinds(changing(2.0, swapped=10.0 * GIB), replace(BOUNDS, swap=0)) == ["warn"]


PROC = {
    "meminfo": "MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable:   2048 kB\n",
    "vmstat": "nr_free_pages 5\npswpin 2\npswpout 3\noom_kill 7\n",
    "pressure/memory": "some avg10=0.00 total=9\nfull avg10=1.00 avg60=0.00 total=1500000\n",
    "self/cgroup": "",
}


def fake(folder: Path, **changes: str) -> Path:
    for name, text in {**PROC, **changes}.items():
        write(folder / name, text.encode())
    return folder


def test_guard_sensor_reads_the_figures_each_time(tmp_path: Path) -> None:
    sensor = Sensor(fake(tmp_path / "proc"), tmp_path / "cgroup", ring=False)
    seen = sensor.read(1.0)
    assert seen is not None
    page = sensor.page
    assert seen == Reading(1.0, 2048 * 1024, 5 * page, 1.5, 7)
    fake(tmp_path / "proc", meminfo="MemAvailable: 1 kB\n")
    again = sensor.read(2.0)
    assert again is not None
    assert again.available == 1024


def test_guard_sensor_works_without_some_figures(tmp_path: Path) -> None:
    assert Sensor(tmp_path, tmp_path).read(0.0) is None
    write(tmp_path / "meminfo", b"MemAvailable: 4 kB\n")
    assert Sensor(tmp_path, tmp_path, ring=False).read(0.0) == Reading(0.0, 4096)


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/a/b\n", {"a/memory.max": "1000000\n", "a/memory.current": "400000\n",
                       "a/memory.stat": "anon 1\ninactive_file 100000\nactive_file 50000\n",
                       "a/b/memory.max": "max\n", "a/b/memory.current": "1\n",
                       "a/b/memory.stat": ""}),
        ("4:memory:/a\n0::/\n", {
            "memory/a/memory.limit_in_bytes": "1000000\n",
            "memory/a/memory.usage_in_bytes": "400000\n",
            "memory/a/memory.stat": "total_inactive_file 100000\ntotal_active_file 50000\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": "1\n", "memory/memory.stat": ""}),
    ],
)  # fmt: skip
def test_guard_sensor_counts_the_limit_of_a_cgroup(
    tmp_path: Path, membership: str, files: dict[str, str]
) -> None:
    for name, text in files.items():
        write(tmp_path / "cgroup" / name, text.encode())
    proc = fake(tmp_path / "proc", **{"self/cgroup": membership})
    seen = Sensor(proc, tmp_path / "cgroup", ring=False).read(0.0)
    assert seen is not None
    assert seen.available == 1_000_000 - 400_000 + 150_000


def test_guard_limits_come_from_machine_and_recipe() -> None:
    spark = guard_bounds(MemoryGuard(), PROFILES["gb10"])
    assert spark is not None
    assert GIB <= spark.stop < 2 * GIB <= spark.warn < 4 * GIB
    plain = guard_bounds(MemoryGuard(), named_machine("cpu:64GiB"))
    assert plain is not None
    assert plain.stop == 256 * MIB
    tiny = guard_bounds(MemoryGuard(), named_machine("cpu:1GiB"))
    assert tiny is not None
    assert tiny.stop == 64 * MIB
    assert guard_bounds(MemoryGuard(enabled=False), PROFILES["gb10"]) is None
    own = guard_bounds(MemoryGuard(stop=8 * GIB, stall=0.1, swap=0), PROFILES["gb10"])
    assert own == Bounds(8 * GIB, 8 * GIB, 0.1, 0, driver=True)
    low = guard_bounds(MemoryGuard(warn=MIB), PROFILES["gb10"])
    assert low == replace(spark, warn=MIB, stop=MIB)
    with pytest.raises(ValueError, match="no warning"):
        MemoryGuard(warn=1, stop=2)
