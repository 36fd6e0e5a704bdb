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
from bakehouse.ports.clock import RealClock
from bakehouse.ports.git import Git, check_url
from bakehouse.ports.http import Reply, Unreachable
from bakehouse.ports.process import Captured, RealProcesses
from bakehouse.sources.choice import choose
from bakehouse.sources.gitpin import resolve_url
from bakehouse.sources.known import known_sha256, remembered
from bakehouse.sources.mirror import mirror_folder
from bakehouse.sources.registry import find_file, index_url
from tests.support.clocks import settle


@pytest.mark.parametrize(
    ("url", "scheme"),
    [
        ("https://github.com/ggml-org/llama.cpp.git", "https"),
        ("https://host:8443/a/b", "https"),
        ("ssh://git@host:22/a.git", "ssh"),
        ("file:///srv/a%20b.git", "file"),
        ("http://127.0.0.1:8000/a.git", "http"),
        ("http://[::1]:8000/a.git", "http"),
        ("http://localhost/a.git", "http"),
    ],
)
def test_urls_that_are_spoken(url: str, scheme: str) -> None:
    assert check_url(url) == scheme


@pytest.mark.parametrize(
    "url",
    [
        "", "-u./x", "--upload-pack=touch /tmp/x", "ext::sh -c id", "fd::17", "http::https://x/y",
        "git://host/x", "ftp://host/x", "rsync://host/x", "javascript://x", "HTTPS://host/x",
        "http://example.org/x.git", "http://127.0.0.1.evil.org/x", "http://127.1@evil.org/x",
        "https://user:secret@host/x", "https://secret@host/x", "ssh://git:secret@host/x",
        "ssh://-oProxyCommand=id/x", "ssh://-l@host/x", "https:///x", "file://host/x",
        "file://relative/x", "file:///", "git@github.com:a/b.git", "../x", "/srv/x.git",
        "https://host/x\n--upload-pack=y", "https://host/a b", "https://host/x?token=secret",
        "https://host/x#y", "https://host:99999/x", "https://[::1/x", "C:\\x",
    ],
)  # fmt: skip
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_url(url)
    assert caught.value.exit_code == 2
    assert caught.value.hint
    assert "user:secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("parent", "url", "wanted"),
    [
        ("https://h/o/p.git", "../q.git", "https://h/o/q.git"),
        ("https://h/o/p.git/", "../../x/q", "https://h/x/q"),
        ("https://h/o/p", "./sub.git", "https://h/o/p/sub.git"),
        ("ssh://git@h:2/o/p", "../q", "ssh://git@h:2/o/q"),
        ("file:///srv/o/p.git", "../q.git", "file:///srv/o/q.git"),
        ("https://h/o/p", "https://other/x", "https://other/x"),
    ],
)
def test_submodule_urls(parent: str, url: str, wanted: str) -> None:
    assert resolve_url(parent, url) == wanted


def test_mirrors_have_names_that_can_be_read_and_do_not_meet(context: Context) -> None:
    urls = [
        "https://h/o/p",
        "https://h/o/p.git",
        "ssh://h/o/p",
        "https://h/o-p",
        "https://h/" + "x" * 300,
    ]
    names = [mirror_folder(context.places, url).name for url in urls]
    assert len(set(names)) == len(urls)
    assert names[0].startswith("h-o-p-")
    assert all(len(name) < 100 and not name.startswith((".", "-")) for name in names)


class OldGit(RealProcesses):
    """A machine whose git is another one."""

    def __init__(self, code: int, out: str) -> None:
        self._answer = (code, out)

    def capture(self, argv: Any, **_: Any) -> Captured:
        return Captured(tuple(argv), self._answer[0], self._answer[1], "")


@pytest.mark.parametrize(
    ("code", "out", "why"),
    [(127, "", "not installed"), (0, "git version 2.25.1", "too old"), (1, "", "does not run")],
)
def test_a_machine_without_a_usable_git(code: int, out: str, why: str) -> None:
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


class Index:
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

    def download(self, *_: Any, **__: Any) -> bool:
        raise AssertionError


FILES = [
    row("Some.Thing-1.0.tar.gz"), row("some_thing-1.0.1.tar.gz"), row("some_thing-1.0.zip"),
    row("some_thing-1.0-py3-none-manylinux_2_28_x86_64.whl"),
    row("some_thing-1.0-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"),
    row("some_thing-1.0-cp312-cp312-win_amd64.whl"), row("some_thing_more-1.0.tar.gz"),
    row("some_thing-1.0.egg"), row("odd"), {"no": "name"}, 5,
]  # fmt: skip


def test_the_right_file_of_a_release() -> None:
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


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
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
    ],
)
def test_an_index_that_cannot_be_used(body: Any, status: int, kind: type[BakehouseError]) -> None:
    with pytest.raises(kind) as caught:
        find_file(Index(body, status), "x==1", want="sdist")
    assert caught.value.where


@pytest.mark.parametrize("requirement", ["x", "x>=1", "x==1,==2", "../x==1", "x==1/..", "x == 1"])
def test_only_one_exact_version(requirement: str) -> None:
    with pytest.raises(UsageError, match="exact version"):
        find_file(Index({}), requirement, want="sdist")


def test_the_index_is_pips() -> None:
    assert index_url({}) == "https://pypi.org/simple"
    assert index_url({"PIP_INDEX_URL": "https://i/simple/"}) == "https://i/simple"


NAMES = ["a.gguf", "q4/m-00001-of-00002.gguf", "q4/m-00002-of-00002.gguf", "q4/x/b.gguf", "c.json"]


@pytest.mark.parametrize(
    ("glob", "wanted"),
    [
        ("*.gguf", ["a.gguf"]),
        ("*.json", ["c.json"]),
        ("b.gguf", ["q4/x/b.gguf"]),
        ("q4/*.gguf", ["q4/m-00001-of-00002.gguf", "q4/m-00002-of-00002.gguf"]),
        ("**/b.gguf", ["q4/x/b.gguf"]),
        ("q?/m-0000[12]-of-00002.gguf", ["q4/m-00001-of-00002.gguf", "q4/m-00002-of-00002.gguf"]),
        ("[!a-b].json", ["c.json"]),
    ],
)
def test_what_a_glob_means(glob: str, wanted: list[str]) -> None:
    assert choose(NAMES, glob, "here") == wanted


@pytest.mark.parametrize("glob", ["q4/**", "**/*.gguf", "q4/m-00001*", "nope", "[", "(", "*.bin"])
def test_globs_that_mean_no_one_model(glob: str) -> None:
    with pytest.raises(LockError) as caught:
        choose(NAMES, glob, "here")
    assert caught.value.hint


def test_a_hash_is_forgotten_with_any_change(context: Context, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")
    os.utime(path, (1, 1))
    settle()
    first = known_sha256(context, path)
    assert remembered(context.places, path) == first
    os.utime(path, ns=(1, 1_000_000_001))
    assert remembered(context.places, path) is None
    path.write_bytes(b"two")
    assert known_sha256(context, path) != first


def test_a_hash_is_forgotten_where_the_time_was_set_back(context: Context, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")
    os.utime(path, (1, 1))
    settle()
    first = known_sha256(context, path)
    seen = path.stat()
    with path.open("r+b") as file:
        file.write(b"two")
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    now = path.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (
        seen.st_size, seen.st_mtime_ns, seen.st_ino,
    )  # fmt: skip
    assert remembered(context.places, path) is None
    assert known_sha256(context, path) != first


def test_a_hash_of_a_file_from_the_future_is_remembered(context: Context, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")
    os.utime(path, (4_000_000_000, 4_000_000_000))
    settle()
    assert remembered(context.places, path) is None
    assert known_sha256(context, path) == remembered(context.places, path)


class Stopped(RealClock):
    """A clock that stands still."""

    def __init__(self, at: float) -> None:
        self.at = at

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.at, UTC)


def test_a_hash_of_a_file_that_may_still_change_is_not_kept(
    context: Context, tmp_path: Path
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")
    at_once = replace(context, clock=Stopped(path.stat().st_ctime + 0.01))
    known_sha256(at_once, path)
    assert remembered(context.places, path) is None
    later = replace(context, clock=Stopped(path.stat().st_ctime + 1.0))
    known_sha256(later, path)
    assert remembered(context.places, path)


@pytest.mark.parametrize("damage", [b"", b"[]", b"{}", b'{"sha256": 5}', b"\xff"])
def test_a_damaged_note_is_no_hash(context: Context, tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")
    os.utime(path, (1, 1))
    found = known_sha256(context, path)
    for note in context.places.weights.rglob("*.json"):
        note.write_bytes(damage)
    assert remembered(context.places, path) is None
    assert known_sha256(replace(context), path) == found
