"""The login of `hf auth login`, and offline mode: what huggingface_hub reads is honoured here."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path

import pytest

from bakehouse import debug_log
from bakehouse.context import Context
from bakehouse.errors import HostError, UsageError
from bakehouse.progress import Bar, Silent
from bakehouse.sources import files
from bakehouse.sources import files as known
from bakehouse.sources.huggingface import headers, token
from bakehouse.sources.weights import ensure, look_first, refuse_offline
from tests.support.clocks import ImpatientClock
from tests.support.hubhost import TOKEN, Hub, serve_hub
from tests.support.weights import MODEL, pinned

pytestmark = pytest.mark.integration


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
def ctx(context: Context, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Context:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    environment = {"HF_ENDPOINT": hub.url}
    return replace(context, environment=environment, clock=ImpatientClock(), progress=Bars())


def with_variables(ctx: Context, **variables: object) -> Context:
    more = {name: str(value) for name, value in variables.items()}
    return replace(ctx, environment={**ctx.environment, **more})


def login(path: Path, text: str = TOKEN + "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("variable", "value", "file"),
    [
        ("HF_TOKEN", TOKEN, ""),
        ("HF_TOKEN_PATH", "elsewhere/my-token", "elsewhere/my-token"),
        ("HF_HOME", "hf", "hf/token"),
        ("XDG_CACHE_HOME", "cache", "cache/huggingface/token"),
        ("HOME", "", ".cache/huggingface/token"),
    ],
)
def test_login_token_is_sent_to_the_hub_only_and_never_shown(
    ctx: Context, hub: Hub, tmp_path: Path, variable: str, value: str, file: str
) -> None:
    if file:
        login(tmp_path / file)
    repo = hub.repo()
    repo.private = True
    repo.commit({"m.gguf": MODEL})
    said = StringIO()
    debug_log.configure(said, ctx.redactor, as_json=False)
    try:
        own = with_variables(ctx, **{variable: tmp_path / value if file else value})
        loaded, lock = pinned(own, tmp_path, hub="org/model", files="*.gguf")
        ensure(own, loaded, lock)
        debug_log.debug("token", it=TOKEN)
    finally:
        debug_log.silence()
    assert {r.headers.get("authorization") for r in hub.api.requests} == {f"Bearer {TOKEN}"}
    assert all("authorization" not in r.headers for r in hub.content.requests)
    assert ctx.redactor.text(f"it was {TOKEN}!") == "it was [hidden]!"
    assert "hub" in said.getvalue()
    assert TOKEN not in said.getvalue() + lock.model_dump_json() + repr(token(own))
    kept = (p for p in ctx.places.cache.rglob("*") if p.is_file())
    assert not [p for p in kept if TOKEN.encode() in p.read_bytes()]


def test_login_token_stays_with_the_endpoint_when_a_listing_redirects(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    """The library follows redirects: without the token when they leave the endpoint."""
    hub.repo().commit({"m.gguf": MODEL})
    page = "/api/models/org/model/revision/main"
    hub.content.pages[page] = hub.api.pages[page]
    there = {"Location": hub.content.at(f"{page}?blobs=true")}
    hub.api.pages[page] = lambda handler: handler.answer(302, b"", there)
    pinned(with_variables(ctx, HF_TOKEN=TOKEN), tmp_path, hub="org/model", files="*.gguf")
    assert hub.api.requests[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert "authorization" not in hub.content.requests[0].headers


def test_login_variables_override_the_file_and_a_switch_both(ctx: Context, tmp_path: Path) -> None:
    own = with_variables(ctx, HF_TOKEN_PATH=login(tmp_path / "t", "of-the-file"))
    of_file = {"Authorization": "Bearer of-the-file"}
    (tmp_path / "empty").write_text(" \n")
    got = {
        "variable": headers(with_variables(own, HF_TOKEN="of-the-variable")),
        "blank": headers(with_variables(own, HF_TOKEN=" ")),
        "off": headers(with_variables(own, HF_HUB_DISABLE_IMPLICIT_TOKEN="Yes")),
        "on": headers(with_variables(own, HF_HUB_DISABLE_IMPLICIT_TOKEN="0")),
        "empty": headers(with_variables(ctx, HF_TOKEN_PATH=tmp_path / "empty")),
        "gone": headers(with_variables(ctx, HF_TOKEN_PATH=tmp_path / "t/below")),
        "nothing": headers(ctx),
    }
    assert got == {
        "variable": {"Authorization": "Bearer of-the-variable"}, "blank": of_file, "off": {},
        "on": of_file, "empty": {}, "gone": {}, "nothing": {},
    }  # fmt: skip
    assert "of-the-file" not in ctx.redactor.text("of-the-file"), "a token of any look is hidden"


def test_login_refuses_text_that_cannot_be_a_token(ctx: Context, hub: Hub, tmp_path: Path) -> None:
    for text in ("two words", "zwölf-zeichen", "a\x00b", "hf_\x7fx"):
        path = login(tmp_path / "t", text)
        for own in (with_variables(ctx, HF_TOKEN_PATH=path), with_variables(ctx, HF_TOKEN=text)):
            with pytest.raises(UsageError, match="is not a valid token") as caught:
                pinned(own, tmp_path, hub="org/model", files="*.gguf")
            assert text not in f"{caught.value.what} {caught.value.where} {caught.value.hint}"
    assert not hub.api.requests


def test_login_files_that_cannot_be_read_are_named_if_the_user_named_them(
    ctx: Context, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "token")  # it is not waited for
    for path, why in ((tmp_path / "token", "not a file"), (tmp_path, "Is a directory")):
        with pytest.raises(HostError, match=why) as caught:
            token(with_variables(ctx, HF_TOKEN_PATH=path))
        assert (caught.value.id, caught.value.where) == ("hub-token", str(path))
    assert token(with_variables(ctx, HF_HOME=tmp_path)) is None


@pytest.mark.parametrize("state", ["gated", "private"])
def test_login_refusal_names_where_the_token_came_from(
    ctx: Context, hub: Hub, tmp_path: Path, state: str
) -> None:
    repo = hub.repo()
    setattr(repo, state, True)
    repo.commit({"m.gguf": MODEL})
    path = login(tmp_path / "t", "hf_wrong")
    id_ = {"gated": "hub-gated", "private": "hub-login"}[state]
    for own, hint in (
        (with_variables(ctx, HF_TOKEN_PATH=path), str(path)),
        (with_variables(ctx, HF_TOKEN="hf_wrong"), "HF_TOKEN"),
        (ctx, "hf auth login"),
    ):
        with pytest.raises(HostError) as caught:
            pinned(own, tmp_path, hub="org/model", files="*.gguf")
        assert caught.value.id == id_
        assert hint in str(caught.value.hint)
        assert "hf_wrong" not in f"{caught.value} {caught.value.where} {caught.value.hint}"


# --- offline mode -------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_names_missing_files_before_anything_is_asked(
    ctx: Context, hub: Hub, tmp_path: Path, variable: str
) -> None:
    hub.repo().commit({"m.gguf": MODEL, "x/n.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="m.gguf")
    hub.api.requests.clear()
    off = with_variables(ctx, **{variable: "1"})
    for call in (lambda: ensure(off, loaded, lock), lambda: refuse_offline(off, lock),
                 lambda: pinned(off, tmp_path, hub="org/model", files="m.gguf"),
                 lambda: look_first(off, tmp_path, loaded.recipe.weights.model)):  # fmt: skip
        with pytest.raises(HostError, match=f"^{variable} is set; cannot download") as caught:
            call()
        assert caught.value.id == "hub-offline"
        assert "org/model" in str(caught.value.where)
        assert variable in str(caught.value.hint)
    with pytest.raises(HostError, match=rf"1 of 1 files, {len(MODEL):,} bytes: m\.gguf"):
        ensure(off, loaded, lock)
    assert not hub.api.requests
    assert not hub.content.requests


def test_offline_refuses_before_another_role_is_fetched(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    hub.repo().commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="m.gguf")
    hub.content.put("/other.gguf", MODEL)
    web = hub.content.at("/other.gguf")
    first = lock.weights["model"].model_copy(update={"origin": web, "revision": None})
    both = lock.model_copy(update={"weights": {"model": first, "drafter": lock.weights["model"]}})
    with pytest.raises(HostError, match="HF_HUB_OFFLINE"):
        ensure(with_variables(ctx, HF_HUB_OFFLINE="yes"), loaded, both)
    assert not hub.content.requests


def test_offline_uses_the_cache_and_refuses_a_damaged_one(
    ctx: Context, hub: Hub, tmp_path: Path
) -> None:
    hub.repo().commit({"m.gguf": MODEL})
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="m.gguf")
    blob = tmp_path / "hf/hub/models--org--model/blobs" / hashlib.sha256(MODEL).hexdigest()
    blob.parent.mkdir(parents=True)
    blob.write_bytes(bytes(len(MODEL)))
    hub.api.requests.clear()
    off = with_variables(ctx, HF_HUB_OFFLINE="1", HF_HOME=tmp_path / "hf")
    with pytest.raises(HostError, match="HF_HUB_OFFLINE"):
        ensure(off, loaded, lock)
    blob.write_bytes(MODEL)
    assert Path(ensure(off, loaded, lock)["model"].first).read_bytes() == MODEL
    again = with_variables(ctx, HF_HUB_OFFLINE="1")
    assert Path(ensure(again, loaded, lock)["model"].first).read_bytes() == MODEL
    assert not hub.api.requests
    for on in ("0", "", "false", "no"):
        pinned(with_variables(ctx, HF_HUB_OFFLINE=on), tmp_path, hub="org/model", files="m.gguf")


# --- hashing downloads --------------------------------------------------------------------------


def test_hash_of_a_large_download_shows_progress(
    ctx: Context, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repo().commit({"m.gguf": MODEL, "n.gguf": MODEL + b"n"})
    assert isinstance(ctx.progress, Bars)
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="n.gguf")
    ensure(ctx, loaded, lock)
    assert not [title for title in ctx.progress.seen if title.startswith("hash")]
    loaded, lock = pinned(ctx, tmp_path, hub="org/model", files="m.gguf")
    monkeypatch.setattr(known, "SHOWN", len(MODEL))
    ensure(ctx, loaded, lock)
    assert ctx.progress.seen["hash m.gguf"][-1] == len(MODEL)
    data = b"x" * 1000
    hub.content.put("/file", data)
    monkeypatch.setattr(files, "SHOWN", 1000)
    sha256 = hashlib.sha256(data).hexdigest()
    files.fetch_pinned(ctx, hub.content.at("/file"), tmp_path / "file", sha256=sha256, title="it")
    assert ctx.progress.seen["hash it"][-1] == 1000
