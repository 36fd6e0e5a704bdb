"""A small part of the proof, again and again: what a server once knew, it must still know.

The first look at a server is the whole of `facts`, and `likelihood` where the engine gives
probabilities. Each later look asks a few of the questions that were answered rightly then, and
scores one text, which is held against its own score of then: a model that is right about seven
questions of eight is not blamed for the eighth, and a look costs a few dozen tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bakehouse.checks import Check, Verdict, check
from bakehouse.probe import facts
from bakehouse.probe.ask import Asker
from bakehouse.probe.golden import read_golden
from bakehouse.probe.prove import conclude
from bakehouse.probe.score import Scored, score_text
from bakehouse.probe.suite import run_suite
from bakehouse.probe.suites import likelihood
from bakehouse.probe.suites.facts import SUITE as FACTS
from bakehouse.probe.suites.facts import one as ask_one
from bakehouse.probe.suites.likelihood import SAME_BACKEND, texts
from bakehouse.probe.talk import Around, Patience, Talk
from bakehouse.probe.types import Endpoint, Given, Known, Proof
from bakehouse.recipe.gate import Probe, Question
from bakehouse.records.model import Answer

QUESTIONS = 2
"""Asked in each look."""
HASTY = Patience(base=60.0, attempts=2)
"""A look may wait behind other requests, but not for ever."""


@dataclass(frozen=True)
class Baseline:
    """What a server knew when it was proven."""

    right: tuple[Question, ...]
    scores: Mapping[str, tuple[float, ...]]
    """Log-probabilities of each text's tokens, in nats; empty where the engine gives none."""


@dataclass(frozen=True)
class Sampled:
    """What one look came to."""

    checks: tuple[Check, ...]
    answers: tuple[Answer, ...]
    problem: str | None = None
    """Why something was not answered at all."""
    lost: bool = False
    """Whether the connection, or a busy server, was at fault."""


def first_look(
    ctx: Around, endpoint: Endpoint, probe: Probe, known: Known | None
) -> tuple[Proof, Baseline]:
    """Judge the whole of it once, and keep what later looks are held against."""
    given = Given(endpoint, probe, known, read_golden(known))
    proofs = [run_suite(ctx, FACTS, given, HASTY)]
    scored: dict[str, Scored] = {}
    if endpoint.engine and not proofs[0].lost:
        scored = likelihood.ask(Talk(ctx, endpoint, HASTY), given)
        proofs.append(likelihood.judge(scored, given))
    if proofs[-1].verdict == "unable":
        proofs, scored = proofs[:1], {}  # such an engine is watched by its answers alone
    proof = conclude(proofs)
    scores = {name: one.logprobs for name, one in scored.items() if not one.trouble}
    asked = facts.questions(probe.facts)
    answers = [a for a in proof.answers if a.verdict == "right"]
    right = tuple(q for q in asked if any(a.question == q.ask for a in answers))
    return proof, Baseline(right, scores)


def look_again(
    ctx: Around, endpoint: Endpoint, probe: Probe, known: Baseline, number: int
) -> Sampled:
    """Ask a part; which part goes round with `number`."""
    talk = Talk(ctx, endpoint, HASTY)
    given = Given(endpoint, probe)
    asker = Asker(talk, probe.request)
    answers = []
    for question in turn(known.right, number):
        others = [q for q in facts.questions(probe.facts) if q is not question]
        answer, lost = ask_one(asker, given, question, others)
        answers.append(answer)
        if answer.verdict == "unanswered":
            return Sampled((facts_check(answers),), tuple(answers), answer.why, lost)
    checks = [facts_check(answers)]
    if known.scores:
        name = list(known.scores)[number % len(known.scores)]
        scored = score_text(talk, texts()[name])
        checks.append(score_check(name, known.scores[name], scored))
        if scored.trouble in ("lost", "reply"):
            return Sampled(tuple(checks), tuple(answers), scored.problem, scored.trouble == "lost")
    return Sampled(tuple(checks), tuple(answers))


def turn(questions: Sequence[Question], number: int) -> tuple[Question, ...]:
    """Give the questions whose turn it is, none twice."""
    count = min(QUESTIONS, len(questions))
    return tuple(questions[(number * count + n) % len(questions)] for n in range(count))


def facts_check(answers: Sequence[Answer]) -> Check:
    """Judge the answers: each was right before."""
    bad = next((a for a in answers if a.verdict != "right"), None)
    heard = [a for a in answers if a.verdict != "unanswered"]
    seen = f"{sum(a.verdict == 'right' for a in answers)} of {len(answers)}"
    if bad:
        seen = f"{seen}; {bad.question!r} got {bad.content[:80]!r} ({bad.verdict}: {bad.why})"
    return check(
        "watch.facts", "what was answered rightly at first is still", seen,
        "POST /v1/chat/completions, /v1/completions", ok=not bad if len(heard) == len(answers) and
        answers else None,
    )  # fmt: skip


def score_check(name: str, before: Sequence[float], scored: Scored) -> Check:
    """Judge a text's score against its first one."""
    expected = f"text '{name}' as likely as at first, give or take {SAME_BACKEND.mean:g} nats"
    if scored.trouble:
        ok = False if scored.trouble == "numbers" else None
        return check("watch.likelihood", expected, scored.problem, name, ok=ok)
    if len(scored.logprobs) != len(before):
        return check("watch.likelihood", expected, "other tokens", name, ok=False)
    change = (math.fsum(before) - math.fsum(scored.logprobs)) / len(before)
    spread = math.fsum(abs(a - b) for a, b in zip(before, scored.logprobs, strict=True))
    near = abs(change) <= SAME_BACKEND.mean and spread / len(before) <= SAME_BACKEND.spread
    return check("watch.likelihood", expected, f"{change:+.4f} nats a token", name, ok=near)


def wrong(checks: Sequence[Check]) -> Check | None:
    """Give the first that failed."""
    return next((c for c in checks if c.verdict is Verdict.FAILED), None)
