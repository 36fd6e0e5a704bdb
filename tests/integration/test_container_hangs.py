"""A Docker Engine that hangs, a container that is paused: reported within seconds."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from bakehouse import cli
from bakehouse.errors import HostError
from bakehouse.server import containers
from bakehouse.server.state import read
from bakehouse.server.status import get_status
from bakehouse.system.docker.client import DockerClient
from bakehouse.system.docker.models import ContainerSpec
from tests.support.boxed import House
from tests.support.docker_engine import Engine, make_image
from tests.support.house import crash, until

pytestmark = [pytest.mark.integration, pytest.mark.docker]

SOON_S = 9.0
"""Five seconds for the engine, and the time that a task takes anyhow on a busy machine."""


@pytest.mark.parametrize("crashed", [False, True], ids=["followed", "left-over"])
def test_hanging_engine_is_reported_and_nothing_changes(house: House, *, crashed: bool) -> None:
    code, document, _ = house.serve()
    assert code == 0, document["error"]
    if crashed:
        crash(house)
    before = read(house.server())
    with house.engine.hanging():
        for task in ("status", "probe", "stop", "serve"):
            containers._timeouts.clear()  # each task is a process of its own
            began = time.monotonic()
            code, document, _ = house.call(task)
            took = time.monotonic() - began
            assert (task, code, document["error"]["id"]) == (task, 9, "docker-timeout")
            assert "does not answer in time" in document["error"]["what"]
            assert "journalctl" in document["error"]["hint"]
            assert took < SOON_S, task
            assert read(house.server()) == before
            if task == "status":
                (seen,) = document["result"]["servers"]
                assert (seen["status"], seen["ended"]) == ("unclear", None)
                assert "is not known" in seen["trouble"] or "may still exist" in seen["trouble"]
    containers._timeouts.clear()
    assert get_status(house.server()).word == ("orphaned" if crashed else "running")
    assert house.call("stop")[0] == 0


def test_hanging_engine_delays_status_only_once(house: House) -> None:
    for name in ("one", "two", "three"):
        assert house.serve(name)[0] == 0
    with house.engine.hanging():
        began = time.monotonic()
        code = cli.main("status", {}, json=True, recipes=house.folder)
        took = time.monotonic() - began
    document = json.loads(house.capsys.readouterr().out)
    assert [s["status"] for s in document["result"]["servers"]] == ["unclear"] * 3
    assert (code, took < SOON_S) == (9, True)
    assert cli.main("stop", {"all": True}, json=True, recipes=house.folder) == 0


def test_hanging_engine_does_not_delay_logs(house: House) -> None:
    assert house.serve()[0] == 0
    with house.engine.hanging():
        began = time.monotonic()
        code, document, _ = house.call("logs")
        assert (code, time.monotonic() - began < 2) == (0, True)
    assert any("startup complete" in line for line in document["result"]["lines"])


def test_hanging_engine_without_containers_is_only_mentioned(house: House) -> None:
    with house.engine.hanging():
        code = cli.main("status", {}, json=False, recipes=house.folder)
    said = house.capsys.readouterr().out
    assert code == 0
    assert "no server runs" in said
    assert "does not answer in time" in said


def test_hanging_engine_during_stop_is_recorded(house: House) -> None:
    code, document, _ = house.serve(serve={"stop_timeout": "1s"})
    assert code == 0, document["error"]
    state = read(house.server())
    assert state
    assert state.keeper
    with house.engine.hanging():
        state.keeper.send(15)
        until(lambda: not get_status(house.server(), inside=False).processes, 40)
        code, document, _ = house.call("status")
        assert (code, document["result"]["servers"][0]["status"]) == (9, "unclear")
    assert len(house.boxes()) == 1
    assert get_status(house.server()).word == "orphaned"
    assert house.call("stop")[0] == 0
    assert house.boxes() == []


def test_hanging_engine_during_start_is_reported(house: House) -> None:
    house.write(container={"env": {"FAKE": "shards"}}, serve={"stall_timeout": "3s"})
    answers = []
    asking = threading.Thread(target=lambda: answers.append(house.call("serve")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bakehouse.cli._signals", _no_signals)
        patch.setattr("bakehouse.system.docker.client.TIMEOUT_S", 4.0)
        asking.start()
        until(
            lambda: (
                bool(house.boxes()) and get_status(house.server(), inside=False).word == "starting"
            )
        )
        time.sleep(1)
        with house.engine.hanging():
            asking.join(110)
    (code, document, _) = answers[0]
    assert (code, document["error"]["id"]) == (9, "docker-timeout"), document["error"]
    assert house.call("stop")[0] == 0
    assert house.boxes() == []


class _no_signals:  # noqa: N801 - stands in place of a function
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_slow_engine_is_not_hanging(docker_engine: Engine) -> None:
    """Waiting and following take as long as they take, whatever a short question may."""
    image = make_image(docker_engine, "hangs/busybox:1", "ENV PATH=/bin")
    port = DockerClient(docker_engine.environment, patience=1.0)
    one = port.create(
        ContainerSpec(image=image, entrypoint=("sh", "-c"), argv=("echo a; sleep 4; echo b",))
    )
    try:
        port.start(one)
        assert b"".join(port.logs(one, follow=True)) == b"a\nb\n"
        assert port.wait(one, 20) == 0
    finally:
        port.remove(one)


def test_hanging_engine_times_out_each_question(docker_engine: Engine) -> None:
    port = DockerClient(docker_engine.environment, patience=1.0)
    assert port.facts().system == "linux"
    with docker_engine.hanging():
        for longest in (3.0, 7.0):  # the first one waits for its answer, the next ones only knock
            began = time.monotonic()
            with pytest.raises(HostError) as caught:
                port.facts()
            assert caught.value.id == "docker-timeout"
            assert time.monotonic() - began < longest
    assert port.facts().system == "linux"


def test_paused_container_is_reported_resumed_and_stopped(house: House) -> None:
    code, document, _ = house.serve()
    assert code == 0, document["error"]
    house.engine.cli("pause", "bakehouse-boxed")

    code, document, _ = house.call("status")
    (seen,) = document["result"]["servers"]
    assert (code, seen["status"]) == (0, "paused")
    assert "docker unpause bakehouse-boxed" in seen["trouble"]
    assert cli.main("status", {"recipe": "boxed"}, json=False, recipes=house.folder) == 0
    assert "docker unpause bakehouse-boxed" in house.capsys.readouterr().out
    for task in ("probe", "serve"):
        began = time.monotonic()
        code, document, _ = house.call(task)
        assert (code, document["error"]["id"]) == (7, "paused")
        assert "docker unpause bakehouse-boxed" in document["error"]["what"]
        assert time.monotonic() - began < 5

    house.engine.cli("unpause", "bakehouse-boxed")
    assert get_status(house.server()).word == "running"
    assert house.call("probe")[0] == 0
    house.engine.cli("pause", "bakehouse-boxed")
    began = time.monotonic()
    assert house.call("stop")[0] == 0
    assert time.monotonic() - began < 15
    assert house.boxes() == []
    assert get_status(house.server()).word == "ended"


def test_paused_container_while_it_loads(house: House) -> None:
    house.write(container={"env": {"FAKE": "shards"}}, serve={"stall_timeout": "3s"})
    pausing = threading.Thread(target=_pause_soon, args=(house.engine, house.server()))
    pausing.start()
    code, document, _ = house.call("serve")
    pausing.join(20)
    assert code == 7
    assert "somebody paused its container" in document["error"]["what"]
    assert "docker unpause bakehouse-boxed" in document["error"]["what"]
    assert house.boxes() == []


def _pause_soon(engine: Engine, folder: Path) -> None:
    until(lambda: "Resolved" in (folder / "server.log").read_text() if folder.exists() else False)
    engine.cli("pause", "bakehouse-boxed")
