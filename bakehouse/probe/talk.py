"""One server's ear: JSON requests within bounds of time and bytes, tried again where that helps.

Every suite asks through a `Talk`, which counts what was asked. Safe to use from several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from bakehouse.ports.clock import Clock
from bakehouse.ports.http import Http, Unreachable
from bakehouse.probe.reply import BUSY, Told, read_json
from bakehouse.probe.types import Endpoint
from bakehouse.progress import Progress
from bakehouse.records.model import Cost
from bakehouse.util.retry import Retry, TransientError, retry_after


class Around(Protocol):
    """What a probe needs of the context."""

    @property
    def http(self) -> Http: ...  # noqa: D102
    @property
    def clock(self) -> Clock: ...  # noqa: D102
    @property
    def progress(self) -> Progress: ...  # noqa: D102


@dataclass(frozen=True)
class Patience:
    """How long a server may take. Seconds, unless said otherwise.

    One request gets `base` plus `per_token` for each token that it may produce, never more than
    `most`: enough for 4 tokens a second after kernels were compiled with the first request.
    """

    base: float = 60.0
    per_token: float = 0.3
    most: float = 900.0
    attempts: int = 4
    """Requests in all where the server is busy (429, 503) or the connection broke."""
    longest_wait: float = 5.0
    """Between two of them, whatever Retry-After says."""
    max_bytes: int = 2**20
    """Of one reply."""

    def timeout(self, tokens: int) -> float:
        """Seconds for one request."""
        return min(self.base + self.per_token * tokens, self.most)


PATIENT = Patience()
TEXT_S = 10.0

_BROKEN = ("connection", "the answer was cut off")
"""How the HTTP port's reasons begin where a connection was made and then lost."""


class Talk:
    """Asks one server."""

    def __init__(self, ctx: Around, endpoint: Endpoint, patience: Patience = PATIENT) -> None:
        self.progress = ctx.progress
        self.endpoint = endpoint
        self._http = ctx.http
        self._clock = ctx.clock
        self._patience = patience
        self._lock = threading.Lock()
        self._cost = Cost()
        self._began = ctx.clock.monotonic()

    @property
    def cost(self) -> Cost:
        """What was asked so far, and the seconds since this talk began."""
        with self._lock:
            seconds = round(self._clock.monotonic() - self._began, 3)
            return self._cost.model_copy(update={"seconds": seconds})

    @property
    def spent(self) -> bool:
        """Whether all requests together took as long as a single one may take at most."""
        return self.cost.seconds > self._patience.most

    def get(self, path: str) -> Told:
        """Ask for a document; see `post`."""
        return self._patiently("GET", path, None, 0)

    def text(self, path: str) -> str | None:
        """Ask once for a document that is no JSON; None where there is none to be had."""
        url = self.endpoint.url.rstrip("/") + path
        try:
            reply = self._http.ask(
                "GET", url, headers=self.endpoint.headers, timeout=TEXT_S,
                max_bytes=self._patience.max_bytes,
            )  # fmt: skip
        except Unreachable:
            return None
        return reply.text if reply.status == 200 else None

    def post(self, path: str, body: Mapping[str, Any], *, tokens: int = 0) -> Told:
        """Send a document; busy servers and broken connections are tried again, within bounds.

        `tokens` is how many may be read or produced: it gives the time. Never raises for what a
        server does.
        """
        return self._patiently("POST", path, dict(body), tokens)

    def _patiently(self, method: str, path: str, body: Any, tokens: int) -> Told:
        def once() -> Told:
            told, after = self._once(method, path, body, tokens)
            if _worth_another_try(told):
                after = None if after is None else min(after, self._patience.longest_wait)
                raise TransientError(told.problem or "busy", after, reply=told)
            return told

        attempts = self._patience.attempts
        try:
            return Retry(self._clock.sleep, attempts=attempts, first_pause=0.4).call(once)
        except TransientError as error:
            told: Told = error.reply
            return replace(told, problem=f"{told.problem} (asked {attempts} times)")

    def _once(self, method: str, path: str, body: Any, tokens: int) -> tuple[Told, float | None]:
        """Send one request; give what was told, and the seconds of Retry-After."""
        began = self._clock.monotonic()
        try:
            reply = self._http.ask(
                method,
                self.endpoint.url.rstrip("/") + path,
                json=body,
                headers=self.endpoint.headers,
                timeout=self._patience.timeout(tokens),
                max_bytes=self._patience.max_bytes,
            )
        except Unreachable as error:
            seconds = self._clock.monotonic() - began
            broken = not error.refused and error.why.startswith(_BROKEN)
            self._count({})
            return Told(problem=error.why, lost=True, broken=broken, seconds=seconds), None
        told = read_json(reply)
        self._count(told.data)
        return told, retry_after(reply.headers) if told.problem else None

    def _count(self, data: Any) -> None:
        """Count a request, and the tokens that its answer says it took."""
        decoded, read = _tokens(data)
        with self._lock:
            cost = self._cost
            self._cost = Cost(
                requests=cost.requests + 1,
                tokens=cost.tokens + decoded,
                prompt_tokens=cost.prompt_tokens + read,
            )


def _tokens(data: Any) -> tuple[int, int]:
    """Tokens decoded and read; what came from a cache is not counted where the server tells."""
    if not isinstance(data, dict):
        return 0, 0
    usage, timings = (
        part if isinstance(part := data.get(key), dict) else {} for key in ("usage", "timings")
    )
    decoded = (timings.get("predicted_n"), usage.get("completion_tokens"))
    read = (timings.get("prompt_n"), usage.get("prompt_tokens"))
    return _first_count(*decoded), _first_count(*read)


def _first_count(*values: Any) -> int:
    good = (v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)
    return next(good, 0)


def _worth_another_try(told: Told) -> bool:
    """Whether the same request may fare better: a busy server, a connection that broke.

    Not after a time-out, and not where nobody listens: those would only wait again.
    """
    return told.http_status in BUSY or told.broken
