"""The suite `facts`: questions whose answers are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bakehouse.models import Verdict
from bakehouse.probe import answers as facts
from bakehouse.probe.answers import (
    Judgement,
    evidence,
    gate,
    judge,
    never_started,
    overall,
    tally,
)
from bakehouse.probe.client import Asker, Client, Completion, first_budget, larger_budget
from bakehouse.probe.models import SuiteInput, SuiteProof
from bakehouse.probe.suites.base import Suite
from bakehouse.probe.text_quality import find_defects, same_words
from bakehouse.recipe.models import Question
from bakehouse.runs.store import Answer, SuiteVerdict

GIVE_UP_AFTER = 2
"""So many questions in a row that no connection answered, and the rest is not asked."""
SHORT = 20
"""Tokens of the first try, where a recipe names no number: enough for each of these answers."""


def ask(talk: Client, given: SuiteInput) -> tuple[Answer, ...]:
    """Ask all questions, in order; each answer is judged as it comes, for the progress bar."""
    asked = facts.questions(given.probe.facts)
    asker = Asker(talk, given.probe.request)
    answers: list[Answer] = []
    lost = 0
    cut_off = True
    with talk.progress.bar("probe", "questions") as bar:
        for number, question in enumerate(asked):
            others = [q for q in asked if q is not question]
            if lost < GIVE_UP_AFTER:
                answer, is_lost = one(asker, given, question, others, cut_off=cut_off)
                lost = lost + 1 if is_lost else 0
                # A model that was given more room and is wrong all the same gets no more of it.
                cut_off = cut_off and not (answer.retried and answer.verdict == "wrong")
            else:
                said = Completion(
                    problem=f"not asked, after {lost} questions in a row without an answer"
                )
                answer = _answer(question, said, judge(question, said))
            answers.append(answer)
            bar.update(number + 1, len(asked), tally(answers))
    return tuple(answers)


def one(
    asker: Asker, given: SuiteInput, question: Question, others: Sequence[Question], *,
    cut_off: bool = True,
) -> tuple[Answer, bool]:  # fmt: skip
    """Ask one question, a second time with more room if the budget ended before the answer.

    With `cut_off` also if it ended within a text that is well formed, and holds no answer yet: many
    a model thinks aloud without a mark, or begins with courtesies. Gives the answer, and whether
    the connection or an overloaded server was at fault.
    """
    request = given.probe.request
    budget = first_budget(question, request)
    if "max_tokens" not in request.model_fields_set:
        budget = min(budget, SHORT)
    said = asker.ask(question, budget)
    judged = judge(question, said, others, asked_tokens=budget)
    larger = larger_budget(budget, given.endpoint.context)
    if larger is None and budget < request.max_tokens and question.mode == "chat":
        larger = request.max_tokens
    if judged.verdict == "wrong" and cut_off and larger and _was_cut_off(question, said, budget):
        return _with_more_room(asker, question, others, (said, judged), (budget, larger))
    if judged.verdict != "never started":
        return _answer(question, said, judged), said.lost
    if larger is None:
        why = f"{judged.why}; the context has no room for more than {budget} tokens"
        return _answer(question, said, replace(judged, why=why)), False
    again = asker.ask(question, larger)
    judged_again = judge(question, again, others, asked_tokens=larger)
    if judged_again.verdict == "unanswered":
        why = f"{judged.why}; asked again with {larger} tokens: {judged_again.why}"
        return _answer(question, said, replace(judged, why=why), retried=True), again.lost
    why = f"{judged_again.why} (asked again with {larger} tokens, {budget} were too few)"
    return _answer(question, again, replace(judged_again, why=why), retried=True), False


def _was_cut_off(question: Question, said: Completion, budget: int) -> bool:
    """Whether a good text ended with its budget; one that goes on with a text always does."""
    if question.mode == "completion" or not never_started(said, "", budget):
        return False
    return not find_defects("\n".join(filter(None, (said.reasoning, said.content))))


def _with_more_room(
    asker: Asker, question: Question, others: Sequence[Question],
    first: tuple[Completion, Judgement], budgets: tuple[int, int],
) -> tuple[Answer, bool]:  # fmt: skip
    """Ask once more. Only a text that came to its own end counts: a long one holds many words."""
    before, larger = budgets
    again = asker.ask(question, larger)
    judged = judge(question, again, others, asked_tokens=larger)
    ended = not never_started(again, "", larger)
    if judged.verdict == "unanswered" or (judged.verdict == "right" and not ended):
        said, judged = first
        return _answer(question, said, judged, retried=True), again.lost
    why = f"{judged.why} (asked again with {larger} tokens, {before} were too few)"
    return _answer(question, again, replace(judged, why=why), retried=True), False


def _answer(
    question: Question, said: Completion, judged: Judgement, *, retried: bool = False
) -> Answer:
    return Answer(
        question=question.ask,
        mode=question.mode,
        wanted=question.answers,
        content=said.content,
        reasoning=said.reasoning,
        finish_reason=said.finish_reason,
        verdict=judged.verdict,
        why=judged.why,
        found_in=judged.found_in,
        tokens=said.tokens,
        seconds=round(said.seconds, 3),
        retried=retried,
        http_status=said.http_status,
    )


def conclude(answers: Sequence[Answer], given: SuiteInput) -> SuiteProof:
    """Judge the answers, which are in the order of the questions."""
    must_pass = facts.must_pass(given.probe.facts)
    checks = gate("facts", facts.questions(given.probe.facts), answers, must_pass)
    summary = f"{tally(answers)} of {len(answers)} ({must_pass} must be right)"
    verdict: SuiteVerdict = "true"
    hint = None
    seen = overall(checks)
    unanswered = [a for a in answers if a.verdict == "unanswered"]
    right = [a for a in answers if a.verdict == "right"]
    if right and not any(a.content.strip() for a in right):
        summary += "; the content is empty, all answers stand in the reasoning"
    if seen is Verdict.FAILED:
        verdict = "wrong"
        if checks[0].passed:
            summary += next(f"; {c.observed}" for c in checks if c.verdict is Verdict.FAILED)
        else:
            summary += f"; {evidence(answers, False, most=1)}"
    elif said := same_words([a.content for a in right]):
        summary += f"; all answers hold the same {len(said)} words: '{' '.join(said[:12])}'"
    elif seen is Verdict.UNKNOWN and unanswered:
        verdict = "unstable"
        summary = f"{summary}; {unanswered[0].why}"
        hint = "look at the server's log for what it made of the request"
    elif seen is Verdict.UNKNOWN:
        verdict = "never started"
        summary = f"{summary}: the model thinks and never comes to an answer"
        hint = "set probe.request.reasoning_effort: low, or raise probe.request.max_tokens"
    return SuiteProof(
        suite="facts", verdict=verdict, summary=summary, checks=checks, answers=tuple(answers),
        figures={"right": sum(a.verdict == "right" for a in answers), "asked": len(answers)},
        hint=hint, lost=len(unanswered) == len(answers),
    )  # fmt: skip


SUITE = Suite("facts", ask, conclude)
