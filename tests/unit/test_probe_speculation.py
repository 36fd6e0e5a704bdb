"""The suite `speculation`: lossless speculation passes, every way of losing something is named."""

from __future__ import annotations

from typing import Any

import pytest

from bakehouse.engines.base import Counters
from bakehouse.errors import NotCorrect, NotHealthy
from bakehouse.models import Verdict
from bakehouse.probe.client import Client
from bakehouse.probe.logprobs import Generated, NextToken, generate, next_token
from bakehouse.probe.models import Endpoint, SuiteInput, SuiteProof
from bakehouse.probe.runner import conclude, explain
from bakehouse.probe.suites.base import run_suite
from bakehouse.probe.suites.speculation import SUITE, Text, acceptance, gaps, sameness
from bakehouse.recipe.models import Probe, Speculation
from bakehouse.system.http import Reply
from tests.support.tiny_model import Around, TinyModel, reply

FACTS = {"questions": [{"ask": "What is 2+2?", "answers": ["4"]}]}


def judged(model: TinyModel, **speculation: Any) -> SuiteProof:
    probe = Probe.model_validate({"facts": FACTS, "speculation": speculation})
    given = SuiteInput(Endpoint("http://127.0.0.1:1", "tiny", engine="llama.cpp"), probe)
    return run_suite(Around(model), SUITE, given)


def seen(proof: SuiteProof) -> dict[str, str]:
    return {c.id.rpartition(".")[2]: c.verdict.value for c in proof.checks}


def test_lossless_speculation_passes_with_its_evidence() -> None:
    model = TinyModel()
    proof = judged(model)
    assert proof.verdict == "true"
    assert set(seen(proof).values()) == {"passed"}
    assert proof.figures["draft_tokens"] == 63 + 31
    assert proof.figures["tokens_compared"] == 64 + 32
    alone = [body for path, body in model.asked if path == "/completion" and body["n_predict"] == 1]
    assert all("n_probs" in body for body in alone)


@pytest.mark.parametrize(
    ("model", "failed", "verdict", "error"),
    [
        (TinyModel(speculates=False, drafts=False), {"on", "drafts"}, "unable", NotHealthy),
        (TinyModel(drafts=False), {"drafts"}, "unable", NotHealthy),
        (TinyModel(accepts=0.0), {"acceptance"}, "unable", NotHealthy),
        (TinyModel(swap={5: 0.6}), {"same"}, "wrong", NotCorrect),
        (TinyModel(swap=dict.fromkeys(range(40), 0.2)), {"loss"}, "wrong", NotCorrect),
        (TinyModel(facts=lambda _: "It is 5."), {"facts"}, "wrong", NotCorrect),
    ],
    ids=["off", "no drafts", "none accepted", "another token", "many near-ties", "a fact lost"],
)
def test_each_loss_is_named(
    model: TinyModel, failed: set[str], verdict: str, error: type[Exception]
) -> None:
    proof = judged(model)
    assert {name for name, value in seen(proof).items() if value == "failed"} == failed
    assert proof.verdict == verdict
    assert isinstance(explain(conclude([proof]), "here"), error)


def test_a_near_tie_passes_and_its_gap_is_stated() -> None:
    proof = judged(TinyModel(swap={5: 0.03}))
    assert proof.verdict == "true"
    same = next(c for c in proof.checks if c.id.endswith("same"))
    assert "near-tie" in same.observed
    assert "0.030 nats" in same.observed
    assert judged(TinyModel(swap={5: 0.03}), near_tie=0.01).verdict == "wrong"


def test_a_question_that_is_wrong_either_way_is_no_loss() -> None:
    proof = judged(TinyModel(facts=lambda _: "It is 5.", alone=(" 5", ".")))
    assert seen(proof)["facts"] == "passed"
    assert proof.figures["wrong_with_speculation"][0]["without"] == " 5."


@pytest.mark.parametrize(
    ("accepts", "bounds", "passes"),
    [
        (0.36, {"min_acceptance": 0.3, "max_acceptance": 0.5}, True),
        (0.36, {"min_acceptance": 0.5}, False),
        (1.0, {"max_acceptance": 0.95}, False),
        (0.02, {}, True),
        (0.0, {"min_acceptance": 0}, True),
    ],
)
def test_acceptance_lies_in_the_recipes_bounds(
    accepts: float, bounds: dict[str, float], passes: bool
) -> None:
    assert (judged(TinyModel(accepts=accepts), **bounds).verdict == "true") is passes


def test_bounds_that_cross_are_refused() -> None:
    with pytest.raises(ValueError, match="above"):
        Speculation.model_validate({"min_acceptance": 0.9, "max_acceptance": 0.5})


def test_no_log_probabilities_is_unknown_and_never_passed() -> None:
    proof = judged(TinyModel(nan=True))
    assert proof.verdict == "unstable"
    assert seen(proof)["same"] == "unknown"
    assert isinstance(explain(conclude([proof]), "here"), NotHealthy)


@pytest.mark.parametrize("model", [TinyModel(down=True), TinyModel(fails=500)])
def test_a_server_that_does_not_answer_is_said_so(model: TinyModel) -> None:
    proof = judged(model)
    assert proof.verdict == "unstable"
    assert not any(c.verdict is Verdict.PASSED for c in proof.checks if c.id[-2:] != "on")


class Vllm(TinyModel):
    """Speaks vLLM's dialect of `/v1/completions`."""

    def answer(self, path: str, body: dict[str, Any]) -> Reply:
        if path != "/v1/completions" or "temperature" not in body or "model" not in body:
            return super().answer(path, body)
        if body["max_tokens"] == 1 and body.get("logprobs"):
            assert body["return_tokens_as_token_ids"] is True
            place = len(body["prompt"]) - 2
            best = self.word(place, speculating=False)
            top = {f"token_id:{best}": -0.1, f"token_id:{best + 1}": -2.0}
            choice = {"logprobs": {"top_logprobs": [top]}, "finish_reason": "length"}
            return reply({"choices": [choice]})
        tokens = [self.word(p, speculating=True) for p in range(body["max_tokens"])]
        return reply({"choices": [{"text": "x", "token_ids": tokens, "prompt_token_ids": [5, 6]}]})


def test_vllm_is_held_against_itself_by_ids() -> None:
    talk = Client(Around(Vllm(swap={3: 1.9})), Endpoint("http://127.0.0.1:1", "m", engine="vllm"))
    spoken = generate(talk, ["a text"], 8)
    assert (spoken.prompt, spoken.drafted) == ((5, 6), None)
    steps = tuple(next_token(talk, [*spoken.prompt, *spoken.tokens[:n]]) for n in range(8))
    [parting] = [p for p in gaps(Text("t", spoken, steps)) if p]
    assert (parting.place, round(parting.gap, 3)) == (3, 1.9)


def test_the_counters_tell_where_answers_do_not() -> None:
    text = Text("t", Generated(["x"], (1,)))
    made, kept = acceptance([text], Counters(draft_tokens=10, accepted=4), Speculation())
    assert made.passed
    assert kept.observed.startswith("4 of 10 (40.0%)")
    assert [c.verdict for c in acceptance([text], None, Speculation())] == [Verdict.UNKNOWN] * 2


def test_a_token_outside_the_likeliest_has_at_least_their_gap() -> None:
    likely = ((1, "a", -0.1), (2, "b", -3.0))
    text = Text("t", Generated(["x"], (9,)), (NextToken(likely),))
    [parting] = gaps(text)
    assert parting is not None
    assert parting.at_least
    assert "at least 2.900" in str(parting)


def test_a_comparison_that_broke_off_is_unknown() -> None:
    spoken = Generated(["x"], (1, 2))
    broken = Text(
        "t", spoken, (NextToken(((1, "a", -0.1),)), NextToken(problem="HTTP 500: it broke"))
    )
    short = Text("t", spoken, (NextToken(((1, "a", -0.1),)),))
    for text in (broken, short):
        assert {c.verdict for c in sameness([text], Speculation())} == {Verdict.UNKNOWN}


def test_speculation_reports_odd_documents_as_problems() -> None:
    documents: list[Any] = [
        {}, [], {"tokens": "x"}, {"tokens": [True]}, {"tokens": []},
        {"completion_probabilities": [{"top_logprobs": [{"id": "x", "logprob": -1}]}]},
        {"completion_probabilities": [{"top_logprobs": [{"id": 1, "logprob": float("nan")}]}]},
        {"completion_probabilities": [None]},
    ]  # fmt: skip

    class Odd(TinyModel):
        document: Any = None

        def answer(self, path: str, body: dict[str, Any]) -> Reply:
            return reply(self.document)

    for document in documents:
        odd = Odd()
        odd.document = document
        talk = Client(Around(odd), Endpoint("http://127.0.0.1:1", engine="llama.cpp"))
        assert generate(talk, ["x"], 4).problem
        assert next_token(talk, ["x"]).problem
