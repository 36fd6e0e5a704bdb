"""A file host on loopback: Range, ETag, and every way in which a real one lets you down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

Fault = Callable[["Handler"], bool]
"""Called before the answer; True where it has answered already."""


@dataclass
class Resource:
    """What lies under a path. `faults` are used up, one a request."""

    content: bytes
    etag: str | None = '"one"'
    ranges: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    length: bool = True
    cut_after: int | None = None


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""


class Handler(BaseHTTPRequestHandler):
    server: FileServer
    timeout = 10

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        host = self.server.host
        headers = {k.lower(): v for k, v in self.headers.items()}
        host.requests.append(Request(self.command, self.path, headers, body))
        resource = host.files.get(self.path)
        if resource is None and (page := host.pages.get(self.path.partition("?")[0])):
            page(self)
            return
        if resource is None:
            self.answer(404, b"not here")
            return
        if resource.faults and resource.faults.pop(0)(self):
            return
        self.send_resource(resource)

    do_POST = do_HEAD = do_GET  # noqa: N815

    def answer(
        self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.write(body)

    def write(self, data: bytes) -> bool:
        try:
            self.wfile.write(data)
            self.wfile.flush()
        except OSError:
            self.close_connection = True
            return False
        return True

    def send_resource(self, resource: Resource) -> None:
        content, begin, status = resource.content, 0, 200
        asked = self.headers.get("Range")
        if_range = self.headers.get("If-Range")
        if asked and resource.ranges and if_range in (None, resource.etag):
            begin = int(asked.removeprefix("bytes=").partition("-")[0])
            status = 206
            if begin >= len(content):
                self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        if resource.etag:
            self.send_header("ETag", resource.etag)
        for name, value in resource.headers.items():
            self.send_header(name, value)
        if resource.length:
            self.send_header("Content-Length", str(len(content) - begin))
        self.end_headers()
        self.write(content[begin:])
        self.close_connection = True


class FileServer(ThreadingHTTPServer):
    daemon_threads = True
    host: FileHost

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is part of the play."""


class FileHost:
    """The host: put files, look at the requests that came."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.files: dict[str, Resource] = {}
        self.pages: dict[str, Callable[[Handler], None]] = {}
        self.requests: list[Request] = []

    def put(self, path: str, content: bytes = b"", *faults: Fault) -> Resource:
        self.files[path] = Resource(content, faults=list(faults))
        return self.files[path]

    def at(self, path: str) -> str:
        return self.url + path


@contextmanager
def running(server: FileServer) -> Iterator[None]:
    """Let a server answer for the length of a `with` block."""
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serve_files() -> Iterator[FileHost]:
    """Run a file host for the length of a `with` block."""
    server = FileServer(("127.0.0.1", 0), Handler)
    server.host = FileHost(server.server_address[1])
    with running(server):
        yield server.host


def status(code: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Fault:
    """Answer with a status instead."""

    def fault(handler: Handler) -> bool:
        handler.answer(code, body, headers)
        return True

    return fault


def redirect(to: str, code: int = 302) -> Fault:
    """Send somewhere else."""
    return status(code, headers={"Location": to})


def raw(data: bytes, *, linger: float = 0.0) -> Fault:
    """Write these bytes in place of an HTTP answer, and close."""

    def fault(handler: Handler) -> bool:
        handler.write(data)
        time.sleep(linger)
        handler.close_connection = True
        return True

    return fault


def cut(after: int, *, etag: str | None = '"one"', pause: float = 0.0) -> Fault:
    """Announce the whole file, send so many bytes of what was asked for, and close."""

    def fault(handler: Handler) -> bool:
        resource = handler.server.host.files[handler.path]
        asked = handler.headers.get("Range")
        begin = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        size = len(resource.content)
        handler.send_response(206 if asked else 200)
        if asked:
            handler.send_header("Content-Range", f"bytes {begin}-{size - 1}/{size}")
        if etag:
            handler.send_header("ETag", etag)
        handler.send_header("Content-Length", str(size - begin))
        handler.end_headers()
        handler.write(resource.content[begin : begin + after])
        time.sleep(pause)
        handler.close_connection = True
        return True

    return fault


def trickle(data: bytes, every: float) -> Fault:
    """Write byte after byte, each after a pause: no read ever times out."""

    def fault(handler: Handler) -> bool:
        for byte in data:
            if not handler.write(bytes([byte])):
                break
            time.sleep(every)
        handler.close_connection = True
        return True

    return fault
