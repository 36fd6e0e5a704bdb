"""The suite `facts`: questions whose answers are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bakehouse.models import Verdict
from bakehouse.probe import answers as facts
from bakehouse.probe.answers import (
    THINK_LESS,
    check_answers,
    evidence,
    grade_answer,
    out_of_tokens,
    overall,
    record_answer,
    tally,
)
from bakehouse.probe.client import Client, JsonResponse, first_budget, larger_budget
from bakehouse.probe.models import SuiteInput, SuiteProof
from bakehouse.probe.suites.base import Suite
from bakehouse.probe.text_quality import find_defects, same_words
from bakehouse.recipe.models import Question
from bakehouse.runs.store import Answer, SuiteVerdict

GIVE_UP_AFTER = 2
"""Questions in a row without a connection, after which the rest is not asked."""
SHORT = 20
"""Tokens of the first try if the recipe sets none: enough for each of these answers."""


def ask(talk: Client, given: SuiteInput) -> tuple[Answer, ...]:
    """Ask all questions, in order; each answer is graded as it comes, for the progress bar."""
    questions = facts.questions(given.probe.facts)
    answers: list[Answer] = []
    lost = 0
    cut_off = True
    with talk.progress.bar("probe", "questions") as bar:
        for number, question in enumerate(questions):
            others = [q for q in questions if q is not question]
            if lost < GIVE_UP_AFTER:
                answer, is_lost = ask_one(talk, given, question, others, cut_off=cut_off)
                lost = lost + 1 if is_lost else 0
                # A model that was given more room and is wrong all the same gets no more of it.
                cut_off = cut_off and not (answer.retried and answer.verdict == "wrong")
            else:
                why = f"not asked, after {lost} questions in a row without an answer"
                none = JsonResponse(problem=why)
                grade = grade_answer(question, none)
                answer = record_answer(
                    question.ask, none, grade, question.answers, mode=question.mode
                )
            answers.append(answer)
            bar.update(number + 1, len(questions), tally(answers))
    return tuple(answers)


def ask_one(
    talk: Client, given: SuiteInput, question: Question, others: Sequence[Question], *,
    cut_off: bool = True,
) -> tuple[Answer, bool]:  # fmt: skip
    """Ask one question, a second time with more room if the budget ended before the answer.

    With `cut_off` also if it ended within a text that is well formed, and holds no answer yet: many
    a model thinks aloud without a mark, or begins with courtesies. Returns the answer, and whether
    the connection or an overloaded server was at fault.
    """
    request = given.probe.request
    budget = first_budget(question, request)
    if "max_tokens" not in request.model_fields_set:
        budget = min(budget, SHORT)
    reply = talk.ask(question, request, budget)
    grade = grade_answer(question, reply, others, asked_tokens=budget)
    larger = larger_budget(budget, given.endpoint.context)
    if larger is None and budget < request.max_tokens and question.mode == "chat":
        larger = request.max_tokens
    # A plain completion always ends with its budget.
    wrong = grade.verdict == "wrong"
    ended_early = (
        wrong and cut_off and larger is not None and question.mode == "chat"
        and out_of_tokens(reply, budget)
        and not find_defects("\n".join(filter(None, (reply.reasoning, reply.content))))
    )  # fmt: skip
    lost, retried = reply.lost, False
    if grade.verdict == "never started" and larger is None:
        why = f"{grade.why}; the context has no room for more than {budget} tokens"
        grade = replace(grade, why=why)
    elif larger is not None and (grade.verdict == "never started" or ended_early):
        retried = True
        again = talk.ask(question, request, larger)
        grade_again = grade_answer(question, again, others, asked_tokens=larger)
        # After a wrong text only one that came to its own end counts: a long one holds many words.
        rambles = grade_again.verdict == "right" and wrong and out_of_tokens(again, larger)
        lost = again.lost
        if grade_again.verdict != "unanswered" and not rambles:
            why = f"{grade_again.why} (asked again with {larger} tokens, {budget} were too few)"
            reply, grade = again, replace(grade_again, why=why)
        elif not wrong:
            why = f"{grade.why}; asked again with {larger} tokens: {grade_again.why}"
            grade = replace(grade, why=why)
    answer = record_answer(
        question.ask, reply, grade, question.answers, mode=question.mode, retried=retried
    )
    return answer, lost


def conclude(answers: Sequence[Answer], given: SuiteInput) -> SuiteProof:
    """Check the answers, which are in the order of the questions."""
    must_pass = facts.must_pass(given.probe.facts)
    checks = check_answers("facts", facts.questions(given.probe.facts), answers, must_pass)
    summary = f"{tally(answers)} of {len(answers)} ({must_pass} must be right)"
    verdict: SuiteVerdict = "true"
    hint = None
    seen = overall(checks)
    unanswered = [a for a in answers if a.verdict == "unanswered"]
    right = [a for a in answers if a.verdict == "right"]
    if right and not any(a.content.strip() for a in right):
        summary += "; the content is empty, all answers are in the reasoning"
    if seen is Verdict.FAILED:
        verdict = "wrong"
        if checks[0].passed:
            summary += next(f"; {c.observed}" for c in checks if c.verdict is Verdict.FAILED)
        else:
            summary += f"; {evidence(answers, False, most=1)}"
    elif same := same_words([a.content for a in right]):
        summary += f"; all answers hold the same {len(same)} words: '{' '.join(same[:12])}'"
    elif seen is Verdict.UNKNOWN and unanswered:
        verdict = "unstable"
        summary = f"{summary}; {unanswered[0].why}"
        hint = "look at the server's log for what it made of the request"
    elif seen is Verdict.UNKNOWN:
        verdict = "never started"
        summary = f"{summary}: the model thinks and never comes to an answer"
        hint = THINK_LESS
    return SuiteProof(
        suite="facts", verdict=verdict, summary=summary, checks=checks, answers=tuple(answers),
        figures={"right": sum(a.verdict == "right" for a in answers), "asked": len(answers)},
        hint=hint, lost=len(unanswered) == len(answers),
    )  # fmt: skip


SUITE = Suite("facts", ask, conclude)
