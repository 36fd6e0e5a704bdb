"""HTTP: bounded questions, and downloads that resume. On `requests`, retries by `tenacity`.

This module is imported wherever a context is; `requests` is imported with the first request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

from bakehouse.errors import HostError
from bakehouse.logs import debug
from bakehouse.ports.clock import Clock, RealClock


@dataclass(frozen=True)
class Reply:
    """What a server answered. `seconds` is from sending to the last byte that was read."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    @property
    def text(self) -> str:
        """The body as text; bytes that are not UTF-8 become replacement characters."""
        return self.body.decode(errors="replace")

    def json(self) -> Any:
        """Parse the body; ValueError where it is not JSON."""
        try:
            return json.loads(self.body)
        except RecursionError as error:
            raise ValueError("the JSON is nested too deeply") from error


class Unreachable(Exception):
    """No answer: refused, reset, timed out, too long, or not HTTP. `why` is for people."""

    def __init__(self, why: str, *, refused: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.refused = refused


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The error and all that it wraps; requests and urllib3 keep causes in `args` and `reason`."""
    seen: set[int] = set()
    left: list[Any] = [error]
    while left:
        one = left.pop(0)
        if not isinstance(one, BaseException) or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        left += [one.__cause__, one.__context__, getattr(one, "reason", None), *one.args]


def web_fault(url: str) -> str | None:
    """Say why an address that somebody gave cannot be asked by HTTP; None where it can."""
    if " " in url or not url.isprintable():
        return "it holds spaces or control characters"
    scheme, separator, _ = url.partition("://")
    if not separator:
        return "it has no scheme, http:// or https://"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "it is malformed"
    faults = {
        f"'{scheme}' is not spoken, only http and https are": parts.scheme in ("http", "https"),
        "it holds a user or a password, which would end up in logs": "@" not in parts.netloc,
        "it names no host": bool(host),
        "it names no port": port != 0,
    }
    return next((fault for fault, fine in faults.items() if not fine), None)


def is_loopback(url: str) -> bool:
    """Whether a URL's host is this machine, by its name or address alone.

    However the address is written: `127.1`, `0x7f000001` and `[::ffff:127.0.0.1]` are asked as
    127.0.0.1 is, and so is 0.0.0.0.
    """
    import ipaddress  # few ask, and these take their time to import
    import socket

    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            address = ipaddress.IPv4Address(socket.inet_aton(host))
        except (OSError, ValueError):
            return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


class HttpStatus(HostError):
    """A download was answered with a status that no retry will change."""

    default_id: ClassVar[str] = "http-status"

    def __init__(
        self,
        what: str,
        *,
        status: int,
        where: str,
        hint: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.status = status
        self.headers = headers or {}


class Http(Protocol):
    """The HTTP port."""

    def ask(
        self,
        method: str,
        url: str,
        *,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        max_bytes: int = 8 * 2**20,
    ) -> Reply:
        """Ask once, no retry; `timeout` (seconds) bounds it all. Raises Unreachable."""

    def download(
        self,
        url: str,
        target: Path,
        *,
        headers: Mapping[str, str] | None = None,
        size: int | None = None,
        on_bytes: Callable[[int, int | None], None] | None = None,
        on_wait: Callable[[str], None] | None = None,
    ) -> bool:
        """Fetch to `target`, through `target.part`, resuming what is there. Raises HostError.

        `on_bytes` gets bytes done and total; transient failures are retried with backoff, and
        Retry-After is honoured; `on_wait` is told of each before its pause. Give whether the file
        was put together from several answers. The caller verifies the hash.
        """


class RealHttp:
    """The HTTP port of this machine. `.netrc` is not read; no proxy stands before loopback."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or RealClock()

    def ask(
        self,
        method: str,
        url: str,
        *,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        max_bytes: int = 8 * 2**20,
    ) -> Reply:
        """See `Http.ask`.

        Redirects are followed for GET and HEAD, never to a weaker scheme, and never between this
        machine and another one: whoever wants that has to name the other address himself.
        """
        from bakehouse.ports.transport import ask  # requests takes 0.1 s to import

        try:
            reply = ask(
                method, url, json=json, headers=headers or {}, timeout=timeout, max_bytes=max_bytes
            )
        except Unreachable as error:
            debug("http", method=method, url=url, unreachable=error.why)
            raise
        debug("http", method=method, url=url, status=reply.status, seconds=round(reply.seconds, 3))
        return reply

    def download(
        self,
        url: str,
        target: Path,
        *,
        headers: Mapping[str, str] | None = None,
        size: int | None = None,
        on_bytes: Callable[[int, int | None], None] | None = None,
        on_wait: Callable[[str], None] | None = None,
    ) -> bool:
        """See `Http.download`."""
        from bakehouse.ports.download import Download  # requests takes 0.1 s to import

        way = Download(url, target, headers or {}, size, on_bytes, on_wait, self._clock)
        return way.run()
