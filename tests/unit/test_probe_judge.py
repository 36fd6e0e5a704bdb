"""The gate, on recorded answers: who is right passes, who is wrong does not, whatever it tries."""

from __future__ import annotations

import random

import pytest

from bakehouse.models import Verdict
from bakehouse.probe.answers import (
    built_in,
    check_answers,
    grade_answer,
    languages,
    must_pass,
    overall,
    questions,
)
from bakehouse.probe.client import JsonResponse
from bakehouse.probe.text_quality import holds, normal
from bakehouse.recipe.models import BUILT_IN, Facts, Question
from bakehouse.runs.store import Answer

CAPITAL = Question(ask="What is the capital of France?", answers=("Paris",))
HOT = Question(ask="What is the opposite of hot?", answers=("cold",))
SUM = Question(ask="What is 2+2? Answer with a number.", answers=("4", "four"))
THREE = (CAPITAL, HOT, SUM)


def verdict(question: Question, content: str, reasoning: str = "", finish: str = "stop") -> str:
    others = [q for q in THREE if q is not question]
    said = JsonResponse(content=content, reasoning=reasoning, finish_reason=finish)
    return grade_answer(question, said, others, asked_tokens=64).verdict


RIGHT = [
    (CAPITAL, "Paris", "", "stop"),
    (CAPITAL, "**Paris**", "", "stop"),
    (CAPITAL, "The capital of France is **Paris**, a city on the Seine.", "", "length"),
    (CAPITAL, "<think>France... Paris.</think>The capital is Paris.", "", "stop"),
    (CAPITAL, "<think>It is Paris. The user wants", "", "length"),
    (CAPITAL, "to=self The user asks for a capital. It is Paris.", "", "length"),
    (CAPITAL, "I would say Paris", "", "length"),
    (CAPITAL, "", "The capital of France is Paris.", "stop"),
    (CAPITAL, "It is what I said.", "France: Paris.", "stop"),
    (SUM, "2 + 2 = 4", "", "stop"),
    (SUM, "Two plus two is four.", "", "stop"),
    (HOT, "The opposite of hot is cold.", "", "stop"),
]


def test_grading_accepts_right_answers() -> None:
    assert [row for row in RIGHT if verdict(*row) != "right"] == []


WRONG = {
    "another answer": (CAPITAL, "London"),
    "part of a word": (SUM, "14"),
    "nothing": (CAPITAL, ""),
    "white space": (CAPITAL, " \n "),
    "question marks": (CAPITAL, "?" * 40),
    "fragments in a loop": (CAPITAL, "lockhandlehandlehandlehandle"),
    "words in a loop": (CAPITAL, " the of France is the of France is"),
    "word soup": (CAPITAL, '|| \\""".||multimult||multmult |multmult |\nmultmultimultimult'),
    "noise of a wrong kernel": (CAPITAL, "\n_con_c\n\nThe\n"),
    "markers of a wrong template": (CAPITAL, "<|eom|>_cassistant_"),
    "the answer in a loop": (CAPITAL, "Paris " * 40),
    "echo of the question": (HOT, "What is the opposite of hot?"),
    "candidates": (
        CAPITAL,
        "London, Berlin, Madrid, Rome, Paris, Vienna, Prague, Oslo, Bern, Kyiv, Riga, Athens",
    ),
    "everything": (CAPITAL, "Paris, cold, 4"),
}


def test_grading_refuses_wrong_answers() -> None:
    assert [name for name, row in WRONG.items() if verdict(*row) != "wrong"] == []


def test_where_the_answer_was_found_is_said() -> None:
    in_reasoning = grade_answer(
        CAPITAL, JsonResponse(content="Done.", reasoning="Paris", finish_reason="stop")
    )
    assert in_reasoning.found_in == "reasoning"
    in_thought = grade_answer(
        CAPITAL, JsonResponse(content="<think>Paris</think>Done.", finish_reason="stop")
    )
    assert in_thought.found_in == "reasoning"
    assert grade_answer(CAPITAL, JsonResponse(content="Paris")).found_in == "content"


def test_raw_thinking_that_was_cut_off_without_an_answer_never_started() -> None:
    assert verdict(CAPITAL, "<think>Okay, the user wants to know", "", "length") == "never started"
    assert verdict(CAPITAL, "<think>Okay, the user wants to know", "", "stop") == "wrong"
    assert verdict(CAPITAL, "to=self the user wants", "", "length") == "never started"


def test_an_empty_reply_that_ran_out_of_tokens_never_started() -> None:
    assert verdict(CAPITAL, "", "Okay, the user", "length") == "never started"
    assert verdict(CAPITAL, "", "", "length") == "never started"
    no_reason = JsonResponse(content="", tokens=64)
    assert grade_answer(CAPITAL, no_reason, asked_tokens=64).verdict == "never started"
    assert (
        grade_answer(CAPITAL, JsonResponse(content="", tokens=3), asked_tokens=64).verdict
        == "wrong"
    )


def test_a_problem_is_unanswered_and_named() -> None:
    judged = grade_answer(CAPITAL, JsonResponse(problem="HTTP 500: broken"))
    assert (judged.verdict, judged.why) == ("unanswered", "HTTP 500: broken")


def test_a_plain_completion_is_judged_by_its_first_sentence() -> None:
    sentence = Question(ask="The capital of France is", answers=("Paris",), mode="completion")
    good = JsonResponse(
        content=" Paris.\n\nThe capital of France is Paris. The capital of France is Par"
    )
    late = JsonResponse(content=" a city. The capital of Italy is Rome. Paris is")
    assert grade_answer(sentence, good).verdict == "right"
    assert grade_answer(sentence, late).verdict == "wrong"


def test_the_answer_and_another_one_beside_it_is_right() -> None:
    german = Question(ask="What is the capital of Germany?", answers=("Berlin",))
    said = JsonResponse(content="Paris. (Berlin is the capital of Germany.)")
    assert grade_answer(CAPITAL, said, [german]).verdict == "right"


def answers_of(suite: tuple[Question, ...], texts: list[str]) -> tuple[Answer, ...]:
    made = []
    for question, text in zip(suite, texts, strict=True):
        said = JsonResponse(content=text, finish_reason="stop")
        judged = grade_answer(question, said, [q for q in suite if q is not question])
        made.append(
            Answer(
                question=question.ask, mode=question.mode, wanted=question.answers,
                content=text, verdict=judged.verdict, why=judged.why, seconds=0,
            )
        )  # fmt: skip
    return tuple(made)


def result(suite: tuple[Question, ...], texts: list[str], need: int) -> Verdict:
    return overall(check_answers("facts", suite, answers_of(suite, texts), need))


def test_enough_right_answers_pass_and_too_few_fail() -> None:
    assert result(THREE, ["Paris", "cold", "4"], 3) is Verdict.PASSED
    assert result(THREE, ["Paris", "cold", "5"], 2) is Verdict.PASSED
    assert result(THREE, ["Paris", "cold", "5"], 3) is Verdict.FAILED


def test_what_was_not_answered_is_never_counted_as_passed_nor_as_wrong() -> None:
    right, _, wrong = answers_of(THREE, ["Paris", "cold", "5"])
    unanswered = right.model_copy(update={"verdict": "unanswered", "content": ""})
    assert (
        overall(check_answers("facts", THREE, (right, unanswered, unanswered), 2))
        is Verdict.UNKNOWN
    )
    assert overall(check_answers("facts", THREE, (unanswered,) * 3, 1)) is Verdict.UNKNOWN
    assert overall(check_answers("facts", THREE, (wrong, wrong, unanswered), 2)) is Verdict.FAILED


SETS = [(language, mode) for language in languages() for mode in ("chat", "completion")]


@pytest.mark.parametrize(("language", "mode"), SETS)
def test_built_in_questions(language: str, mode: str) -> None:
    suite = built_in(language, mode)
    assert len(suite) == BUILT_IN
    seen: set[str] = set()
    for question in suite:
        mine = {normal(a) for a in question.answers}
        assert not mine & seen, "two questions with one answer"
        assert not any(holds(normal(question.ask), a) for a in mine), "gives its answer away"
        seen |= mine
    assert result(suite, [q.answers[0] for q in suite], BUILT_IN) is Verdict.PASSED
    # No fixed text passes.
    need = BUILT_IN - 1
    everything = " ".join(a for q in suite for a in q.answers)
    for text in ("", everything, everything * 20, suite[0].answers[0], "I am a language model"):
        assert result(suite, [text] * BUILT_IN, need) is not Verdict.PASSED
        echoed = [f"{q.ask} {text}" for q in suite]
        assert result(suite, echoed, need) is not Verdict.PASSED
        numbered = [f"{i}. {text}" for i in range(BUILT_IN)]
        assert result(suite, numbered, need) is not Verdict.PASSED
    # A soup of a thousand words does not pass.
    words = [a for q in suite for a in q.answers] + [f"word{i}" for i in range(300)]
    for seed in range(2):
        mixer = random.Random(seed)
        soups = [" ".join(mixer.choices(words, k=1000)) for _ in suite]
        assert result(suite, soups, BUILT_IN - 1) is not Verdict.PASSED


def test_the_same_text_for_two_questions_that_share_an_answer_is_fine() -> None:
    legs = Question(ask="How many legs has a dog?", answers=("4", "four"))
    assert result((SUM, legs), ["4", "4"], 2) is Verdict.PASSED


def test_one_text_that_is_right_twice_fails() -> None:
    assert result((CAPITAL, HOT), ["Paris and cold"] * 2, 2) is Verdict.FAILED


def test_a_constant_answer_fails_even_where_one_is_enough() -> None:
    assert result(THREE, ["4"] * 3, 1) is Verdict.FAILED


def test_how_many_must_pass() -> None:
    assert must_pass(Facts()) == BUILT_IN - 1
    assert must_pass(Facts(questions=THREE)) == 3
    assert must_pass(Facts(questions=THREE, must_pass=2)) == 2
    assert questions(Facts(questions=THREE)) == THREE
    with pytest.raises(ValueError, match="8 built-in questions"):
        Facts(must_pass=9)
