"""The memory guard on a machine with unified memory, by a GB10's figures."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from bakehouse.server.memory_guard import GIB, Alarm, Bounds, Guard, Reading
from bakehouse.server.supervisor import MEMORY_GRACE_S
from tests.support.spark import COURSES, LOADED, TOTAL, Event, falling, play

SPARK = Bounds.usual(TOTAL, unified=True)
DRIVER = "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY]"


def kinds(events: list[Event]) -> list[str]:
    return [event.alarm.kind for event in events]


def test_guard_leaves_normal_use_alone(tmp_path: Path) -> None:
    names = ["UD-Q2_K_XL is loaded and served", "a cache of 9 GiB is taken at once",
             "swapping with 13 GiB left"]  # fmt: skip
    assert [play(COURSES[name], tmp_path / name[:4]) for name in names] == [[], [], []]


def test_guard_stops_a_fall_in_time_however_steep(tmp_path: Path) -> None:
    rates = {
        "UD-IQ3_XXS is loaded": 1.3, "a cache too large, 2 GiB/s": 2.0,
        "a cache too large, 5 GiB/s": 5.0, "a cache too large, 10 GiB/s": 10.0,
        "a cache too large, 20 GiB/s": 20.0, "memory that creeps away, 50 MiB/s": 0.05,
    }  # fmt: skip
    for name, rate in rates.items():
        events = play(COURSES[name], tmp_path / str(rate))
        alarm = events[-1].alarm
        assert alarm.kind == "stop", name
        assert alarm.figures["falling_per_second"] / GIB == pytest.approx(rate, 0.2), name
        until_nothing = events[-1].left / rate
        assert until_nothing > 0.25, name
        # KILL comes while memory is left.
        assert alarm.patience(MEMORY_GRACE_S) <= min(MEMORY_GRACE_S, 0.3 * until_nothing), name
        if rate < 10:
            assert kinds(events) == ["warn", "stop"], name


def test_guard_stops_at_any_moment_of_sampling(tmp_path: Path) -> None:
    late = []
    for rate, after in itertools.product((12.0, 16.0, 20.0, 25.0), (2.0, 2.05, 2.1, 2.15)):
        *_, last = play(falling(LOADED, rate, after=after), tmp_path / f"{rate}-{after}")
        if last.alarm.kind != "stop" or last.left / rate <= 0.1:
            late.append((rate, after, last))
    assert late == []


def test_guard_stops_when_the_machine_begins_to_stall(tmp_path: Path) -> None:
    for name in ("swapping at 2.5 GiB left", "waiting for memory at 2.5 GiB left"):
        events = play(COURSES[name], tmp_path / name[:4])
        assert kinds(events) == ["warn", "stop"], name
        assert events[-1].at - 2.0 < 1.5
        assert events[-1].alarm.patience(MEMORY_GRACE_S) == MEMORY_GRACE_S


def test_guard_stops_a_fall_to_one_gib_within_two_samples() -> None:
    guard, taken = Guard(SPARK), 0
    alarm: Alarm | None = None
    for i, level in enumerate([100.0, 60.0, 20.0, 1.0, 1.0, 1.0]):
        alarm = guard.look(Reading(i * 1.0, int(level * GIB)))
        taken += level == 1.0
        if alarm and alarm.kind == "stop":
            break
    assert alarm is not None
    assert (alarm.kind, taken <= 2) == ("stop", True)


def test_guard_stops_for_the_gpu_driver_on_unified_memory() -> None:
    readings = [Reading(0.0, 12 * GIB), Reading(0.2, 12 * GIB, messages=(DRIVER,))]
    alarms = [alarm for r in readings if (alarm := Guard(SPARK).look(r))]
    assert [(a.kind, a.messages) for a in alarms] == [("stop", (DRIVER,))]
    assert "driver" in alarms[0].reason
    guard = Guard(replace(SPARK, driver=False))  # a discrete GPU may refuse and all goes on
    said = [guard.look(replace(readings[1], at=i / 5)) for i in range(5)]
    assert [alarm.kind for alarm in said if alarm] == ["warn"]


def test_guard_warns_long_before_it_stops_a_slow_leak(tmp_path: Path) -> None:
    warn, stop = play(COURSES["memory that creeps away, 50 MiB/s"], tmp_path)
    assert stop.at - warn.at > 40
    assert 3.6 < warn.left < 3.7
    assert 1.2 < stop.left < 1.3


def test_guard_limits_keep_the_driver_rule() -> None:
    assert SPARK.changed(None, 4 * GIB, None, None).driver
    assert not Bounds.usual(TOTAL, unified=False).driver
