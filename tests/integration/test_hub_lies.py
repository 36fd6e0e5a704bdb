"""A hub that lies in its listing, loses files, or asks for patience: what a user is told."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bakehouse.commands import fit
from bakehouse.context import Context
from bakehouse.errors import HostError, LockError, NotFound, RecipeError, UsageError
from bakehouse.lock import Lock, WeightPin
from bakehouse.ports.http import RealHttp
from bakehouse.sources import known, weights
from bakehouse.sources.pinning import pin_weights
from bakehouse.sources.weights import ensure
from tests.integration.test_weights import MODEL, pinned
from tests.support.clocks import ImpatientClock
from tests.support.filehost import Handler, cut, status
from tests.support.heard import Heard
from tests.support.hubhost import Hub, serve_hub
from tests.support.recipes import make_loaded

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
        context, environment={"HF_ENDPOINT": hub.url}, clock=clock, http=RealHttp(clock),
        progress=heard,
    )  # fmt: skip


def listed(name: Any, size: Any = 5, **changes: Any) -> dict[str, Any]:
    return {"rfilename": name, "size": size, "lfs": {"sha256": SHA, "size": size}, **changes}


def answer(hub: Hub, body: bytes) -> None:
    for page in ("revision/main", f"tree/{COMMIT}"):
        hub.api.pages[f"/api/models/org/model/{page}"] = lambda h: h.answer(200, body)


def publish(hub: Hub, *rows: Any) -> None:
    answer(hub, json.dumps({"sha": COMMIT, "siblings": rows}).encode())


def pin(ctx: Context, folder: Path, files: str = "**") -> WeightPin:
    loaded = make_loaded(folder, weights={"model": {"hub": "org/model", "files": files}})
    return pin_weights(ctx, loaded.folder, "model", loaded.recipe.weights.model)


@pytest.mark.parametrize(
    "row",
    [
        listed("a.gguf", -5),
        listed("a.gguf", size=True),
        listed("a.gguf", 10**30),
        listed("a.gguf", 1.5),
        listed("a.gguf", "5"),
        listed("a.gguf", lfs=[1]),
        listed("a.gguf", lfs={"sha256": "../../x", "size": 5}),
        ["a.gguf"],
        5,
        None,
    ],
)
def test_rows_that_are_none_are_no_listing(
    ctx: Context, hub: Hub, tmp_path: Path, row: object
) -> None:
    publish(hub, row)
    for ask in (lambda: pin(ctx, tmp_path), lambda: fit.run(ctx, fit.Options(hub="org/model"))):
        with pytest.raises(HostError, match="not a listing") as caught:
            ask()
        assert "HF_ENDPOINT" in str(caught.value.hint)


@pytest.mark.parametrize(
    "body",
    [b"[" * 200_000, b'{"sha":' * 100_000, b"\xff\xfe", b'"x"', b'{"sha": 1e999}', b"9" * 9000],
)  # fmt: skip
def test_an_answer_that_is_no_json_of_ours(
    ctx: Context, hub: Hub, tmp_path: Path, body: bytes
) -> None:
    answer(hub, body)
    with pytest.raises(HostError, match="not a listing"):
        pin(ctx, tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../a.gguf", "x/../a.gguf", "/a.gguf", "./a.gguf", "x//a.gguf", "a\0.gguf", "a\x1b[2J.gguf",
     "\ud800.gguf", "a\n.gguf", f"{'x' * 300}.gguf", f"{'x/' * 600}a.gguf"],
)  # fmt: skip
def test_names_that_cannot_be_files_of_ours(
    ctx: Context, hub: Hub, tmp_path: Path, name: str
) -> None:
    publish(hub, listed(name))
    with pytest.raises(LockError, match="not a usable file name") as caught:
        pin(ctx, tmp_path)
    assert len(caught.value.what) < 200
    with pytest.raises(NotFound, match="no GGUF"):  # nor are they advised
        fit.run(ctx, fit.Options(hub="org/model"))


def test_a_file_that_is_a_folder_too(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    publish(hub, listed("a.safetensors"), listed("a.safetensors/b.safetensors"))
    with pytest.raises(LockError, match="a file and a folder"):
        pin(ctx, tmp_path)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a-00001-of-99999.gguf", "99998 of 99999 shards are missing"),
        ("a-00002-of-00003.safetensors", "2 of 3 shards are missing"),
        ("a-00000-of-00000.gguf", "not among its own 0"),
        ("a-00007-of-00003.gguf", "not among its own 3"),
    ],
)
def test_split_numbers_are_counted_whatever_they_say(
    ctx: Context, hub: Hub, tmp_path: Path, name: str, why: str
) -> None:
    publish(hub, listed(name))
    with pytest.raises(LockError, match=why):
        pin(ctx, tmp_path)


def test_an_empty_weight_file_is_not_pinned_and_not_advised(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    publish(hub, listed("m-Q8_0.gguf", 0), listed("m-Q4_0.gguf", 10**9))
    with pytest.raises(LockError, match="is empty in the repository"):
        pin(ctx, tmp_path, "m-Q8_0.gguf")
    names = [rung["name"] for rung in fit.run(ctx, fit.Options(hub="org/model")).result["rungs"]]
    assert names == ["Q4_0"]


@pytest.mark.parametrize("code", [404, 410, 451])
def test_a_file_that_was_taken_away_since_it_was_pinned(
    ctx: Context, hub: Hub, tmp_path: Path, code: int
) -> None:
    repo = hub.repo()
    repo.commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    repo.resources["m.gguf"].faults = [status(code)]
    with pytest.raises(NotFound, match="no longer gives out this file") as caught:
        ensure(ctx, loaded, lock)
    assert "--update" in str(caught.value.hint)


def test_waiting_is_said_with_its_reason_and_its_length(
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
    assert heard.lines[0].startswith("the hub: it answers 429; try 2 of 4 in 7.0 s: ")
    repo.resources["m.gguf"].faults = [status(503)]
    ensure(ctx, loaded, lock)
    assert heard.lines[1].startswith("the host answers 503 Service Unavailable; try 2 of 6 in ")
    assert isinstance(ctx.clock, ImpatientClock)
    assert len(ctx.clock.slept) == 2


def test_a_hub_that_asks_for_hours_is_not_waited_for(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    page = "/api/models/org/model/revision/main"
    hub.api.pages[page] = lambda h: h.answer(429, b"", {"Retry-After": "9999"})
    with pytest.raises(HostError, match="answers 429"):
        pin(ctx, tmp_path)
    assert isinstance(ctx.clock, ImpatientClock)
    assert not ctx.clock.slept


def test_nobody_listening_here_is_told_at_once(
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


def test_what_came_whole_is_not_fetched_again_after_a_kill(
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


def test_what_lies_there_and_is_another_file_is_fetched_anew(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    repo = hub.repo()
    repo.commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    left = whole_but_not_placed(ctx, lock)
    left.parent.mkdir(parents=True)
    left.write_bytes(b"x" * len(MODEL))
    assert Path(ensure(ctx, loaded, lock)["model"].first).read_bytes() == MODEL


def test_pieces_of_two_files_are_fetched_anew(ctx: Context, hub: Hub, tmp_path: Path) -> None:
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


def test_a_host_that_cuts_at_the_same_place_is_given_up(
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


def test_a_page_in_the_place_of_a_file_is_named(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    repo = hub.repo()
    repo.commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    page = status(200, b"<html>log in</html>", {"Content-Type": "text/html; charset=utf-8"})
    repo.resources["m.gguf"].faults = [page]
    with pytest.raises(HostError, match="19 offered, as an HTML page"):
        ensure(ctx, loaded, lock)


def test_a_disk_that_takes_no_note_is_no_reason_to_fail(
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


@pytest.mark.parametrize(
    ("path", "sha256"),
    [
        ("../m.gguf", SHA),
        ("/m.gguf", SHA),
        ("a/./m.gguf", SHA),
        ("m.gguf", "../../../x"),
        ("", SHA),
    ],
)
def test_a_lock_leads_nowhere_else(path: str, sha256: str) -> None:
    with pytest.raises(ValueError, match="does not stay in its folder"):
        WeightPin.model_validate(
            {"origin": "hub:o/m", "files": [{"path": path, "size": 1, "sha256": sha256}]}
        )


def test_progress_counts_only_what_is_new(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    """However often a host cuts, a download that comes further each time is gone on with."""
    big = MODEL + os.urandom(20_000)
    repo = hub.repo()
    repo.commit({"m.gguf": big})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    etag = repo.resources["m.gguf"].etag
    repo.resources["m.gguf"].faults = [cut(1000, etag=etag) for _ in range(15)]
    assert Path(ensure(ctx, loaded, lock)["model"].first).read_bytes() == big


@pytest.mark.parametrize("token", ["hf_secret\nX-Evil: 1", "hf_sécret", "hf secret", "hf_\x7fx"])
def test_a_token_that_is_none_is_said_and_not_shown(
    ctx: Context, hub: Hub, tmp_path: Path, token: str
) -> None:
    hub.repo().commit({"m.gguf": MODEL})
    wrong = replace(ctx, environment={**ctx.environment, "HF_TOKEN": token})
    with pytest.raises(UsageError, match="HF_TOKEN holds what no token holds") as caught:
        pin(wrong, tmp_path)
    assert "secret" not in f"{caught.value} {caught.value.where} {caught.value.hint}"
    assert not hub.api.requests


@pytest.mark.parametrize(
    "url",
    ["https://user:sesame99@hub.example", "https://sesame99@hub.example", "http://[::1",
     "https://hub.example/?token=sesame99", "https://hub.example/#sesame99", "https://exa mple",
     "https://", "hub.example", "https://hub.example:port", "https://hub.example\r\nx: 1"],
)  # fmt: skip
def test_an_address_that_is_no_hub_s(ctx: Context, tmp_path: Path, url: str) -> None:
    wrong = replace(ctx, environment={"HF_ENDPOINT": url})
    with pytest.raises(UsageError, match="HF_ENDPOINT is no address") as caught:
        pin(wrong, tmp_path)
    shown = f"{caught.value} {caught.value.where}"
    assert "\r" not in shown
    assert "sesame99" not in shown.partition("#")[0]


@pytest.mark.parametrize("name", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"])
@pytest.mark.parametrize("place", ["~nobody-of-that-name/x", "/proc/1/root/none", "/dev/null", "."])
def test_a_cache_that_is_nowhere_is_no_obstacle(
    ctx: Context, hub: Hub, tmp_path: Path, name: str, place: str
) -> None:
    hub.repo().commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    there = replace(ctx, environment={**ctx.environment, name: place})
    assert Path(ensure(there, loaded, lock)["model"].first).read_bytes() == MODEL


def test_a_user_who_is_not_there_is_a_path_that_is_not_there(ctx: Context, tmp_path: Path) -> None:
    loaded = make_loaded(tmp_path, weights={"model": {"path": "~nobody-of-that-name/m.gguf"}})
    with pytest.raises(LockError, match="not there"):
        pin_weights(ctx, loaded.folder, "model", loaded.recipe.weights.model)


@pytest.mark.parametrize("kind", ["folder", "file above"])
def test_what_is_in_the_way_of_weights_is_named(
    ctx: Context, hub: Hub, tmp_path: Path, kind: str
) -> None:
    hub.repo().commit({"x/m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="x/*.gguf")
    folder = weights.folder_of(ctx.places, lock.weights["model"].files)
    if kind == "folder":
        (folder / "x" / "m.gguf" / "more").mkdir(parents=True)
    else:
        folder.mkdir(parents=True)
        (folder / "x").write_text("")
    with pytest.raises(HostError) as caught:
        ensure(ctx, loaded, lock)
    assert caught.value.id == "disk"
    assert str(folder / "x") in str(caught.value.where)


def test_a_part_from_elsewhere_in_the_file_is_not_read(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize(
    "query",
    ["token=x", "a=1&X-Amz-Signature=x", "sig=x", "Expires=1&Signature=x", "access_token=x",
     "api_key=x", "X-Goog-Credential=x", "X-Amz-Security-Token=x"],
)  # fmt: skip
def test_a_signed_address_is_no_recipe_s(tmp_path: Path, query: str) -> None:
    with pytest.raises(RecipeError) as caught:
        make_loaded(tmp_path, weights={"model": {"url": f"https://host.example/m.gguf?{query}"}})
    assert "must not contain" in str(caught.value.faults)
    for fine in ("download=true", "version=2&design=x"):
        make_loaded(tmp_path, weights={"model": {"url": f"https://host.example/m.gguf?{fine}"}})
