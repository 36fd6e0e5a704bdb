"""Weights that are there already, come several at once, or come from a hub that lets us down."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir, try_to_load_from_cache

from bakehouse import flags
from bakehouse.context import Context
from bakehouse.errors import BakehouseError, CheckpointError, HostError, LockError, NotFound
from bakehouse.progress import Bar
from bakehouse.sources.files import store_sha256
from bakehouse.sources.weights import ensure, folder_of
from bakehouse.util.parallel import NAME
from tests.support.checkpoints import safetensors_bytes, write
from tests.support.clocks import ImpatientClock
from tests.support.filehost import Handler, cut, status
from tests.support.hubhost import TOKEN, Hub, HubRepo, page, serve_hub
from tests.support.weights import MODEL, pinned, splits

pytestmark = pytest.mark.integration


@dataclass
class Heard:
    """Progress that remembers what was said."""

    lines: list[str] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    updates: list[tuple[float, float | None]] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.lines.append(text)

    @contextmanager
    def bar(self, title: str, unit: str = "") -> Iterator[Bar]:
        self.titles.append(title)
        heard = self

        class One:
            def update(self, done: float, total: float | None = None, note: str = "") -> None:
                heard.updates.append((done, total))

        yield One()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as served:
        yield served


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def ctx(context: Context, hub: Hub, heard: Heard, tmp_path: Path) -> Context:
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    return replace(context, environment=environment, clock=ImpatientClock(), progress=heard)


def cached(folder: Path, commit: str, files: dict[str, bytes], name: str = "org/model") -> Path:
    """A cache as huggingface_hub lays it out; give the repository's folder."""
    base = folder / "hub" / f"models--{name.replace('/', '--')}"
    for path, data in files.items():
        blob = base / "blobs" / hashlib.sha256(data).hexdigest()
        write(blob, data)
        link = base / "snapshots" / commit / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    write(base / "refs" / "main", commit.encode())
    return base


# --- what is there already --------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "HOME"])
def test_hub_cache_is_used_in_place(
    ctx: Context, hub: Hub, tmp_path: Path, heard: Heard, variable: str
) -> None:
    commit = hub.repo().commit({"q/m.gguf": MODEL})
    base = cached(tmp_path / "hf", commit, {"q/m.gguf": MODEL})
    where = {"HF_HOME": tmp_path / "hf", "HF_HUB_CACHE": tmp_path / "hf" / "hub",
             "XDG_CACHE_HOME": tmp_path / "cache", "HOME": tmp_path}[variable]  # fmt: skip
    if variable in {"XDG_CACHE_HOME", "HOME"}:
        target = tmp_path / ("cache" if variable == "XDG_CACHE_HOME" else ".cache") / "huggingface"
        target.parent.mkdir()
        (tmp_path / "hf").rename(target)
        base = target / "hub" / base.name
    environment = {"HF_ENDPOINT": hub.url, variable: str(where)}
    known = replace(ctx, environment=environment)
    loaded, lock = pinned(known, tmp_path, hub="org/model", files="**/*.gguf")
    first = Path(ensure(known, loaded, lock)["model"].first)
    assert first.read_bytes() == MODEL
    assert first.resolve().parent == base.resolve() / "blobs"
    assert not hub.content.requests
    assert any("used in place" in line for line in heard.lines)
    titles = len(heard.titles)
    ensure(known, loaded, lock)
    assert len(heard.titles) == titles  # nor is anything hashed again


def test_hub_download_lands_once_where_other_tools_find_it(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    """huggingface_hub itself, offline, finds the files by commit and by branch."""
    files = {"q/m.gguf": MODEL, "config.json": b"{}"}
    commit = hub.repo().commit(files)
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="**")
    located = ensure(ctx, loaded, lock)["model"]
    for name, data in files.items():
        for revision in (commit, "main"):
            found = try_to_load_from_cache("org/model", name, tmp_path / "hf/hub", revision)
            assert isinstance(found, str)
            assert Path(found).read_bytes() == data
            assert os.path.realpath(found) in {os.path.realpath(path) for path in located.files}
    folders = (tmp_path, ctx.places.cache)
    whole = {p for f in folders for p in f.rglob("*") if p.is_file() and not p.is_symlink()}
    assert len([p for p in whole if p.read_bytes() == MODEL]) == 1
    assert scan_cache_dir(tmp_path / "hf/hub").warnings == []
    again = hub.repo().commit({**files, "more": b"x"}, revision="v2")
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", revision="v2", files="**/*.gguf")
    ensure(ctx, loaded, lock)
    assert len([r for r in hub.content.requests if "blob" in r.path and r.method == "GET"]) == 3
    assert again != commit


def test_hub_download_of_the_version_before_is_reused(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    """It kept its own copy, outside the Hub's cache."""
    hub.repo().commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    write(folder_of(ctx.places, lock.weights["model"].files) / "m.gguf", MODEL)
    asked = len(hub.content.requests)
    assert Path(ensure(ctx, loaded, lock)["model"].first).read_bytes() == MODEL
    assert len(hub.content.requests) == asked


def test_hub_cache_file_that_is_corrupt_or_deleted_is_downloaded_again(
    ctx: Context, hub: Hub, tmp_path: Path, heard: Heard
) -> None:
    commit = hub.repo().commit({"m.gguf": MODEL})
    base = cached(tmp_path / "hf", commit, {"m.gguf": MODEL})
    (blob,) = (base / "blobs").iterdir()
    blob.write_bytes(b"x" * len(MODEL))
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    with blob.open("rb") as mapped:
        assert Path(ensure(ctx, loaded, lock)["model"].first).read_bytes() == MODEL
        assert mapped.read() == b"x" * len(MODEL), "who has it mapped keeps it"
    assert any("corrupt" in line for line in heard.lines)
    assert blob.read_bytes() == MODEL
    blob.unlink()
    assert Path(ensure(ctx, loaded, lock)["model"].first).read_bytes() == MODEL


def test_weights_path_in_the_hub_cache_names_the_snapshot(ctx: Context, tmp_path: Path) -> None:
    base = cached(tmp_path / "hf", "5" * 40, {"config.json": b"{}"})
    with pytest.raises(LockError, match="no weight file") as caught:
        pinned(ctx, tmp_path, path=str(base / "snapshots" / ("5" * 40)))
    assert caught.value.exit_code == 4
    with pytest.raises(LockError, match="whole repository") as whole:
        pinned(ctx, tmp_path, path=str(base))
    assert "5" * 40 in str(whole.value.hint)


def test_weights_path_may_be_a_snapshot(ctx: Context, tmp_path: Path) -> None:
    base = cached(tmp_path / "hf", "5" * 40, {"config.json": b"{}", "m.gguf": MODEL})
    snapshot = base / "snapshots" / ("5" * 40)
    loaded, lock = pinned(ctx, tmp_path, path=str(snapshot))
    assert ensure(ctx, loaded, lock)["model"].path == str(snapshot)


def test_rehash_reads_downloads_again(ctx: Context, hub: Hub, tmp_path: Path, heard: Heard) -> None:
    hub.repo().commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    path = Path(ensure(ctx, loaded, lock)["model"].first)
    seen = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(b"X")
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    store_sha256(ctx, path, lock.weights["model"].files[0].sha256)  # a bad sector: nothing tells
    ensure(ctx, loaded, lock)
    assert path.read_bytes()[:1] == b"X"
    ensure(ctx, loaded, lock, rehash=True)
    assert path.read_bytes() == MODEL
    heard.titles.clear()
    ensure(ctx, loaded, lock, rehash=True)
    assert heard.titles == ["hash m.gguf"]
    assert flags.Fetch("x", rehash=True).rehash


def test_rehash_reads_files_in_place_again(ctx: Context, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", MODEL)
    os.utime(path, (1_600_000_000, 1_600_000_000))
    loaded, lock = pinned(ctx, tmp_path, path="m.gguf")
    with path.open("r+b") as file:
        file.seek(len(MODEL) - 1)
        file.write(b"X")
    store_sha256(ctx, path, lock.weights["model"].files[0].sha256)  # a bad sector: nothing tells
    ensure(ctx, loaded, lock)
    with pytest.raises(LockError, match="differ from their pin"):
        ensure(ctx, loaded, lock, rehash=True)


# --- several at once --------------------------------------------------------------------------


def test_download_runs_in_parallel_with_one_bar(
    ctx: Context, hub: Hub, tmp_path: Path, heard: Heard
) -> None:
    files = splits(6)
    repo = hub.repo()
    repo.commit(files)
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    together = threading.Barrier(3, timeout=20)

    def meets(_: Handler) -> bool:
        together.wait()  # it breaks where fewer than three are under way at once
        return False

    for name in list(files)[:3]:
        repo.resources[name].faults = [meets]
    located = ensure(ctx, loaded, lock)["model"]
    assert [Path(name).read_bytes() for name in located.files] == list(files.values())
    total = sum(map(len, files.values()))
    assert "fetch 6 files" in heard.titles
    assert (total, total) in heard.updates


def test_download_failure_keeps_the_other_files(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    files = splits(3)
    repo = hub.repo()
    repo.commit(files)
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    names = list(files)
    repo.resources[names[1]].faults = [status(404)]
    with pytest.raises(NotFound):
        ensure(ctx, loaded, lock)
    asked = len(hub.content.requests)
    located = ensure(ctx, loaded, lock)["model"]
    assert [Path(name).read_bytes() for name in located.files] == list(files.values())
    fetched_first = asked - 1
    assert len(hub.content.requests) - asked == 3 - fetched_first


def test_download_interrupt_ends_all_threads(
    ctx: Context, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: data + os.urandom(300_000) for name, data in splits(3).items()}
    repo = hub.repo()
    repo.commit(files)
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    for name in files:
        repo.resources[name].faults = [
            cut(200_000, etag=repo.resources[name].etag, pause=12) for _ in range(3)
        ]
    real, calls = threading.Thread.join, 0

    def interrupts(self: threading.Thread, timeout: float | None = None) -> None:
        nonlocal calls
        calls += timeout == 0.1
        if calls == 5:
            raise KeyboardInterrupt
        real(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupts)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ensure(ctx, loaded, lock)
    assert time.monotonic() - began < 10  # silent hosts are not waited for
    monkeypatch.undo()
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join(30)
    assert not list(tmp_path.rglob("*.gguf"))


# --- what a hub may do ------------------------------------------------------------------------


def test_hub_without_blobs_in_its_listing(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    repo = hub.repo()
    repo.blobs = False
    commit = repo.commit({"config.json": b"{}", "a/m.gguf": MODEL, "b.txt": b"x"})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="**/*.gguf")
    (file,) = lock.weights["model"].files
    assert (file.size, file.sha256) == (len(MODEL), hashlib.sha256(MODEL).hexdigest())
    assert Path(ensure(ctx, loaded, lock)["model"].first).read_bytes() == MODEL
    for body in (b"<html>", b"[1]", b'[{"type": "file"}]'):
        hub.api.pages[f"/api/models/org/model/paths-info/{commit}"] = page(200, body)
        with pytest.raises(HostError, match="not a listing"):
            pinned(ctx, tmp_path, hub="org/model", files="**/*.gguf")


def shards(hub: Hub, index: dict[str, str], *names: str) -> HubRepo:
    data = safetensors_bytes({"a": ("U8", [1], b"x")})
    files = {f"sub/{name}": data for name in names}
    files["sub/model.safetensors.index.json"] = json.dumps({"weight_map": index}).encode()
    repo = hub.repo()
    repo.commit(files)
    return repo


def test_hub_index_is_compared_with_the_listing(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    both = {"a": "x.safetensors", "b": "y.safetensors"}
    rows: list[tuple[dict[str, str], list[str], str, str]] = [
        (both, ["x.safetensors"], "sub/*",
         "1 of 2 shards in the index are not in the repository: sub/y.safetensors"),
        (both, ["x.safetensors", "y.safetensors"], "sub/x*",
         "1 of 2 shards in the index are not matched by the glob"),
        ({"a": "../x.safetensors"}, ["x.safetensors"], "sub/*", "damaged"),
    ]  # fmt: skip
    for index, names, glob, said in rows:
        shards(hub, index, *names)
        with pytest.raises(LockError, match=said):
            pinned(ctx, tmp_path, hub="org/model", files=glob)


def test_hub_index_with_all_shards(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    shards(hub, {"a": "x.safetensors"}, "x.safetensors")
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="sub/*")
    assert len(ensure(ctx, loaded, lock)["model"].files) == 2


def test_download_of_a_committed_pointer_is_refused(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    """The hash is right, and the file is no model: a pointer was committed in its place."""
    hub.repo().commit({"m.gguf": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    with pytest.raises(CheckpointError, match="git-lfs pointer"):
        ensure(ctx, loaded, lock)


def test_hub_refusals_of_a_file_are_explained(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    rows = {
        (401, "GatedRepo", ""): "hub-gated",
        (403, "GatedRepo", TOKEN): "hub-gated",
        (403, "", TOKEN): "hub-gated",
        (404, "RevisionNotFound", ""): "hub-revision",
        (404, "EntryNotFound", ""): "hub-file",
        (410, "", ""): "hub-file",
        (401, "", ""): "hub-login",
        (418, "", ""): "hub",
    }
    commit = hub.repo().commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    got = {}
    for code, said, token in rows:
        own = replace(ctx, environment={**ctx.environment, "HF_TOKEN": token})
        sent = {"X-Error-Code": said} if said else {}
        hub.api.pages[f"/org/model/resolve/{commit}/m.gguf"] = page(code, b"", sent)
        with pytest.raises(BakehouseError) as caught:
            ensure(own, loaded, lock)
        assert TOKEN not in f"{caught.value} {caught.value.where} {caught.value.hint}"
        got[code, said, token] = caught.value.id
    assert got == rows
    assert not list(tmp_path.rglob("*.gguf"))


def test_download_survives_a_cut_and_a_refused_range(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    big = MODEL + os.urandom(500_000)
    repo = hub.repo()
    repo.commit({"m.gguf": big})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    tag = repo.resources["m.gguf"].etag
    repo.resources["m.gguf"].faults = [cut(300_000, etag=tag), status(416), cut(100_000, etag=tag)]
    assert Path(ensure(ctx, loaded, lock)["model"].first).read_bytes() == big


def test_download_of_another_size_than_listed_is_refused(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    repo = hub.repo()
    repo.commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    repo.resources["m.gguf"].content = MODEL + b"more"
    with pytest.raises(HostError, match="wrong size"):
        ensure(ctx, loaded, lock)
