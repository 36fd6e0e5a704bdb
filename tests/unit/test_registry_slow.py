"""Registries that answer a byte now and then: each question has an end, whichever it is."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bakehouse.context import Context
from bakehouse.errors import HostError
from bakehouse.sources import registry as oci
from bakehouse.sources.images import pin_image
from bakehouse.system.docker.client import DockerClient
from tests.support.manifests import CONFIG, MANIFEST, NO_ENGINE, digest, encoded, manifest_of

BODY = encoded(CONFIG)


@contextmanager
def registry(slow: str, pause: float) -> Iterator[tuple[str, list[str]]]:
    """A registry on loopback that wants a token; what `slow` names comes byte by byte."""
    asked: list[str] = []
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

        def do_GET(self) -> None:
            kind = self.path.split("/")[-2].split("?")[0] if "/v2/" in self.path else "token"
            if kind == "blobs" and self.command == "HEAD":
                kind = "head"
            asked.append(kind)
            body, status = (
                {"token": b'{"token": "t"}', "blobs": BODY, "head": b""}.get(
                    kind, json.dumps(manifest_of(BODY)).encode()
                ),
                200,
            )
            lines = {"Content-Length": str(len(body)), "Content-Type": MANIFEST}
            if kind != "token" and "Authorization" not in self.headers:
                status, body = 401, b""
                realm = f'Bearer realm="http://{self.headers["Host"]}/token",service="r"'
                lines = {"Content-Length": "0", "WWW-Authenticate": realm}
            head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
            data = f"HTTP/1.0 {status} X\r\n{head}\r\n".encode() + body
            with suppress(OSError):
                if kind != slow or status == 401:
                    self.wfile.write(data)
                    return
                for byte in data:
                    self.wfile.write(bytes([byte]))
                    if over.wait(pause):
                        return

        do_HEAD = do_GET  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", asked
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def pin(context: Context, host: str) -> str:
    made = replace(context, docker=DockerClient(NO_ENGINE))
    return str(pin_image(made, f"{host}/a:1", "x86_64").id)


def test_registry_that_answers_at_once(context: Context) -> None:
    with registry("nothing", 0) as (host, asked):
        assert pin(context, host) == digest(BODY)
    assert set(asked) == {"manifests", "token", "blobs", "head"}


@pytest.mark.parametrize("slow", ["manifests", "token", "blobs", "head"])
def test_registry_that_drips_is_given_up(
    context: Context, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    monkeypatch.setattr(oci, "ONCE_S", 0.6)
    monkeypatch.setattr(oci, "QUESTION_S", 1.0)
    with registry(slow, 0.2) as (host, asked):
        began = time.monotonic()
        with pytest.raises(HostError) as caught:
            pin(context, host)
        took = time.monotonic() - began
    assert caught.value.id == "registry-unreachable"
    assert "no complete answer within" in caught.value.what
    assert (1 <= asked.count(slow) <= 3, took < 8) == (True, True), (asked, took)


def test_registry_that_is_always_a_little_late_is_given_up(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each comes within its own time: the manifest's takes more than half of what all may."""
    monkeypatch.setattr(oci, "ALL_S", 1.0)
    with registry("blobs", 0.02) as (host, _), pytest.raises(HostError) as caught:
        pin(context, host)
    assert caught.value.id == "registry-unreachable"
