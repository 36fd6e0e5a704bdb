"""A home with servers in containers, and a crash of one of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bakehouse.server.state import ServerState, read
from bakehouse.server.status import get_status
from tests.support.boxed import House, opened
from tests.support.docker_engine import Engine


@pytest.fixture
def house(
    tmp_path: Path, docker_engine: Engine, fake_vllm: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[House]:  # fmt: skip
    with opened(tmp_path, docker_engine, fake_vllm, monkeypatch, capsys) as made:
        yield made


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def crash(house: House) -> ServerState:
    """Kill supervisor and follower before either can clean up; return the state before."""
    state = read(house.server())
    assert state
    assert state.keeper
    assert state.server
    os.kill(state.server.pid, signal.SIGSTOP)
    state.keeper.send(signal.SIGKILL)
    state.server.send(signal.SIGKILL)
    until(lambda: not get_status(house.server()).processes)
    return state
