"""A hub that lies in its listing, loses files, or asks for patience: what a user is told."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bakehouse.commands import fit
from bakehouse.context import Context
from bakehouse.errors import HostError, LockError, NotFound, RecipeError, UsageError
from bakehouse.lock import Lock, WeightPin
from bakehouse.sources import files as known
from bakehouse.sources import weights
from bakehouse.sources.weights import ensure, pin_weights
from bakehouse.system.http import Http
from tests.support.clocks import ImpatientClock
from tests.support.filehost import Handler, cut, status
from tests.support.heard import Heard
from tests.support.hubhost import Hub, serve_hub
from tests.support.recipes import make_loaded
from tests.support.weights import MODEL, pinned, refusal

pytestmark = pytest.mark.integration
COMMIT, SHA = "5" * 40, "a" * 64


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as served:
        yield served


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def ctx(context: Context, hub: Hub, heard: Heard) -> Context:
    clock = ImpatientClock()
    return replace(
        context, environment={"HF_ENDPOINT": hub.url}, clock=clock, http=Http(clock),
        progress=heard,
    )  # fmt: skip


def listed(name: Any, size: Any = 5, **changes: Any) -> dict[str, Any]:
    lfs = {"sha256": SHA, "size": size, "pointerSize": 134}
    return {"rfilename": name, "size": size, "lfs": lfs, **changes}


def answer(hub: Hub, body: bytes) -> None:
    hub.api.pages["/api/models/org/model/revision/main"] = lambda h: h.answer(200, body)


def publish(hub: Hub, *rows: Any) -> None:
    answer(hub, json.dumps({"id": "m", "sha": COMMIT, "siblings": rows}).encode())


def pin(ctx: Context, folder: Path, files: str = "**") -> WeightPin:
    loaded = make_loaded(folder, weights={"model": {"hub": "org/model", "files": files}})
    return pin_weights(ctx, loaded.folder, "model", loaded.recipe.weights.model)


def test_hub_listing_refuses_odd_rows_and_bodies(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    rows = (
        listed("a.gguf", -5), listed("a.gguf", size=True), listed("a.gguf", 10**30),
        listed("a.gguf", "5"), listed("a.gguf", lfs=[1]),
        listed("a.gguf", lfs={"sha256": "../../x", "size": 5, "pointerSize": 1}), ["a.gguf"], None,
    )  # fmt: skip
    bodies = [json.dumps({"id": "m", "sha": COMMIT, "siblings": [row]}).encode() for row in rows]
    bodies += [b"[" * 200_000, b"\xff\xfe", b'"x"', b'{"id": "m", "sha": 1e999}', b"<html>"]
    got = []
    for body in bodies:
        answer(hub, body)
        got.append(refusal(lambda: pin(ctx, tmp_path)))
    assert got == ["hub: the hub's answer is not a listing"] * len(bodies)
    with pytest.raises(HostError, match="not a listing") as caught:
        fit.run(ctx, fit.Options(hub="org/model"))
    assert "HF_ENDPOINT" in str(caught.value.hint)


def test_hub_listing_refuses_unsafe_file_names(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    names = ("../a.gguf", "x/../a.gguf", "/a.gguf", "./a.gguf", "x//a.gguf", "a\0.gguf",
             "a\x1b[2J.gguf", "\ud800.gguf", "a\n.gguf", f"{'x' * 300}.gguf",
             f"{'x/' * 600}a.gguf")  # fmt: skip
    for name in names:
        publish(hub, listed(name))
        with pytest.raises(LockError, match="unsafe file name") as caught:
            pin(ctx, tmp_path)
        assert len(caught.value.what) < 200
        with pytest.raises(NotFound, match="no GGUF"):  # nor are they advised
            fit.run(ctx, fit.Options(hub="org/model"))


def test_hub_listing_of_no_whole_model_is_refused(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    rows = {
        "a-00001-of-99999.gguf": "weights-shards: 99998 of 99999 shards are missing",
        "a-00002-of-00003.safetensors": "weights-shards: 2 of 3 shards are missing",
        "a-00000-of-00000.gguf": "weights-shards: 'a' has shards that are not among its own 0",
        "a-00007-of-00003.gguf": "weights-shards: 'a' has shards that are not among its own 3",
    }
    got = {}
    for name, said in rows.items():
        publish(hub, listed(name))
        got[name] = refusal(lambda: pin(ctx, tmp_path))[: len(said)]
    assert got == rows
    publish(hub, listed("a.safetensors"), listed("a.safetensors/b.safetensors"))
    with pytest.raises(LockError, match="a file and a folder"):
        pin(ctx, tmp_path)


def test_hub_empty_weight_file_is_neither_pinned_nor_advised(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    publish(hub, listed("m-Q8_0.gguf", 0), listed("m-Q4_0.gguf", 10**9))
    with pytest.raises(LockError, match="is empty in the repository"):
        pin(ctx, tmp_path, "m-Q8_0.gguf")
    names = [rung["name"] for rung in fit.run(ctx, fit.Options(hub="org/model")).result["rungs"]]
    assert names == ["Q4_0"]


def test_hub_file_deleted_since_it_was_pinned(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    repo = hub.repo()
    repo.commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    for code in (404, 410, 451):
        repo.resources["m.gguf"].faults = [status(code)]
        with pytest.raises(NotFound, match="no longer offers this file") as caught:
            ensure(ctx, loaded, lock)
        assert "--update" in str(caught.value.hint)


def test_hub_waiting_shows_reason_and_seconds(
    ctx: Context, hub: Hub, heard: Heard, tmp_path: Path
) -> None:
    repo = hub.repo()
    repo.commit({"m.gguf": MODEL})
    page = "/api/models/org/model/revision/main"
    real, tries = hub.api.pages[page], []

    def busy(handler: Handler) -> None:
        tries.append(1)
        handler.answer(429, b"", {"Retry-After": "7"}) if len(tries) < 2 else real(handler)

    hub.api.pages[page] = busy
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    assert heard.lines[0].startswith("the hub: it answered 429; try 2 of 4 in 7.0 s: ")
    repo.resources["m.gguf"].faults = [status(503)]
    ensure(ctx, loaded, lock)
    assert heard.lines[1].startswith("the host answers 503 Service Unavailable; try 2 of 6 in ")
    assert isinstance(ctx.clock, ImpatientClock)
    assert len(ctx.clock.slept) == 2


def test_hub_that_asks_for_hours_is_not_waited_for(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    page = "/api/models/org/model/revision/main"
    hub.api.pages[page] = lambda h: h.answer(429, b"", {"Retry-After": "9999"})
    with pytest.raises(HostError, match="answered 429"):
        pin(ctx, tmp_path)
    assert isinstance(ctx.clock, ImpatientClock)
    assert not ctx.clock.slept


def test_hub_refused_on_loopback_is_reported_at_once(
    ctx: Context, hub: Hub, heard: Heard, tmp_path: Path
) -> None:
    gone = replace(ctx, environment={"HF_ENDPOINT": "http://127.0.0.1:1"})
    with pytest.raises(HostError, match="connection refused"):
        pin(gone, tmp_path)
    loaded = make_loaded(tmp_path, weights={"model": {"url": "http://127.0.0.1:1/m.gguf"}})
    with pytest.raises(HostError, match="connection refused"):
        pin_weights(ctx, loaded.folder, "model", loaded.recipe.weights.model)
    said = [line.partition(": http")[0].partition(" in ")[0] for line in heard.lines]
    assert said == [
        "the hub: connection refused; try 2 of 2",
        "connection refused; try 2 of 2",
    ]
    assert isinstance(ctx.clock, ImpatientClock)
    assert sum(ctx.clock.slept) < 6


def whole_but_not_placed(ctx: Context, lock: Lock) -> Path:
    """Where a download lies that was ended while it was hashed."""
    files = lock.weights["model"].files
    return weights.folder_of(ctx.places, files) / ".incoming" / files[0].sha256


def test_download_that_was_whole_when_killed_is_not_repeated(
    ctx: Context, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = hub.repo()
    repo.commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")

    def killed(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "hash_fetched", killed)
    with pytest.raises(KeyboardInterrupt):
        ensure(ctx, loaded, lock)
    assert whole_but_not_placed(ctx, lock).read_bytes() == MODEL
    monkeypatch.undo()
    asked = len(hub.content.requests)
    assert Path(ensure(ctx, loaded, lock)["model"].first).read_bytes() == MODEL
    assert len(hub.content.requests) == asked
    notes = list((ctx.places.weights / ".known").iterdir())
    assert len(notes) == 1  # of the file in its place, none of the way there


def test_download_replaces_another_file_in_its_place(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    repo = hub.repo()
    repo.commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    left = whole_but_not_placed(ctx, lock)
    left.parent.mkdir(parents=True)
    left.write_bytes(b"x" * len(MODEL))
    assert Path(ensure(ctx, loaded, lock)["model"].first).read_bytes() == MODEL


def test_download_of_pieces_of_two_files_is_repeated(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    """A host without validators may give the rest of another file, within one download."""
    big = MODEL + os.urandom(300_000)
    repo = hub.repo()
    repo.commit({"m.gguf": big})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    resource = repo.resources["m.gguf"]

    def beginning_of_another(handler: Handler) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(big)))
        handler.end_headers()
        handler.write(b"other" * 1000)
        handler.close_connection = True
        return True

    resource.etag = None
    resource.faults = [beginning_of_another]
    assert Path(ensure(ctx, loaded, lock)["model"].first).read_bytes() == big
    assert [r.headers.get("range") for r in hub.content.requests] == [None, "bytes=5000-", None]


def test_download_gives_up_on_a_host_that_cuts_at_the_same_place(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    repo = hub.repo()
    repo.commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    resource = repo.resources["m.gguf"]
    resource.ranges, resource.etag = False, None

    def again(handler: Handler) -> bool:
        resource.faults.append(again)
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(MODEL)))
        handler.end_headers()
        handler.write(MODEL[:100])
        handler.close_connection = True
        return True

    resource.faults = [again]
    with pytest.raises(HostError, match="the answer was cut off"):
        ensure(ctx, loaded, lock)
    assert len(hub.content.requests) <= 8


def test_download_names_an_html_page(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    repo = hub.repo()
    repo.commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    page = status(200, b"<html>log in</html>", {"Content-Type": "text/html; charset=utf-8"})
    repo.resources["m.gguf"].faults = [page]
    with pytest.raises(HostError, match="19 offered, as an HTML page"):
        ensure(ctx, loaded, lock)


def test_hash_cache_that_cannot_be_written_is_no_obstacle(
    ctx: Context, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = hub.repo()
    repo.commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    ensure(ctx, loaded, lock)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(known, "write_atomic", full)
    again = ensure(ctx, loaded, lock, rehash=True)
    assert Path(again["model"].first).read_bytes() == MODEL


def test_lock_refuses_paths_that_leave_the_folder() -> None:
    rows = (("../m.gguf", SHA), ("/m.gguf", SHA), ("a/./m.gguf", SHA), ("m.gguf", "../../../x"),
            ("", SHA))  # fmt: skip
    for path, sha256 in rows:
        with pytest.raises(ValueError, match="does not stay in its folder"):
            WeightPin.model_validate(
                {"origin": "hub:o/m", "files": [{"path": path, "size": 1, "sha256": sha256}]}
            )


def test_download_continues_while_it_makes_progress(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    """However often a host cuts, a download that comes further each time is gone on with."""
    big = MODEL + os.urandom(20_000)
    repo = hub.repo()
    repo.commit({"m.gguf": big})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    etag = repo.resources["m.gguf"].etag
    repo.resources["m.gguf"].faults = [cut(1000, etag=etag) for _ in range(15)]
    assert Path(ensure(ctx, loaded, lock)["model"].first).read_bytes() == big


def test_hub_endpoint_refuses_credentials_plain_http_and_malformed_urls(
    ctx: Context, tmp_path: Path
) -> None:
    urls = (
        "https://user:sesame99@hub.example", "https://sesame99@hub.example", "http://[::1",
        "https://hub.example/?token=sesame99", "https://hub.example/#sesame99", "https://exa mple",
        "https://", "hub.example", "https://hub.example:port", "https://hub.example\r\nx: 1",
        "http://hub.example.org",
    )  # fmt: skip
    for url in urls:
        wrong = replace(ctx, environment={"HF_ENDPOINT": url})
        with pytest.raises(UsageError, match="HF_ENDPOINT must") as caught:
            pin(wrong, tmp_path)
        shown = f"{caught.value} {caught.value.where}"
        assert "\r" not in shown
        assert "sesame99" not in shown.partition("#")[0]


def test_hub_cache_that_cannot_be_written_is_no_obstacle(
    ctx: Context, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hub.repo().commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"):
        for place in ("~nobody-of-that-name/x", "/proc/1/root/none", "/dev/null"):
            there = replace(ctx, environment={**ctx.environment, name: place})
            first = Path(ensure(there, loaded, lock)["model"].first)
            assert first.read_bytes() == MODEL
            assert first.resolve().is_relative_to(ctx.places.weights)
            first.unlink()


def test_weights_path_of_an_unknown_user_is_not_found(ctx: Context, tmp_path: Path) -> None:
    loaded = make_loaded(tmp_path, weights={"model": {"path": "~nobody-of-that-name/m.gguf"}})
    with pytest.raises(LockError, match="not found"):
        pin_weights(ctx, loaded.folder, "model", loaded.recipe.weights.model)


def test_weights_name_what_is_in_their_way(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    hub.repo().commit({"x/m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="x/*.gguf")
    cached = replace(ctx, environment={**ctx.environment, "HF_HOME": str(tmp_path / "hf")})
    folder = weights.folder_of(ctx.places, lock.weights["model"].files)
    for own in (ctx, cached):
        for in_the_way in ("x/m.gguf/more", "x"):
            path = folder / in_the_way
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir() if "/" in in_the_way else path.write_text("")
            with pytest.raises(HostError) as caught:
                ensure(own, loaded, lock)
            assert caught.value.id == "disk"
            assert str(folder / "x") in str(caught.value.where)
            shutil.rmtree(folder)


def test_header_refuses_another_part_of_the_file(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    repo = hub.repo()
    repo.commit({"m-Q4_0.gguf": MODEL})
    path = f"/org/model/resolve/{repo.commit({'m-Q4_0.gguf': MODEL})}/m-Q4_0.gguf"
    total = len(MODEL)

    def lies(handler: Handler) -> None:
        handler.answer(206, MODEL[5:], {"Content-Range": f"bytes 5-{total - 1}/{total}"})

    hub.api.pages[path] = lies
    outcome = fit.run(ctx, fit.Options(hub="org/model"))
    assert any("another part of the file" in note for note in outcome.result["notes"])
    assert outcome.result["shape"] is None


def test_recipe_refuses_a_signed_url(tmp_path: Path) -> None:
    queries = ("token=x", "a=1&X-Amz-Signature=x", "sig=x", "access_token=x", "api_key=x",
               "X-Goog-Credential=x")  # fmt: skip
    for query in queries:
        with pytest.raises(RecipeError) as caught:
            make_loaded(tmp_path, weights={"model": {"url": f"https://host.example/m?{query}"}})
        assert "must not contain" in str(caught.value.faults)
    for fine in ("download=true", "version=2&design=x"):
        make_loaded(tmp_path, weights={"model": {"url": f"https://host.example/m.gguf?{fine}"}})
