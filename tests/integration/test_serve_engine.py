"""The real llama-server with the real model: it is served, proven, and leaves nothing."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bakehouse.context import Context
from bakehouse.engines.base import read_counters
from bakehouse.errors import NotHealthy
from bakehouse.probe.runner import run_probe
from bakehouse.recipe.models import Probe
from bakehouse.server.launcher import ServerSpec
from bakehouse.server.session import start_or_reuse
from bakehouse.server.status import folders, get_status, stop
from bakehouse.server.verification import Prove
from tests.support.serving import Notes, agree, left_of, order

pytestmark = [pytest.mark.integration, pytest.mark.engine]

QUESTIONS = Probe.model_validate(
    {
        "request": {"max_tokens": 16},
        "facts": {
            "questions": [
                {"ask": "What is 2+2? Answer with a number.", "answers": ["4", "four"]},
                {"ask": "What is the opposite of hot?", "answers": ["cold"]},
                {"ask": "The capital of France is", "answers": ["Paris"], "mode": "completion"},
            ]
        },
    }
)


@pytest.fixture(autouse=True)
def _nothing_left(context: Context) -> Iterator[None]:
    yield
    for folder in folders(context.places):
        stop(folder)
        assert not left_of(context, folder.name)


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    folder = tmp_path / "run"
    folder.mkdir()
    return Notes(folder)


@pytest.fixture
def real(context: Context, llama_server: Path, smollm2: Path) -> Callable[..., ServerSpec]:
    def make(*flags: str, **serve: object) -> ServerSpec:
        command = (str(llama_server), "-m", str(smollm2), "-c", "1024", "-t", "2", *flags)
        return order(context, command=command, model=str(smollm2), ready=60.0, **serve)  # type: ignore[arg-type]

    return make


@pytest.fixture
def questions(context: Context) -> Prove:
    return lambda endpoint: run_probe(context, endpoint, QUESTIONS)


def test_engine_is_served_and_verified_twice(
    context: Context, notes: Notes, real: Callable[..., ServerSpec], questions: Prove
) -> None:
    wanted = real("-fa", "on", slots=2)
    ready = start_or_reuse(context, wanted, questions, notes)
    seen = {c.id: c.observed for c in notes.seen}
    assert all(c.passed for c in notes.seen)
    assert seen["context"] == "1024 (512 + 512)"
    assert seen["flash-attention"] == "enabled"
    assert ready.server.port
    models = context.http.ask("GET", f"{ready.server.url}/v1/models").json()
    assert models["data"][0]["id"] == "fake"  # the name, and not the nonce, is the model's id
    metrics = context.http.ask("GET", f"{ready.server.url}/metrics").text
    counted = read_counters(metrics)
    assert counted is not None
    assert counted.generated
    again = start_or_reuse(context, wanted, questions, notes)
    assert again.again
    assert again.server.process == ready.server.process
    stopped = stop(ready.server.folder)
    assert stopped.ran
    assert not stopped.killed


def test_engine_speculation_is_on(
    context: Context, notes: Notes, real: Callable[..., ServerSpec]
) -> None:
    start_or_reuse(context, real("--spec-type", "ngram-simple"), agree, notes)
    assert next(c for c in notes.seen if c.id == "speculation").observed == "true"


def test_engine_speculation_without_a_drafter(
    context: Context, notes: Notes, real: Callable[..., ServerSpec]
) -> None:
    with pytest.raises(NotHealthy):
        start_or_reuse(context, real("--spec-type", "draft-simple"), agree, notes)
    [missing] = [c for c in notes.seen if not c.passed]
    assert missing.id == "speculation"
    assert "draft-simple without -md" in missing.observed


def test_engine_drafter_without_a_mode(
    context: Context, notes: Notes, real: Callable[..., ServerSpec], smollm2: Path
) -> None:
    with pytest.raises(NotHealthy) as caught:
        start_or_reuse(context, real("-md", str(smollm2)), agree, notes)
    assert "-md without --spec-type" in caught.value.what


def test_engine_layers_without_a_gpu(
    context: Context, notes: Notes, real: Callable[..., ServerSpec]
) -> None:
    with pytest.raises(NotHealthy):
        start_or_reuse(context, real("-ngl", "99"), agree, notes)
    assert "gpu-layers" in {c.id for c in notes.seen if not c.passed}


def test_engine_checks_the_key(
    context: Context, notes: Notes, real: Callable[..., ServerSpec]
) -> None:
    ready = start_or_reuse(context, real(key="sekret-key-1"), agree, notes)
    assert context.http.ask("GET", f"{ready.server.url}/v1/models").status == 401
    assert next(c for c in notes.seen if c.id == "key").passed
    assert "key-1" not in (ready.server.folder / "server.log").read_text()
    stop(ready.server.folder)
    assert not (ready.server.folder / "api-key").exists()


def test_engine_ignores_the_users_own_settings(
    context: Context, notes: Notes, real: Callable[..., ServerSpec], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = tmp_path / ".config" / "llama.cpp"
    config.mkdir(parents=True)
    (config / "config.ini").write_text("[*]\nctx-size = 256\n")
    user = {"HOME": str(tmp_path), "LLAMA_ARG_PORT": "1", "LLAMA_ARG_CTX_SIZE": "256"}
    ctx = Context(context.places, context.recipes, {**context.environment, **user})
    start_or_reuse(ctx, real(), agree, notes)
    assert next(c for c in notes.seen if c.id == "context").observed == "1024 (1024)"


def test_engine_errors_quote_its_log(
    context: Context, notes: Notes, real: Callable[..., ServerSpec]
) -> None:
    for flags, words in (
        (("--no-such-flag",), "invalid argument"),
        (("-m", "/nowhere/x.gguf"), "failed to open GGUF file"),
    ):
        with pytest.raises(NotHealthy) as caught:
            start_or_reuse(context, real(*flags), agree, notes)
        assert "exited by itself with 1" in caught.value.what
        assert words in str(caught.value.where)


def test_engine_fixed_port_is_refused_to_a_second_server(
    context: Context, notes: Notes, real: Callable[..., ServerSpec]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ready = start_or_reuse(context, real(port=port), agree, notes)
    assert ready.server.port == port
    assert get_status(ready.server.folder).state
    start_or_reuse(context, real(port=port), agree, notes)


def test_engine_killed_is_recorded(
    context: Context, notes: Notes, real: Callable[..., ServerSpec]
) -> None:
    ready = start_or_reuse(context, real(), agree, notes)
    ready.server.process.send(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while get_status(ready.server.folder).word != "ended":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ended = get_status(ready.server.folder).state
    assert ended is not None
    assert ended.ended is not None
    assert "SIGKILL" in ended.ended.says
