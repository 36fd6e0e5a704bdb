"""A Docker Engine that restarts: its container runs on, or its end is recorded correctly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from bakehouse.errors import HostError
from bakehouse.server import container_follower
from bakehouse.system.docker.models import ContainerSpec
from tests.support.docker_engine import Engine, make_image, running
from tests.support.house import until

pytestmark = [pytest.mark.integration, pytest.mark.docker]


@contextmanager
def restarted(engine: Engine) -> Iterator[None]:
    """End the engine in an orderly way, and start it anew for the length of the block."""
    os.kill(engine.pid, signal.SIGTERM)
    os.waitpid(engine.pid, 0)
    log = (engine.root / "again.log").open("wb")
    again = subprocess.Popen(engine.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                             env=engine.environment, start_new_session=True)  # fmt: skip
    try:
        until(lambda: _answers(engine), 40)
        yield
    finally:
        again.terminate()
        again.wait(40)
        log.close()
        # An engine of --live-restore leaves its mounts in place.
        left = ["umount", "--recursive", "--lazy", str(engine.root / "data")]
        subprocess.run(left, check=False, capture_output=True)


def _answers(engine: Engine) -> bool:
    with suppress(HostError):
        return engine.port().facts().system == "linux"
    return False


@pytest.mark.parametrize("live", [True, False], ids=["live-restore", "stops-all"])
def test_engine_restart(docker_engine: Engine, tmp_path: Path, *, live: bool) -> None:
    del docker_engine  # its skips are ours
    root = tmp_path / "engine"
    root.mkdir()
    folder = tmp_path / "server"
    folder.mkdir()
    script = "echo first; trap 'exit 0' TERM; while true; do sleep 0.2; done"
    with running(root, *["--live-restore"] * live) as engine:
        image = make_image(engine, "restart/busybox:1", "ENV PATH=/bin")
        spec = ContainerSpec(image=image, entrypoint=("sh", "-c"), argv=(script,), network="none")
        made = engine.port().create(spec)
        with (tmp_path / "log").open("wb") as log:
            follower = subprocess.Popen(
                [sys.executable, "-m", container_follower.__name__, str(folder), made, "5", "n"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=engine.environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
        until(lambda: "first" in (tmp_path / "log").read_text())
        with restarted(engine):
            if live:
                time.sleep(2)
                assert follower.poll() is None
                found = engine.port().container(made)
                assert found
                assert found.state == "running"
                follower.terminate()
            follower.wait(40)
            note = json.loads((folder / "container.json").read_text())
            said = "exited by itself with 0" if live else "while the Docker Engine was away"
            assert said in note["says"], note
            assert engine.port().container(made) is None
