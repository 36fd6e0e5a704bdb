"""A Docker Engine that is missing, hangs or is something else: one error id for each case."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from bakehouse.errors import BakehouseError
from bakehouse.system.docker import client
from bakehouse.system.docker.client import DockerClient


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="bh-", dir="/tmp") as made:
        yield Path(made)


def never(*_: object) -> None:
    raise AssertionError("it was connected to")


def asked(**env: str) -> BakehouseError:
    with pytest.raises(BakehouseError) as caught:
        DockerClient({"HOME": "/nowhere", **env}).facts()
    assert caught.value.exit_code == 9
    assert caught.value.hint
    return caught.value


def test_docker_host_is_checked_before_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        "garbage",
        "tcp://[::1",
        "tcp://",
        "tcp://127.0.0.1:99999",
        "tcp://h:x",
        "unix://",
        "ftp://h",
        "tcp://h:0",
        "tcp://user:secret@[::1",
    ]
    for host in rows:
        monkeypatch.setattr(client, "connect", never)
        error = asked(DOCKER_HOST=host)
        assert (error.id, error.where) == ("docker-host", "DOCKER_HOST")
        assert "secret" not in f"{error.what} {error.hint}"


def test_docker_socket_is_missing_a_file_or_a_folder(short: Path) -> None:
    (short / "file").write_text("x")
    (short / "folder").mkdir()
    assert asked(DOCKER_HOST=f"unix://{short}/none").id == "docker-daemon"
    for name in ("file", "folder"):
        error = asked(DOCKER_HOST=f"unix://{short}/{name}")
        assert (error.id, "DOCKER_HOST" in str(error.hint)) == ("docker-socket", True)


def test_docker_socket_without_listener(short: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"{short}/sock")
    error = asked(DOCKER_HOST=f"unix://{short}/sock")
    assert (error.id, "systemctl start docker" in str(error.hint)) == ("docker-daemon", True)


@pytest.mark.parametrize("way", ["accepts", "never-accepts", "full"])
def test_docker_engine_that_hangs(short: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(client, "PING_S", 1)
    held: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"{short}/sock")
        one.listen(0 if way == "full" else 5)
        if way == "accepts":
            accepting = threading.Thread(target=lambda: held.append(one.accept()[0]), daemon=True)
            accepting.start()
        while way == "full" and len(held) < 10:
            held.append(socket.socket(socket.AF_UNIX))
            held[-1].setblocking(False)
            try:
                held[-1].connect(f"{short}/sock")
            except BlockingIOError:
                break
        began = time.monotonic()
        error = asked(DOCKER_HOST=f"unix://{short}/sock")
        assert (error.id, time.monotonic() - began < 15) == ("docker-timeout", True)
        # Remembered for a moment: nobody knocks again.
        monkeypatch.setattr(client, "REMEMBERED_S", 60.0)
        monkeypatch.setattr(client, "connect", never)
        assert asked(DOCKER_HOST=f"unix://{short}/sock").id == "docker-timeout"
    for each in held:
        each.close()
    client._silent.clear()


def test_docker_host_unknown_or_port_closed() -> None:
    assert asked(DOCKER_HOST="tcp://127.0.0.1:1").id == "docker-daemon"
    error = asked(DOCKER_HOST="tcp://no-such-machine.invalid:2375")
    assert (error.id, "no-such-machine.invalid" in error.what) == ("docker-host-unknown", True)


def test_docker_context_with_unknown_host(tmp_path: Path) -> None:
    meta = tmp_path / "contexts/meta" / hashlib.sha256(b"far").hexdigest() / "meta.json"
    meta.parent.mkdir(parents=True)
    for host, id_ in (
        ("tcp://no-such-machine.invalid:2376", "docker-host-unknown"), ("", "docker-host"),
    ):  # fmt: skip
        meta.write_text(json.dumps({"Endpoints": {"docker": {"Host": host}}}))
        error = asked(DOCKER_CONFIG=str(tmp_path), DOCKER_CONTEXT="far")
        assert (error.id, "the context 'far'" in str(error.where)) == (id_, True)


def test_docker_host_that_is_not_an_engine() -> None:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

        def do_GET(self) -> None:
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        error = asked(DOCKER_HOST=f"tcp://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert (error.id, "404" in error.what) == ("docker-host", True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("folder_open", [True, False], ids=["socket", "folder"])
def test_docker_socket_without_permission(short: Path, *, folder_open: bool) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"{short}/sock")
        one.listen(5)
        os.chmod(f"{short}/sock", 0o660)
        short.chmod(0o755 if folder_open else 0o700)
        DockerClient({"HOME": "/nowhere", "DOCKER_HOST": "tcp://127.0.0.1:1"})
        assert asked(DOCKER_HOST="tcp://127.0.0.1:1")  # all that is imported is, by now
        read, write = os.pipe()
        child = os.fork()
        if not child:  # as another user, in a process of its own
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                error = asked(DOCKER_HOST=f"unix://{short}/sock")
                os.write(write, f"{error.id} {error.hint}".encode())
            finally:
                os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        said = os.read(read, 1000).decode()
        os.close(read)
    assert said.startswith("docker-permission ")
    assert "usermod -aG docker" in said
