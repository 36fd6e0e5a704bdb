"""One HTTP exchange on `requests`: bounded in time as a whole, redirects kept on a short lead."""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from bakehouse import __version__
from bakehouse.ports.http import Reply, Unreachable, causes_of, is_loopback
from bakehouse.redact import clean

MAX_REDIRECTS = 8
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PRIVATE_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization"})
CHUNK = 2**16
LATER_S = 1.0
"""The sockets' own timeouts come so much after the deadline of the whole: one of the two always
wins, and a busy machine does not change the words."""


class Connections:
    """The connections of one exchange, so that a deadline can cut them off."""

    def __init__(self) -> None:
        self.opened: list[HTTPConnection] = []
        self.cut_off = False

    def opening(self, connection: HTTPConnection) -> None:
        """Note a connection that is about to be made."""
        if self.cut_off:
            raise TimeoutError
        self.opened.append(connection)

    def cut(self) -> None:
        """End every socket, whichever thread is reading from it."""
        self.cut_off = True
        for connection in self.opened:
            sock = connection.sock
            if sock is None:
                continue
            try:
                # The plain socket's method: that of a TLS socket would first drop its TLS state.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
            except OSError:
                continue


class _Adapter(HTTPAdapter):
    """An adapter whose connections are known to a `Connections`."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        super().__init__(max_retries=0)

    def _classes(self) -> dict[str, type[HTTPConnectionPool]]:
        opening = self._connections.opening

        class Plain(HTTPConnection):
            def connect(self) -> None:
                opening(self)
                super().connect()

        class Tls(HTTPSConnection):
            def connect(self) -> None:
                opening(self)
                super().connect()

        class PlainPool(HTTPConnectionPool):
            ConnectionCls = Plain

        class TlsPool(HTTPSConnectionPool):
            ConnectionCls = Tls

        return {"http": PlainPool, "https": TlsPool}

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        """Make the pool manager, with pools of our own."""
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = self._classes()

    def proxy_manager_for(self, *args: Any, **kwargs: Any) -> Any:
        """Make a proxy's pool manager, with pools of our own."""
        manager = super().proxy_manager_for(*args, **kwargs)
        manager.pool_classes_by_scheme = self._classes()
        return manager


def _no_netrc(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Stand where requests would otherwise add what `.netrc` holds for the host."""
    return request


def _session(connections: Connections) -> requests.Session:
    session = requests.Session()
    session.auth = _no_netrc
    session.verify = os.environ.get("SSL_CERT_FILE") or True
    session.headers.clear()
    session.headers["User-Agent"] = f"bakehouse/{__version__}"
    for scheme in ("http://", "https://"):
        session.mount(scheme, _Adapter(connections))
    return session


def _next_hop(url: str, location: str) -> str:
    """Where a redirect leads; Unreachable where it must not be followed."""
    try:
        there = urljoin(url, location)
        parts = urlsplit(there)
        host = parts.hostname or ""
        good = parts.port != 0 and len(host) < 254 and host.isascii()
    except ValueError:
        good = False
    if not good:
        raise Unreachable("redirected to an address that is none")
    before, after = urlsplit(url).scheme, parts.scheme
    if after not in ("http", "https") or (before == "https" and after == "http"):
        raise Unreachable(f"redirected from {before} to {after}, which is not followed")
    if is_loopback(url) != is_loopback(there):
        # Either way somebody would be asked whom nobody has named: a service of this machine that
        # trusts its own, or a host on the network in place of one that was meant to be near.
        ends = ("this machine", "another") if is_loopback(url) else ("another machine", "this one")
        raise Unreachable(
            f"redirected from {ends[0]} to {ends[1]} ({clean(host, one_line=True)}), which is not "
            "followed: give that address itself, if it is right"
        )
    return there


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


@contextmanager
def exchange(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    timeouts: tuple[float, float],
    json: Any = None,
    connections: Connections | None = None,
) -> Iterator[requests.Response]:
    """Open one exchange, redirects followed, the body not yet read.

    `timeouts` are seconds to connect and seconds without a byte. Credentials are dropped when a
    redirect leaves the origin. Raises Unreachable for a redirect that must not be followed, and
    what requests raises for the rest; `why` puts that into words.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise Unreachable("only http and https are spoken")
    sent = {"Accept": "*/*", **headers, "Accept-Encoding": "identity"}
    with _session(connections or Connections()) as session:
        for _ in range(MAX_REDIRECTS):
            session.trust_env = not is_loopback(url)
            try:
                response = session.request(
                    method, url, json=json, headers=sent, timeout=timeouts,
                    allow_redirects=False, stream=True,
                )  # fmt: skip
            except requests.RequestException:
                raise
            except ValueError as error:  # it looks at where a redirect leads, and trips over it
                raise Unreachable("a header of the answer is malformed") from error
            location = response.headers.get("Location")
            follow = method in ("GET", "HEAD") and response.status_code in _REDIRECTS
            if not follow or not location:
                with response:
                    yield response
                return
            response.close()
            there = _next_hop(url, location)
            if _origin(there) != _origin(url):
                sent = {k: v for k, v in sent.items() if k.lower() not in _PRIVATE_HEADERS}
            url = there
    raise Unreachable(f"redirected more than {MAX_REDIRECTS} times")


_REASONS: tuple[tuple[type[BaseException], str], ...] = (
    (socket.gaierror, "the host's name is not known"),
    (urllib3.exceptions.NameResolutionError, "the host's name is not known"),
    (ConnectionRefusedError, "connection refused"),
    (requests.exceptions.SSLError, "no trusted TLS connection"),
    (requests.exceptions.ProxyError, "the proxy did not let it through"),
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
    """Put what went wrong into words."""
    if isinstance(error, Unreachable):
        return error
    causes = list(causes_of(error))
    for kind, words in _REASONS:
        if any(isinstance(cause, kind) for cause in causes):
            return Unreachable(words, refused=kind is ConnectionRefusedError)
    for cause in causes:
        if isinstance(cause, OSError) and cause.strerror:
            return Unreachable(cause.strerror.lower())
    return Unreachable(f"no usable answer ({type(causes[-1]).__name__})")


def ask(
    method: str,
    url: str,
    *,
    json: Any,
    headers: Mapping[str, str],
    timeout: float,
    max_bytes: int,
) -> Reply:
    """Ask once; `timeout` bounds the whole, from the name's look-up to the last byte.

    A read timeout alone would not: a server that sends a byte now and then keeps it from ever
    running out. So the exchange runs in a thread, and its sockets are cut off at the deadline.
    """
    connections = Connections()
    outcome: list[Reply | Unreachable] = []
    done = threading.Event()  # is_alive() is wrong after a join that a signal interrupted (3.11)

    def work() -> None:
        try:
            outcome.append(_ask(method, url, json, headers, timeout, max_bytes, connections))
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            outcome.append(why(error))
        except (OSError, ValueError, Unreachable) as error:
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


def _above(announced: str, limit: int) -> bool:
    """Whether a length is a number above a limit, however many digits it has."""
    if not (announced.isascii() and announced.isdigit()):
        return False
    return len(announced) > 18 or int(announced) > limit


def _ask(
    method: str,
    url: str,
    json: Any,
    headers: Mapping[str, str],
    timeout: float,
    max_bytes: int,
    connections: Connections,
) -> Reply:
    started = time.monotonic()
    with exchange(
        method, url, headers=headers, timeouts=(timeout + LATER_S, timeout + LATER_S), json=json,
        connections=connections,
    ) as response:  # fmt: skip
        too_long = Unreachable(f"the answer is longer than {max_bytes:,} bytes")
        announced = response.headers.get("Content-Length", "")
        if _above(announced, max_bytes) and method != "HEAD":
            raise too_long
        body = bytearray()
        for chunk in response.iter_content(CHUNK):
            body += chunk
            if len(body) > max_bytes:
                raise too_long
        seconds = time.monotonic() - started
        return Reply(response.status_code, response.headers, bytes(body), seconds)
