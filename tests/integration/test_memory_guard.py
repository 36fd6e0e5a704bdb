"""The memory guard against a real server that really eats memory, well bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bakehouse.context import Context
from bakehouse.errors import NotHealthy
from bakehouse.host import read_host
from bakehouse.probe.models import Endpoint, Proof
from bakehouse.server import state as states
from bakehouse.server.memory_guard import Bounds
from bakehouse.server.session import start_or_reuse
from bakehouse.server.status import folders, get_status, stop
from tests.support.serving import Notes, agree, left_of, order, proof

pytestmark = pytest.mark.integration
MIB = 2**20


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    folder = tmp_path / "run"
    folder.mkdir()
    return Notes(folder)


@pytest.fixture(autouse=True)
def _nothing_left(context: Context) -> Iterator[None]:
    yield
    for folder in folders(context.places):
        stop(folder)
        assert not left_of(context, folder.name)


def wait_until_gone(ctx: Context, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while left_of(ctx):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def slightly_below(warn: int = 100, stop: int = 200) -> Bounds:
    """Bounds that a few hundred megabytes reach, whatever this machine has."""
    available = read_host().memory_available
    if available < 6 * 2**30:
        pytest.skip("too little memory to eat some of it in safety")
    return Bounds(available - warn * MIB, available - stop * MIB, stall=1.0, swap=0)


def test_guard_stops_a_server_before_it_is_verified(context: Context, notes: Notes) -> None:
    wanted = order(context, "eats=300:3000", guard=slightly_below())

    def until_gone(_: Endpoint) -> Proof:
        wait_until_gone(context)
        return proof()

    with pytest.raises(NotHealthy):
        start_or_reuse(context, wanted, until_gone, notes)
    state = states.read(wanted.folder)
    assert state is not None
    assert state.ended is not None
    assert state.ended.why == "memory"
    assert "memory guard" in state.ended.says
    said = notes.facts["memory_guard"]
    assert isinstance(said, list)
    assert said[-1]["kind"] == "stop"
    assert said[-1]["figures"]["available"] < wanted.guard.warn  # type: ignore[union-attr]
    assert said[-1]["at"]


def test_guard_warns_then_stops_a_verified_server(context: Context, notes: Notes) -> None:
    # Far enough away that what others take meanwhile does not reach them before the proof is made.
    bounds = slightly_below(500, 1000)
    waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE) as bystander:
        start_or_reuse(context, order(context, "eats=400:3000", guard=bounds), agree, notes)
        wait_until_gone(context)
        assert bystander.poll() is None  # never a neighbour
    state = states.read(context.places.servers / "fake")
    assert state is not None
    assert state.ended is not None
    assert state.ended.why == "memory"
    kinds = [alarm["kind"] for alarm in state.alarms]
    assert kinds[-1] == "stop"
    kept = json.loads((notes.folder / "memory-guard.json").read_text())
    assert kept == list(state.alarms)


def test_guard_leaves_a_normal_server_alone(context: Context, notes: Notes) -> None:
    bounds = Bounds(64 * MIB, 32 * MIB, stall=1.0, swap=0)
    start_or_reuse(context, order(context, "eats=500:100", guard=bounds), agree, notes)
    time.sleep(1.0)
    seen = get_status(context.places.servers / "fake")
    assert seen.word == "running"
    assert seen.state is not None
    assert not seen.state.alarms


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 400 MB; skipped where none can be made."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        limit = "memory.limit_in_bytes" if controllers == "memory" else "memory.max"
        parent = Path("/sys/fs/cgroup", controllers, path.lstrip("/"))
        group = parent / f"bakehouse-test-{os.getpid()}"
        if controllers not in {"", "memory"}:
            continue
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(400 * MIB))
        except OSError:
            group.rmdir()
            continue
        yield group
        deadline = time.monotonic() + 10
        while (group / "cgroup.procs").read_text().strip() and time.monotonic() < deadline:
            time.sleep(0.05)
        group.rmdir()
        return
    pytest.skip("no control group with a memory limit can be made here")


SERVE = """
import os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
Path({group!r}, "cgroup.procs").write_text(str(os.getpid()))
from bakehouse.context import Context
from bakehouse.paths import Places
from bakehouse.server.memory_guard import Bounds
from bakehouse.server.session import start_or_reuse
from tests.support.serving import Notes, agree, order
ctx = Context(Places(Path({cache!r}), Path({state!r})), Path("."))
bounds = Bounds(120 << 20, 60 << 20, 1.0, 0)
start_or_reuse(ctx, order(ctx, "eats=100:2000", guard=bounds), agree, Notes(Path({run!r})))
"""


def test_guard_respects_the_limit_of_a_cgroup(
    context: Context, notes: Notes, small_group: Path
) -> None:
    text = SERVE.format(
        root=str(Path(__file__).parents[2]), group=str(small_group),
        cache=str(context.places.cache), state=str(context.places.state), run=str(notes.folder),
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", text], check=False, capture_output=True, text=True, timeout=60
    )
    wait_until_gone(context)
    state = states.read(context.places.servers / "fake")
    assert state is not None, done.stderr
    assert state.ended is not None
    assert state.ended.why == "memory", (state.ended, done.stderr)  # and not the kernel's SIGKILL
    stopped = state.alarms[-1]
    assert stopped["kind"] == "stop"
    assert stopped["figures"]["available"] < 120 * MIB
