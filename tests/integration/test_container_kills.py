"""Kill -9 of any process around a container, at any moment: the container is never lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from bakehouse.server.state import LOST, read
from bakehouse.server.status import get_status
from tests.support.boxed import House
from tests.support.house import crash, until

pytestmark = [pytest.mark.integration, pytest.mark.docker]

TASK = """
import sys
from pathlib import Path
from bakehouse import cli
sys.exit(cli.main(sys.argv[1], {"recipe": "boxed"}, json=True, recipes=Path(sys.argv[2])))
"""
QUESTION = """
import sys
from bakehouse.system.docker.models import ContainerSpec
from bakehouse.system.docker.client import DockerClient
spec = ContainerSpec(image=sys.argv[1], entrypoint=("/bin/sleep",), argv=("99",))
DockerClient().ask(spec, timeout=90)
"""


def start(house: House, task: str) -> subprocess.Popen[bytes]:
    """Run a task in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", TASK, task, str(house.folder)], stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait(10)


def all_is_well(house: House) -> None:
    """Status tells no lie, stop removes all, and a second serve works."""
    code, document, _ = house.call("status")
    (seen,) = document["result"]["servers"]
    assert code == 0, document["error"]
    assert seen["status"] in ("orphaned", "gone", "ended", "starting"), seen
    code, document, _ = house.call("stop")
    assert code == 0, document["error"]
    assert house.boxes() == []
    assert get_status(house.server()).word in ("ended", "gone")
    code, document, _ = house.serve()
    assert code == 0, document["error"]
    assert document["result"]["again"] is False
    assert len(house.boxes()) == 1
    assert get_status(house.server()).word == "running"


def test_kill_of_the_follower(house: House) -> None:
    assert house.serve()[0] == 0
    state = read(house.server())
    assert state
    assert state.server
    state.server.send(signal.SIGKILL)
    until(lambda: get_status(house.server()).word == "ended")
    state = read(house.server())
    assert state
    assert state.ended
    assert "the process following its container was killed" in state.ended.says
    assert house.boxes() == []
    all_is_well(house)


def test_kill_of_the_follower_while_the_engine_hangs(house: House) -> None:
    assert house.serve()[0] == 0
    state = read(house.server())
    assert state
    assert state.server
    with house.engine.hanging():
        state.server.send(signal.SIGKILL)
        until(lambda: not get_status(house.server(), inside=False).processes, 40)
    ended = read(house.server())
    assert ended
    assert ended.ended
    assert ended.ended.says.startswith(LOST)
    assert len(house.boxes()) == 1
    all_is_well(house)


def test_kill_of_the_supervisor(house: House) -> None:
    assert house.serve()[0] == 0
    state = read(house.server())
    assert state
    assert state.keeper
    state.keeper.send(signal.SIGKILL)
    until(lambda: get_status(house.server()).word == "gone")
    assert house.boxes() == []
    all_is_well(house)


def test_kill_of_supervisor_and_follower(house: House) -> None:
    assert house.serve()[0] == 0
    crash(house)
    assert len(house.boxes()) == 1
    all_is_well(house)


def _made(house: House) -> bool:
    return bool(house.boxes())


def _loading(house: House) -> bool:
    log = house.server() / "server.log"
    return log.exists() and "Resolved architecture" in log.read_text()


def _proving(house: House) -> bool:
    state = get_status(house.server(), inside=False).state
    return bool(state and state.port and state.phase == "starting")


@pytest.mark.parametrize("at", [_made, _loading, _proving])
def test_kill_of_serve_before_the_verification(house: House, at: Callable[[House], bool]) -> None:
    house.write(container={"env": {"FAKE": "shards"}} if at is _loading else {})
    child = start(house, "serve")
    until(lambda: at(house) or child.poll() is not None, 40)
    kill(child)
    until(lambda: not get_status(house.server(), inside=False).processes, 30)
    state = read(house.server())
    proven = bool(state and state.proven)
    assert not proven or child.returncode == 0  # it came too late
    assert house.boxes() == []
    all_is_well(house)


@pytest.mark.parametrize("after", [0.1, 0.6, 1.2])
def test_kill_of_serve_at_some_moment(house: House, after: float) -> None:
    """Before, while and after its image is asked what it can do, and so on."""
    house.write()
    child = start(house, "serve")
    time.sleep(after)
    kill(child)
    until(lambda: not get_status(house.server(), inside=False).processes, 30)
    assert house.boxes() == []
    code, document, _ = house.serve()
    assert code == 0, document["error"]
    assert house.call("stop")[0] == 0


@pytest.mark.parametrize("after", [0.3, 1.0, 2.0])
def test_kill_of_stop(house: House, after: float) -> None:
    code, document, _ = house.serve(
        container={"env": {"FAKE": "deaf"}}, serve={"stop_timeout": "2s"}
    )
    assert code == 0, document["error"]
    child = start(house, "stop")
    time.sleep(after)
    kill(child)
    house.write()
    code, document, _ = house.call("stop")
    assert code == 0, document["error"]
    assert house.boxes() == []
    all_is_well(house)


def test_kill_of_a_query_is_cleaned_up_by_stop(house: House) -> None:
    assert house.serve()[0] == 0
    child = subprocess.Popen([sys.executable, "-c", QUESTION, house.image])
    until(lambda: bool(_questions(house)))
    kill(child)
    assert house.call("stop")[0] == 0
    assert _questions(house) == []


def _questions(house: House) -> list[str]:
    return [one.id for one in house.docker.containers({"bakehouse.asked-by": ""})]
