"""Servers in containers, through `serve`, `status`, `logs` and `stop`; only vLLM is fake.

The stand-in for vLLM runs in a real container of a real Docker Engine.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from bakehouse import cli
from bakehouse.plan.serve import SERVER
from bakehouse.server import containers, launcher
from bakehouse.server.container_follower import ContainerExit
from bakehouse.server.state import Ended, read, write
from bakehouse.server.status import get_status
from bakehouse.system.docker.models import ContainerSpec
from tests.support.boxed import House
from tests.support.house import crash, until

pytestmark = [pytest.mark.integration, pytest.mark.docker]


def checks(document: dict[str, Any]) -> dict[str, str]:
    return {one["id"]: one["verdict"] for one in document["checks"]}


def test_container_is_served_verified_and_stopped(house: House) -> None:
    code, document, _ = house.serve()

    assert code == 0, document["error"]
    assert set(checks(document).values()) == {"passed"}
    judged = {"alive", "port-owner", "image", "nonce", "implementation", "cache-size", "version"}
    assert judged <= set(checks(document))
    url = document["result"]["url"]
    assert url.startswith("http://127.0.0.1:")
    box = house.docker.container("bakehouse-boxed")
    assert box
    assert box.labels[SERVER] == str(house.server())

    code, again, _ = house.call("serve")
    assert code == 0
    assert again["result"]["again"] is True
    code, status, _ = house.call("status")
    assert [s["status"] for s in status["result"]["servers"]] == ["running"]
    code, logs, _ = house.call("logs")
    assert any("Application startup complete" in line for line in logs["result"]["lines"])
    code, _, _ = house.call("stop")
    assert code == 0
    assert house.boxes() == []
    with pytest.raises(requests.ConnectionError):
        requests.get(f"{url}/health", timeout=2)


def test_container_has_read_only_weights_and_no_privileges(house: House) -> None:
    (house.model / "not-pinned.py").write_text("x")
    house.write(weights={"model": {"path": str(house.model), "files": "[cmt]*"}})
    code, document, _ = house.call("serve")
    assert code == 0, document["error"]

    told = json.loads(house.engine.cli("inspect", "bakehouse-boxed"))[0]
    assert told["HostConfig"]["Privileged"] is False
    assert told["HostConfig"]["RestartPolicy"]["Name"] == "no"
    assert "HF_HUB_OFFLINE=1" in told["Config"]["Env"]
    assert told["HostConfig"]["PortBindings"]["8000/tcp"][0]["HostIp"] == "127.0.0.1"
    assert told["Config"]["Entrypoint"] == ["vllm"]
    assert not any(m["RW"] for m in told["Mounts"])
    seen = house.engine.cli("exec", "bakehouse-boxed", "ls", "/weights/model").split()
    assert seen == ["config.json", "model.safetensors", "tokenizer_config.json"]


def test_container_faults_are_named_and_leave_nothing(house: House) -> None:
    rows: list[tuple[dict[str, Any], int, str, str]] = [
        ({"env": {"FAKE": "exit"}}, 7, "exited by itself with 1", "No available memory"),
        ({"env": {"FAKE": "memory"}, "memory": "64MiB"}, 7, "its memory limit", "server.log"),
        ({"env": {"FAKE": "fallback"}}, 7, "implementation", "Transformers"),
        ({"env": {"FAKE": "no-nonce"}}, 7, "nonce", ""),
        ({"env": {"FAKE": "version"}}, 7, "version: expected 0.32.0; observed 0.31.0", "/version"),
        ({"env": {"FAKE": "no-version"}}, 7, "version: expected 0.32.0; observed nothing", ""),
        ({"env": {"FAKE": "write"}}, 7, "exited by itself with 1", "Read-only file system"),
        ({"gpus": "all"}, 9, "no NVIDIA runtime", "container"),
        ({"user": "nobody-of-that-name"}, 9, "user", "container"),
    ]
    wrong = []
    for container, exit_, what, where in rows:
        code, document, _ = house.serve(container=container)
        error = document["error"]
        named = what in error["what"] and where in (error["where"] or "") + error["what"]
        boxes = house.boxes()
        _, status, _ = house.call("status")
        (seen,) = status["result"]["servers"]
        if (code, named, boxes, seen["status"]) != (exit_, True, [], "ended"):
            wrong.append((container, code, error, boxes, seen["status"]))
    assert wrong == []


def test_container_stall_names_the_shard(house: House) -> None:
    code, document, _ = house.serve(
        container={"env": {"FAKE": "shards"}}, serve={"stall_timeout": "2s"}
    )
    assert code == 7
    seen = next(c for c in document["checks"] if c["id"] == "loading")
    assert "loading shards, 0 of 2" in seen["observed"]
    assert "the largest shard is " in document["error"]["what"]
    assert "of memory are available" in document["error"]["what"]


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "a-strangers"])
def test_container_name_in_use(house: House, ours: bool) -> None:
    house.write()
    labels = {SERVER: str(house.server())} if ours else {"who": "somebody"}
    image = house.docker.image(house.image)
    assert image
    made = house.docker.create(
        ContainerSpec(image=image.id, name="bakehouse-boxed", entrypoint=("sleep",),
                      argv=("1000",), labels=labels)
    )  # fmt: skip
    try:
        code, document, _ = house.call("serve")
        if ours:
            assert code == 0, document["error"]
            assert house.docker.container(made) is None
        else:
            assert code == 9
            assert document["error"]["id"] == "name-in-use"
            assert house.docker.container(made)
    finally:
        house.docker.remove(made)


def test_container_port_in_use_is_refused_first(house: House) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        code, document, _ = house.serve(serve={"port": held.getsockname()[1]})
    assert code == 9
    assert document["error"]["id"] == "port-taken"
    assert house.boxes() == []


Break = Callable[[House, str], None]


def die(house: House, url: str) -> None:
    requests.get(f"{url}/die", timeout=5)


def kill(house: House, url: str) -> None:
    house.engine.cli("kill", "bakehouse-boxed")


def stop_it(house: House, url: str) -> None:
    house.engine.cli("stop", "bakehouse-boxed")


def remove(house: House, url: str) -> None:
    house.engine.cli("rm", "--force", "bakehouse-boxed")


def restart(house: House, url: str) -> None:
    house.engine.cli("restart", "bakehouse-boxed")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (die, "exited by itself with 3"),
        (kill, "was killed by somebody else (docker kill, SIGKILL)"),
        (stop_it, "was stopped by somebody else (docker stop)"),
        (remove, "removed by somebody else"),
        (restart, "restarted externally"),
    ],
)
def test_container_end_is_recorded_with_its_cause(house: House, how: Break, says: str) -> None:
    code, document, _ = house.serve()
    assert code == 0, document["error"]
    how(house, document["result"]["url"])

    until(lambda: get_status(house.server()).word == "ended")
    _, status, _ = house.call("status")
    assert says in status["result"]["servers"][0]["ended"]["says"]
    assert house.boxes() == []


def test_container_that_ignores_term_is_killed(house: House) -> None:
    code, document, _ = house.serve(
        container={"env": {"FAKE": "deaf"}}, serve={"stop_timeout": "1s"}
    )
    assert code == 0, document["error"]
    began = time.monotonic()
    code, _, _ = house.call("stop")
    assert code == 0
    assert time.monotonic() - began < 10
    assert house.boxes() == []


def test_container_ends_with_a_killed_supervisor(house: House) -> None:
    code, document, _ = house.serve()
    assert code == 0, document["error"]
    state = read(house.server())
    assert state
    assert state.keeper
    state.keeper.send(signal.SIGKILL)
    until(lambda: house.boxes() == [])


@pytest.mark.parametrize("trace", ["state", "no-state", "no-folder", "engine-lost"])
def test_container_left_by_a_crash_is_found_and_removed(house: House, trace: str) -> None:
    code, document, _ = house.serve()
    assert code == 0, document["error"]
    state = crash(house)
    if trace == "no-state":
        (house.server() / "state.json").unlink()
    if trace == "engine-lost":
        # As its follower judges where the engine no longer answers; the container may run on.
        _, says = ContainerExit(None, (), False, "", False, True, "no engine").verdict()
        ended = Ended(at="", why="exited", code=1, says=says)
        write(house.server(), replace(state, phase="ended", ended=ended))
    if trace == "no-folder":
        house.server().rename(house.folder / "moved")

    assert house.boxes()
    code = cli.main("status", {}, json=True, recipes=house.folder)
    status = json.loads(house.capsys.readouterr().out)
    (seen,) = status["result"]["servers"]
    assert (seen["name"], seen["status"]) == ("boxed", "orphaned")
    code, _, _ = house.call("stop")
    assert code == 0
    assert house.boxes() == []


def test_container_without_an_engine_is_unclear(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, document, _ = house.serve()
    assert code == 0, document["error"]
    state = crash(house)
    path = house.server() / "state.json"
    kept = path.read_text()
    path.write_text(kept.replace(str(state.docker), "unix:///nowhere/docker.sock"))

    code, status, _ = house.call("status")
    (seen,) = status["result"]["servers"]
    assert (seen["status"], "no Docker Engine answers" in seen["trouble"]) == ("unclear", True)
    code, document, _ = house.call("stop")
    assert (code, document["error"]["id"]) == (9, "docker-daemon")
    path.write_text(kept)
    assert house.call("stop")[0] == 0
    assert house.boxes() == []


def test_container_leftover_is_replaced_by_the_next_serve(house: House) -> None:
    code, document, _ = house.serve()
    crash(house)
    before = house.boxes()

    code, document, _ = house.call("serve")
    assert code == 0, document["error"]
    assert len(house.boxes()) == 1
    assert house.boxes() != before


def test_container_api_key_is_required_and_hidden(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "tell-nobody-7")
    code, document, _ = house.serve(serve={"api_key": {"env": "SOME_KEY"}})
    assert code == 0, document["error"]
    assert checks(document)["key"] == "passed"
    told = json.loads(house.engine.cli("inspect", "bakehouse-boxed"))[0]
    assert "tell-nobody-7" not in json.dumps([told["Path"], told["Args"], told["Config"]["Cmd"]])
    assert "tell-nobody-7" not in json.dumps(document)
    state = (house.server() / "state.json").read_text()
    assert "tell-nobody-7" not in state


@pytest.mark.parametrize("swept", [True, False], ids=["interrupted", "killed-outright"])
def test_container_start_interrupted_before_its_supervisor(
    house: House, monkeypatch: pytest.MonkeyPatch, *, swept: bool
) -> None:
    def never(*_: object) -> socket.socket:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(launcher, "start_supervisor", never)
        if not swept:  # killed at once: nothing of ours runs any more
            patch.setattr(containers, "remove_failed_launch", lambda *_: os._exit(9))
        if child := os.fork():
            os.waitpid(child, 0)
        else:
            with suppress(BaseException):
                house.serve()
            os._exit(0)

    assert len(house.boxes()) == (0 if swept else 1)
    code, status, _ = house.call("status")
    words = [one["status"] for one in status["result"]["servers"]]
    assert (code, words) == (0, ["ended" if swept else "orphaned"])
    assert house.call("stop")[0] == 0
    assert house.boxes() == []
    assert house.serve()[0] == 0


def test_container_volumes(house: House, tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    (tmp_path / "way").symlink_to(house.engine.host.removeprefix("unix://"))
    code, document, _ = house.serve(container={"volumes": [f"{tmp_path}/kept.txt:/kept.txt"]})
    assert code == 0, document["error"]
    assert house.engine.cli("exec", "bakehouse-boxed", "cat", "/kept.txt") == "mine"
    assert house.call("stop")[0] == 0

    held = Path(house.engine.host.removeprefix("unix://")).parent
    for source, exit_, said in (
        (f"{tmp_path}/kept.txt/below", 9, "cannot create"), (f"{tmp_path}/way", 2, "own socket"),
        (str(held), 2, "own socket"), (str(held.parent), 2, "own socket"),
    ):  # fmt: skip
        code, document, _ = house.serve(container={"volumes": [f"{source}:/x"]})
        assert (code, said in str(document["error"])) == (exit_, True), document["error"]
    assert house.boxes() == []
