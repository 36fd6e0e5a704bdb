"""The smaller suites on recorded replies: what is right, wrong, unable, unstable, never started."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from bakehouse.models import Verdict
from bakehouse.probe.answers import built_in
from bakehouse.probe.client import RequestLimits
from bakehouse.probe.models import Proof, SuiteInput, SuiteProof
from bakehouse.probe.runner import conclude, explain, run_probe, worst
from bakehouse.probe.suites import REGISTRY, context
from bakehouse.recipe.models import SUITES, Probe, SuiteName, default_suites
from bakehouse.runs.store import SuiteVerdict
from bakehouse.system.http import Unreachable
from tests.support.scripted import Answer, Scripted, endpoint

HASTY = RequestLimits(base=0.5, per_token=0, attempts=2, longest_wait=0.01)
ANSWERS = {q.ask: q.answers[0] for q in built_in()}
SEA = (
    "The sea is one of the most fascinating places on Earth. Its waves rise and fall with the wind,"
    " and beneath them lives a world of fish, corals and plants."
)
PARIS = '{"city": "Paris", "country": "France", "capital": true}'
CALL = {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "celsius"}'}


def chat(content: Any, finish: str = "stop", **message: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": content, **message}
    return {"choices": [{"message": said, "finish_reason": finish}],
            "usage": {"completion_tokens": 7}}  # fmt: skip


def good(path: str, body: dict[str, Any]) -> Any:
    """A server that is right about everything."""
    if path != "/v1/chat/completions":
        return 404, {"error": "not found"}
    asked = body["messages"][0]["content"]
    if "tools" in body:
        return chat(None, "tool_calls", tool_calls=[{"type": "function", "function": CALL}])
    if "response_format" in body:
        return chat(PARIS)
    if "secret word" in asked:
        return chat(next(a for _, _, about, a in context.NEEDLES if asked.count(about) > 1))
    return chat(ANSWERS.get(asked, SEA))


def judged(server: Answer, suite: SuiteName, engine: str | None = None, **probe: Any) -> SuiteProof:
    wanted = Probe.model_validate({"suites": [suite], **probe})
    proof = run_probe(Scripted(server), endpoint(engine), wanted, patience=HASTY)
    assert (proof.word, len(proof.suites)) == (proof.suites[0].verdict, 1)
    assert proof.passed == proof.suites[0].good
    assert (explain(proof, "here") is None) == proof.passed
    return proof.suites[0]


CHAT_SUITES: tuple[SuiteName, ...] = (
    "facts", "fluency", "context", "json", "tools", "determinism", "concurrency",
)  # fmt: skip


@pytest.mark.parametrize("suite", CHAT_SUITES)
def test_a_right_server_is_true(suite: SuiteName) -> None:
    proof = judged(good, suite)
    assert (proof.verdict, proof.hint) == ("true", None)
    assert proof.cost.requests
    assert proof.cost.tokens >= 7


BAD: dict[str, Answer] = {
    "refused": lambda *_: Unreachable("connection refused", refused=True),
    "503 for ever": lambda *_: (503, {"error": {"message": "Loading model"}}),
    "429": lambda *_: (429, {"error": "slow down"}),
    "500": lambda *_: (500, {"error": "broken inside"}),
    "error in 200": lambda *_: {"error": {"message": "no such"}},
    "no choices": lambda *_: {"choices": []},
    "a string": lambda *_: "Paris",
    "null": lambda *_: None,
}


@pytest.mark.parametrize("suite", [*CHAT_SUITES, "likelihood"])
def test_suites_name_every_reply_of_no_use(suite: SuiteName) -> None:
    got = {}
    for name, server in BAD.items():
        proof = judged(server, suite)
        asked = proof.cost.requests <= 10
        got[name] = (proof.verdict, proof.checks[0].verdict, bool(proof.hint), asked)
    assert got == dict.fromkeys(BAD, ("unstable", Verdict.UNKNOWN, True, True))


@pytest.mark.parametrize("suite", CHAT_SUITES)
def test_a_model_that_only_thinks_never_started(suite: SuiteName) -> None:
    def thinks(path: str, body: dict[str, Any]) -> Any:
        del path, body
        return chat("", "length", reasoning_content="")

    expected = {"determinism": "true", "concurrency": "never started"}
    proof = judged(thinks, suite)
    assert proof.verdict == expected.get(suite, "never started"), proof.summary


class TestFluency:
    def test_fluency_refuses_degenerate_text(self) -> None:
        for text in ("?" * 40, "\n_con_c\n\nThe\n", "I am a cat. " * 20, ""):
            proof = judged(lambda *_, t=text: chat(t), "fluency")
            assert (text, proof.verdict) == (text, "wrong")
            assert proof.checks[0].verdict is Verdict.FAILED

    def test_fluency_accepts_raw_reasoning_and_a_cut_off_text(self) -> None:
        replies = [
            chat(f"to=self The user wants a text. to=user {SEA}"),
            chat(f"<think>They ask for the sea.</think>{SEA}"),
            chat("", "length", reasoning_content=SEA),
            chat(SEA[:120], "length"),
        ]
        got = [judged(lambda *_, r=reply: r, "fluency").verdict for reply in replies]
        assert got == ["true"] * 4

    def test_a_text_may_be_gone_on_with(self) -> None:
        def plain(path: str, body: dict[str, Any]) -> Any:
            assert path == "/v1/completions"
            assert body["prompt"].startswith("The sea")
            return {"choices": [{"text": SEA, "finish_reason": "length"}]}

        assert judged(plain, "fluency", fluency={"mode": "completion"}).verdict == "true"


class TestDeterminism:
    @pytest.mark.parametrize(("required", "verdict"), [(False, "true"), (True, "unstable")])
    def test_a_difference_is_reported_and_fails_where_asked(
        self, required: bool, verdict: str
    ) -> None:
        answers = iter([SEA, SEA, "Another text."])
        proof = judged(
            lambda *_: chat(next(answers)), "determinism", determinism={"required": required}
        )
        assert (proof.verdict, proof.figures["different"]) == (verdict, 2)
        assert len(proof.figures["sha256"]) == 3


def _in_company(change: Callable[[str], str]) -> Answer:
    """A server that answers otherwise once every question was asked."""
    asked: list[str] = []

    def server(path: str, body: dict[str, Any]) -> Any:
        del path
        question = body["messages"][0]["content"]
        asked.append(question)
        right = ANSWERS[question]
        return chat(right if len(asked) <= len(ANSWERS) else change(right))

    return server


class TestConcurrency:
    def test_what_turns_wrong_in_company_is_wrong(self) -> None:
        proof = judged(_in_company(lambda _: "I do not know."), "concurrency")
        assert (proof.verdict, proof.figures["turned_wrong"]) == ("wrong", len(ANSWERS))

    @pytest.mark.parametrize(("required", "verdict"), [(False, "true"), (True, "wrong")])
    def test_other_words_are_reported_and_fail_where_asked(
        self, required: bool, verdict: str
    ) -> None:
        server = _in_company(lambda right: f"It is {right}.")
        proof = judged(server, "concurrency", concurrency={"required": required})
        assert (proof.verdict, proof.figures["other_text"]) == (verdict, len(ANSWERS))

    def test_nothing_right_alone_is_no_proof(self) -> None:
        assert judged(lambda *_: chat("I do not know."), "concurrency").verdict == "wrong"


class TestContext:
    def test_the_needle_stands_at_its_depth(self) -> None:
        for depth, sentence, about, _ in context.NEEDLES:
            text = context.prompt(1024, depth, sentence, about)
            assert text.index(sentence) / len(text) == pytest.approx(depth / 100, abs=0.08)
            assert text == context.prompt(1024, depth, sentence, about)

    def test_context_length(self) -> None:
        rows: list[tuple[int | None, dict[str, Any], int]] = [
            (None, {}, 1024), (8192, {}, 1024), (600, {}, 472), (200, {}, 256),
            (8192, {"whole": True}, 8064), (None, {"whole": True}, 1024),
            (8192, {"tokens": 300}, 300),
        ]  # fmt: skip
        got = []
        for room, wanted, _ in rows:
            probe = Probe.model_validate({"context": wanted})
            got.append((room, wanted, context.length(SuiteInput(endpoint(context=room), probe))))
        assert got == rows

    def test_what_is_not_found_is_named(self) -> None:
        def forgets(path: str, body: dict[str, Any]) -> Any:
            blue = body["messages"][0]["content"].count("the blue house") > 1
            return chat("Sapphire.") if blue else good(path, body)

        proof = judged(forgets, "context")
        assert (proof.verdict, proof.figures["found"]) == ("wrong", 2)
        assert "50%" in proof.summary
        assert judged(forgets, "context", context={"must_find": 2}).verdict == "true"

    def test_the_echo_of_the_prompt_is_no_find(self) -> None:
        everything = " ".join(sentence for _, sentence, _, _ in context.NEEDLES)
        assert judged(lambda *_: chat(everything), "context").verdict == "wrong"

    def test_a_prompt_that_is_too_long_is_unable(self) -> None:
        refused = (400, {"error": {"message": "the request exceeds the available context size"}})
        assert judged(lambda *_: refused, "context").verdict == "unable"


JSON_FAULTS = {
    "prose": "Paris is a city.",
    "half": PARIS[:30],
    "a list": f"[{PARIS}]",
    "another key": PARIS.replace("capital", "mayor"),
    "a key too many": PARIS.replace("}", ', "x": 1}'),
    "another city": PARIS.replace("Paris", "Oslo"),
    "a number": PARIS.replace('"France"', "33"),
    "too long": PARIS.replace("France", "F" * 30),
    "no boolean": PARIS.replace("true", '"yes"'),
    "nested without end": '{"a":' * 5000,
}


class TestJson:
    def test_json_accepts_only_an_object_that_the_schema_allows(self) -> None:
        good = (PARIS, f"```json\n{PARIS}\n```", f" {PARIS}\n")
        got = [judged(lambda *_, t=text: chat(t), "json").verdict for text in good]
        assert got == ["true"] * 3
        faults = {
            name: judged(lambda *_, t=text: chat(t), "json").verdict
            for name, text in JSON_FAULTS.items()
        }
        assert faults == dict.fromkeys(JSON_FAULTS, "wrong")

    def test_thoughts_that_stand_in_the_content_although_they_are_parsed(self) -> None:
        raw = f"<think>Hm.</think>{PARIS}"
        assert judged(lambda *_: chat(raw), "json").verdict == "true"
        assert judged(lambda *_: chat(raw, reasoning="Hm."), "json").verdict == "wrong"

    def test_json_and_tools_are_unable_if_the_server_refuses(self) -> None:
        suites: tuple[SuiteName, ...] = ("json", "tools")
        for suite in suites:
            for status in (400, 404, 501):
                reply = (status, {"error": "response_format"})
                assert judged(lambda *_, r=reply: r, suite).verdict == "unable"


def called(function: Any, finish: str = "tool_calls") -> Answer:
    return lambda *_: chat(None, finish, tool_calls=[{"type": "function", "function": function}])


class TestTools:
    def test_tools_accepts_only_the_right_call(self) -> None:
        for right in (CALL, {**CALL, "arguments": {"unit": "celsius", "city": "Paris"}}):
            assert judged(called(right), "tools").verdict == "true"
        wrong: list[Any] = [
            None, "get_weather", {}, {**CALL, "name": "get_time"}, {**CALL, "arguments": "Paris"},
            {**CALL, "arguments": '{"city": "Paris"}'}, {**CALL, "arguments": None},
            {**CALL, "arguments": json.dumps({"city": "Oslo", "unit": "celsius"})},
        ]  # fmt: skip
        got = [judged(called(function), "tools").verdict for function in wrong]
        assert got == ["wrong"] * len(wrong)

    def test_no_call_is_wrong_unless_the_budget_ended(self) -> None:
        assert judged(lambda *_: chat("It rains."), "tools").verdict == "wrong"
        assert judged(lambda *_: chat("Well,", "length"), "tools").verdict == "never started"

    @pytest.mark.parametrize(("knows", "verdict"), [(False, "unable"), (True, "wrong")])
    def test_a_template_without_tools_is_unable(self, knows: bool, verdict: str) -> None:
        def llama(path: str, body: dict[str, Any]) -> Any:
            del body
            if path == "/props":
                return {"chat_template_caps": {"supports_tools": knows}}
            return chat("It rains.")

        assert judged(llama, "tools", "llama.cpp").verdict == verdict


def suite_proof(verdict: SuiteVerdict, name: str = "facts") -> SuiteProof:
    return SuiteProof(name, verdict, "why")


class TestOverall:
    def test_every_suite_has_its_place(self) -> None:
        assert set(REGISTRY) == set(SUITES)
        assert all(name == suite.name for name, suite in REGISTRY.items())
        for engine in ("llama.cpp", "vllm", None):
            assert set(default_suites(engine)) <= set(SUITES)

    def test_the_worst_suite_speaks_for_all(self) -> None:
        order: list[SuiteVerdict] = [
            "true", "unable", "wrong", "unstable", "never started", "true (provisional)",
        ]  # fmt: skip
        proofs = [suite_proof(verdict) for verdict in order]
        assert worst(proofs).verdict == "wrong"
        assert worst(proofs[:2]).verdict == "unable"
        assert worst([proofs[0], proofs[5]]).verdict == "true (provisional)"

    def test_the_sentence_names_what_is_not_good(self) -> None:
        proof: Proof = conclude([
            judged(good, "facts"), judged(lambda *_: chat("G" * 40), "fluency"),
        ])  # fmt: skip
        assert proof.word == "wrong"
        assert proof.summary.startswith("the server does not answer correctly: fluency degenerate")
        assert "facts" not in proof.summary

    def test_nobody_who_answers_is_not_asked_by_every_suite(self) -> None:
        server = Scripted(lambda *_: Unreachable("connection refused", refused=True))
        probe = Probe(suites=("facts", "fluency", "context"))
        proof = run_probe(server, endpoint(None), probe, patience=HASTY)
        assert proof.word == "unstable"
        assert [p.verdict for p in proof.suites] == ["unstable"] * 3
        assert "not asked" in proof.suites[2].summary
        assert len(server.asked) == 2
