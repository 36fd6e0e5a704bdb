"""When the memory guard acts on a machine with unified memory, by a GB10's figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bakehouse.serve.guard import GIB, Alarm, Bounds, Guard, Reading
from bakehouse.serve.keeper import MEMORY_GRACE_S
from tests.support.spark import COURSES, LOADED, TOTAL, Event, falling, play

SPARK = Bounds.usual(TOTAL, unified=True)
DRIVER = "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY]"


def kinds(events: list[Event]) -> list[str]:
    return [event.alarm.kind for event in events]


@pytest.mark.parametrize(
    "name",
    ["UD-Q2_K_XL is loaded and served", "a cache of 9 GiB is taken at once",
     "swapping with 13 GiB left"],
)  # fmt: skip
def test_what_is_meant_to_be_is_left_alone(tmp_path: Path, name: str) -> None:
    assert play(COURSES[name], tmp_path) == []


@pytest.mark.parametrize(
    "name", [name for name in COURSES if "too large" in name or "IQ3" in name or "creeps" in name]
)
def test_a_fall_is_stopped_in_time_however_steep(tmp_path: Path, name: str) -> None:
    events = play(COURSES[name], tmp_path)
    assert events[-1].alarm.kind == "stop"
    falls = events[-1].alarm.figures["falling_per_second"] / GIB
    rate = next((r for r in (0.05, 1.3, 2.0, 5.0, 10.0, 20.0) if falls == pytest.approx(r, 0.2)), 0)
    assert rate, falls
    until_nothing = events[-1].left / rate
    patience = events[-1].alarm.patience(MEMORY_GRACE_S)
    assert until_nothing > 0.25
    assert patience <= min(MEMORY_GRACE_S, 0.3 * until_nothing)  # KILL comes while there is some
    if rate < 10:
        assert kinds(events) == ["warn", "stop"]


@pytest.mark.parametrize("rate", [12.0, 16.0, 20.0, 25.0])
@pytest.mark.parametrize("after", [2.0, 2.05, 2.1, 2.15])
def test_no_moment_of_sampling_is_a_bad_one(tmp_path: Path, rate: float, after: float) -> None:
    events = play(falling(LOADED, rate, after=after), tmp_path)
    assert events[-1].alarm.kind == "stop"
    assert events[-1].left / rate > 0.1


@pytest.mark.parametrize("name", ["swapping at 2.5 GiB left", "waiting for memory at 2.5 GiB left"])
def test_a_machine_that_begins_to_stall_is_freed(tmp_path: Path, name: str) -> None:
    events = play(COURSES[name], tmp_path)
    assert kinds(events) == ["warn", "stop"]
    assert events[-1].at - 2.0 < 1.5
    assert events[-1].alarm.patience(MEMORY_GRACE_S) == MEMORY_GRACE_S


def test_d04_a_fall_to_one_gib_is_stopped_within_two_samples() -> None:
    guard, taken = Guard(SPARK), 0
    alarm: Alarm | None = None
    for i, level in enumerate([100.0, 60.0, 20.0, 1.0, 1.0, 1.0]):
        alarm = guard.look(Reading(i * 1.0, int(level * GIB)))
        taken += level == 1.0
        if alarm and alarm.kind == "stop":
            break
    assert alarm is not None
    assert (alarm.kind, taken <= 2) == ("stop", True)


def test_d05_the_driver_s_want_of_memory_ends_the_server_on_unified_memory() -> None:
    readings = [Reading(0.0, 12 * GIB), Reading(0.2, 12 * GIB, messages=(DRIVER,))]
    alarms = [alarm for r in readings if (alarm := Guard(SPARK).look(r))]
    assert [(a.kind, a.messages) for a in alarms] == [("stop", (DRIVER,))]
    assert "driver" in alarms[0].reason
    guard = Guard(replace(SPARK, driver=False))  # a discrete GPU may refuse and all goes on
    said = [guard.look(replace(readings[1], at=i / 5)) for i in range(5)]
    assert [alarm.kind for alarm in said if alarm] == ["warn"]


def test_d12_a_server_that_creeps_is_warned_about_long_before(tmp_path: Path) -> None:
    warn, stop = play(COURSES["memory that creeps away, 50 MiB/s"], tmp_path)
    assert stop.at - warn.at > 40
    assert 3.6 < warn.left < 3.7
    assert 1.2 < stop.left < 1.3


def test_what_others_have_set_stays() -> None:
    assert SPARK.changed(None, 4 * GIB, None, None).driver
    assert not Bounds.usual(TOTAL, unified=False).driver
