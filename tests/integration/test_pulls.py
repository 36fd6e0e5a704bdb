"""Pull requests fetched and pinned, from a real git host on loopback that fails at times."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bakehouse.commands import patch
from bakehouse.context import Context, Outcome
from bakehouse.errors import (
    BakehouseError,
    LockError,
    NotFound,
    PatchError,
    RecipeError,
    UsageError,
)
from bakehouse.patches.apply import stored
from bakehouse.patches.manifest import Manifest, read_manifest, write_manifest
from bakehouse.progress import Silent
from tests.support.clocks import ImpatientClock
from tests.support.filehost import cut, raw, redirect, serve_files, status
from tests.support.githost import Repo, git
from tests.support.pullhost import REPO, PullHost, serve_pulls

pytestmark = pytest.mark.integration

A = "".join(f"line {number}\n" for number in range(1, 41))
B = "alpha\nbeta\ngamma\n"
FIXED = A.replace("line 20\n", "line twenty\n")
DIFF, MAIL = f"/raw/{REPO}/pull/7.diff", f"/raw/{REPO}/pull/7.patch"


class Saying(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[PullHost]:
    with serve_pulls(tmp_path / "host") as served:
        yield served


@pytest.fixture
def repo(host: PullHost) -> Repo:
    made = host.repo(f"{REPO}.git")
    base = made.commit({"a.txt": A, "b.txt": B})
    push(made, FIXED, base=base)
    made.commit({"a.txt": A, "b.txt": B, "c.txt": "other\n"}, parents=(base,))
    return made


def push(repo: Repo, text: str, *, base: str, message: str = "Fix line 20", number: int = 7) -> str:
    """Push a pull request of two commits."""
    first = repo.commit({"a.txt": text, "b.txt": B}, ref=None, parents=(base,), message=message)
    files = {"a.txt": text, "b.txt": B.replace("beta", "BETA")}
    return repo.commit(files, ref=f"refs/pull/{number}/head", parents=(first,), message="and b")


@pytest.fixture
def said() -> Saying:
    return Saying()


@pytest.fixture
def ctx(context: Context, host: PullHost, said: Saying, tmp_path: Path) -> Context:
    (tmp_path / "recipes").mkdir()
    environment = {**context.environment, "BAKEHOUSE_GITHUB": host.url}
    return replace(
        context, recipes=tmp_path / "recipes", environment=environment, progress=said,
        clock=ImpatientClock(),
    )  # fmt: skip


def run(ctx: Context, **flags: Any) -> Outcome:
    return patch.run(ctx, patch.Options(**{"pr": "7", "repo": REPO, **flags}))


def manifest(ctx: Context, name: str = "7") -> Manifest:
    return read_manifest(ctx.recipes.parent / "patches" / "org" / "project" / f"{name}.yaml")


def refused(ctx: Context, **flags: Any) -> BakehouseError:
    with pytest.raises(PatchError) as caught:
        run(ctx, **flags)
    assert caught.value.exit_code == 5
    assert caught.value.hint
    assert not (ctx.recipes.parent / "patches").exists() or flags.get("update")
    return caught.value


def test_patch_pins_a_pull_request(ctx: Context, repo: Repo, host: PullHost) -> None:
    done = run(ctx)
    found = manifest(ctx)
    base = git(repo.folder, "rev-parse", "main^")
    assert (found.pr, found.repo, found.title) == (7, REPO, "Fix line 20")
    assert found.head == git(repo.folder, "rev-parse", "refs/pull/7/head")
    assert found.base == base
    assert found.source == f"{host.url}/{REPO}/pull/7"
    assert [(f.path, f.added, f.removed) for f in found.files] == [("a.txt", 1, 1), ("b.txt", 1, 1)]
    assert found.pinned
    assert found.date is not None
    data = stored(ctx.places, str(found.sha256)).read_bytes()
    assert hashlib.sha256(data).hexdigest() == found.sha256
    assert len(data) == found.size
    assert not list((ctx.recipes.parent / "patches").rglob("*.diff")), "the diff is in the cache"
    assert done.result["how"] == "new"
    assert "Fix line 20" in done.text
    assert json.loads(json.dumps(done.result))["manifest"]["id"] == "7"
    assert all("full_index=1" in p for p in host.asked if ".diff" in p)

    again = run(ctx)
    assert again.result["how"] == "same"
    assert manifest(ctx) == found


def test_patch_dry_run_writes_nothing(ctx: Context, repo: Repo) -> None:
    done = run(ctx, dry_run=True)
    assert "would be pinned" in done.text
    assert not (ctx.recipes.parent / "patches").exists()
    assert not (ctx.places.cache / "patches").exists()


def test_patch_force_push_needs_update(ctx: Context, repo: Repo) -> None:
    run(ctx)
    before = manifest(ctx)
    base = str(before.base)
    head = push(repo, FIXED.replace("line 30\n", "line 30\nmore\n"), base=base)
    with pytest.raises(LockError, match="the pull request moved") as caught:
        run(ctx)
    assert caught.value.exit_code == 4
    where = str(caught.value.where)
    assert f"head {before.head} -> {head}" in where
    assert "a.txt: +1 -1 -> +2 -1" in where
    assert "--update" in str(caught.value.hint)
    assert manifest(ctx) == before
    done = run(ctx, update=True)
    after = manifest(ctx)
    assert after.head == head
    assert after.sha256 != before.sha256
    assert done.result["how"] == "moved"
    assert stored(ctx.places, str(before.sha256)).is_file(), "the old one stays: locks name it"


def test_patch_rebase_without_changes_is_the_same(ctx: Context, repo: Repo) -> None:
    run(ctx)
    before = manifest(ctx)
    push(repo, FIXED, base=str(before.base), message="Fix line 20, reworded")
    done = run(ctx)
    assert done.result["how"] == "same"
    assert manifest(ctx) == before
    assert any("its head is now" in note for note in done.result["notes"])


def test_patch_push_while_it_is_read(ctx: Context, repo: Repo, host: PullHost) -> None:
    base = git(repo.folder, "rev-parse", "main^")
    versions = iter(range(9))

    def pushed(_: object) -> bool:
        push(repo, FIXED, base=base, message=f"version {next(versions)}")
        return False

    host.page_faults[MAIL] = [pushed]
    run(ctx)
    assert manifest(ctx).head == git(repo.folder, "rev-parse", "refs/pull/7/head")
    host.page_faults[MAIL] = [pushed] * 3
    with pytest.raises(PatchError, match="being pushed to"):
        run(ctx)


REFUSED: list[tuple[Any, str, str]] = [
    (status(200, b"<html>x</html>", {"Content-Type": "text/html"}), "web page", "patch-html"),
    (status(200, b"<!DOCTYPE html>\n"), "HTML page", "patch-html"),
    (status(200, b'<html>You are being <a href="x">redirected</a>'), "HTML", "patch-html"),
    (status(200, b""), "contains no diff", "patch-empty"),
    (status(200, b"Not a diff\n"), "contains no diff", "patch-empty"),
    (status(302, b"<html>"), "redirect", "patch-redirect"),
    (redirect("ftp://127.0.0.1/x"), "redirected", "patch-redirect"),
    (status(404, b"Not Found"), "404", "patch-gone"),
    (status(410), "410", "patch-gone"),
    (status(406, b"diff too large"), "406", "patch-refused"),
    (status(401), "401", "patch-refused"),
    (status(200, b"x" * (5 * 2**20 + 1)), "larger than 5 MiB", "patch-large"),
    (
        status(200, b"diff --git a/x b/x\r\n--- a/x\r\n+++ b/x\r\n@@ -1 +1 @@\r\n-a\r\n+b\r\n"),
        "CRLF", "patch-crlf",
    ),
    (status(200, b"--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n a\n"), "in the middle",
     "patch-truncated"),
    (status(200, b"diff --git a/x b/x\nBinary files a/x and b/x differ\n"), "binary",
     "patch-binary"),
    (status(200, b"--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n"), "leaves the source tree",
     "patch-path"),
    (status(200, b"diff --git a/l b/l\nnew file mode 120000\n"), "symbolic", "patch-special"),
]  # fmt: skip


def test_fetch_refuses(ctx: Context, repo: Repo, host: PullHost) -> None:
    got = []
    for answer, why, _ in REFUSED:
        host.page_faults[DIFF] = [answer]
        error = refused(ctx)
        got.append((why in error.what, error.id))
    assert got == [(True, id_) for _, _, id_ in REFUSED]


def test_fetch_retries_an_incomplete_answer(ctx: Context, repo: Repo, host: PullHost) -> None:
    whole = host.text(f"/{REPO}/pull/7.diff") or b""
    half = b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n" % len(whole) + whole[:100]
    host.page_faults[DIFF] = [raw(half)]
    run(ctx)
    assert manifest(ctx).size == len(whole)
    host.page_faults[DIFF] = [raw(half)] * 9
    (ctx.recipes.parent / "patches" / "org" / "project" / "7.yaml").unlink()
    with pytest.raises(PatchError, match="cut off"):
        run(ctx)


def test_fetch_waits_for_a_rate_limit(
    ctx: Context, repo: Repo, host: PullHost, said: Saying
) -> None:
    busy = status(429, b"<html>slow down</html>", {"Retry-After": "7", "Content-Type": "text/html"})
    host.page_faults[DIFF] = [busy, busy]
    run(ctx)
    clock = ctx.clock
    assert isinstance(clock, ImpatientClock)
    assert clock.slept == [7.0, 7.0]
    assert "rate limited" in said.said[0]


BUSY: list[tuple[Any, list[float]]] = [
    (status(429, b"<html>", {"Retry-After": "3600"}), []),
    (status(429), [1.0, 2.0, 4.0]),
    (status(503), [1.0, 2.0, 4.0]),
    (status(403, b"", {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "4000000000"}), []),
    (status(403, b"", {"Retry-After": "2"}), [2.0] * 3),
]
"""Answers of a busy host, and the pauses in seconds before it is asked again."""


def test_fetch_gives_up_on_a_busy_host(ctx: Context, repo: Repo, host: PullHost) -> None:
    got = []
    for answer, _ in BUSY:
        clock = ImpatientClock()
        host.page_faults[DIFF] = [answer] * 20
        error = refused(replace(ctx, clock=clock))
        assert error.id in ("rate-limited", "patch-unreachable")
        assert "not found" not in error.what
        got.append(clock.slept)
    assert got == [pytest.approx(waits, rel=0.26) for _, waits in BUSY]


def test_patch_pinned_needs_no_host(ctx: Context, repo: Repo, host: PullHost) -> None:
    run(ctx)
    before = manifest(ctx)
    for answer in ([status(429)] * 9, [status(404)], [status(503)] * 9):
        host.page_faults[DIFF] = list(answer)
        done = run(ctx)
        assert done.result["how"] == "offline"
        assert "using the pinned diff" in done.result["notes"][0]
        host.page_faults[DIFF] = list(answer)
        with pytest.raises(PatchError):
            run(ctx, update=True)
    host.page_faults[DIFF] = [status(200, b"<html>")]
    with pytest.raises(PatchError, match="HTML"):
        run(ctx)  # a web page is not an unreachable host
    assert manifest(ctx) == before
    stored(ctx.places, str(before.sha256)).unlink()
    host.page_faults[DIFF] = [status(404)]
    with pytest.raises(PatchError, match="404"):
        run(ctx)


def test_patch_without_title_and_base_is_pinned(ctx: Context, repo: Repo, host: PullHost) -> None:
    host.page_faults[MAIL] = [status(404)]
    done = run(ctx)
    found = manifest(ctx)
    assert found.title == ""
    assert found.base is None
    assert found.head == git(repo.folder, "rev-parse", "refs/pull/7/head")
    assert any("title and commits are unknown" in note for note in done.result["notes"])


def test_patch_head_from_mails_without_git(ctx: Context, repo: Repo, host: PullHost) -> None:
    host.faults = [status(404)] * 20
    done = run(ctx)
    assert manifest(ctx).head == git(repo.folder, "rev-parse", "refs/pull/7/head")
    assert manifest(ctx).base is None
    assert len(done.result["notes"]) == 2


def test_patch_base_from_an_older_host(ctx: Context, repo: Repo) -> None:
    repo.be_strict()
    run(ctx)
    assert manifest(ctx).base == git(repo.folder, "rev-parse", "main^")


def test_patch_title_is_escaped(ctx: Context, repo: Repo) -> None:
    base = git(repo.folder, "rev-parse", "main^")
    push(repo, FIXED, base=base, message="F\u00efx \x1b[31mred\x1b[0m " + "long " * 60)
    run(ctx)
    title = manifest(ctx).title
    assert title.startswith("F\u00efx \\x1b[31mred")
    assert len(title) <= 200


def test_patch_vendored_diff(ctx: Context, repo: Repo, host: PullHost) -> None:
    run(ctx, vendor=True)
    found = manifest(ctx)
    copy = ctx.recipes.parent / "patches" / "org" / "project" / str(found.vendored)
    assert hashlib.sha256(copy.read_bytes()).hexdigest() == found.sha256
    stored(ctx.places, str(found.sha256)).unlink()
    host.page_faults[DIFF] = [status(404)]
    assert run(ctx).result["how"] == "offline"
    push(repo, FIXED.replace("line 3\n", "3\n"), base=str(found.base))
    run(ctx, update=True)
    assert hashlib.sha256(copy.read_bytes()).hexdigest() == manifest(ctx).sha256


def test_patch_pins_a_commit(ctx: Context, repo: Repo, host: PullHost) -> None:
    head = git(repo.folder, "rev-parse", "refs/pull/7/head")
    run(ctx, pr="", commit=head)
    found = manifest(ctx, head[:12])
    assert (found.head, found.pr, found.title) == (head, None, "and b")
    assert found.base == git(repo.folder, "rev-parse", f"{head}^")
    assert [f.path for f in found.files] == ["b.txt"]
    same = run(ctx, pr="", url=f"{host.url}/{REPO}/commit/{head}.patch")
    assert same.result["how"] == "same"
    with pytest.raises(PatchError, match="404"):
        run(ctx, pr="", commit="1" * 40)
    host.gone = True
    assert run(ctx, pr="", commit=head).result["how"] == "offline", "from the cache"
    with pytest.raises(UsageError, match="40 hex"):
        run(ctx, pr="", commit=head[:12])


def test_patch_url_of_a_pull_request(ctx: Context, repo: Repo, host: PullHost) -> None:
    run(ctx, pr="", repo="", url=f"{host.url}/{REPO}/pull/7/files")
    assert manifest(ctx).pr == 7


def test_patch_pins_a_url_and_a_file(
    ctx: Context, repo: Repo, host: PullHost, tmp_path: Path
) -> None:
    data = host.text(f"/{REPO}/pull/7.diff") or b""
    with serve_files() as files:
        files.put("/some/my-fix.diff", data, cut(30))
        run(ctx, pr="", url=files.at("/some/my-fix.diff"))
        assert manifest(ctx, "my-fix").source == files.at("/some/my-fix.diff")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "local.patch").write_bytes(host.text(f"/{REPO}/pull/7.patch") or b"")
    done = run(ctx, pr="", file=str(tmp_path / "local.patch"))
    assert manifest(ctx, "local").title == "Fix line 20"
    assert "only in this machine's cache" in done.text
    wrongs = {"none.patch": NotFound, "": PatchError, "pipe": PatchError, "a\0b": PatchError}
    for wrong, kind in wrongs.items():
        with pytest.raises(kind):
            run(ctx, pr="", file=str(tmp_path / wrong))
    with pytest.raises(UsageError):
        run(ctx, pr="", url="http://example.org/x.diff")


def test_patch_file_named_like_a_pull_request(
    ctx: Context, repo: Repo, host: PullHost, tmp_path: Path
) -> None:
    run(ctx)
    before = manifest(ctx)
    push(repo, FIXED.replace("line 3\n", "3\n"), base=str(before.base), number=8)
    (tmp_path / "7.diff").write_bytes(host.text(f"/{REPO}/pull/8.diff") or b"")
    run(ctx, pr="", file=str(tmp_path / "7.diff"))
    assert manifest(ctx) == before
    assert manifest(ctx, "file-7").pr is None
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "7.diff").write_bytes(host.text(f"/{REPO}/pull/7.diff") or b"")
    with pytest.raises(LockError, match="the patch moved") as caught:
        run(ctx, pr="", file=str(tmp_path / "x" / "7.diff"))
    assert f"source {tmp_path}/7.diff -> {tmp_path}/x/7.diff" in str(caught.value.where)


def test_patch_refuses_invalid_flags(ctx: Context) -> None:
    flags: list[dict[str, str]] = [
        {"pr": ""}, {"pr": "0"}, {"pr": "-1"}, {"pr": "x"}, {"pr": "\u0663"}, {"pr": "9" * 30},
        {"url": "https://example.org/x"}, {"repo": "nonsense"}, {"repo": "a/../b"},
        {"allow": "anything"},
    ]  # fmt: skip
    for one in flags:
        with pytest.raises(UsageError):
            run(ctx, **one)


def test_patch_first_fetch_is_compared_with_the_known_size(ctx: Context, repo: Repo) -> None:
    path = ctx.recipes.parent / "patches" / "org" / "project" / "7.yaml"
    known = Manifest(id="7", pr=7, repo=REPO, source="x", experimental=True, notes="by hand",
                     known={"files": 2, "added": 2, "removed": 3})  # fmt: skip
    write_manifest(path, known)
    with pytest.raises(LockError, match="moved") as caught:
        run(ctx)
    assert "expected 2 files, +2 -3; it is now 2 files, +2 -2" in str(caught.value.where)
    write_manifest(path, known.changed(known={"files": 2, "added": 2, "removed": 2}))
    run(ctx)
    found = manifest(ctx)
    assert found.pinned
    assert found.experimental
    assert found.notes == "by hand"


def test_patch_does_not_overwrite_an_invalid_manifest(ctx: Context, repo: Repo) -> None:
    run(ctx)
    path = ctx.recipes.parent / "patches" / "org" / "project" / "7.yaml"
    path.write_text(path.read_text() + "nonsense: 1\n")
    with pytest.raises(RecipeError):
        run(ctx, update=True)
    assert "nonsense" in path.read_text()
