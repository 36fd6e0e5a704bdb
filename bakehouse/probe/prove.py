"""Runs the suites of a recipe against a server: asks, judges, and gives the proof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from bakehouse.checks import Verdict
from bakehouse.errors import BakehouseError, NotCorrect, NotHealthy
from bakehouse.ports.clock import Clock
from bakehouse.ports.http import Http, Unreachable
from bakehouse.probe import facts
from bakehouse.probe.ask import Asker, Patience, first_budget, larger_budget, list_models
from bakehouse.probe.judge import Judgement, gate, judge, overall, tally
from bakehouse.probe.reply import Said
from bakehouse.probe.types import Endpoint, Proof
from bakehouse.progress import Progress
from bakehouse.recipe.model import Probe, Question
from bakehouse.records.model import Answer

GIVE_UP_AFTER = 2
"""So many questions in a row that no connection answered, and the rest is not asked."""


PATIENT = Patience()


class Around(Protocol):
    """What a probe needs of the context."""

    @property
    def http(self) -> Http: ...  # noqa: D102
    @property
    def clock(self) -> Clock: ...  # noqa: D102
    @property
    def progress(self) -> Progress: ...  # noqa: D102


def prove(
    ctx: Around,
    endpoint: Endpoint,
    probe: Probe,
    *,
    patience: Patience = PATIENT,
) -> Proof:
    """Ask what the recipe wants asked, and judge it. Never raises for what a server does."""
    endpoint = _with_model(ctx.http, endpoint)
    asked = facts.questions(probe.facts)
    must_pass = facts.must_pass(probe.facts)
    asker = Asker(ctx.http, ctx.clock, endpoint, probe.request, patience)
    answers: list[Answer] = []
    lost = 0
    with ctx.progress.bar("probe", "questions") as bar:
        for number, question in enumerate(asked):
            others = [q for q in asked if q is not question]
            if lost < GIVE_UP_AFTER:
                answer, is_lost = _one(asker, endpoint, probe, question, others)
                lost = lost + 1 if is_lost else 0
            else:
                said = Said(problem=f"not asked, after {lost} questions in a row without an answer")
                answer = _answer(question, said, judge(question, said))
            answers.append(answer)
            bar.update(number + 1, len(asked), tally(answers))
    checks = gate("facts", asked, answers, must_pass)
    verdict = overall(checks)
    summary = _summary(verdict, answers, must_pass)
    return Proof(checks, tuple(answers), verdict, summary)


def _with_model(http: Http, endpoint: Endpoint) -> Endpoint:
    """Name the model to ask for, where nobody did: the first that the server lists."""
    if endpoint.model:
        return endpoint
    try:
        models = list_models(http, endpoint)
    except Unreachable:
        return endpoint  # the questions will tell
    return replace(endpoint, model=models[0]) if models else endpoint


def _one(
    asker: Asker, endpoint: Endpoint, probe: Probe, question: Question, others: Sequence[Question]
) -> tuple[Answer, bool]:
    """Ask one question, a second time with more room if the budget ended before the answer."""
    budget = first_budget(question, probe.request)
    said = asker.ask(question)
    judged = judge(question, said, others, asked_tokens=budget)
    if judged.verdict != "never started":
        return _answer(question, said, judged), said.lost
    larger = larger_budget(budget, endpoint.context)
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


def _summary(verdict: Verdict, answers: Sequence[Answer], must_pass: int) -> str:
    word = {
        Verdict.PASSED: "answers correctly",
        Verdict.FAILED: "does not answer correctly",
        Verdict.UNKNOWN: "is not proven",
    }[verdict]
    return f"the server {word}: {tally(answers)} of {len(answers)} ({must_pass} must be right)"


def explain(proof: Proof, where: str) -> BakehouseError | None:
    """Give the error that says why this is no proof; None where it is one.

    NotHealthy where too little was answered at all, NotCorrect where answers were wrong, or where
    the model never came to an answer.
    """
    if proof.passed:
        return None
    verdicts = {a.verdict for a in proof.answers}
    checks = proof.checks
    if proof.verdict is Verdict.UNKNOWN and "unanswered" in verdicts:
        first = next(a for a in proof.answers if a.verdict == "unanswered")
        return NotHealthy(
            f"{proof.summary}; {first.why}",
            where=where,
            hint="look at the server's log for what it made of the request",
            checks=checks,
        )
    if "never started" in verdicts and proof.verdict is Verdict.UNKNOWN:
        return NotCorrect(
            f"{proof.summary}: the model thinks and never comes to an answer",
            where=where,
            hint="set probe.request.reasoning_effort: low, or raise probe.request.max_tokens",
            checks=checks,
        )
    return NotCorrect(
        proof.summary,
        where=where,
        hint="do not trust this server: suspect the build (toolkit, kernels), the quantisation, "
        "the chat template and the last flag that changed, in this order",
        checks=checks,
    )


def answer_lines(answers: Sequence[Answer]) -> list[str]:
    """Give one line an answer: verdict, question, what was said. Untrusted text, not cleaned."""
    width = max((len(a.verdict) for a in answers), default=0)
    return [f"{a.verdict:{width}}  {a.question}  {_said(a)}" for a in answers]


def _said(answer: Answer) -> str:
    text = " ".join((answer.content.strip() or answer.reasoning.strip())[:400].split())
    short = text if len(text) <= 80 else f"{text[:77]}..."
    parts = [f"-> {short}" if short else f"-> nothing ({answer.why})"]
    if short and answer.verdict != "right":
        parts.append(f"({answer.why})")
    if answer.verdict == "right" and answer.found_in == "reasoning":
        parts.append("(found in the reasoning)")
    return " ".join(parts)
