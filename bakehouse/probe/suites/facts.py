"""The suite `facts`: questions whose answers are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bakehouse.checks import Verdict
from bakehouse.probe import facts
from bakehouse.probe.ask import Asker, first_budget, larger_budget
from bakehouse.probe.judge import Judgement, gate, judge, overall, tally
from bakehouse.probe.reply import Said
from bakehouse.probe.suite import Suite
from bakehouse.probe.talk import Talk
from bakehouse.probe.types import Given, SuiteProof
from bakehouse.recipe.gate import Question
from bakehouse.records.model import Answer, SuiteVerdict

GIVE_UP_AFTER = 2
"""So many questions in a row that no connection answered, and the rest is not asked."""


def ask(talk: Talk, given: Given) -> tuple[Answer, ...]:
    """Ask all questions, in order; each answer is judged as it comes, for the progress bar."""
    asked = facts.questions(given.probe.facts)
    asker = Asker(talk, given.probe.request)
    answers: list[Answer] = []
    lost = 0
    with talk.progress.bar("probe", "questions") as bar:
        for number, question in enumerate(asked):
            others = [q for q in asked if q is not question]
            if lost < GIVE_UP_AFTER:
                answer, is_lost = one(asker, given, question, others)
                lost = lost + 1 if is_lost else 0
            else:
                said = Said(problem=f"not asked, after {lost} questions in a row without an answer")
                answer = _answer(question, said, judge(question, said))
            answers.append(answer)
            bar.update(number + 1, len(asked), tally(answers))
    return tuple(answers)


def one(
    asker: Asker, given: Given, question: Question, others: Sequence[Question]
) -> tuple[Answer, bool]:
    """Ask one question, a second time with more room if the budget ended before the answer.

    Gives the answer, and whether the connection or an overloaded server was at fault.
    """
    budget = first_budget(question, given.probe.request)
    said = asker.ask(question)
    judged = judge(question, said, others, asked_tokens=budget)
    if judged.verdict != "never started":
        return _answer(question, said, judged), said.lost
    larger = larger_budget(budget, given.endpoint.context)
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


def _answer(question: Question, said: Said, judged: Judgement, *, retried: bool = False) -> Answer:
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


def conclude(answers: Sequence[Answer], given: Given) -> SuiteProof:
    """Judge the answers, which are in the order of the questions."""
    must_pass = facts.must_pass(given.probe.facts)
    checks = gate("facts", facts.questions(given.probe.facts), answers, must_pass)
    summary = f"{tally(answers)} of {len(answers)} ({must_pass} must be right)"
    verdict: SuiteVerdict = "true"
    hint = None
    seen = overall(checks)
    unanswered = [a for a in answers if a.verdict == "unanswered"]
    if seen is Verdict.FAILED:
        verdict = "wrong"
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
