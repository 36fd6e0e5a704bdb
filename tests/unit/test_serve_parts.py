"""Parts around a server: sockets, activity, how it ended, log tail, processes, state."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bakehouse.server import state as states
from bakehouse.server.memory_guard import KILLED, Bounds, cgroup_kills, describe_end
from bakehouse.server.processes import (
    Process,
    Reading,
    command_of,
    listeners,
    overlapping,
    owned,
    parse_listeners,
    read_activity,
    sockets,
    start_time,
)
from bakehouse.server.session import IdleTimer
from bakehouse.server.state import Ended, ServerState, SupervisorInput
from bakehouse.server.status import is_supervisor
from bakehouse.server.supervisor import Tail
from bakehouse.server.verification import url_of

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 111 1
   1: 00000000:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 222 1
   2: 0100007F:1F90 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0 333 1
   3: nonsense
"""
TABLE6 = """\
  sl  local_address                         remote_address                        st ...
   0: 00000000000000000000000001000000:1F90 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 4
   1: 00000000000000000000000000000000:0050 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 5
   2: 0000000000000000FFFF00000100007F:2328 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 6
"""
little_endian = pytest.mark.skipif(sys.byteorder != "little", reason="the table is little-endian")


@little_endian
def test_listeners_are_read_from_both_tables() -> None:
    found = [(str(one), one.inode) for one in parse_listeners(TABLE)]
    assert found == [("127.0.0.1:8080", 111), ("0.0.0.0:80", 222)]
    six = [str(one) for one in parse_listeners(TABLE6)]
    assert six == ["[::1]:8080", "[::]:80", "[::ffff:7f00:1]:9000"]


@little_endian
def test_listeners_that_overlap_an_address() -> None:
    expected = {
        ("127.0.0.1", 8080): {111},
        ("0.0.0.0", 8080): {111},
        ("::1", 8080): {4},
        ("::", 8080): {111, 4},
        ("192.0.2.1", 8080): set(),
        ("192.0.2.1", 80): {222, 5},
        ("::1", 80): {5},
        ("127.0.0.1", 9000): {6},
        ("127.0.0.1", 81): set(),
    }
    table = (*parse_listeners(TABLE), *parse_listeners(TABLE6))
    assert {at: {one.inode for one in overlapping(table, *at)} for at in expected} == expected


def test_listeners_of_our_own_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (mine,) = [one for one in owned([os.getpid()]) if one.port == port]
        assert str(mine.address) == "127.0.0.1"
        assert mine in listeners()
        assert sockets([os.getpid()])[mine.inode] == os.getpid()


def idle_after(*updates: tuple[float, Reading, list[str], int]) -> float:
    timer = IdleTimer(since=0.0)
    return [timer.update(*one) for one in updates][-1]


def test_idle_timer_grows_without_activity() -> None:
    still = Reading(calls=100, disk=5, mapped=7)
    assert idle_after((1.0, still, [], 0), (61.0, still, [], 0)) == 60.0
    for grown in (Reading(calls=1), Reading(disk=1), Reading(mapped=1)):
        assert idle_after((50.0, Reading(), [], 0), (60.0, grown, [], 0)) == 0.0


def test_idle_timer_ignores_our_own_polls() -> None:
    echo = ["GET /health 503", "   "]
    assert idle_after((60.0, Reading(calls=4096 * 5), echo, 5)) == 60.0
    assert idle_after((60.0, Reading(calls=4096 * 5 + 1), [], 5)) == 0.0
    assert idle_after((60.0, Reading(), ["load_tensors: loading"], 0)) == 0.0


def test_activity_is_summed_over_processes(tmp_path: Path) -> None:
    for pid, number in ((7, 10), (8, 5)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "io").write_text(f"rchar: {number}\nread_bytes: {number * 2}\n")
        (tmp_path / str(pid) / "status").write_text(f"Name:\tx\nRssFile:\t  {number} kB\n")
    seen = read_activity([7, 8, 9], tmp_path)
    assert seen == Reading(calls=15, disk=30, mapped=15 * 1024)
    assert seen.loaded == 15 * 1024


def test_end_is_described() -> None:
    rows: list[tuple[int | None, str, bool | None, str]] = [
        (0, "exited", None, "exited by itself with 0"),
        (127, "exited", None, "not found"),
        (-4, "exited", None, "SIGILL: an instruction that this CPU does not have"),
        (-9, "exited", True, "SIGKILL: the kernel killed it because memory ran out"),
        (-9, "exited", None, "SIGKILL: somebody killed it, or the kernel"),
        (-6, "exited", None, "SIGABRT: it aborted"),
        (-7, "exited", None, "SIGBUS: a memory fault"),
        (-64, "exited", None, "died of S"),
        (None, "exited", None, "the cause is not known"),
        (-15, "stopped", None, "stopped as asked"),
        (-9, "memory", None, "the memory guard, before the machine stalls: 1 MiB left"),
    ]
    got = [
        (words, describe_end(code, why, killed, "1 MiB left")) for code, why, killed, words in rows
    ]
    assert [one for one in got if one[0] not in one[1]] == []


def test_oom_kills_of_cgroup_v1_and_v2(tmp_path: Path) -> None:
    group = tmp_path / "cgroup"
    for text, file in (("0::/a\n", "a/memory.events"),
                       ("9:cpu:/\n4:memory:/b\n", "memory/b/memory.oom_control")):  # fmt: skip
        group.write_text(text)
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("low 0\noom_kill 3\n")
        assert cgroup_kills(group, tmp_path) == 3
    assert cgroup_kills(tmp_path / "none", tmp_path) == 0
    assert KILLED.findall(b"Out of memory: Killed process 12 (llama-server) x") == [b"12"]


def test_log_tail_gives_whole_lines_and_survives_truncation(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tail = Tail(log)
    assert tail.lines() == []
    log.write_bytes(b"one\r\ntw")
    assert tail.lines() == ["one"]
    with log.open("ab") as file:
        file.write(b"o\n\xff\n")
    assert tail.lines() == ["two", "\ufffd"]
    log.write_bytes(b"new\n")
    assert tail.lines() == ["new"]


def test_process_is_its_id_and_start_time() -> None:
    me = Process.of(os.getpid())
    assert me is not None
    assert me.alive
    assert me.command == command_of(os.getpid())
    other = Process(me.pid, me.start + 1)
    assert not other.alive
    assert not other.send(0)
    assert me.send(0)
    assert start_time(2**22 + 1) is None


def state() -> ServerState:
    return ServerState(
        name="n", nonce="0123456789abcdef", phase="ended", boot="b", argv=("a", "b"),
        host="::1", port=1, plan="p", started="s", stop_timeout=2.0, keeper=Process(5, 6),
        ended=Ended("t", "exited", 0, "says"), findings=({"id": "x"},),
    )  # fmt: skip


def test_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "n"
    folder.mkdir()
    assert states.read(folder) is None
    states.write(folder, state())
    assert states.read(folder) == state()
    assert states.path(folder).stat().st_mode & 0o777 == 0o600
    assert [f.name for f in folder.iterdir()] == ["state.json"]
    spec = SupervisorInput(state(), {"A": "b"}, "/", Bounds(2, 1, 0.5, 3), "llama.cpp")
    assert SupervisorInput.from_json(spec.to_json()) == spec


def test_state_that_was_edited_is_refused(tmp_path: Path) -> None:
    edits = [
        ('"phase": "ended"', '"phase": "gone"'),
        ('"pid": 5', '"pid": 1'),
        ('"pid": 5', '"pid": "x"'),
        ('"port": 1', '"port": 70000'),
        ('"nonce": "0123456789abcdef"', '"nonce": ""'),
        ('"name": "n"', '"name": "m"'),
        ('"host": "::1"', '"host": null'),
        ('"stop_timeout": 2.0', '"stop_timeout": 1e99'),
        ('"schema": 1', '"schema": 2'),
        ('"port": 1,', ""),
        ('"plan": "p"', '"plan": "p", "more": 1'),
    ]
    folder = tmp_path / "n"
    folder.mkdir()
    states.write(folder, state())
    text = states.path(folder).read_text()
    accepted = []
    for old, new in edits:
        assert old in text
        states.path(folder).write_text(text.replace(old, new))
        with contextlib.suppress(states.Unreadable):
            accepted.append((old, new, states.read(folder)))
    assert accepted == []


OLD_STATE = """{"schema": 1, "name": "n", "nonce": "0123456789abcdef", "phase": "proven",
"boot": "b", "argv": ["a"], "host": "127.0.0.1", "port": 8000, "plan": "p",
"started": "2026-01-01T00:00:00+00:00", "stop_timeout": 20.0,
"keeper": {"pid": 5, "start": 6}, "server": {"pid": 7, "start": 8},
"proven": "2026-01-01T00:01:00+00:00", "record": "/r", "foreground": false, "ended": null,
"findings": [], "container": null, "docker": null, "image": null, "version": null, "alarms": []}"""


def test_state_of_the_previous_version_is_read(tmp_path: Path) -> None:
    """The form on disk must not change: a server outlives an upgrade."""
    folder = tmp_path / "n"
    folder.mkdir()
    states.path(folder).write_text(OLD_STATE)
    found = states.read(folder)
    assert found is not None
    assert (found.keeper, found.server) == (Process(5, 6), Process(7, 8))
    states.write(folder, found)
    assert json.loads(states.path(folder).read_text()) == json.loads(OLD_STATE)


def test_supervisor_is_recognised_whatever_its_module_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "n"
    tail = {
        ("-m", "bakehouse.server.supervisor", str(folder), "7"): True,
        ("-m", "bakehouse.serve.keeper", str(folder), "9"): True,
        ("-m", "bakehouse.server.container_follower", str(folder), "c", "20", "n"): False,
        ("-m", "bakehouse.server.supervisor", str(tmp_path / "m"), "7"): False,
        ("-m", "pytest", str(folder), "7"): False,
    }
    got = {}
    for arguments in tail:
        with subprocess.Popen([sys.executable, "-c", "input()", *arguments], stdin=-1) as child:
            process = Process.of(child.pid)
            deadline = time.monotonic() + 5  # until its exec
            while process and arguments != process.command[-len(arguments) :]:
                assert time.monotonic() < deadline
            got[arguments] = process is not None and is_supervisor(process, folder)
            child.communicate(b"\n")
    assert got == tail


def test_url_of_a_server() -> None:
    assert url_of("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert url_of("::", 1) == "http://[::1]:1"
    assert url_of("192.0.2.1", 1) == "http://192.0.2.1:1"
