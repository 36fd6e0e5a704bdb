"""HTTP requests and downloads against a real server that misbehaves in every known way."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bakehouse.errors import HostError
from bakehouse.system.http import Http, HttpStatus, Unreachable
from tests.support.clocks import ImpatientClock
from tests.support.filehost import (
    Fault,
    FileHost,
    cut,
    raw,
    redirect,
    serve_files,
    status,
    trickle,
)

pytestmark = pytest.mark.integration

DATA = bytes(range(256)) * 4000
OK = b"HTTP/1.1 200 OK\r\n"


@pytest.fixture
def host() -> Iterator[FileHost]:
    with serve_files() as served:
        yield served


@pytest.fixture
def clock() -> ImpatientClock:
    return ImpatientClock()


@pytest.fixture
def http(clock: ImpatientClock) -> Http:
    return Http(clock)


def test_request_sends_json_and_headers(host: FileHost, http: Http) -> None:
    host.put("/v1", b'{"a": 1}').headers["X-Some"] = "thing"
    reply = http.ask("POST", host.at("/v1"), json={"q": "é"}, headers={"X-Key": "k"})
    assert (reply.status, reply.json(), reply.headers["x-some"]) == (200, {"a": 1}, "thing")
    assert 0 < reply.seconds < 5
    assert json.loads(host.requests[0].body) == {"q": "é"}
    assert host.requests[0].headers["x-key"] == "k"


def test_request_returns_an_error_status(host: FileHost, http: Http) -> None:
    host.put("/", b"", status(503, b'{"error": "Loading model"}'))
    reply = http.ask("GET", host.at("/"))
    assert (reply.status, reply.text) == (503, '{"error": "Loading model"}')


def test_request_to_a_closed_port(http: Http) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
    with pytest.raises(Unreachable, match="connection refused") as caught:
        http.ask("GET", url)
    assert caught.value.refused


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (raw(b""), "closed without an answer"),
        (raw(b"SSH-2.0-OpenSSH_9.2\r\n"), "not HTTP"),
        (raw(b"\x00\x01\x02" * 100), "not HTTP"),
        (raw(OK + b"Content-Length: 100\r\n\r\nshort"), "cut off"),
        (raw(OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n"), "chunks are malformed"),
        (raw(OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel"), "cut off|malformed"),
        (raw(OK + b"Content-Length: 99999999\r\n\r\n" + b"x" * 4000), "longer than 1,000 bytes"),
        (raw(OK + b"\r\n" + b"x" * 200_000), "longer than 1,000 bytes"),
        (raw(OK + b"Content-Encoding: gzip\r\n\r\nnot gzip at all"), "compression is malformed"),
        (raw(OK + b"X: " + b"y" * 100_000 + b"\r\n\r\n"), "not HTTP"),
    ],
)
def test_request_names_a_broken_answer(host: FileHost, http: Http, fault: Fault, why: str) -> None:
    host.put("/", b"", fault)
    with pytest.raises(Unreachable, match=why) as caught:
        http.ask("GET", host.at("/"), timeout=5, max_bytes=1000)
    assert not caught.value.refused


@pytest.mark.parametrize(
    "fault",
    [
        trickle(OK + b"X-Slow: " + b"y" * 1000, 0.05),
        trickle(OK + b"Content-Length: 1000\r\n\r\n" + b"y" * 1000, 0.05),
        raw(OK, linger=30),
    ],
    ids=["headers byte by byte", "body byte by byte", "silence"],
)
def test_request_timeout_limits_the_whole(host: FileHost, http: Http, fault: Fault) -> None:
    host.put("/", b"", fault)
    started = time.monotonic()
    with pytest.raises(Unreachable, match=r"within 0\.4 s"):
        http.ask("GET", host.at("/"), timeout=0.4)
    assert time.monotonic() - started < 10  # the fault lasts far longer


def test_request_is_closed_by_an_interrupt(http: Http) -> None:
    """Else a server that is told to end would wait for it."""
    with socket.create_server(("127.0.0.1", 0)) as mute:

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            with pytest.raises(KeyboardInterrupt):
                http.ask("GET", f"http://127.0.0.1:{mute.getsockname()[1]}/", timeout=30)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        connection, _ = mute.accept()
        with connection:
            connection.settimeout(3)
            assert connection.recv(4096).startswith(b"GET / ")
            assert connection.recv(4096) == b""


def test_redirect_to_another_origin_drops_credentials(http: Http) -> None:
    with serve_files() as one, serve_files() as other:
        other.put("/there", b"here")
        one.put("/", b"", redirect(other.at("/there")))
        one.put("/same", b"", redirect("/near"))
        one.put("/near", b"near")
        secret = {"Authorization": "Bearer sesame", "X-Plain": "yes"}
        assert http.ask("GET", one.at("/"), headers=secret).body == b"here"
        assert http.ask("GET", one.at("/same"), headers=secret).body == b"near"
    assert "authorization" not in other.requests[0].headers
    assert other.requests[0].headers["x-plain"] == "yes"
    assert one.requests[-1].headers["authorization"] == "Bearer sesame"


def test_redirect_to_another_scheme_is_refused(host: FileHost, http: Http, tmp_path: Path) -> None:
    rows = ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://x/"]
    for to in rows:
        host.put("/", b"", redirect(to), redirect(to))
        with pytest.raises(Unreachable, match="redirected from http"):
            http.ask("GET", host.at("/"))
        with pytest.raises(HostError, match="redirected from http"):
            http.download(host.at("/"), tmp_path / "f")


def test_redirect_to_an_invalid_url_is_refused(host: FileHost, http: Http, tmp_path: Path) -> None:
    rows = ["http://[bad/", "http://127.0.0.1:99999/", "http://h:0/", f"http://{'a' * 60_000}/"]
    for to in rows:
        host.put("/", b"", redirect(to), redirect(to))
        named = "redirected to an invalid URL|a header of the answer is malformed"
        with pytest.raises(Unreachable, match=named):
            http.ask("GET", host.at("/"))
        with pytest.raises(HostError, match=named):
            http.download(host.at("/"), tmp_path / "f")


def test_redirect_loop_ends(host: FileHost, http: Http) -> None:
    host.put("/", b"", *[redirect("/")] * 20)
    with pytest.raises(Unreachable, match="redirected more than"):
        http.ask("GET", host.at("/"))


def test_redirect_does_not_repeat_a_post(host: FileHost, http: Http) -> None:
    host.put("/", b"", redirect("/other"))
    assert http.ask("POST", host.at("/"), json={}).status == 302
    assert len(host.requests) == 1


def test_request_to_loopback_uses_no_proxy(
    host: FileHost, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    host.put("/", b"direct")
    assert http.ask("GET", host.at("/")).body == b"direct"


def test_download_whole(host: FileHost, http: Http, tmp_path: Path) -> None:
    host.put("/f", DATA)
    seen: list[tuple[int, int | None]] = []
    target = tmp_path / "deep" / "f"
    http.download(host.at("/f"), target, on_bytes=lambda done, total: seen.append((done, total)))
    assert target.read_bytes() == DATA
    assert seen[-1] == (len(DATA), len(DATA))
    assert [p.name for p in target.parent.iterdir()] == ["f"]


def test_download_resumes_where_it_was_cut(host: FileHost, http: Http, tmp_path: Path) -> None:
    host.put("/f", DATA, cut(1000), cut(5000), status(503))
    http.download(host.at("/f"), tmp_path / "f", size=len(DATA))
    assert (tmp_path / "f").read_bytes() == DATA
    asked = [request.headers.get("range") for request in host.requests]
    assert asked == [None, "bytes=1000-", "bytes=6000-", "bytes=6000-"]
    assert host.requests[1].headers["if-range"] == '"one"'


def test_download_without_length_is_cut_by_size(host: FileHost, http: Http, tmp_path: Path) -> None:
    short = raw(OK + b'ETag: "one"\r\n\r\n' + DATA[:777])
    host.put("/f", DATA, short)
    http.download(host.at("/f"), tmp_path / "f", size=len(DATA))
    assert (tmp_path / "f").read_bytes() == DATA
    assert host.requests[1].headers["range"] == "bytes=777-"


def test_download_starts_over_if_the_file_changed(
    host: FileHost, http: Http, tmp_path: Path
) -> None:
    host.put("/f", DATA, cut(1000, etag='"before"'))
    http.download(host.at("/f"), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA


def test_download_starts_over_if_if_range_is_ignored(
    host: FileHost, http: Http, tmp_path: Path
) -> None:
    host.put("/f", DATA, cut(1000, etag='"before"'), cut(2000, etag='"one"'))
    http.download(host.at("/f"), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA


def test_download_starts_over_without_ranges(host: FileHost, http: Http, tmp_path: Path) -> None:
    host.put("/f", DATA, cut(1000)).ranges = False
    http.download(host.at("/f"), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA


def test_download_of_a_whole_part_fetches_nothing(
    host: FileHost, http: Http, tmp_path: Path
) -> None:
    host.put("/f", DATA)
    (tmp_path / "f.part").write_bytes(DATA)
    note = {"url": host.at("/f"), "validator": '"one"', "size": None}
    (tmp_path / "f.part.json").write_text(json.dumps(note))
    http.download(host.at("/f"), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA
    assert len(host.requests) == 1  # the host's 416 says how long the file is


def test_download_discards_a_part_that_is_too_long(
    host: FileHost, http: Http, tmp_path: Path
) -> None:
    host.put("/f", DATA)
    (tmp_path / "f.part").write_bytes(DATA + b"more")
    (tmp_path / "f.part.json").write_text(json.dumps({"url": host.at("/f")}))
    http.download(host.at("/f"), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA


def test_download_discards_a_part_of_unknown_origin(
    host: FileHost, http: Http, tmp_path: Path
) -> None:
    rows = ["", "not json", "[]", '{"url": "http://elsewhere/f"}']
    for note in rows:
        host.put("/f", DATA)
        (tmp_path / "f").unlink(missing_ok=True)
        (tmp_path / "f.part").write_bytes(b"garbage")
        if note:
            (tmp_path / "f.part.json").write_text(note)
        http.download(host.at("/f"), tmp_path / "f")
        assert (tmp_path / "f").read_bytes() == DATA


def test_download_obeys_retry_after(
    host: FileHost, http: Http, clock: ImpatientClock, tmp_path: Path
) -> None:
    host.put("/f", DATA, status(429, headers={"Retry-After": "7"}), status(503))
    http.download(host.at("/f"), tmp_path / "f")
    assert clock.slept[0] == 7
    assert 0 < clock.slept[1] < 10


def test_download_gives_up_on_a_long_retry_after(
    host: FileHost, http: Http, clock: ImpatientClock, tmp_path: Path
) -> None:
    host.put("/f", DATA, status(429, headers={"Retry-After": "86400"}))
    with pytest.raises(HostError, match=r"429.*86400 s"):
        http.download(host.at("/f"), tmp_path / "f")
    assert clock.slept == []


def test_download_retries_end(host: FileHost, http: Http, tmp_path: Path) -> None:
    host.put("/f", DATA, cut(1000), *[status(503)] * 50)
    with pytest.raises(HostError, match="503") as caught:
        http.download(host.at("/f"), tmp_path / "f")
    assert caught.value.exit_code == 9
    assert len(host.requests) < 10
    assert (tmp_path / "f.part").stat().st_size == 1000  # kept for the next run


def test_download_does_not_retry_a_final_status(host: FileHost, http: Http, tmp_path: Path) -> None:
    rows = [401, 403, 404, 410, 501]
    for code in rows:
        host.put("/f", DATA, status(code, b"<html>"))
        with pytest.raises(HttpStatus, match=str(code)) as caught:
            http.download(host.at("/f"), tmp_path / "f")
        assert caught.value.status == code
        assert list(tmp_path.iterdir()) == []
    assert len(host.requests) == len(rows)


def test_download_refuses_another_size(host: FileHost, http: Http, tmp_path: Path) -> None:
    host.put("/f", DATA)
    with pytest.raises(HostError, match="wrong size"):
        http.download(host.at("/f"), tmp_path / "f", size=len(DATA) - 1)
    assert list(tmp_path.iterdir()) == []


def test_download_keeps_compressed_files(host: FileHost, http: Http, tmp_path: Path) -> None:
    host.put("/f.tar.gz", b"\x1f\x8b" + DATA).headers["Content-Encoding"] = "gzip"
    http.download(host.at("/f.tar.gz"), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"\x1f\x8b" + DATA


def test_download_hides_a_secret_in_the_url(host: FileHost, http: Http, tmp_path: Path) -> None:
    url = host.url.replace("http://", "http://user:hunter2@") + "/missing"
    with pytest.raises(HttpStatus) as caught:
        http.download(url, tmp_path / "f")
    assert "hunter2" not in f"{caught.value} {caught.value.where}"


def test_download_on_a_full_disk_keeps_the_part(host: FileHost, http: Http, tmp_path: Path) -> None:
    """A file-size limit gives the same error path as a full disk: the kernel refuses a write."""
    host.put("/f", DATA)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(HostError, match="disk is full") as caught:
            http.download(host.at("/f"), tmp_path / "f")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert "BAKEHOUSE_HOME" in str(caught.value.hint)
    http.download(host.at("/f"), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA


def test_download_larger_than_the_disk_is_refused(
    host: FileHost, http: Http, tmp_path: Path
) -> None:
    huge = 2**60
    host.put("/f", b"", raw(OK + b"Content-Length: %d\r\n\r\n" % huge))
    with pytest.raises(HostError, match="disk is full"):
        http.download(host.at("/f"), tmp_path / "f")


def test_download_names_an_unwritable_folder(host: FileHost, http: Http, tmp_path: Path) -> None:
    host.put("/f", DATA)
    (tmp_path / "file").write_text("")
    with pytest.raises(HostError, match="cannot be written") as caught:
        http.download(host.at("/f"), tmp_path / "file" / "f")
    assert str(tmp_path / "file") in str(caught.value.where)


def test_download_resumes_after_kill(host: FileHost, http: Http, tmp_path: Path) -> None:
    host.put("/f", DATA, cut(300_000, pause=10))
    code = (
        "import sys; from pathlib import Path; from bakehouse.system.http import Http\n"
        "Http().download(sys.argv[1], Path(sys.argv[2]))"
    )
    argv = [sys.executable, "-c", code, host.at("/f"), str(tmp_path / "f")]
    child = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": os.getcwd()})
    part = tmp_path / "f.part"
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (part.exists() and part.stat().st_size):
        time.sleep(0.02)
    child.kill()
    child.wait()
    kept = part.stat().st_size
    assert 0 < kept < len(DATA)
    assert not (tmp_path / "f").exists()
    http.download(host.at("/f"), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA
    assert host.requests[-1].headers["range"] == f"bytes={kept}-"
