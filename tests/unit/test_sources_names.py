"""Names from outside: git URLs, submodule URLs, index entries, globs, and hashes remembered."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bakehouse.context import Context
from bakehouse.errors import BakehouseError, HostError, LockError, NotFound, UsageError
from bakehouse.resolver import resolve_url
from bakehouse.sources.files import cached_sha256, remembered
from bakehouse.sources.git_mirror import mirror_folder
from bakehouse.sources.pypi import find_file, index_url
from bakehouse.sources.weights import select_files
from bakehouse.system.git import Git, check_url
from bakehouse.system.http import Http, Reply, Unreachable
from bakehouse.system.process import Captured, Clock, Processes
from tests.support.clocks import settle


def test_git_urls_that_are_accepted() -> None:
    urls = {
        "https://github.com/ggml-org/llama.cpp.git": "https",
        "https://host:8443/a/b": "https",
        "ssh://git@host:22/a.git": "ssh",
        "file:///srv/a%20b.git": "file",
        "http://127.0.0.1:8000/a.git": "http",
        "http://[::1]:8000/a.git": "http",
        "http://localhost/a.git": "http",
    }
    assert {url: check_url(url) for url in urls} == urls


def test_git_urls_that_are_refused() -> None:
    urls = (
        "", "-u./x", "--upload-pack=touch /tmp/x", "ext::sh -c id", "fd::17", "http::https://x/y",
        "git://host/x", "ftp://host/x", "javascript://x", "HTTPS://host/x",
        "http://example.org/x.git", "http://127.0.0.1.evil.org/x", "http://127.1@evil.org/x",
        "https://user:secret@host/x", "https://secret@host/x", "ssh://git:secret@host/x",
        "ssh://-oProxyCommand=id/x", "ssh://-l@host/x", "https:///x", "file://host/x",
        "file:///", "git@github.com:a/b.git", "../x", "/srv/x.git",
        "https://host/x\n--upload-pack=y", "https://host/a b", "https://host/x?token=secret",
        "https://host/x#y", "https://host:99999/x", "https://[::1/x", "C:\\x",
    )  # fmt: skip
    for url in urls:
        with pytest.raises(UsageError) as caught:
            check_url(url)
        assert caught.value.hint, url
        assert "user:secret" not in str(caught.value)


def test_submodule_urls_are_resolved() -> None:
    rows = {
        ("https://h/o/p.git", "../q.git"): "https://h/o/q.git",
        ("https://h/o/p.git/", "../../x/q"): "https://h/x/q",
        ("https://h/o/p", "./sub.git"): "https://h/o/p/sub.git",
        ("ssh://git@h:2/o/p", "../q"): "ssh://git@h:2/o/q",
        ("file:///srv/o/p.git", "../q.git"): "file:///srv/o/q.git",
        ("https://h/o/p", "https://other/x"): "https://other/x",
    }
    assert {(parent, url): resolve_url(parent, url) for parent, url in rows} == rows


def test_mirror_names_are_readable_and_unique(context: Context) -> None:
    urls = ("https://h/o/p", "https://h/o/p.git", "ssh://h/o/p", "https://h/o-p",
            "https://h/" + "x" * 300)  # fmt: skip
    names = [mirror_folder(context.places, url).name for url in urls]
    assert len(set(names)) == len(urls)
    assert names[0].startswith("h-o-p-")
    assert all(len(name) < 100 and not name.startswith((".", "-")) for name in names)


class OldGit(Processes):
    """A machine whose git is another one."""

    def __init__(self, code: int, out: str) -> None:
        self._answer = (code, out)

    def capture(self, argv: Any, **_: Any) -> Captured:
        return Captured(tuple(argv), self._answer[0], self._answer[1], "")


def test_git_that_is_missing_or_too_old() -> None:
    rows = ((127, "", "not installed"), (0, "git version 2.25.1", "too old"),
            (1, "", "does not (run|work)"))  # fmt: skip
    for code, out, why in rows:
        with pytest.raises(HostError, match=why):
            Git(OldGit(code, out)).ask(None, "ls-remote")


SHA = "a" * 64


def row(name: str, **over: Any) -> dict[str, Any]:
    return {
        "filename": name,
        "url": f"../../f/{name}",
        "hashes": {"sha256": SHA},
        "size": 1,
        **over,
    }


class Index(Http):
    """An index that gives one answer; the real one is asked in the test of the toolkits."""

    def __init__(self, body: Any, status: int = 200) -> None:
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.status = status
        self.asked = ""

    def ask(self, method: str, url: str, **_: Any) -> Reply:
        self.asked = url
        if self.status == 0:
            raise Unreachable("connection refused")
        return Reply(self.status, {}, self.body, 0.0)


FILES = [
    row("Some.Thing-1.0.tar.gz"), row("some_thing-1.0.1.tar.gz"), row("some_thing-1.0.zip"),
    row("some_thing-1.0-py3-none-manylinux_2_28_x86_64.whl"),
    row("some_thing-1.0-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"),
    row("some_thing-1.0-cp312-cp312-win_amd64.whl"), row("some_thing_more-1.0.tar.gz"),
    row("some_thing-1.0.egg"), row("odd"), {"no": "name"}, 5,
]  # fmt: skip


def test_index_file_of_a_release() -> None:
    index = Index({"files": FILES})
    found = find_file(index, "Some_Thing==1.0", want="sdist", index="https://i/simple")
    assert (found.filename, found.url) == (
        "Some.Thing-1.0.tar.gz", "https://i/f/Some.Thing-1.0.tar.gz",
    )  # fmt: skip
    assert index.asked == "https://i/simple/some-thing/"
    tags = ["py3-none-manylinux2014_x86_64", "py3-none-*"]
    wheel = find_file(index, "some-thing==1.0", want="wheel", tags=tags)
    assert "manylinux2014" in wheel.filename
    with pytest.raises(NotFound, match="no fitting wheel"):
        find_file(index, "some-thing==1.0", want="wheel")
    by_hash = find_file(index, "some-thing==1.0", want="any", sha256=SHA)
    assert by_hash.sha256 == SHA
    with pytest.raises(LockError, match="has the sha256"):
        find_file(index, "some-thing==1.0", want="any", sha256="b" * 64)


def test_index_wheel_of_the_highest_build_is_chosen() -> None:
    names = ("x-1.0-9-py3-none-any.whl", "x-1.0-10-py3-none-any.whl", "x-1.0.0-py3-none-any.whl",
             "x-1.0-py2.py3-none-any.whl", "x-1.0+cu130-py3-none-any.whl")  # fmt: skip
    found = find_file(Index({"files": [row(name) for name in names]}), "X==1", want="wheel")
    assert found.filename == "x-1.0-10-py3-none-any.whl"


def test_index_that_cannot_be_used() -> None:
    rows: list[tuple[Any, int, type[BakehouseError]]] = [
        (b"<html>", 200, HostError),
        ([], 200, HostError),
        ({"files": 5}, 200, HostError),
        (b"", 404, NotFound),
        (b"", 500, HostError),
        (b"", 0, HostError),
        ({"files": []}, 200, NotFound),
        ({"files": [row("x-1.tar.gz", hashes={})]}, 200, LockError),
        ({"files": [row("x-1.tar.gz", hashes={"sha256": "short"})]}, 200, LockError),
        ({"files": [row("x-1.tar.gz", hashes=None)]}, 200, LockError),
        ({"files": [row("x-1.tar.gz", url="file:///etc/passwd")]}, 200, HostError),
    ]
    for body, status, kind in rows:
        with pytest.raises(kind) as caught:
            find_file(Index(body, status), "x==1", want="sdist")
        assert caught.value.where


def test_index_needs_one_exact_version() -> None:
    for requirement in ("x", "x>=1", "x==1,==2", "../x==1", "x==1/..", "x == 1", "x==1.*"):
        with pytest.raises(UsageError, match="exact version"):
            find_file(Index({}), requirement, want="sdist")


def test_index_url_is_pips() -> None:
    assert index_url({}) == "https://pypi.org/simple"
    assert index_url({"PIP_INDEX_URL": "https://i/simple/"}) == "https://i/simple"


def test_glob_selects_one_model() -> None:
    names = ["a.gguf", "q4/m-00001-of-00002.gguf", "q4/m-00002-of-00002.gguf", "q4/x/b.gguf",
             "c.json"]  # fmt: skip
    q4 = names[1:3]
    rows = {
        "*.gguf": ["a.gguf"],
        "b.gguf": ["q4/x/b.gguf"],
        "q4/*.gguf": q4,
        "**/b.gguf": ["q4/x/b.gguf"],
        "q?/m-0000[12]-of-00002.gguf": q4,
        "[!a-b].json": ["c.json"],
    }
    assert {glob: select_files(names, glob, "here") for glob in rows} == rows
    for glob in ("q4/**", "**/*.gguf", "q4/m-00001*", "nope", "[", "(", "*.bin"):
        with pytest.raises(LockError) as caught:
            select_files(names, glob, "here")
        assert caught.value.hint


def test_hash_is_dropped_after_any_change(context: Context, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")
    os.utime(path, (1, 1))
    settle()
    first = cached_sha256(context, path)
    assert remembered(context.places, path) == first
    os.utime(path, ns=(1, 1_000_000_001))
    assert remembered(context.places, path) is None
    path.write_bytes(b"two")
    assert cached_sha256(context, path) != first


def test_hash_is_dropped_when_the_time_was_set_back(context: Context, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")
    os.utime(path, (1, 1))
    settle()
    first = cached_sha256(context, path)
    seen = path.stat()
    with path.open("r+b") as file:
        file.write(b"two")
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    now = path.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (
        seen.st_size, seen.st_mtime_ns, seen.st_ino,
    )  # fmt: skip
    assert remembered(context.places, path) is None
    assert cached_sha256(context, path) != first


def test_hash_of_a_file_from_the_future_is_cached(context: Context, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")
    os.utime(path, (4_000_000_000, 4_000_000_000))
    settle()
    assert remembered(context.places, path) is None
    assert cached_sha256(context, path) == remembered(context.places, path)


class Stopped(Clock):
    """A clock that stands still."""

    def __init__(self, at: float) -> None:
        self.at = at

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.at, UTC)


def test_hash_of_a_file_that_may_still_change_is_not_cached(
    context: Context, tmp_path: Path
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")
    at_once = replace(context, clock=Stopped(path.stat().st_ctime + 0.01))
    cached_sha256(at_once, path)
    assert remembered(context.places, path) is None
    later = replace(context, clock=Stopped(path.stat().st_ctime + 1.0))
    cached_sha256(later, path)
    assert remembered(context.places, path)


def test_hash_note_that_is_damaged_is_ignored(context: Context, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")
    os.utime(path, (1, 1))
    found = cached_sha256(context, path)
    for damage in (b"", b"[]", b"{}", b'{"sha256": 5}', b"\xff"):
        for note in context.places.weights.rglob("*.json"):
            note.write_bytes(damage)
        assert remembered(context.places, path) is None
        assert cached_sha256(context, path) == found
