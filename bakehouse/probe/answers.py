"""Is an answer right?

An answer counts wherever it is in the reply, so that a model which thinks out loud passes. So that
a server which is wrong cannot pass, these do not count: the question's own words; one text for all
questions; a text that loops; a list of candidates; a text that answers everything at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from bakehouse.models import Check, Verdict, check
from bakehouse.probe.client import JsonResponse, split_thoughts
from bakehouse.probe.text_quality import (
    asserted,
    find_defects,
    holds,
    lists,
    loops,
    normal,
    without_echo,
)
from bakehouse.recipe.models import BUILT_IN, Facts, Question
from bakehouse.runs.store import Answer

SAME = "same"
"""The key of the words that mean the same in all languages."""
DATA = Path(__file__).with_name("facts.yaml")


@cache
def _data() -> dict[str, list[Any]]:
    from ruamel.yaml import YAML  # only a probe needs it

    loaded: dict[str, list[Any]] = YAML(typ="safe", pure=True).load(DATA)
    return loaded


def languages() -> tuple[str, ...]:
    """Languages that there are built-in questions in, English first."""
    return tuple(key for key in _data() if key != SAME)


def _everywhere(answers: Sequence[str]) -> tuple[str, ...]:
    """Give answers and what they are called in other languages: a model may answer in its own."""
    groups = (group for group in _data()[SAME] if not set(group).isdisjoint(answers))
    return tuple(dict.fromkeys([*answers, *(word for group in groups for word in group)]))


def built_in(language: str = "en", mode: str = "chat") -> tuple[Question, ...]:
    """Give the built-in questions of a language, as questions or as sentences to go on with."""
    key = "complete" if mode == "completion" else "ask"
    return tuple(
        Question.model_validate(
            {"ask": row[key], "answers": _everywhere(row["answers"]), "mode": mode}
        )
        for row in _data()[language]
    )


def questions(facts: Facts) -> tuple[Question, ...]:
    """Give what is asked: the recipe's own questions, or the built-in ones."""
    return facts.questions or built_in(facts.language, facts.mode)


def must_pass(facts: Facts) -> int:
    """Give how many must be right, where the recipe does not say.

    All of a recipe's own: whoever writes them knows their model. All but one of the built-in ones:
    a small model may miss one, while a corrupted one misses nearly all.
    """
    if facts.must_pass:
        return facts.must_pass
    return len(facts.questions) if facts.questions else BUILT_IN - 1


AnswerVerdict = Literal["right", "wrong", "never started", "unanswered"]
THINK_LESS = "set probe.request.reasoning_effort: low, or raise probe.request.max_tokens"
"""Hint for a model that never comes to an answer."""

FIRST_SENTENCE = re.compile(r"\s*\S.*?(?:[.!?。！？](?=\s|$)|\n|\Z)", re.DOTALL)  # noqa: RUF001
"""The part of a plain completion that is graded: a model continues with whatever it likes."""


@dataclass(frozen=True)
class Judgement:
    """Grade of one reply; `why` says what was found, `found_in` where."""

    verdict: AnswerVerdict
    why: str
    found_in: Literal["content", "reasoning"] | None = None


def grade_answer(
    question: Question,
    reply: JsonResponse,
    others: Sequence[Question] = (),
    *,
    asked_tokens: int = 0,
) -> Judgement:
    """Grade one reply.

    `others` are the suite's other questions, `asked_tokens` the budget that the request gave.
    """
    if reply.problem is not None:
        return Judgement("unanswered", reply.problem)
    answer, raw_thoughts = split_thoughts(reply.content)
    if question.mode == "completion":
        found = FIRST_SENTENCE.match(answer)
        answer = found[0] if found else ""
    thoughts = "\n".join(filter(None, (reply.reasoning, raw_thoughts)))
    # Raw thinking that came as content is not an answer; if it holds one all the same, it counts.
    unfinished = not answer.strip() and out_of_tokens(reply, asked_tokens)
    if not unfinished or reply.content.strip():
        grade = _find_in_places(question, answer, thoughts, others)
        if grade.verdict == "right" or not unfinished:
            return grade
    spent = f" after {len(thoughts)} characters of reasoning" if thoughts else ""
    return Judgement("never started", f"the budget ended{spent} before any answer")


def record_answer(
    question: str, reply: JsonResponse, grade: Judgement, wanted: Sequence[str], *,
    mode: str = "chat", retried: bool = False, content: str | None = None,
) -> Answer:  # fmt: skip
    """Make the record of one answer; `content` replaces that of the reply."""
    return Answer(
        question=question, mode=mode, wanted=tuple(wanted),
        content=reply.content if content is None else content, reasoning=reply.reasoning,
        finish_reason=reply.finish_reason, verdict=grade.verdict, why=grade.why,
        found_in=grade.found_in, tokens=reply.tokens, seconds=round(reply.seconds, 3),
        retried=retried, http_status=reply.http_status,
    )  # fmt: skip


def out_of_tokens(reply: JsonResponse, asked_tokens: int) -> bool:
    """Whether a reply ended because its budget was used up."""
    spent = reply.tokens is not None and 0 < asked_tokens <= reply.tokens
    return reply.finish_reason == "length" or (reply.finish_reason is None and spent)


def _find_in_places(
    question: Question, answer: str, thoughts: str, others: Sequence[Question]
) -> Judgement:
    """Look for a known answer in the content, then in the reasoning."""
    if not answer.strip() and not thoughts.strip():
        return Judgement("wrong", "the reply is empty")
    if loops(normal(answer)):
        return Judgement("wrong", "the content repeats one piece of text over and over")
    reasons: list[str] = []
    places: tuple[tuple[Literal["content", "reasoning"], str], ...] = (
        ("content", answer), ("reasoning", thoughts),
    )  # fmt: skip
    for place, text in places:
        matched, why_not = find_answer(question, text, others)
        if matched and not why_not:
            return Judgement("right", f"'{matched}' in the {place}", place)
        if matched:
            reasons.append(f"the {place} holds '{matched}', but {why_not}")
    return Judgement("wrong", "; ".join(reasons) or f"no '{question.answers[0]}' in it")


def find_answer(
    question: Question, text: str, others: Sequence[Question] = ()
) -> tuple[str | None, str | None]:
    """Give the known answer that a text holds, and what speaks against the text."""
    asked = normal(question.ask)
    said = without_echo(normal(text), asked)
    claims = asserted(said)
    matched = next((a for a in question.answers if holds(claims, normal(a))), None)
    if matched is None:
        return None, None
    if loops(normal(text)):
        return matched, "repeats one piece of text over and over"
    if lists(text):
        return matched, "only as one of a list of candidates"
    # Answers to other questions, which are no answer to this one and are not named in it.
    elsewhere = sum(
        any(holds(said, normal(a)) and not holds(asked, normal(a)) for a in other.answers)
        for other in others
        if disjoint(question, other)
    )
    if len(others) >= 2 and elsewhere >= min(3, len(others)):
        return matched, f"answers {elsewhere} other questions as well: a text for everything"
    return matched, None


def disjoint(one: Question, other: Question) -> bool:
    """Whether no answer to one is an answer to the other."""
    return not {normal(a) for a in one.answers} & {normal(a) for a in other.answers}


ILL_FORMED = frozenset({"control-token", "broken-characters", "mixed-scripts"})
"""Defects that do not belong in any answer, however short; several are a fault of the server."""


def check_answers(
    suite: str, questions: Sequence[Question], answers: Sequence[Answer], must_pass: int
) -> tuple[Check, ...]:
    """Check a suite by its answers, which are in the order of the questions.

    Enough must be right. If too few are right but unanswered ones might have been, the verdict is
    unknown. Different questions must not have got one and the same text, and not several answers
    may hold characters that belong to no answer.
    """
    right = sum(a.verdict == "right" for a in answers)
    graded = sum(a.verdict in ("right", "wrong") for a in answers)
    undecided = right < must_pass <= right + len(answers) - graded
    checks = [
        check(
            f"probe.{suite}", f"at least {must_pass} of {len(questions)} right", tally(answers),
            evidence(answers, right >= must_pass),
            ok=None if undecided else right >= must_pass,
        )
    ]  # fmt: skip
    if len(questions) < 2:
        return tuple(checks)
    same = _same_text(questions, answers)
    checks.append(check(
        f"probe.{suite}.distinct", "different answers to different questions",
        f"the same text for {len(same)} questions" if same else f"{graded} answers compared",
        _quote(same[0]) if same else evidence(answers, True),
        ok=False if same else (True if graded >= 2 else None),
    ))  # fmt: skip
    defects = {
        n: (answer, flaw.what)
        for n, answer in enumerate(answers)
        for flaw in find_defects(split_thoughts(answer.content)[0])[::-1]
        if flaw.id in ILL_FORMED
    }
    if len(defects) >= 2:
        first, what = next(iter(defects.values()))
        checks.append(check(
            f"probe.{suite}.form", "answers without anything that does not belong in one",
            f"{len(defects)} answers are ill formed: {what}", _quote(first), ok=False,
        ))  # fmt: skip
    return tuple(checks)


def _same_text(questions: Sequence[Question], answers: Sequence[Answer]) -> list[Answer]:
    """Answers with one and the same text, to questions that have no answer in common.

    Two of them that count as right are enough: the text then holds several answers. Otherwise half
    of all: a small model may well give one wrong answer twice.
    """
    groups: dict[str, list[tuple[Question, Answer]]] = {}
    for question, answer in zip(questions, answers, strict=True):
        if answer.verdict in ("right", "wrong"):
            text = normal(f"{answer.content} {answer.reasoning}")
            groups.setdefault(without_echo(text, normal(question.ask)), []).append(
                (question, answer)
            )
    for group in groups.values():
        first = group[0][0]
        if len(group) < 2 or not any(disjoint(first, other) for other, _ in group[1:]):
            continue
        right = sum(a.verdict == "right" for _, a in group)
        if right >= 2 or len(group) * 2 > len(questions):
            return [a for _, a in group]
    return []


def tally(answers: Sequence[Answer]) -> str:
    """Count verdicts: `6 right, 1 wrong, 1 never started`."""
    order: tuple[AnswerVerdict, ...] = ("right", "wrong", "never started", "unanswered")
    counts = {v: sum(a.verdict == v for a in answers) for v in order}
    return ", ".join(f"{n} {v}" for v, n in counts.items() if n or v == "right")


def evidence(answers: Sequence[Answer], passed: bool, *, most: int = 3) -> str:
    """Quote a right answer, or up to `most` that were not right, with their questions."""
    chosen = [a for a in answers if (a.verdict == "right") == passed]
    return "; ".join(map(_quote, chosen[: 1 if passed else most])) or "no answers"


def _quote(answer: Answer) -> str:
    text = answer.content.strip() or answer.reasoning.strip()
    said = f'"{_short(text)}"' if text else "nothing"
    because = "" if answer.verdict == "right" else f" ({answer.verdict}: {_short(answer.why)})"
    return f'"{answer.question}" got {said}{because}'


def _short(text: str) -> str:
    flat = " ".join(text[:600].split())
    return flat if len(flat) <= 100 else f"{flat[:97]}..."


def overall(checks: Sequence[Check]) -> Verdict:
    """Give the verdict over all checks: failed if any failed, passed only if all passed."""
    verdicts = {c.verdict for c in checks}
    if Verdict.FAILED in verdicts:
        return Verdict.FAILED
    return Verdict.PASSED if verdicts == {Verdict.PASSED} else Verdict.UNKNOWN
