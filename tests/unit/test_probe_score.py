"""Probabilities of a text: three ways to them, and every reply that holds none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from bakehouse.probe.client import Client, RequestLimits
from bakehouse.probe.logprobs import FLOOR, greedy, logprob, score_text, score_tokens
from bakehouse.system.http import Unreachable
from tests.support import scripted
from tests.support.scripted import Answer, Llama, Scripted, talk, varied, vllm

TEXT = "some text"


def test_llama_server_scores_a_text_in_two_requests() -> None:
    asked = talk(Llama(lambda place: -place / 10))
    scored = score_text(asked, TEXT, top=3)
    assert (scored.how, scored.problem, scored.trouble) == ("grammar", None, None)
    assert scored.tokens == tuple(TEXT.encode())
    assert scored.logprobs == pytest.approx([-n / 10 for n in range(1, len(TEXT))])
    assert all(len(top) == 3 and top[0][0] == token
               for top, token in zip(scored.top, scored.tokens[1:], strict=True))  # fmt: skip
    assert (asked.cost.requests, asked.cost.tokens) == (2, len(TEXT) - 1)


@pytest.mark.parametrize("server", [Llama(grammar=False), Llama(drafts=3)], ids=["old", "drafts"])
def test_token_by_token_where_a_grammar_will_not_do(server: Llama) -> None:
    scored = score_text(talk(server), TEXT)
    assert (scored.how, scored.logprobs) == (
        "logit_bias", tuple(varied(place) for place in range(1, len(TEXT)))
    )  # fmt: skip


def test_another_token_than_the_wanted_one_is_not_taken_for_it() -> None:
    def stubborn(path: str, body: dict[str, Any]) -> Any:
        said = Llama()(path, body)
        for row in said.get("completion_probabilities", []):
            row["id"] = 5
        return said

    assert score_text(talk(stubborn), TEXT).trouble == "unable"


@pytest.mark.parametrize("top", [0, 2])
def test_vllm_scores_a_text_in_one_request(top: int) -> None:
    asked = talk(vllm, "vllm")
    scored = score_text(asked, TEXT, top=top)
    assert (scored.how, scored.problem) == ("prompt_logprobs", None)
    assert scored.tokens == tuple(TEXT.encode())
    assert scored.logprobs == (-2.0,) * (len(TEXT) - 1)
    assert [place[0][1] for place in scored.top] == ([-0.5] * (len(TEXT) - 1) if top else [])
    assert asked.cost.requests == 1


def test_an_older_vllm_that_gives_no_ids_puts_the_own_token_first() -> None:
    def older(path: str, body: dict[str, Any]) -> Any:
        said = vllm(path, body)
        del said["choices"][0]["prompt_token_ids"]
        return said

    assert score_text(talk(older, "vllm"), TEXT).tokens[1:] == tuple(TEXT.encode()[1:])


def test_an_unknown_engine_is_asked_in_both_ways() -> None:
    assert score_text(talk(vllm, None), TEXT).how == "prompt_logprobs"
    assert score_text(talk(Llama(), None), TEXT).how == "grammar"
    nothing = talk(lambda *_: (404, {"error": "no"}), None)
    assert score_text(nothing, TEXT).trouble == "unable"


@pytest.mark.parametrize("grammar", [True, False])
def test_scoring_stops_at_a_number_that_is_not_a_probability(grammar: bool) -> None:
    got = []
    values: list[Any] = [None, math.nan, math.inf, 0.5, "NaN", "-1", True, [], {}]
    for value in values:
        numbers = [-1.0] * 3 + [value] + [-1.0] * len(TEXT)
        asked = talk(Llama(numbers.__getitem__, grammar=grammar))
        scored = score_text(asked, TEXT)
        got.append((repr(value), scored.trouble, asked.cost.requests <= 5))
    assert [row for row in got if row[1:] != ("numbers", True)] == []


def test_scoring_takes_a_probability_of_zero_for_a_very_small_one() -> None:
    assert {logprob(value) for value in (-9999.0, -3.4e38, -math.inf)} == {FLOOR}


def test_vllm_that_cannot_write_nan_as_json_computes_nan() -> None:
    refused = "Out of range float values are not JSON compliant: nan"
    scored = score_text(talk(lambda *_: (400, {"error": {"message": refused}}), "vllm"), TEXT)
    assert scored.trouble == "numbers"


def _vllm_with(change: Callable[[list[Any]], Any]) -> Answer:
    def server(path: str, body: dict[str, Any]) -> Any:
        said = vllm(path, body)
        said["choices"][0]["prompt_logprobs"] = change(said["choices"][0]["prompt_logprobs"])
        return said

    return server


ODD: dict[str, tuple[Answer, str, str]] = {
    "refused": (lambda *_: Unreachable("connection refused", refused=True), "lost", "refused"),
    "loading": (lambda *_: (503, {"error": {"message": "Loading model"}}), "lost", "Loading"),
    "no such route": (lambda *_: (404, {"error": "not found"}), "unable", "not found"),
    "not allowed": (lambda *_: (401, {"error": "Invalid API Key"}), "unable", "Invalid API Key"),
    "broken inside": (lambda *_: (500, {"error": "broken"}), "reply", "broken"),
    "error in 200": (lambda *_: {"error": {"message": "no such"}}, "reply", "no such"),
    "a string": (lambda *_: "hello", "", ""),
    "a list": (lambda *_: [1, 2], "", ""),
    "null": (lambda *_: None, "", ""),
    "tokens of no kind": (lambda *_: {"tokens": ["a", None]}, "", ""),
    "one token": (lambda *_: {"tokens": [1]}, "", ""),
    "negative tokens": (lambda *_: {"tokens": [-1, -2]}, "", ""),
    "no probabilities": (
        lambda path, _: {"tokens": [1, 2, 3]} if path == "/tokenize" else {"content": "x"},
        "unable", "no probabilities",
    ),
    "probabilities of no kind": (
        lambda path, _: {"tokens": [1, 2]} if path == "/tokenize"
        else {"completion_probabilities": [None]},
        "unable", "no probabilities",
    ),
}  # fmt: skip


@pytest.mark.parametrize("engine", ["llama.cpp", "vllm", None])
def test_scoring_names_every_odd_reply(engine: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = []
    for name, (server, trouble, named) in ODD.items():
        asked = talk(server, engine)
        monkeypatch.setattr(asked._clock, "sleep", lambda _: None)
        scored = score_text(asked, TEXT)
        exact = engine == "llama.cpp" and trouble
        good = scored.trouble == trouble if exact else bool(scored.trouble)
        if not good or not scored.problem or (exact and named not in scored.problem):
            bad.append((name, scored))
        if not greedy(asked, TEXT, 4).problem:
            bad.append((f"{name}, greedy", scored))
    assert bad == []


ODD_ROWS: list[Callable[[list[Any]], Any]] = [
        lambda _: None, lambda _: [], lambda rows: [None] * len(rows),
        lambda rows: [{}] * len(rows),
        lambda rows: [None, *[{"x": {"logprob": -1}}] * (len(rows) - 1)],
        lambda rows: [None, *[{"999": {"logprob": -1}}] * (len(rows) - 1)],
        lambda rows: [None, *[{"1": None}] * (len(rows) - 1)], lambda rows: {"0": rows},
        lambda rows: rows[:-3],
]  # fmt: skip


def test_scoring_names_every_odd_row_of_vllm() -> None:
    got = [score_text(talk(_vllm_with(change), "vllm"), TEXT).trouble for change in ODD_ROWS]
    assert set(got) <= {"unable", "reply", "numbers"}


@pytest.mark.parametrize(("server", "engine"), [(Llama(), "llama.cpp"), (vllm, "vllm")])
def test_a_greedy_run_gives_the_prompt_s_tokens_and_its_own(server: Answer, engine: str) -> None:
    run = greedy(talk(server, engine), TEXT, 4)
    assert (run.prompt, run.tokens) == (tuple(TEXT.encode()), (97, 97, 97, 97))
    tokens = [*TEXT.encode(), *run.tokens]
    again = score_tokens(scripted.talk(server, engine), tokens, top=2)
    assert (len(again.logprobs), len(again.top)) == (len(TEXT) + 3, len(TEXT) + 3)


@pytest.mark.parametrize(("logit", "trouble"), [(5000.0, "numbers"), (math.inf, "unable")])
def test_logits_that_no_sound_weights_make_are_told_from_a_server_that_forces_nothing(
    logit: float, trouble: str
) -> None:
    """Another token wins by `logit`, whatever is added to the wanted one up to that."""

    def answer(path: str, body: dict[str, Any]) -> Any:
        if path == "/tokenize" or "grammar" in body:
            return Llama(grammar=False)(path, body)
        wanted, bias = body["logit_bias"][0]
        row = {"id": wanted if bias > logit else wanted + 1, "logprob": -0.5}
        return {"completion_probabilities": [row]}

    assert score_text(talk(answer), TEXT).trouble == trouble


def test_more_tokens_than_a_text_has_bytes_are_none_of_it() -> None:
    asked = []

    def answer(path: str, body: dict[str, Any]) -> Any:
        asked.append(path)
        return {"tokens": [97] * 10_000}

    assert score_text(talk(answer), TEXT).trouble == "reply"
    assert "not a list of tokens" in str(greedy(talk(answer), TEXT, 4).problem)
    assert asked == ["/tokenize"] * 2


def test_token_by_token_is_given_up_when_it_takes_for_ever() -> None:
    around = Scripted(Llama(grammar=False))
    hasty = Client(around, scripted.endpoint(), RequestLimits(most=-1.0))
    scored = score_text(hasty, TEXT)
    assert scored.trouble == "lost"
    assert "1 of 8 tokens took" in str(scored.problem)
    assert len(around.asked) == 3
