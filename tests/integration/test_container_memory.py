"""The memory guard of a server in a container ends it before the machine runs out of memory."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import requests

from bakehouse.host import read_host
from bakehouse.server.state import read
from bakehouse.server.status import get_status
from tests.support.boxed import House
from tests.support.house import until

pytestmark = [pytest.mark.integration, pytest.mark.docker]

MIB = 2**20


def bounds(room: int) -> dict[str, object]:
    """A guard that acts once so many bytes are gone of what is there now."""
    free = read_host().memory_available
    return {"warn": f"{(free - room // 2) // MIB}MiB", "stop": f"{(free - room) // MIB}MiB"}


def test_guard_ends_a_container_that_eats_memory(house: House) -> None:
    limits = {"memory": "6GiB", "env": {"FAKE": "eats"}}
    # A leisurely stop would let it eat on: it takes no notice of TERM.
    code, document, _ = house.serve(
        container=limits, serve={"guard": bounds(1024 * MIB), "stop_timeout": "60s"}
    )
    assert code == 0, document["error"]
    before = read_host().memory_available
    began = time.monotonic()
    requests.get(f"{document['result']['url']}/eat", timeout=5)
    until(lambda: get_status(house.server()).word == "ended", 60)

    assert time.monotonic() - began < 45
    state = read(house.server())
    assert state
    assert state.ended
    assert state.ended.why == "memory", state.ended
    assert "stopped by the memory guard" in state.ended.says
    assert [a["kind"] for a in state.alarms][-1] == "stop"
    assert house.boxes() == []
    code, status, _ = house.call("status")
    (seen,) = status["result"]["servers"]
    assert (code, seen["status"], seen["ended"]["why"]) == (0, "ended", "memory")
    kept = json.loads((Path(str(state.record)) / "memory-guard.json").read_text())
    assert kept[-1]["kind"] == "stop"
    # It was ended close to the bound, and what it held came back.
    assert kept[-1]["figures"]["available"] > before - 4096 * MIB
    until(lambda: read_host().memory_available > before - 700 * MIB)


def test_guard_ends_a_container_that_eats_while_it_loads(house: House) -> None:
    code, document, _ = house.serve(
        container={"memory": "6GiB", "env": {"FAKE": "eats-first"}},
        serve={"guard": bounds(1024 * MIB)},
    )
    assert code == 7
    assert "stopped by the memory guard" in document["error"]["what"]
    assert house.boxes() == []


def test_container_oom_score_is_on_the_server_not_the_follower(house: House) -> None:
    code, document, _ = house.serve()
    assert code == 0, document["error"]
    box = house.docker.container("bakehouse-boxed")
    state = read(house.server())
    assert box
    assert state
    assert state.server
    assert Path(f"/proc/{box.pid}/oom_score_adj").read_text().strip() == "500"
    mine = Path("/proc/self/oom_score_adj").read_text()
    assert Path(f"/proc/{state.server.pid}/oom_score_adj").read_text() == mine
