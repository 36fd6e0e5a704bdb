"""Over real HTTP: every bad reply gets a named verdict, in bounded time, without a traceback."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bakehouse.cli import main
from bakehouse.context import Context
from bakehouse.errors import NotCorrect, NotHealthy
from bakehouse.models import Verdict
from bakehouse.probe.client import RequestLimits, served
from bakehouse.probe.models import Endpoint, Proof
from bakehouse.probe.runner import explain, run_probe
from bakehouse.recipe.models import Probe, Request, SuiteName
from tests.support import openai_fake as fake
from tests.support.openai_fake import Fault, chat, right

pytestmark = pytest.mark.integration

HASTY = RequestLimits(base=0.5, per_token=0, attempts=2, longest_wait=0.05)


ALOUD = "Okay, so somebody asks a simple question. Let me think about it before I answer, and"


def thinks_without_a_mark(handler: fake.Handler, body: dict[str, Any]) -> None:
    """A model whose template opens the thought itself; only what closes it is ever seen."""
    if body["max_tokens"] < 300:
        handler.json(chat(ALOUD, "length"))
    else:
        handler.json(chat(f"{ALOUD} it is plain.\n</think>\n\n{right(body)}"))


def streams(handler: fake.Handler, body: dict[str, Any]) -> None:
    """A server that knows nothing but streams."""
    thought = [{"reasoning_content": "Hm."}, {"reasoning_content": None}]
    deltas = [{"role": "assistant"}, *thought, *({"content": c} for c in right(body))]
    events: list[Any] = [
        {"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas
    ]
    events += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
    events += [{"choices": [], "usage": {"completion_tokens": 9}}]
    text = ": keep-alive\n\n" + "".join(f"data: {json.dumps(e)}\n\n" for e in events)
    handler.raw(f"{text}data: [DONE]\n\n".encode(), kind="text/event-stream")


TRANSLATED = {
    "4": "vier", "7": "siete", "cold": "kalt", "H2O": "H₂O", "Berlin": "柏林",
    "Pacific": "Der Stille Ozean", "Shakespeare": "莎士比亚", "January": "janvier",
}  # fmt: skip


def headers(*lines: bytes) -> Fault:
    """A right answer below headers that are written byte for byte."""

    def fault(handler: fake.Handler, body: dict[str, Any]) -> None:
        messages = body.get("messages")
        said = fake.ANSWERS.get(messages[0]["content"] if messages else "", "4")
        head = b"\r\n".join((b"HTTP/1.1 200 OK", b"Connection: close", *lines))
        handler.wfile.write(head + b"\r\n\r\n" + json.dumps(chat(said)).encode())
        handler.close_connection = True

    return fault


def judged(context: Context, fault: Fault) -> Proof:
    with fake.serving(fault) as server:
        began = time.monotonic()
        proof = run_probe(context, Endpoint(server.url), Probe(), patience=HASTY)
        assert (
            time.monotonic() - began < 60
        )  # a server that sleeps would hold each of 8 questions for 30 s
    assert len(proof.answers) == 8
    return proof


GOOD: dict[str, Fault] = {
    "plain": fake.says(lambda body: chat(right(body))),
    "markdown": fake.says(lambda body: chat(f"**{right(body)[6:-1]}**")),
    "list of parts": fake.says(lambda body: chat([{"type": "text", "text": right(body)}])),
    "thinking parts": fake.says(
        lambda body: chat([
            {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]},
            {"type": "text", "text": right(body)},
        ])
    ),
    "raw thinking": fake.says(lambda body: chat(f"<think>Hm.</think>\n{right(body)}")),
    "to=self": fake.says(lambda body: chat(f"to=self Let me think. {right(body)}")),
    "reasoning only": fake.says(lambda body: chat(None, reasoning=right(body))),
    "NaN logprobs": fake.says(lambda body: {**chat(right(body)), "logprobs": float("nan")}),
    "odd usage": fake.says(lambda body: {**chat(right(body)), "usage": {"completion_tokens": "x"}}),
    "busy at first": fake.busy(1),
    "newer name of the token limit": fake.newer_name_only,
    "needs a larger budget": fake.thinks(500),
    "a mark of the byte order": lambda handler, body: handler.raw(
        b"\xef\xbb\xbf" + json.dumps(chat(right(body))).encode()
    ),
    "other marks of thinking": fake.says(lambda body: chat(f"[THINK]{ALOUD}[/THINK]{right(body)}")),
    "a family's own mark": fake.says(
        lambda body: chat(f"<seed:think>{ALOUD}</seed:think>{right(body)}")
    ),
    "a channel of thought": fake.says(
        lambda body: chat(f"<|channel>thought\n{ALOUD}<channel|>{right(body)}")
    ),
    "nothing but streams": streams,
    "thinking aloud": thinks_without_a_mark,
    "courtesies first": fake.says(
        lambda body: chat("What a good question! Many people have asked that, and", "length")
        if body["max_tokens"] < 300 else chat(f"What a good question! {right(body)}")
    ),
    "in other languages": fake.says(
        lambda body: chat(TRANSLATED[fake.ANSWERS[fake.question(body)]])
    ),
    "HTML": fake.says(lambda body: chat(f"<p>So it is</p><p>{right(body)[6:-1]}</p>")),
    "no length": headers(),
    "a length that is no number": headers(b"Content-Length: many"),
    "a length of odd digits": headers(b"Content-Length: \xb2"),
    "a length below zero": headers(b"Content-Length: -5"),
    "BOM-less UTF-8": fake.says(lambda body: chat(f"{right(body)} \u2713 你好")),
}  # fmt: skip


def test_probe_passes_a_right_server_in_whatever_form_it_answers(context: Context) -> None:
    got = {}
    for name, fault in GOOD.items():
        proof = judged(context, fault)
        wrong = [a.why for a in proof.answers if a.verdict != "right"]
        got[name] = (proof.verdict, wrong, explain(proof, "here"))
    assert got == dict.fromkeys(GOOD, (Verdict.PASSED, [], None))


UNANSWERED: dict[str, tuple[Fault, str]] = {
    "HTML": (fake.sends(b"<!DOCTYPE html><title>502 Bad Gateway</title>"), "HTML"),
    "empty": (fake.sends(b""), "empty"),
    "half a JSON": (fake.sends(b'{"choices": [{"message": {"content": "Par'), "cut off JSON"),
    "no JSON": (fake.sends(b"Paris"), "JSON"),
    "a JSON string": (fake.sends(b'"Paris"'), "not an object"),
    "nested too deeply": (fake.sends(b"[" * 100_000), "nested too deeply"),
    "an endless number": (fake.sends(b'{"n": ' + b"1" * 5000 + b"}"), "cannot be read"),
    "200 with an error": (fake.says(lambda _: {"error": {"message": "no such"}}), "no such"),
    "no choices": (fake.says(lambda _: {"choices": []}), "no choices"),
    "choices of nothing": (fake.says(lambda _: {"choices": [None]}), "no choices"),
    "no message": (fake.says(lambda _: {"choices": [{"text": "Paris"}]}), "no message"),
    "invalid UTF-8": (fake.sends(b'{"choices": "\xff\xfe"}'), "not UTF-8"),
    "10 MB": (fake.sends(b" " * 10_000_000), "longer than"),
    "HTML behind a comment": (fake.sends(b"<!-- x --><html><title>Login</title>"), "HTML"),
    "elsewhere": (fake.status(302, Location="http://127.0.0.1:9/x"), "a redirect to http"),
    "nowhere": (fake.status(307), "a redirect to nowhere"),
    "an absurd length": (headers(b"Content-Length: " + b"9" * 5000), "longer than"),
    "two lengths": (headers(b"Content-Length: 5", b"Content-Length: 7"), "header"),
    "half a stream": (
        fake.sends(b'data: {"choices":[{"delta":{"content":"4"}}]}\n\n'),
        "stops before its end",
    ),
    "half an event": (fake.sends(b'data: {"choices":[{"del'), "stream of events"),
    "an error in a stream": (fake.sends(b'data: {"error": {"message": "out of it"}}'), "out of it"),
    "a stream": (fake.sends(b"data: {}\n\ndata: [DONE]\n\n"), "stream of events"),
    "a stream that stops": (fake.stops, "no complete answer"),
    "a byte now and then": (fake.trickles, "no complete answer"),
    "never answers": (fake.sleeps, "no complete answer"),
    "hangs up": (fake.hangs_up, "cut off"),
    "429": (fake.status(429, Retry_After="3600"), "HTTP 429"),
    "503 for ever": (
        fake.status(503, {"error": {"message": "Loading model", "code": 503}}),
        "Loading model",
    ),
    "500": (fake.status(500, {"detail": "broken inside"}), "broken inside"),
    "wrong model id": (fake.status(404, {"error": "model 'x' not found"}), "not found"),
    "no chat template": (fake.status(400, {"message": "no chat template"}), "no chat template"),
}


SLOW = ("a stream that stops", "a byte now and then", "never answers", "hangs up", "429",
        "503 for ever")  # fmt: skip
GROUPS = [[name] for name in SLOW] + [[name for name in UNANSWERED if name not in SLOW]]
OTHER_SUITES: tuple[SuiteName, ...] = ("fluency", "likelihood", "tools")
"""Suites that send other kinds of requests than `facts`."""


@pytest.mark.parametrize("names", GROUPS, ids=[*SLOW, "bytes"])
def test_probe_names_a_reply_of_no_use_and_never_passes_it(
    context: Context, names: list[str]
) -> None:
    bad: list[tuple[str, str, object]] = []
    for name in names:
        fault, named = UNANSWERED[name]
        proof = judged(context, fault)
        error = explain(proof, "here")
        good = {a.verdict for a in proof.answers} == {"unanswered"} and named in (
            proof.answers[0].why
        )  # fmt: skip
        good = good and proof.verdict is Verdict.UNKNOWN and isinstance(error, NotHealthy)
        if not good or error is None or named not in error.what:
            bad.append((name, "facts", proof.summary))
        for suite in OTHER_SUITES:
            with fake.serving(fault) as server:
                began = time.monotonic()
                endpoint = Endpoint(server.url, "m", engine="llama.cpp")
                proof = run_probe(context, endpoint, Probe(suites=(suite,)), patience=HASTY)
                seconds = time.monotonic() - began
            told = named in proof.summary or "not a list of tokens" in proof.summary
            good = told and proof.word in ("unstable", "unable") and seconds < 8
            if not good or not isinstance(explain(proof, "here"), NotHealthy):
                bad.append((name, suite, (proof.summary, seconds)))
    assert bad == []


WRONG: dict[str, Fault] = {
    "null content": fake.says(lambda _: chat(None)),
    "empty content": fake.says(lambda _: chat("")),
    "question marks": fake.says(lambda _: chat("?" * 40, "length")),
    "fragments": fake.says(lambda _: chat("lockhandlehandlehandlehandlehandlehandle", "length")),
    "echo": fake.says(lambda body: chat(fake.question(body))),
    "everything": fake.says(lambda _: chat(" ".join(fake.ANSWERS.values()))),
    "echo and everything": fake.says(
        lambda body: chat(f"{fake.question(body)} {', '.join(fake.ANSWERS.values())}")
    ),
    "one constant": fake.says(lambda _: chat("The answer is 4.")),
    "role tokens behind it": fake.says(lambda body: chat(f"{right(body)}<|im_end|><|im_start|>")),
    "several scripts behind it": fake.says(
        lambda body: chat(f"{right(body)} 的是 который της και")
    ),
    "denied": fake.says(lambda body: chat(f"It is not {right(body)[6:-1]}.")),
    "more room and no answer": fake.says(lambda _: chat(ALOUD, "length")),
    "a refusal": fake.says(lambda _: chat(None, refusal="I cannot answer that.")),
    "content of no known kind": fake.says(lambda _: chat(12)),
    "parts of no known kind": fake.says(lambda _: chat([1, None, {"type": "image"}])),
}


def test_probe_fails_a_wrong_server(context: Context) -> None:
    got = {}
    for name, fault in WRONG.items():
        proof = judged(context, fault)
        got[name] = (proof.verdict, type(explain(proof, "here")))
    assert got == dict.fromkeys(WRONG, (Verdict.FAILED, NotCorrect))


def test_a_text_without_an_answer_is_given_more_room_once(context: Context) -> None:
    with fake.serving(fake.says(lambda _: chat(ALOUD, "length"))) as server:
        run_probe(context, Endpoint(server.url), Probe(), patience=HASTY)
        assert sorted(b["max_tokens"] for b in server.asked) == [20] * 8 + [2048]


def test_what_stands_in_a_text_without_end_is_no_answer(context: Context) -> None:
    def rambles(body: dict[str, Any]) -> dict[str, Any]:
        more = f" {right(body)} And so on, with many other words that were never" * (
            body["max_tokens"] > 300
        )
        return chat(ALOUD + more, "length")

    assert judged(context, fake.says(rambles)).verdict is Verdict.FAILED


def test_the_sentence_says_what_was_answered(context: Context) -> None:
    proof = judged(context, fake.says(lambda _: chat("No idea.")))
    assert 'got "No idea."' in proof.summary
    proof = judged(context, fake.says(lambda body: chat(f"{right(body)}</s>")))
    assert "ill formed" in proof.summary
    assert "</s>" in proof.summary
    tail = "And the quick brown fox jumps over the lazy dog."
    proof = judged(context, fake.says(lambda body: chat(f"{right(body)} {tail}")))
    assert f"the same 10 words: '{tail}'" in proof.summary
    proof = judged(context, fake.says(lambda body: chat(None, reasoning=right(body))))
    assert "all answers are in the reasoning" in proof.summary


def test_probe_grades_hostile_text_in_bounded_time(context: Context) -> None:
    for text in ("a" + "\u0316\u0301" * 150_000, "\ufdfa" * 100_000):
        began = time.monotonic()

        def hostile(body: dict[str, Any], text: str = text) -> dict[str, Any]:
            return chat(f"{right(body)} {text}")

        judged(context, fake.says(hostile))
        assert time.monotonic() - began < 50  # 8 answers; ordering such marks took minutes


def test_a_model_that_never_stops_thinking_is_called_that_and_not_wrong(context: Context) -> None:
    proof = judged(context, fake.thinks(10**9))
    assert {a.verdict for a in proof.answers} == {"never started"}
    assert all(a.retried for a in proof.answers)
    error = explain(proof, "here")
    assert isinstance(error, NotCorrect)
    assert "reasoning_effort" in str(error.hint)


def test_the_second_budget_is_larger_and_stays_within_the_context(context: Context) -> None:
    with fake.serving(fake.thinks(500)) as server:
        run_probe(context, Endpoint(server.url), Probe(), patience=HASTY)
        assert [b["max_tokens"] for b in server.asked[:2]] == [20, 2048]
    with fake.serving(fake.thinks(500)) as server:
        run_probe(context, Endpoint(server.url, context=1024), Probe(), patience=HASTY)
        assert [b["max_tokens"] for b in server.asked[:2]] == [20, 768]
    with fake.serving(fake.thinks(500)) as server:
        probe = Probe(request=Request(max_tokens=64))
        proof = run_probe(context, Endpoint(server.url, context=256), probe, patience=HASTY)
        assert len(server.asked) == 8
        assert "no room" in proof.answers[0].why


def test_a_dead_server_is_given_up_on_after_two_questions(context: Context) -> None:
    with fake.serving(fake.sleeps) as server:
        proof = run_probe(context, Endpoint(server.url), Probe(), patience=HASTY)
        assert len(server.asked) == 2
    assert "not asked" in proof.answers[-1].why


def test_retry_after_is_honoured_within_bounds(context: Context) -> None:
    with fake.serving(fake.status(429, Retry_After="3600")) as server:
        began = time.monotonic()
        run_probe(context, Endpoint(server.url), Probe(), patience=HASTY)
        assert time.monotonic() - began < 60
        assert len(server.asked) == 4


def test_the_request_is_what_the_recipe_says(context: Context) -> None:
    request = Request(max_tokens=77, reasoning_effort="low", temperature=0.5)
    with fake.serving(fake.says(lambda body: chat(right(body)))) as server:
        run_probe(context, Endpoint(server.url), Probe(request=request), patience=HASTY)
        assert served(context.http, Endpoint(server.url)).models == (fake.MODEL,)
    first = server.asked[0]
    assert (first["max_tokens"], first["reasoning_effort"], first["temperature"]) == (
        77,
        "low",
        0.5,
    )
    assert (first["model"], first["stream"]) == (fake.MODEL, False)


Cli = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.setenv("BAKEHOUSE_HOME", str(tmp_path / "home"))

    def call(**options: Any) -> tuple[int, dict[str, Any]]:
        code = main("probe", options, json=True)
        return code, json.loads(capfd.readouterr().out)

    return call


def test_probe_of_a_right_server(cli: Cli, tmp_path: Path) -> None:
    with fake.serving(fake.says(lambda body: chat(right(body)))) as server:
        code, document = cli(url=f"{server.url}/v1/")
    assert (code, document["ok"], document["error"]) == (0, True, None)
    assert len(document["result"]["answers"]) == 8
    assert [c["verdict"] for c in document["checks"]] == ["passed"] * 3
    record = json.loads((Path(document["result"]["record"]) / "record.json").read_text())
    assert (record["ok"], record["task"], len(record["answers"])) == (True, "probe", 8)


def test_probe_of_a_wrong_server(cli: Cli) -> None:
    with fake.serving(fake.says(lambda body: chat("No idea."))) as server:
        code, document = cli(url=server.url)
    assert (code, document["error"]["id"]) == (8, "not-correct")
    assert len(document["result"]["answers"]) == 8
    record = json.loads((Path(document["result"]["record"]) / "record.json").read_text())
    assert (record["ok"], record["exit"], len(record["answers"])) == (False, 8, 8)


def test_a_proxy_that_hides_the_engine_is_judged_by_answers_alone(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lists(handler: fake.Handler) -> None:
        handler.json({"data": [{"id": fake.MODEL, "owned_by": "llamacpp"}]})

    def answers(handler: fake.Handler, body: dict[str, Any]) -> None:
        asked = body["messages"][0]["content"] if "messages" in body else None
        if asked is None:
            handler.json({"error": {"message": "Not Found"}}, 404)
        else:
            text = fake.ANSWERS.get(asked, "The sea is wide and calm, and boats sail far out.")
            handler.json(chat(text))

    monkeypatch.setattr(fake.Handler, "do_GET", lists)
    with fake.serving(answers) as server:
        code, document = cli(url=server.url)
    assert code == 0
    assert [s["suite"] for s in document["result"]["suites"]] == ["facts", "fluency"]


def test_probe_of_nobody_and_of_a_model_that_is_not_there(cli: Cli) -> None:
    code, document = cli(url="http://127.0.0.1:1")
    assert (code, document["error"]["id"]) == (7, "not-healthy")
    with fake.serving(fake.says(lambda body: chat(right(body)))) as server:
        code, document = cli(url=server.url, model="gpt-99")
    assert code == 7
    assert "gpt-99" in document["error"]["what"]
    assert fake.MODEL in document["error"]["hint"]


def test_a_key_is_sent_and_stays_out_of_everything_written(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def tells(handler: fake.Handler, body: dict[str, Any]) -> None:
        handler.json(chat(f"{right(body)} Your key is {handler.headers['Authorization']}"))

    monkeypatch.setenv("SOME_VARIABLE", fake.KEY)
    with fake.serving(tells, key=fake.KEY) as server:
        code, document = cli(url=server.url, api_key_env="SOME_VARIABLE")
        assert code == 0
        assert fake.KEY not in json.dumps(document)
        assert cli(url=server.url)[0] == 7
        code = main("probe", {"url": server.url, "api_key_env": "SOME_VARIABLE"}, debug=True)
        assert code == 0
    said = capfd.readouterr()
    everything = [said.out, said.err]
    everything += [p.read_text(errors="replace") for p in tmp_path.rglob("*") if p.is_file()]
    assert not [text for text in everything if fake.KEY in text]


USAGE: list[tuple[dict[str, Any], str]] = [
    ({}, "--recipe"),
    ({"url": "http://127.0.0.1:1", "recipe": "x"}, "--recipe"),
    ({"url": "127.0.0.1:8000"}, "no scheme"),
    ({"url": "ftp://host"}, "unsupported scheme 'ftp'"),
    ({"url": "http://host:999999"}, "malformed"),
    ({"url": "http://me:secret@host"}, "password"),
    ({"url": "http://host/\nX: y"}, "control characters"),
    ({"url": "http://host/a b"}, "spaces"),
    ({"url": "http://127.0.0.1:1", "api_key_env": "NOT_SET"}, "NOT_SET"),
    ({"url": "http://127.0.0.1:1", "set_": ["a=b"]}, "--set"),
    ({"url": "http://127.0.0.1:1", "instance": "b"}, "--instance"),
]


def test_probe_refuses_wrong_options(cli: Cli) -> None:
    bad = []
    for options, named in USAGE:
        code, document = cli(**options)
        text = document["error"]["what"] + str(document["error"]["hint"])
        if code != 2 or named not in text:
            bad.append((options, code, text))
    assert bad == []
