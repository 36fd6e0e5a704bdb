"""HTTP requests, limited in time and size; redirects that would leak or surprise are refused.

This module is imported wherever a context is; `requests`, which is slow to import, is imported
with the first request.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urljoin, urlsplit

from bakehouse import __version__
from bakehouse.debug_log import debug
from bakehouse.errors import HostError
from bakehouse.redact import clean
from bakehouse.system.process import Clock

if TYPE_CHECKING:
    import requests
    from urllib3.connection import HTTPConnection

MAX_REDIRECTS = 8
CHUNK = 2**16
LATER_S = 1.0
"""The sockets time out this long after the deadline of the whole request, so that the same one of
the two always wins."""
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PRIVATE_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization"})


def header(headers: Mapping[str, str], name: str) -> str | None:
    """Find a header by its name in lower case; None if it is missing."""
    return next((value for key, value in headers.items() if key.lower() == name), None)


@dataclass(frozen=True)
class Reply:
    """A response. `seconds` is from sending to the last byte that was read."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    @property
    def text(self) -> str:
        """The body as text; bytes that are not UTF-8 become replacement characters."""
        return self.body.decode(errors="replace")

    def header(self, name: str) -> str | None:
        """A header by its name in lower case; None if it is missing."""
        return header(self.headers, name)

    def json(self) -> Any:
        """Parse the body. Raises ValueError if it is not JSON."""
        try:
            return json.loads(self.body)
        except RecursionError as error:
            raise ValueError("the JSON is nested too deeply") from error


class Unreachable(Exception):
    """No usable response: refused, reset, timed out, too long, or not HTTP. `why` is a message."""

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
    """Say why an address given by the user cannot be used for HTTP; None if it can."""
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
        f"unsupported scheme '{scheme}'; use http or https": parts.scheme in ("http", "https"),
        "it holds a user or a password, which would end up in logs": "@" not in parts.netloc,
        "it names no host": bool(host),
        "it names no port": port != 0,
    }
    return next((fault for fault, fine in faults.items() if not fine), None)


def is_loopback(url: str) -> bool:
    """Whether a URL's host is this machine, by its name or address alone.

    `127.1`, `0x7f000001`, `[::ffff:127.0.0.1]` and 0.0.0.0 lead to this machine as 127.0.0.1 does.
    """
    import ipaddress  # slow to import, and rarely needed

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


class _Connections:
    """The connections of one request, so that a deadline can close them."""

    def __init__(self) -> None:
        self.opened: list[HTTPConnection] = []
        self.cut_off = False

    def opening(self, connection: HTTPConnection) -> None:
        """Register a connection before it is opened. Raises TimeoutError after the deadline."""
        if self.cut_off:
            raise TimeoutError
        self.opened.append(connection)

    def cut(self) -> None:
        """Close every socket, whichever thread is reading from it."""
        self.cut_off = True
        for connection in self.opened:
            if connection.sock is not None:
                # The plain socket's method: that of a TLS socket would first drop its TLS state.
                with suppress(OSError):
                    socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)


def _session(connections: _Connections) -> requests.Session:
    """Make a session whose connections are registered in `connections`."""
    import requests
    from requests.adapters import HTTPAdapter
    from urllib3.connection import HTTPConnection, HTTPSConnection
    from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

    def registered(kind: type[HTTPConnection], pool: type[HTTPConnectionPool]) -> Any:
        def connect(self: HTTPConnection) -> None:
            connections.opening(self)
            kind.connect(self)

        ours = type(kind.__name__, (kind,), {"connect": connect})
        return type(pool.__name__, (pool,), {"ConnectionCls": ours})

    pools = {
        "http": registered(HTTPConnection, HTTPConnectionPool),
        "https": registered(HTTPSConnection, HTTPSConnectionPool),
    }

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
            super().init_poolmanager(*args, **kwargs)
            self.poolmanager.pool_classes_by_scheme = pools

        def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
            manager = super().proxy_manager_for(*args, **kwargs)
            manager.pool_classes_by_scheme = pools
            return manager

    session = requests.Session()
    session.auth = lambda request: request  # otherwise requests adds what `.netrc` has for the host
    session.verify = os.environ.get("SSL_CERT_FILE") or True
    session.headers.clear()
    session.headers["User-Agent"] = f"bakehouse/{__version__}"
    for scheme in ("http://", "https://"):
        session.mount(scheme, Adapter(max_retries=0))
    return session


def _next_hop(url: str, location: str) -> str:
    """The address that a redirect leads to. Raises Unreachable if it must not be followed."""
    try:
        there = urljoin(url, location)
        parts = urlsplit(there)
        host = parts.hostname or ""
        good = parts.port != 0 and len(host) < 254 and host.isascii()
    except ValueError:
        good = False
    if not good:
        raise Unreachable("redirected to an invalid URL")
    before, after = urlsplit(url).scheme, parts.scheme
    if after not in ("http", "https") or (before == "https" and after == "http"):
        raise Unreachable(f"redirected from {before} to {after}, which is not followed")
    if is_loopback(url) != is_loopback(there):
        # Either way the request would reach a host that nobody named: a service of this machine
        # that trusts local users, or a host on the network instead of a local one.
        ends = ("this machine", "another") if is_loopback(url) else ("another machine", "this one")
        raise Unreachable(
            f"redirected from {ends[0]} to {ends[1]} ({clean(host, one_line=True)}), which is not "
            "followed: use that address itself, if it is right"
        )
    return there


@contextmanager
def exchange(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    timeouts: tuple[float, float],
    json: Any = None,
    connections: _Connections | None = None,
) -> Iterator[requests.Response]:
    """Send one request and follow redirects; the body is not read yet.

    `timeouts` are seconds to connect and seconds without a byte. Credentials are dropped when a
    redirect leaves the origin. Raises Unreachable for a redirect that must not be followed, and
    the errors of requests; `why` translates those.
    """
    import requests

    if urlsplit(url).scheme not in ("http", "https"):
        raise Unreachable("only http and https are supported")
    sent = {"Accept": "*/*", **headers, "Accept-Encoding": "identity"}
    with _session(connections or _Connections()) as session:
        for _ in range(MAX_REDIRECTS):
            session.trust_env = not is_loopback(url)
            try:
                response = session.request(
                    method, url, json=json, headers=sent, timeout=timeouts,
                    allow_redirects=False, stream=True,
                )  # fmt: skip
            except requests.RequestException:
                raise
            except ValueError as error:  # from requests' own look at the redirect
                raise Unreachable("a header of the answer is malformed") from error
            location = response.headers.get("Location")
            follow = method in ("GET", "HEAD") and response.status_code in _REDIRECTS
            if not follow or not location:
                with response:
                    yield response
                return
            response.close()
            there = _next_hop(url, location)
            old, new = urlsplit(url), urlsplit(there)
            if (old.scheme, old.hostname, old.port) != (new.scheme, new.hostname, new.port):
                sent = {k: v for k, v in sent.items() if k.lower() not in _PRIVATE_HEADERS}
            url = there
    raise Unreachable(f"redirected more than {MAX_REDIRECTS} times")


@functools.cache
def _reasons() -> tuple[tuple[type[BaseException], str], ...]:
    """What each kind of error means; the first one that fits counts."""
    import http.client

    import requests
    import urllib3

    return (
        (socket.gaierror, "unknown host"),
        (urllib3.exceptions.NameResolutionError, "unknown host"),
        (ConnectionRefusedError, "connection refused"),
        (requests.exceptions.SSLError, "the TLS certificate is not trusted"),
        (requests.exceptions.ProxyError, "the proxy refused the connection"),
        (urllib3.exceptions.InvalidChunkLength, "the answer's chunks are malformed"),
        (urllib3.exceptions.IncompleteRead, "the answer was cut off"),
        (http.client.IncompleteRead, "the answer was cut off"),
        (http.client.RemoteDisconnected, "connection closed without an answer"),
        (ConnectionResetError, "connection reset"),
        (BrokenPipeError, "connection closed while sending"),
        (requests.exceptions.ConnectTimeout, "timed out while connecting"),
        (requests.exceptions.ReadTimeout, "timed out waiting for an answer"),
        (urllib3.exceptions.ReadTimeoutError, "timed out waiting for more of the answer"),
        (TimeoutError, "timed out"),
        (requests.exceptions.InvalidURL, "the URL is malformed"),
        (requests.exceptions.InvalidHeader, "a header is malformed"),
        (http.client.HTTPException, "the answer is not HTTP"),
        (requests.exceptions.ContentDecodingError, "the answer's compression is malformed"),
    )


def why(error: BaseException) -> Unreachable:
    """Translate an error of requests, urllib3 or the system."""
    if isinstance(error, Unreachable):
        return error
    causes = list(causes_of(error))
    for kind, words in _reasons():
        if any(isinstance(cause, kind) for cause in causes):
            return Unreachable(words, refused=kind is ConnectionRefusedError)
    for cause in causes:
        if isinstance(cause, OSError) and cause.strerror:
            return Unreachable(cause.strerror.lower())
    return Unreachable(f"no usable answer ({type(causes[-1]).__name__})")


def _ask_in_time(
    method: str, url: str, json: Any, headers: Mapping[str, str], timeout: float, max_bytes: int
) -> Reply:
    """Send one request; `timeout` limits all of it, from the name's look-up to the last byte.

    A read timeout alone is reset by every byte. So the request runs in a thread, and its sockets
    are closed at the deadline.
    """
    connections = _Connections()
    outcome: list[Reply | Unreachable] = []
    done = threading.Event()  # is_alive() is wrong after a join that a signal interrupted (3.11)

    def request() -> Reply:
        started = time.monotonic()
        with exchange(
            method, url, headers=headers, timeouts=(timeout + LATER_S, timeout + LATER_S),
            json=json, connections=connections,
        ) as response:  # fmt: skip
            too_long = Unreachable(f"the answer is longer than {max_bytes:,} bytes")
            length = response.headers.get("Content-Length", "")
            number = length.isascii() and length.isdigit()  # of any number of digits
            if method != "HEAD" and number and (len(length) > 18 or int(length) > max_bytes):
                raise too_long
            body = bytearray()
            for chunk in response.iter_content(CHUNK):
                body += chunk
                if len(body) > max_bytes:
                    raise too_long
            seconds = time.monotonic() - started
            return Reply(response.status_code, response.headers, bytes(body), seconds)

    def work() -> None:
        try:
            outcome.append(request())
        except Exception as error:
            outcome.append(why(error))
        finally:
            done.set()

    threading.Thread(target=work, name="http-ask", daemon=True).start()
    try:
        done.wait(timeout)
    finally:
        if not done.is_set():
            connections.cut()
            done.wait(0.2)
    if connections.cut_off or not outcome:
        raise Unreachable(f"no complete answer within {timeout:g} s")
    if isinstance(outcome[0], Unreachable):
        raise outcome[0]
    return outcome[0]


class HttpStatus(HostError):
    """A download got a status that no retry will change."""

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


class Http:
    """HTTP through `requests`. `.netrc` is not read; no proxy is used for loopback."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()

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
        """Send one request, no retry; `timeout` (seconds) limits all of it. Raises Unreachable.

        Redirects are followed for GET and HEAD, but not from https to http, and not between this
        machine and another one.
        """
        try:
            reply = _ask_in_time(method, url, json, headers or {}, timeout, max_bytes)
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
        """Fetch to `target`, through `target.part`, resuming what is there. Raises HostError.

        `on_bytes` gets bytes done and total; transient failures are retried with backoff, and
        Retry-After is obeyed; `on_wait` gets a line before each pause. Return whether the file was
        put together from several responses. The caller verifies the hash.
        """
        from bakehouse.system.download import Download

        return Download(url, target, headers or {}, size, on_bytes, on_wait, self._clock).run()
