"""Pulls that stall, and an engine's disk that is really full: named, and mended by trying again."""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bakehouse.context import Context
from bakehouse.errors import HostError
from bakehouse.sources import images
from bakehouse.sources.images import ensure_image, pin_image
from bakehouse.system.docker.client import DockerClient
from tests.support.docker_engine import Engine, LocalRegistry, make_image, push, registry, running

pytestmark = [pytest.mark.integration, pytest.mark.docker]

MIB = 2**20


class Way:
    """A way to a registry on which large blobs stop coming after their first bytes."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.port = 0
        self.open = threading.Event()
        self.over = threading.Event()

    @contextmanager
    def serve(self) -> Iterator[str]:
        way = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None: ...

            def do_GET(self) -> None:
                asking = http.client.HTTPConnection(way.target, timeout=30)
                accept = {"Accept": self.headers.get("Accept", "*/*")}
                asking.request(self.command, self.path, headers=accept)
                answer = asking.getresponse()
                body = answer.read()
                asking.close()
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    self.send_header(name, value)
                self.end_headers()
                with suppress(OSError):
                    if self.command == "GET" and len(body) > MIB and not way.open.is_set():
                        self.wfile.write(body[: MIB // 2])
                        way.over.wait(60)
                        return
                    self.wfile.write(body)

            do_HEAD = do_GET  # noqa: N815

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            self.over.set()
            server.shutdown()
            thread.join()
            server.server_close()


def test_docker_pull_names_a_stalled_layer_and_resumes(
    docker_engine: Engine, docker_registry: LocalRegistry
) -> None:
    noise = {"noise": os.urandom(3 * MIB)}
    made = make_image(docker_engine, "slow/thing:1", extra=noise)
    reference = f"{docker_registry.host}/slow/thing:1"
    digest = push(docker_engine, made, reference)
    docker_engine.cli("rmi", "slow/thing:1", reference)
    way = Way(docker_registry.host)
    with way.serve() as host:
        port = DockerClient(docker_engine.environment, stall=2.0)
        with pytest.raises(HostError) as caught:
            port.pull(f"{host}/slow/thing@{digest}", arch="x86_64")
        assert caught.value.id == "pull-stalled"
        assert re.search(r"for 2 s of layer [0-9a-f]{12} \(", caught.value.what)
        way.open.set()
        way.over.set()
        found = port.pull(f"{host}/slow/thing@{digest}", arch="x86_64")
        assert found.id == made
        port.remove_image(f"{host}/slow/thing@{digest}")


@pytest.fixture
def small_engine(docker_engine: Engine, tmp_path: Path) -> Iterator[Engine]:
    """An engine whose data lie on a file system of 160 MB, mounted from a file."""
    del docker_engine  # its skips are ours
    disk, root = tmp_path / "disk.img", tmp_path / "small"
    root.mkdir()
    with disk.open("wb") as file:
        file.truncate(160 * MIB)
    run = ["mkfs.ext4", "-q", "-F", str(disk)], ["mount", "-o", "loop", str(disk), str(root)]
    for argv in run:
        done = subprocess.run(argv, capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"NO FULL DISK WAS TESTED: {argv[0]}: {done.stderr.decode()[-200:]}")
    try:
        with running(root) as engine:
            yield engine
    finally:
        subprocess.run(["umount", "-l", str(root)], check=False)


def test_docker_pull_on_a_full_disk(
    docker_engine: Engine, small_engine: Engine, tmp_path: Path, context: Context,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    zeros = {"zeros": bytes(60 * MIB), "noise": os.urandom(2 * MIB)}
    made = make_image(docker_engine, "full/thing:1", extra=zeros)
    ctx = replace(context, docker=small_engine.port())
    ballast = small_engine.root / "ballast"
    with registry(tmp_path / "reg") as host:
        reference = f"{host.host}/full/thing:1"
        push(docker_engine, made, reference)
        docker_engine.cli("rmi", reference)
        pin = pin_image(ctx, reference, "x86_64")

        free = os.statvfs(small_engine.root)
        room = free.f_bavail * free.f_frsize
        ballast.write_bytes(bytes(room - 3 * MIB))
        with pytest.raises(HostError) as caught:
            ensure_image(ctx, pin, "x86_64")
        assert (caught.value.id, "not enough disk" in caught.value.what) == ("disk-full", True)

        # Packed it is small, and the look before the pull cannot know what zeros come to.
        ballast.write_bytes(bytes(room - 40 * MIB))
        with pytest.raises(HostError) as caught:
            ensure_image(ctx, pin, "x86_64")
        assert (caught.value.id, "no space left" in caught.value.what) == ("disk-full", True)
        assert ctx.docker.image(pin.ref) is None

        ballast.unlink()
        assert ensure_image(ctx, pin, "x86_64").id == pin.id
    assert images.UNPACKED == 3
