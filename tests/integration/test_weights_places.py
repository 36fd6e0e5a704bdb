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
from typing import Any

import pytest

from bakehouse.commands import fetch
from bakehouse.context import Context
from bakehouse.errors import BakehouseError, CheckpointError, HostError, LockError, NotFound
from bakehouse.lock import Lock, WeightPin
from bakehouse.progress import Bar
from bakehouse.recipe.load import Loaded
from bakehouse.sources.known import remember
from bakehouse.sources.pinning import pin_weights
from bakehouse.sources.together import NAME
from bakehouse.sources.weights import ensure
from tests.support.checkpoints import (
    f32,
    gguf_bytes,
    llama_metadata,
    safetensors_bytes,
    write,
)
from tests.support.clocks import ImpatientClock
from tests.support.filehost import Handler, cut, status
from tests.support.hubhost import TOKEN, Hub, HubRepo, serve_hub
from tests.support.recipes import make_loaded

pytestmark = pytest.mark.integration
MODEL = gguf_bytes(llama_metadata(), [f32("token_embd.weight", 64, 3)])


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


def pinned(ctx: Context, folder: Path, **weights: Any) -> tuple[Loaded, Lock]:
    loaded = make_loaded(folder, weights={"model": weights})
    pin = pin_weights(ctx, loaded.folder, "model", loaded.recipe.weights.model)
    return loaded, lock_of(pin)


def lock_of(pin: WeightPin) -> Lock:
    return Lock(recipe="test", engine="llama.cpp", wants="", weights={"model": pin})


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
def test_a_cache_of_huggingface_hub_is_used_in_place(
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


def test_a_cached_file_that_is_damaged_is_fetched_and_left_as_it_is(
    ctx: Context, hub: Hub, tmp_path: Path, heard: Heard
) -> None:
    commit = hub.repo().commit({"m.gguf": MODEL})
    base = cached(tmp_path / "hf", commit, {"m.gguf": MODEL})
    (blob,) = (base / "blobs").iterdir()
    blob.write_bytes(b"x" * len(MODEL))
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    first = Path(ensure(ctx, loaded, lock)["model"].first)
    assert first.read_bytes() == MODEL
    assert not first.is_symlink()
    assert blob.read_bytes() == b"x" * len(MODEL)
    assert any("damaged" in line for line in heard.lines)


def test_a_cache_that_was_emptied_meanwhile(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    commit = hub.repo().commit({"m.gguf": MODEL})
    base = cached(tmp_path / "hf", commit, {"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    ensure(ctx, loaded, lock)
    (blob,) = (base / "blobs").iterdir()
    blob.unlink()
    first = Path(ensure(ctx, loaded, lock)["model"].first)
    assert first.read_bytes() == MODEL
    assert not first.is_symlink()


def test_a_cache_with_the_configuration_only_is_named(
    ctx: Context, hub: Hub, tmp_path: Path, heard: Heard
) -> None:
    files = {"config.json": b"{}", "m.gguf": MODEL}
    commit = hub.repo().commit(files)
    base = cached(tmp_path / "hf", commit, {"config.json": b"{}"})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    ensure(ctx, loaded, lock)
    assert any("only the configuration" in line for line in heard.lines)
    with pytest.raises(LockError, match="no weight file") as caught:
        pinned(ctx, tmp_path, path=str(base / "snapshots" / commit))
    assert caught.value.exit_code == 4
    with pytest.raises(LockError, match="whole repository") as whole:
        pinned(ctx, tmp_path, path=str(base))
    assert commit in str(whole.value.hint)


def test_a_snapshot_is_a_local_folder(ctx: Context, tmp_path: Path) -> None:
    base = cached(tmp_path / "hf", "5" * 40, {"config.json": b"{}", "m.gguf": MODEL})
    snapshot = base / "snapshots" / ("5" * 40)
    loaded, lock = pinned(ctx, tmp_path, path=str(snapshot))
    assert ensure(ctx, loaded, lock)["model"].path == str(snapshot)


def test_rehash_reads_again_what_is_remembered(
    ctx: Context, hub: Hub, tmp_path: Path, heard: Heard
) -> None:
    hub.repo().commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    path = Path(ensure(ctx, loaded, lock)["model"].first)
    seen = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(b"X")
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    remember(ctx, path, lock.weights["model"].files[0].sha256)  # a bad sector: nothing tells
    ensure(ctx, loaded, lock)
    assert path.read_bytes()[:1] == b"X"
    ensure(ctx, loaded, lock, rehash=True)
    assert path.read_bytes() == MODEL
    heard.titles.clear()
    ensure(ctx, loaded, lock, rehash=True)
    assert heard.titles == ["hash m.gguf"]
    assert fetch.Options("x", rehash=True).rehash


def test_rehash_of_files_in_place(ctx: Context, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", MODEL)
    os.utime(path, (1_600_000_000, 1_600_000_000))
    loaded, lock = pinned(ctx, tmp_path, path="m.gguf")
    with path.open("r+b") as file:
        file.seek(len(MODEL) - 1)
        file.write(b"X")
    remember(ctx, path, lock.weights["model"].files[0].sha256)  # a bad sector: nothing tells
    ensure(ctx, loaded, lock)
    with pytest.raises(LockError, match="not those that are pinned"):
        ensure(ctx, loaded, lock, rehash=True)


# --- several at once --------------------------------------------------------------------------


def splits(count: int) -> dict[str, bytes]:
    files = {}
    for number in range(count):
        own = {"split.no": number, "split.count": count, "split.tensors.count": 0}
        metadata = {**llama_metadata(), **own} if not number else own
        files[f"m-{number + 1:05d}-of-{count:05d}.gguf"] = gguf_bytes(metadata) + bytes(number)
    return files


def test_files_come_several_at_once_with_one_account_of_all(
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


def test_one_that_fails_loses_nothing_of_the_others(ctx: Context, hub: Hub, tmp_path: Path) -> None:
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


def test_an_interrupt_ends_all_of_them(
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
    assert not list(ctx.places.weights.rglob("*.gguf"))


# --- what a hub may do ------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 2, 100])
def test_a_hub_that_knows_no_blobs_lists_its_tree(
    ctx: Context, hub: Hub, tmp_path: Path, page: int
) -> None:
    repo = hub.repo()
    repo.blobs, repo.page = False, page
    repo.commit({"config.json": b"{}", "a/m.gguf": MODEL, "b.txt": b"x"})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="**/*.gguf")
    (file,) = lock.weights["model"].files
    assert (file.size, file.sha256) == (len(MODEL), hashlib.sha256(MODEL).hexdigest())
    assert Path(ensure(ctx, loaded, lock)["model"].first).read_bytes() == MODEL


@pytest.mark.parametrize(
    ("body", "link", "why"),
    [
        (b"<html>", "", "not a listing"),
        (b"[1]", "", "not a listing"),
        (b"[]", "<https://evil.example/api/models/org/model/tree/x>; rel=next", "leads elsewhere"),
        (b"[]", "<?cursor=1>; rel=next", "no end"),
    ],
)
def test_a_tree_that_is_none(
    ctx: Context, hub: Hub, tmp_path: Path, body: bytes, link: str, why: str
) -> None:
    repo = hub.repo()
    repo.blobs = False
    commit = repo.commit({"m.gguf": MODEL})
    page = f"/api/models/org/model/tree/{commit}"
    hub.api.pages[page] = lambda handler: handler.answer(200, body, {"Link": link} if link else {})
    with pytest.raises(HostError, match=why):
        pinned(ctx, tmp_path, hub="org/model", files="*.gguf")


def shards(hub: Hub, index: dict[str, str], *names: str) -> HubRepo:
    data = safetensors_bytes({"a": ("U8", [1], b"x")})
    files = {f"sub/{name}": data for name in names}
    files["sub/model.safetensors.index.json"] = json.dumps({"weight_map": index}).encode()
    repo = hub.repo()
    repo.commit(files)
    return repo


@pytest.mark.parametrize(
    ("index", "names", "glob", "why"),
    [
        ({"a": "x.safetensors", "b": "y.safetensors"}, ["x.safetensors"], "sub/*",
         "1 of 2 shards that the index names are not in the repository: sub/y.safetensors"),
        ({"a": "x.safetensors", "b": "y.safetensors"}, ["x.safetensors", "y.safetensors"],
         "sub/x*", "1 of 2 shards that the index names are left out by the glob"),
        ({"a": "../x.safetensors"}, ["x.safetensors"], "sub/*", "damaged"),
    ],
)  # fmt: skip
def test_an_index_on_the_hub_is_held_against_what_is_listed(
    ctx: Context, hub: Hub, tmp_path: Path, index: dict[str, str], names: list[str], glob: str,
    why: str,
) -> None:  # fmt: skip
    shards(hub, index, *names)
    with pytest.raises(LockError, match=why):
        pinned(ctx, tmp_path, hub="org/model", files=glob)


def test_an_index_whose_shards_are_all_there(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    shards(hub, {"a": "x.safetensors"}, "x.safetensors")
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="sub/*")
    assert len(ensure(ctx, loaded, lock)["model"].files) == 2


def test_what_the_hub_itself_has_wrong_is_seen_after_the_fetch(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    """The hash is right, and the file is no model: a pointer was committed in its place."""
    hub.repo().commit({"m.gguf": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    with pytest.raises(CheckpointError, match="git-lfs pointer"):
        ensure(ctx, loaded, lock)


@pytest.mark.parametrize(
    ("code", "said", "token", "kind", "why"),
    [
        (401, "GatedRepo", "", HostError, "gated"),
        (403, "GatedRepo", TOKEN, HostError, "gated"),
        (403, "", TOKEN, HostError, "gated"),
        (404, "RevisionNotFound", "", NotFound, "no such revision"),
        (404, "EntryNotFound", "", NotFound, "no such file"),
        (410, "", "", NotFound, "no longer gives out this file"),
    ],
)
def test_what_is_refused_at_the_file_is_told_apart(
    ctx: Context, hub: Hub, tmp_path: Path, code: int, said: str, token: str,
    kind: type[BakehouseError], why: str,
) -> None:  # fmt: skip
    commit = hub.repo().commit({"m.gguf": MODEL})
    known = replace(ctx, environment={**ctx.environment, "HF_TOKEN": token})
    loaded, lock = pinned(known, tmp_path, hub="org/model", files="*.gguf")
    page = f"/org/model/resolve/{commit}/m.gguf"
    headers = {"X-Error-Code": said} if said else {}
    hub.api.pages[page] = lambda handler: handler.answer(code, b"", headers)
    with pytest.raises(kind, match=why) as caught:
        ensure(known, loaded, lock)
    assert TOKEN not in f"{caught.value} {caught.value.where} {caught.value.hint}"
    assert not list(known.places.weights.rglob("*.gguf"))


def test_a_cut_and_a_refused_range_lose_nothing(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    big = MODEL + os.urandom(500_000)
    repo = hub.repo()
    repo.commit({"m.gguf": big})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    tag = repo.resources["m.gguf"].etag
    repo.resources["m.gguf"].faults = [cut(300_000, etag=tag), status(416), cut(100_000, etag=tag)]
    assert Path(ensure(ctx, loaded, lock)["model"].first).read_bytes() == big


def test_a_file_of_another_size_than_listed(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    repo = hub.repo()
    repo.commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    repo.resources["m.gguf"].content = MODEL + b"more"
    with pytest.raises(HostError, match="wrong size"):
        ensure(ctx, loaded, lock)
