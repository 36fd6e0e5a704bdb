"""An OpenAI-compatible server that answers rightly, or goes wrong in one chosen way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from bakehouse.probe.answers import built_in

MODEL = "fake-model"
KEY = "key-of-the-fake"
ANSWERS = {q.ask: q.answers[0] for q in built_in()}

Body = dict[str, Any]
Fault = Callable[["Handler", Body], None]


def chat(content: Any, finish: str | None = "stop", **message: Any) -> Body:
    """A chat completion's document."""
    return {
        "id": "x",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": content, **message},
                "finish_reason": finish,
            }
        ],
        "usage": {"completion_tokens": 3},
    }


def question(body: Body) -> str:
    """What was asked."""
    asked: str = body["messages"][0]["content"]
    return asked


def right(body: Body) -> str:
    """The answer that is known."""
    return f"It is {ANSWERS[question(body)]}."


class Handler(BaseHTTPRequestHandler):
    """Answers `/v1/models` and chat completions; the fault decides how."""

    protocol_version = "HTTP/1.1"
    server: Fake

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if self.refused():
            return
        self.json({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        if self.refused():
            return
        self.server.fault(self, body)

    def refused(self) -> bool:
        if not self.server.key or self.headers.get("Authorization") == f"Bearer {self.server.key}":
            return False
        self.json({"error": {"message": "Invalid API Key", "code": 401}}, 401)
        return True

    def json(self, data: Any, status: int = 200, **headers: str) -> None:
        self.raw(json.dumps(data).encode(), status, "application/json", **headers)

    def raw(self, data: bytes, status: int = 200, kind: str = "text/plain", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", headers.pop("length", str(len(data))))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)


class Fake(ThreadingHTTPServer):
    """The server, on a free port of loopback."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, fault: Fault, key: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault = fault
        self.key = key
        self.asked: list[Body] = []
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, address: Any) -> None:
        """A client that hangs up is what some tests are about."""


@contextmanager
def serving(fault: Fault, key: str | None = None) -> Iterator[Fake]:
    """Serve for the length of a `with` block."""
    with Fake(fault, key) as fake:
        thread = threading.Thread(target=fake.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield fake
        finally:
            fake.over.set()
            fake.shutdown()
            thread.join()


def says(make: Callable[[Body], Any]) -> Fault:
    """A server that answers with one document, made from the request."""
    return lambda handler, body: handler.json(make(body))


def status(code: int, data: Any = None, **headers: str) -> Fault:
    """A server that answers everything with a status."""
    error = data if data is not None else {"error": {"message": f"status {code}"}}
    return lambda handler, body: handler.json(error, code, **headers)


def sends(data: bytes, kind: str = "application/json") -> Fault:
    """A server that answers everything with these bytes."""
    return lambda handler, body: handler.raw(data, 200, kind)


def stops(handler: Handler, body: Body) -> None:
    """Promises a long answer, sends a little of it and goes silent."""
    handler.raw(b'{"choices": [', length="5000")
    handler.wfile.flush()
    handler.server.over.wait(30)


def trickles(handler: Handler, body: Body) -> None:
    """Sends a byte now and then, for ever."""
    handler.raw(b"", length="1000000")
    while not handler.server.over.wait(0.05):
        handler.wfile.write(b" ")
        handler.wfile.flush()


def hangs_up(handler: Handler, body: Body) -> None:
    """Closes the connection in the middle of an answer."""
    handler.raw(b'{"choices": [', length="5000")
    handler.close_connection = True


def sleeps(handler: Handler, body: Body) -> None:
    """Never answers."""
    handler.server.over.wait(30)


def busy(times: int) -> Fault:
    """Is busy so many times, and then answers rightly."""
    left = [times]

    def fault(handler: Handler, body: Body) -> None:
        if left[0] > 0:
            left[0] -= 1
            handler.json({"error": {"message": "slow down"}}, 429, Retry_After="0")
        else:
            handler.json(chat(right(body)))

    return fault


def thinks(needs: int) -> Fault:
    """A reasoning model that needs so many tokens before it answers."""

    def fault(handler: Handler, body: Body) -> None:
        thought = "Okay, the user asks something. Let me think about it first."
        if body["max_tokens"] < needs:
            handler.json(chat("", "length", reasoning_content=thought))
        else:
            handler.json(chat(right(body), reasoning_content=thought))

    return fault


def newer_name_only(handler: Handler, body: Body) -> None:
    """Knows the token limit by its newer name only."""
    if "max_tokens" in body:
        message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
        handler.json({"error": {"message": message}}, 400)
    else:
        handler.json(chat(right(body)))


def slowly(seconds: float) -> Fault:
    """Answers rightly, after a while."""

    def fault(handler: Handler, body: Body) -> None:
        time.sleep(seconds)
        handler.json(chat(right(body)))

    return fault
