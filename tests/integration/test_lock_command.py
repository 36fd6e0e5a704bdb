"""The tasks `lock` and `fetch`, from a recipe to files on disk, against real hosts on loopback."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bakehouse import flags
from bakehouse.commands import build, plan, serve
from bakehouse.commands.lock import run_fetch, run_lock
from bakehouse.context import Context
from bakehouse.errors import BakehouseError, HostError, LockError
from bakehouse.patches.source_tree import materialise
from bakehouse.progress import Silent
from bakehouse.recipe.loader import load
from bakehouse.resolver import ensure_lock, lock_path, read_lock
from tests.support.checkpoints import gguf_bytes, llama_metadata
from tests.support.clocks import ImpatientClock
from tests.support.filehost import FileHost, cut, serve_files
from tests.support.githost import GitHost, Repo, serve_git
from tests.support.recipes import recipe_data, write_recipe

pytestmark = pytest.mark.integration

MODEL = gguf_bytes(llama_metadata())
DATE = 1_500_000_000


class Saying(Silent):
    """Progress that remembers what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def said() -> Saying:
    return Saying()


@pytest.fixture
def ctx(context: Context, said: Saying, tmp_path: Path) -> Context:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "model.gguf").write_bytes(MODEL)
    os.utime(tmp_path / "recipes" / "model.gguf", (DATE, DATE))
    return replace(context, recipes=tmp_path / "recipes", progress=said, clock=ImpatientClock())


@pytest.fixture
def git_host(tmp_path: Path) -> Iterator[GitHost]:
    with serve_git(tmp_path / "host") as served:
        yield served


@pytest.fixture
def repo(git_host: GitHost) -> Repo:
    return git_host.repo()


@pytest.fixture
def host() -> Iterator[FileHost]:
    with serve_files() as served:
        yield served


def tarball(files: dict[str, bytes], big: int = 0) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as made:
        for name, data in {**files, **({"p-1/big": os.urandom(big)} if big else {})}.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), DATE
            made.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


TAR = tarball(
    {"p-1/src/main.c": b"int x;\n", "p-1/src/.gitattributes": b"* eol=crlf\n", "p-1/n": b""}
)


def archive(data: bytes = TAR, **over: Any) -> dict[str, Any]:
    return {"archive": {"sha256": hashlib.sha256(data).hexdigest(), "folder": "src", **over}}


def write(ctx: Context, **over: Any) -> Path:
    return write_recipe(ctx.recipes, recipe_data(**over))


def test_lock_first_is_written_and_printed(ctx: Context, repo: Repo, said: Saying) -> None:
    commit = repo.commit({"a": "1"})
    path = write(ctx, source={"git": repo.url, "commit": commit})
    outcome = run_lock(ctx, flags.Lock(recipe="test"))
    assert outcome.result["created"]
    assert commit in outcome.text
    assert not any(commit in line for line in said.said), "printed twice"
    assert json.loads(lock_path(path).read_text())["source"]["commit"] == commit
    again = run_lock(ctx, flags.Lock(recipe="test"))
    assert not again.result["created"]
    assert again.result["lock"] == outcome.result["lock"]


def test_lock_reports_a_moved_ref(ctx: Context, repo: Repo, git_host: GitHost) -> None:
    first = repo.commit({"a": "1"})
    write(ctx, source={"git": repo.url, "commit": first, "ref": "main"})
    run_lock(ctx, flags.Lock(recipe="test"))
    second = repo.commit({"a": "2"}, parents=(first,))
    outcome = run_lock(ctx, flags.Lock(recipe="test"))
    (drifted,) = outcome.result["drift"]
    assert (drifted["reason"], drifted["locked"], drifted["now"]) == ("ref-moved", first, second)
    assert "ref-moved" in outcome.text
    updated = run_lock(ctx, flags.Lock(recipe="test", update=True))
    assert updated.result["lock"]["source"]["commit"] == first
    assert updated.result["lock"]["source"]["ref_commit"] == second
    assert [change["where"] for change in updated.result["moved"]] == ["ref"]
    git_host.gone = True
    assert run_lock(ctx, flags.Lock(recipe="test")).result["drift"] == []


def test_lock_update_moves_pins(ctx: Context, repo: Repo, said: Saying) -> None:
    first, second = repo.commit({"a": "1"}), repo.commit({"a": "2"})
    path = write(ctx, source={"git": repo.url, "commit": first})
    run_lock(ctx, flags.Lock(recipe="test"))
    write(ctx, source={"git": repo.url, "commit": second})
    with pytest.raises(LockError, match="commit-changed") as caught:
        run_lock(ctx, flags.Lock(recipe="test"))
    assert caught.value.exit_code == 4
    assert "invoke lock --recipe test --update" in str(caught.value.hint)
    outcome = run_lock(ctx, flags.Lock(recipe="test", update=True))
    assert "moved source" in outcome.text
    found = read_lock(lock_path(path))
    assert found is not None
    assert found.source is not None
    assert found.source.tree == repo.tree({"a": "2"})


def test_lock_locked_writes_nothing(ctx: Context, repo: Repo) -> None:
    path = write(ctx, source={"git": repo.url, "commit": repo.commit({"a": "1"})})
    with pytest.raises(LockError, match="no lock") as caught:
        run_fetch(ctx, flags.Fetch(recipe="test", locked=True))
    assert caught.value.exit_code == 4
    assert not lock_path(path).exists()
    run_lock(ctx, flags.Lock(recipe="test"))
    run_fetch(ctx, flags.Fetch(recipe="test", locked=True))


def test_lock_is_not_written_by_dry_runs(ctx: Context, repo: Repo) -> None:
    path = write(ctx, source={"git": repo.url, "commit": repo.commit({"a": "1"})})
    tasks: list[Callable[[], object]] = [
        lambda: plan.run(ctx, plan.Options(recipe="test")),
        lambda: build.run(ctx, build.Options(recipe="test", dry_run=True)),
        lambda: serve.run(ctx, serve.Options(recipe="test", dry_run=True)),
    ]
    for task in tasks:
        with pytest.raises(LockError, match="no lock file") as caught:
            task()
        assert "--locked" not in caught.value.what
        assert "invoke lock --recipe test" in str(caught.value.hint)
        assert not lock_path(path).exists()


def test_lock_refuses_an_override(ctx: Context, repo: Repo) -> None:
    commit = repo.commit({"a": "1"})
    path = write(ctx, source={"git": repo.url, "commit": "3" * 40})
    over = (f"source.commit={commit}",)
    with pytest.raises(LockError, match="--set changes what is locked"):
        run_lock(ctx, flags.Lock(recipe="test", set_=over))
    assert not lock_path(path).exists()


def test_lock_refuses_one_of_another_recipe(ctx: Context, repo: Repo) -> None:
    path = write(ctx, source={"git": repo.url, "commit": repo.commit({"a": "1"})})
    run_lock(ctx, flags.Lock(recipe="test"))
    other = write_recipe(ctx.recipes, {**recipe_data(), "name": "other"}, "other")
    lock_path(other).write_bytes(lock_path(path).read_bytes())
    with pytest.raises(LockError, match="belongs to another recipe"):
        ensure_lock(ctx, load(other))


def test_lock_update_replaces_a_damaged_lock(ctx: Context, repo: Repo) -> None:
    path = write(ctx, source={"git": repo.url, "commit": repo.commit({"a": "1"})})
    lock_path(path).write_text("{")
    with pytest.raises(LockError, match="damaged"):
        run_fetch(ctx, flags.Fetch(recipe="test"))
    run_lock(ctx, flags.Lock(recipe="test", update=True))
    run_fetch(ctx, flags.Fetch(recipe="test"))


def test_fetch_all_then_needs_no_network(ctx: Context, host: FileHost, tmp_path: Path) -> None:
    host.put("/p-1.tar.gz", TAR, cut(50))
    host.put("/m.gguf", MODEL)
    write(
        ctx, source=archive(url=host.at("/p-1.tar.gz"), number=7),
        weights={"model": {"url": host.at("/m.gguf")}},
    )  # fmt: skip
    outcome = run_fetch(ctx, flags.Fetch(recipe="test"))
    assert Path(outcome.result["weights"]["model"]["first"]).read_bytes() == MODEL
    host.files.clear()
    host.requests.clear()
    again = run_fetch(ctx, flags.Fetch(recipe="test"))
    assert again.result == outcome.result
    assert host.requests == []
    locked = ensure_lock(ctx, load(ctx.recipes / "test.yaml"))
    materialise(ctx, locked, tmp_path / "out")
    assert (tmp_path / "out" / "main.c").read_bytes() == b"int x;\n"
    assert (tmp_path / "out" / ".gitattributes").read_bytes() == b"* eol=crlf\n"
    assert (tmp_path / "out" / "main.c").stat().st_mtime == DATE
    assert locked.build_number == 7
    assert locked.stamp == hashlib.sha256(TAR).hexdigest()[:9]


def test_fetch_copies_and_verifies_a_local_archive(ctx: Context, tmp_path: Path) -> None:
    (ctx.recipes / "p.tar.gz").write_bytes(TAR)
    write(ctx, source=archive(path="p.tar.gz"))
    run_fetch(ctx, flags.Fetch(recipe="test"))
    (ctx.recipes / "q.tar.gz").write_bytes(tarball({"p/src/other": b"x"}))
    write(ctx, source=archive(path="q.tar.gz"))
    with pytest.raises(LockError, match="archive-changed"):
        run_fetch(ctx, flags.Fetch(recipe="test"))
    with pytest.raises(LockError, match="differs from its pin"):
        run_lock(ctx, flags.Lock(recipe="test", update=True))


def test_fetch_refuses_another_archive(ctx: Context, host: FileHost) -> None:
    host.put("/p.tar.gz", b"<html>Log in</html>")
    write(ctx, source=archive(url=host.at("/p.tar.gz")))
    with pytest.raises(LockError, match="an HTML page"):
        run_lock(ctx, flags.Lock(recipe="test"))
    assert not list(ctx.places.downloads.rglob("*.tar.gz"))


def test_lock_archive_of_a_release(ctx: Context, host: FileHost) -> None:
    host.put("/files/some_engine-1.0.tar.gz", TAR)
    row = {
        "filename": "some_engine-1.0.tar.gz", "size": len(TAR),
        "url": host.at("/files/some_engine-1.0.tar.gz"),
        "hashes": {"sha256": hashlib.sha256(TAR).hexdigest()},
    }  # fmt: skip
    host.put("/simple/some-engine/", json.dumps({"files": [row]}).encode())
    known = replace(ctx, environment={**ctx.environment, "PIP_INDEX_URL": host.at("/simple")})
    write(ctx, source=archive(pypi="some-engine==1.0"))
    outcome = run_lock(known, flags.Lock(recipe="test"))
    assert outcome.result["lock"]["source"]["origin"] == "pypi:some-engine==1.0"


def test_fetch_refuses_a_changed_patch(ctx: Context) -> None:
    (ctx.recipes / "p.tar.gz").write_bytes(TAR)
    patch = ctx.recipes / "p.patch"
    patch.write_text("--- a/main.c\n+++ b/main.c\n@@ -1 +1 @@\n-int x;\n+int y;\n")
    write(ctx, source={**archive(path="p.tar.gz"), "patches": [{"file": "p.patch"}]})
    outcome = run_lock(ctx, flags.Lock(recipe="test"))
    assert outcome.result["lock"]["source_tree"] != outcome.result["lock"]["source"]["tree"]
    run_fetch(ctx, flags.Fetch(recipe="test"))
    patch.write_text(patch.read_text().replace("int y", "int z"))
    with pytest.raises(LockError, match="changed since it was pinned"):
        run_fetch(ctx, flags.Fetch(recipe="test"))
    updated = run_lock(ctx, flags.Lock(recipe="test", update=True))
    moved = {change["where"] for change in updated.result["moved"]}
    assert moved == {"patch p.patch", "source tree"}


def test_fetch_after_losing_the_cache(ctx: Context, host: FileHost, tmp_path: Path) -> None:
    """A lock and its recipe are all that another machine has."""
    host.put("/p-1.tar.gz", TAR)
    (ctx.recipes / "p.patch").write_text(
        "--- a/main.c\n+++ b/main.c\n@@ -1 +1 @@\n-int x;\n+int y;\n"
    )
    write(ctx, source={**archive(url=host.at("/p-1.tar.gz")), "patches": [{"file": "p.patch"}]})
    run_lock(ctx, flags.Lock(recipe="test"))
    ctx.places.cache.rename(tmp_path / "lost")
    loaded = load(ctx.recipes / "test.yaml")
    materialise(ctx, ensure_lock(ctx, loaded, locked=True), tmp_path / "out")
    assert (tmp_path / "out" / "main.c").read_bytes() == b"int y;\n"


def test_lock_to_a_read_only_folder(ctx: Context, repo: Repo, tmp_path: Path) -> None:
    write(ctx, source={"git": repo.url, "commit": repo.commit({"a": "1"})})
    (tmp_path / "file").write_text("")
    places = replace(ctx.places, cache=tmp_path / "file" / "cache")
    with pytest.raises(HostError) as caught:
        run_lock(replace(ctx, places=places), flags.Lock(recipe="test"))
    assert caught.value.exit_code == 9


CHILD = """
import sys
from pathlib import Path
from bakehouse import flags
from bakehouse.commands.lock import run_lock
from bakehouse.context import Context
from bakehouse.paths import Places
home = Path(sys.argv[1])
ctx = Context(places=Places(home / "cache", home / "state"), recipes=Path(sys.argv[2]))
run_lock(ctx, flags.Lock(recipe="test"))
"""


@pytest.mark.parametrize("after", [0.4, 0.6, 0.8])
def test_fetch_killed_while_unpacking(ctx: Context, tmp_path: Path, after: float) -> None:
    files = {f"p-1/src/{n}.c": os.urandom(3000) for n in range(400)}
    data = tarball(files)
    (ctx.recipes / "p.tar.gz").write_bytes(data)
    write(ctx, source=archive(data, path="p.tar.gz"))
    argv = [sys.executable, "-c", CHILD, str(ctx.places.cache.parent), str(ctx.recipes)]
    child = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": os.getcwd()})
    time.sleep(after)
    child.kill()
    child.wait()
    locked = ensure_lock(ctx, load(ctx.recipes / "test.yaml"))
    materialise(ctx, locked, tmp_path / "out")
    found = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert found == {name.rpartition("/")[2]: content for name, content in files.items()}
    assert not list(ctx.places.git.glob(".unpack-*"))


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        ({"path": "none.gguf"}, "not found"),
        ({"path": "pointer.gguf"}, "git-lfs pointer"),
        ({"path": "half-00001-of-00002.gguf"}, "1 of 2 files"),
        ({"path": "config"}, "no weight file"),
        ({"hub": "o/m", "files": "*.gguf"}, "HF_ENDPOINT must use https"),
    ],
)
def test_lock_checks_weights_before_fetching_the_source(
    ctx: Context, repo: Repo, weights: dict[str, str], why: str
) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (ctx.recipes / "pointer.gguf").write_bytes(pointer)
    (ctx.recipes / "half-00001-of-00002.gguf").write_bytes(MODEL)
    (ctx.recipes / "config").mkdir()
    (ctx.recipes / "config" / "config.json").write_text("{}")
    ctx = replace(ctx, environment={**ctx.environment, "HF_ENDPOINT": "http://hub.example"})
    write(ctx, source={"git": repo.url, "commit": repo.commit({"a": "1"})},
          weights={"model": weights})  # fmt: skip
    with pytest.raises(BakehouseError, match=why):
        run_lock(ctx, flags.Lock(recipe="test"))
    assert not list(ctx.places.git.glob("*"))
