"""`hf auth login`, and a hub that may not be asked: what huggingface_hub reads is honoured here."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from bakehouse import logs
from bakehouse.context import Context
from bakehouse.errors import HostError, UsageError
from bakehouse.lock import Lock
from bakehouse.progress import Bar, Silent
from bakehouse.recipe.load import Loaded
from bakehouse.sources import files, known
from bakehouse.sources.hublogin import headers, token
from bakehouse.sources.pinning import look_first, pin_weights
from bakehouse.sources.weights import ensure, refuse_offline
from tests.support.checkpoints import f32, gguf_bytes, llama_metadata
from tests.support.clocks import ImpatientClock
from tests.support.hubhost import TOKEN, Hub, serve_hub
from tests.support.recipes import make_loaded

pytestmark = pytest.mark.integration

MODEL = gguf_bytes(llama_metadata(), [f32("a", 8, 4)])


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as served:
        yield served


@dataclass
class Bars(Silent):
    """Keeps the titles of bars, and what was reported to them."""

    seen: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def bar(self, title: str, unit: str = "") -> Iterator[Bar]:
        seen = self.seen.setdefault(title, [])

        class One:
            def update(self, done: float, total: float | None = None, note: str = "") -> None:
                seen.append(done)

        yield One()


@pytest.fixture
def ctx(context: Context, hub: Hub) -> Context:
    environment = {"HF_ENDPOINT": hub.url}
    return replace(context, environment=environment, clock=ImpatientClock(), progress=Bars())


def knowing(ctx: Context, **variables: object) -> Context:
    more = {name: str(value) for name, value in variables.items()}
    return replace(ctx, environment={**ctx.environment, **more})


def pinned(ctx: Context, folder: Path, **weights: Any) -> tuple[Loaded, Lock]:
    loaded = make_loaded(folder, weights={"model": weights})
    pin = pin_weights(ctx, loaded.folder, "model", loaded.recipe.weights.model)
    return loaded, Lock(recipe="test", engine="llama.cpp", wants="", weights={"model": pin})


def login(path: Path, text: str = TOKEN + "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


PLACES = {
    "HF_TOKEN_PATH": ("elsewhere/my-token", "elsewhere/my-token"),
    "HF_HOME": ("hf", "hf/token"),
    "XDG_CACHE_HOME": ("cache", "cache/huggingface/token"),
    "HOME": ("", ".cache/huggingface/token"),
}


@pytest.mark.parametrize("variable", PLACES)
def test_the_token_of_a_login_is_sent_to_the_hub_only_and_never_shown(
    ctx: Context, hub: Hub, tmp_path: Path, variable: str
) -> None:
    value, file = PLACES[variable]
    login(tmp_path / file)
    repo = hub.repo()
    repo.private = True
    repo.commit({"m.gguf": MODEL})
    said = StringIO()
    logs.configure(said, ctx.redactor, as_json=False)
    try:
        own = knowing(ctx, **{variable: tmp_path / value})
        loaded, lock = pinned(own, tmp_path, hub="org/model", files="*.gguf")
        ensure(own, loaded, lock)
        logs.debug("token", it=TOKEN)
    finally:
        logs.silence()
    assert {r.headers.get("authorization") for r in hub.api.requests} == {f"Bearer {TOKEN}"}
    assert all("authorization" not in r.headers for r in hub.content.requests)
    assert ctx.redactor.text(f"it was {TOKEN}!") == "it was [hidden]!"
    assert "http" in said.getvalue()
    assert TOKEN not in said.getvalue() + lock.model_dump_json() + repr(token(own))
    kept = (p for p in ctx.places.cache.rglob("*") if p.is_file())
    assert not [p for p in kept if TOKEN.encode() in p.read_bytes()]


def test_a_token_of_any_look_is_hidden(ctx: Context, tmp_path: Path) -> None:
    own = knowing(ctx, HF_TOKEN_PATH=login(tmp_path / "t", "an-odd-looking-one"))
    assert headers(own) == {"Authorization": "Bearer an-odd-looking-one"}
    assert "odd-looking" not in ctx.redactor.text("an-odd-looking-one")


def test_a_variable_goes_before_the_file_and_a_switch_before_both(
    ctx: Context, tmp_path: Path
) -> None:
    own = knowing(ctx, HF_TOKEN_PATH=login(tmp_path / "t", "of-the-file"))
    assert headers(knowing(own, HF_TOKEN="of-the-variable")) == {
        "Authorization": "Bearer of-the-variable"
    }
    assert headers(knowing(own, HF_TOKEN=" ")) == {"Authorization": "Bearer of-the-file"}
    for on in ("1", "true", "Yes", "ON"):
        assert headers(knowing(own, HF_HUB_DISABLE_IMPLICIT_TOKEN=on)) == {}
    assert headers(knowing(own, HF_HUB_DISABLE_IMPLICIT_TOKEN="0"))
    (tmp_path / "empty").write_text(" \n")
    for nothing in ("empty", "gone", "t/below"):
        assert headers(knowing(ctx, HF_TOKEN_PATH=tmp_path / nothing)) == {}
    assert headers(ctx) == {}


@pytest.mark.parametrize("text", ["two words", "zwölf-zeichen", "a\nb", "a\x00b"])
def test_a_file_that_holds_no_token_is_named_and_not_quoted(
    ctx: Context, tmp_path: Path, text: str
) -> None:
    own = knowing(ctx, HF_TOKEN_PATH=login(tmp_path / "t", text))
    with pytest.raises(UsageError, match="holds what no token holds") as caught:
        headers(own)
    assert str(tmp_path / "t") in caught.value.what
    assert text not in f"{caught.value.what} {caught.value.where} {caught.value.hint}"


@pytest.mark.parametrize("named", [True, False])
def test_a_pipe_is_not_waited_for(ctx: Context, tmp_path: Path, *, named: bool) -> None:
    os.mkfifo(tmp_path / "token")
    given = {"HF_TOKEN_PATH": str(tmp_path / "token")} if named else {"HF_HOME": str(tmp_path)}
    asking = replace(ctx, environment={**ctx.environment, **given})
    if named:
        with pytest.raises(HostError, match="no file"):
            token(asking)
    else:
        assert token(asking) is None


def test_a_file_that_cannot_be_read_is_named(ctx: Context, tmp_path: Path) -> None:
    with pytest.raises(HostError, match="cannot be read: Is a directory") as caught:
        headers(knowing(ctx, HF_TOKEN_PATH=tmp_path))
    assert caught.value.where == str(tmp_path)
    (tmp_path / "token").mkdir()
    assert headers(knowing(ctx, HF_HOME=tmp_path)) == {}, "nobody has named that one"


@pytest.mark.parametrize("state", ["gated", "private"])
def test_a_refusal_names_where_the_token_came_from(
    ctx: Context, hub: Hub, tmp_path: Path, state: str
) -> None:
    repo = hub.repo()
    setattr(repo, state, True)
    repo.commit({"m.gguf": MODEL})
    path = login(tmp_path / "t", "hf_wrong")
    with pytest.raises(HostError) as caught:
        pinned(knowing(ctx, HF_TOKEN_PATH=path), tmp_path, hub="org/model", files="*.gguf")
    assert str(path) in str(caught.value.hint)
    assert "hf_wrong" not in f"{caught.value} {caught.value.where} {caught.value.hint}"
    with pytest.raises(HostError) as caught:
        pinned(ctx, tmp_path, hub="org/model", files="*.gguf")
    assert "hf auth login" in str(caught.value.hint)


# --- a hub that may not be asked --------------------------------------------------------------


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_says_what_is_missing_before_anything_is_asked(
    ctx: Context, hub: Hub, tmp_path: Path, variable: str
) -> None:
    hub.repo().commit({"m.gguf": MODEL, "x/n.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="m.gguf")
    hub.api.requests.clear()
    off = knowing(ctx, **{variable: "1"})
    for call in (lambda: ensure(off, loaded, lock), lambda: refuse_offline(off, lock),
                 lambda: pinned(off, tmp_path, hub="org/model", files="m.gguf"),
                 lambda: look_first(off, tmp_path, loaded.recipe.weights.model)):  # fmt: skip
        with pytest.raises(HostError, match=f"^{variable} is set, so the hub is not") as caught:
            call()
        assert caught.value.id == "hub-offline"
        assert "org/model" in str(caught.value.where)
        assert variable in str(caught.value.hint)
    with pytest.raises(HostError, match=rf"1 of 1 files, {len(MODEL):,} bytes: m\.gguf"):
        ensure(off, loaded, lock)
    assert not hub.api.requests
    assert not hub.content.requests


def test_offline_is_refused_before_another_role_is_fetched(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    hub.repo().commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="m.gguf")
    host = hub.content.put("/other.gguf", MODEL)
    web = hub.content.at("/other.gguf")
    first = lock.weights["model"].model_copy(update={"origin": web, "revision": None})
    both = lock.model_copy(update={"weights": {"model": first, "drafter": lock.weights["model"]}})
    hub.api.requests.clear()
    with pytest.raises(HostError, match="HF_HUB_OFFLINE"):
        ensure(knowing(ctx, HF_HUB_OFFLINE="yes"), loaded, both)
    assert host is not None
    assert not hub.content.requests


def test_offline_what_is_here_is_enough(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    commit = hub.repo().commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="m.gguf")
    blob = tmp_path / "hf/hub/models--org--model/blobs" / hashlib.sha256(MODEL).hexdigest()
    blob.parent.mkdir(parents=True)
    blob.write_bytes(MODEL)
    hub.api.requests.clear()
    off = knowing(ctx, HF_HUB_OFFLINE="1", HF_HOME=tmp_path / "hf")
    assert Path(ensure(off, loaded, lock)["model"].first).read_bytes() == MODEL
    again = knowing(ctx, HF_HUB_OFFLINE="1")
    assert Path(ensure(again, loaded, lock)["model"].first).read_bytes() == MODEL
    assert not hub.api.requests, commit


def test_offline_a_damaged_cache_is_no_reason_to_ask(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    hub.repo().commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="m.gguf")
    blob = tmp_path / "hf/hub/models--org--model/blobs" / hashlib.sha256(MODEL).hexdigest()
    blob.parent.mkdir(parents=True)
    blob.write_bytes(bytes(len(MODEL)))
    hub.api.requests.clear()
    with pytest.raises(HostError, match="HF_HUB_OFFLINE"):
        ensure(knowing(ctx, HF_HUB_OFFLINE="1", HF_HOME=tmp_path / "hf"), loaded, lock)
    assert not hub.api.requests


@pytest.mark.parametrize("off", ["0", "", "false", "no"])
def test_a_switch_that_is_off_is_off(ctx: Context, hub: Hub, tmp_path: Path, off: str) -> None:
    hub.repo().commit({"m.gguf": MODEL})
    own = knowing(ctx, HF_HUB_OFFLINE=off)
    loaded, lock = pinned(own, tmp_path, hub="org/model", files="m.gguf")
    assert ensure(own, loaded, lock)


# --- hashing what has come ----------------------------------------------------------------------


def test_hashing_a_large_file_that_was_fetched_shows_how_far_it_is(
    ctx: Context, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo().commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="m.gguf")
    assert isinstance(ctx.progress, Bars)
    monkeypatch.setattr(known, "SHOWN", len(MODEL))
    ensure(ctx, loaded, lock)
    assert ctx.progress.seen["hash m.gguf"][-1] == len(MODEL)
    data = b"x" * 1000
    hub.content.put("/file", data)
    monkeypatch.setattr(files, "SHOWN", 1000)
    sha256 = hashlib.sha256(data).hexdigest()
    files.fetch_pinned(ctx, hub.content.at("/file"), tmp_path / "file", sha256=sha256, title="it")
    assert ctx.progress.seen["hash it"][-1] == 1000


def test_hashing_a_small_one_takes_no_line(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    hub.repo().commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="m.gguf")
    ensure(ctx, loaded, lock)
    assert isinstance(ctx.progress, Bars)
    assert not [title for title in ctx.progress.seen if title.startswith("hash")]
