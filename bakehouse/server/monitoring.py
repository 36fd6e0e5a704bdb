"""Samples of a running server between whole proofs.

The first look at a server is the whole of `facts`, and `likelihood` where the engine gives
probabilities. Each later look asks a few of the questions that were answered rightly then, and
scores one text, which is compared with its first score: a model that is right about seven
questions of eight is not blamed for the eighth, and a look costs a few dozen tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from bakehouse.context import Context
from bakehouse.engines.base import Counters, read_counters
from bakehouse.errors import BakehouseError, NotCorrect, NotHealthy
from bakehouse.models import Check, Verdict, check
from bakehouse.probe import answers as facts
from bakehouse.probe.client import Client, ProbeContext, RequestLimits
from bakehouse.probe.golden import read_golden
from bakehouse.probe.logprobs import Scored, score_text
from bakehouse.probe.models import Endpoint, Proof, ServedModel, SuiteInput
from bakehouse.probe.runner import SUSPECTS, conclude, explain
from bakehouse.probe.suites import likelihood
from bakehouse.probe.suites.base import run_suite
from bakehouse.probe.suites.facts import SUITE as FACTS
from bakehouse.probe.suites.facts import ask_one
from bakehouse.probe.suites.likelihood import SAME_BACKEND, texts
from bakehouse.progress import Silent
from bakehouse.recipe.models import Probe, Question
from bakehouse.runs.store import Answer
from bakehouse.server.session import log_since_proof
from bakehouse.server.status import get_status
from bakehouse.server.verification import (
    ServerHandle,
    VerificationResult,
    describe_failure,
    identity,
)
from bakehouse.system.http import Unreachable

QUESTIONS = 2
"""Asked in each look."""
HASTY = RequestLimits(base=60.0, attempts=2)
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
    ctx: ProbeContext, endpoint: Endpoint, probe: Probe, known: ServedModel | None
) -> tuple[Proof, Baseline]:
    """Judge the whole of it once, and keep what later looks are held against."""
    given = SuiteInput(endpoint, probe, known, read_golden(known))
    proofs = [run_suite(ctx, FACTS, given, HASTY)]
    scored: dict[str, Scored] = {}
    if endpoint.engine and not proofs[0].lost:
        scored = likelihood.ask(Client(ctx, endpoint, HASTY), given)
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
    ctx: ProbeContext, endpoint: Endpoint, probe: Probe, known: Baseline, number: int
) -> Sampled:
    """Ask a part; which part goes round with `number`."""
    talk = Client(ctx, endpoint, HASTY)
    given = SuiteInput(endpoint, probe)
    answers = []
    for question in turn(known.right, number):
        others = [q for q in facts.questions(probe.facts) if q is not question]
        answer, lost = ask_one(talk, given, question, others)
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


STALL_S = 120.0
"""Seconds that the counters may stand still, unless a recipe says otherwise."""
POLL_S = 2.0
METRICS_S = 10.0
"""Seconds that `/metrics` may take."""

Word = Literal["right", "busy", "failed"]


@dataclass(frozen=True)
class Watched:
    """What is watched. Seconds."""

    endpoint: Endpoint
    probe: Probe
    server: ServerHandle | None = None
    """If it is ours."""
    known: ServedModel | None = None
    stall: float = STALL_S
    identify: Callable[[Endpoint], Endpoint] | None = None
    """Asks an unknown server which models it serves. Raises NotHealthy if it does not say."""


@dataclass(frozen=True)
class Round:
    """One round. Seconds of wall time; `busy` could not be judged, and is no failure."""

    number: int
    at: str
    seconds: float
    word: Word
    says: str
    checks: tuple[Check, ...] = ()
    answers: tuple[Answer, ...] = ()
    error: BakehouseError | None = None

    def to_data(self) -> dict[str, Any]:
        """Plain data for the record; the checks are kept beside it."""
        return {name: getattr(self, name) for name in ("number", "at", "seconds", "word", "says")}


class _Busy(Exception):
    """Nothing can be said now: others use the server."""


class Monitor:
    """Checks one server, round after round. The first round asks all that later ones sample."""

    def __init__(self, ctx: Context, what: Watched) -> None:
        self._ctx = replace(ctx, progress=Silent())  # one line per round is enough
        self._what = what
        self._endpoint: Endpoint | None = None
        self._baseline: Baseline | None = None
        self._number = 0
        self._checks: list[Check] = []
        self._answers: tuple[Answer, ...] = ()

    def check_once(self) -> Round:
        """Check once. Never raises because of what a server does."""
        clock = self._ctx.clock
        at, began = clock.now(), clock.monotonic()
        self._number += 1
        self._checks, self._answers = [], ()
        error: BakehouseError | None = None
        word: Word = "right"
        try:
            says = self._check()
        except _Busy as busy:
            word, says = "busy", f"not judged: {busy}"
        except (NotHealthy, NotCorrect) as failed:
            word, says, error = "failed", failed.what, failed
        return Round(
            self._number, at.isoformat(timespec="seconds"), round(clock.monotonic() - began, 3),
            word, says, tuple(self._checks), self._answers, error,
        )  # fmt: skip

    def _check(self) -> str:
        what = self._what
        if what.server:
            self._check_ours(what.server)
        if self._endpoint is None:
            self._endpoint = what.identify(what.endpoint) if what.identify else what.endpoint
        endpoint = self._endpoint
        moves = progress(self._ctx, endpoint, what.stall)
        if moves:
            self._checks.append(moves)
        if moves and moves.verdict is Verdict.FAILED:
            raise self._deadlock(moves)
        before = counters(self._ctx, endpoint)
        began = self._ctx.clock.monotonic()
        if self._baseline is None:
            return self._first(endpoint)
        seen = look_again(self._ctx, endpoint, what.probe, self._baseline, self._number)
        self._checks += seen.checks
        self._answers = seen.answers
        if bad := wrong(seen.checks):
            raise NotCorrect(
                describe_failure(bad), where=bad.where, hint=SUSPECTS, checks=self._checks
            )
        if seen.problem:
            now = counters(self._ctx, endpoint) if before else None
            seconds = self._ctx.clock.monotonic() - began
            stall = stalled(before, now, seconds) if before else None
            raise self._unanswered(seen, stall, working=bool(now and now.busy))
        return "; ".join(c.observed for c in seen.checks)

    def _first(self, endpoint: Endpoint) -> str:
        proof, baseline = first_look(self._ctx, endpoint, self._what.probe, self._what.known)
        self._checks += proof.checks
        self._answers = proof.answers
        if error := explain(proof, endpoint.url):
            raise error
        self._baseline = baseline
        return proof.summary

    def _check_ours(self, server: ServerHandle) -> None:
        """Check that the verified server still runs, answers, and logs no severe fault."""
        seen = get_status(server.folder)
        state = seen.state
        if state is None or state.server != server.process or not seen.alive:
            how = state.ended.says if state and state.ended else seen.word
            raise NotHealthy(
                f"the server is gone: {how}", where=str(server.log), id="server-ended",
                hint="restart it with invoke serve, or watch it with --on-failure restart",
            )  # fmt: skip
        log = log_since_proof(server.folder, state.findings)
        VerificationResult(self._checks).add(server, [*identity(self._ctx, server), log])

    def _deadlock(self, moves: Check) -> NotHealthy:
        return NotHealthy(
            f"/health is green, but {moves.observed}", where=moves.where, id="deadlock",
            hint="the engine hangs; restart it, and look for the last request in its log",
            checks=self._checks,
        )  # fmt: skip

    def _unanswered(
        self, seen: Sampled, stall: Check | None, *, working: bool
    ) -> NotHealthy | _Busy:
        """Distinguish a deadlock, a server that is busy with others, and an error."""
        if stall and working:
            self._checks.append(stall)
            if stall.verdict is Verdict.FAILED:
                return self._deadlock(stall)
            if stall.passed and seen.lost:
                return _Busy(f"{seen.problem}; {stall.observed}")
        return NotHealthy(
            f"a question that was answered before is not answered now: {seen.problem}",
            where=self._what.endpoint.url, hint="read the server's log", checks=self._checks,
        )  # fmt: skip


def counters(ctx: Context, endpoint: Endpoint) -> Counters | None:
    """Return an engine's counters; None if it has none, or does not answer."""
    url = endpoint.url.rstrip("/") + "/metrics"
    try:
        reply = ctx.http.ask("GET", url, headers=endpoint.headers, timeout=METRICS_S)
    except Unreachable:
        return None
    return read_counters(reply.text) if reply.status == 200 else None


def progress(ctx: Context, endpoint: Endpoint, patience: float) -> Check | None:
    """Judge whether token counters move within `patience` seconds; None if there are no counters.

    They stand still during one pass of a long prompt: patience has to be longer than that.
    """
    first = counters(ctx, endpoint)
    if first is None:
        return None
    deadline = ctx.clock.monotonic() + patience
    now: Counters | None = first
    while now is None or now.busy:
        if (now and now.moved(first)) or ctx.clock.monotonic() >= deadline:
            return stalled(first, now, patience)
        ctx.clock.sleep(POLL_S)
        now = counters(ctx, endpoint)
    return _progress_check("no requests run", ok=True)


def stalled(before: Counters, now: Counters | None, seconds: float) -> Check:
    """Compare two readings of the counters; `now` is None if `/metrics` did not answer."""
    if now is None:
        return _progress_check(f"/metrics has not answered for {seconds:.0f} s", ok=None)
    work = f"{now.running or 0:.0f} requests run, {now.waiting or 0:.0f} wait"
    moved = now.moved(before)
    if moved is None:
        return _progress_check(f"{work}; the engine has no token counter", ok=None)
    what = "token counters move" if moved else f"no tokens in {seconds:.0f} s: a deadlock"
    return _progress_check(f"{work}; {what}", ok=moved)


def _progress_check(seen: str, *, ok: bool | None) -> Check:
    expected = "token counters move while requests run"
    return check("watch.progress", expected, seen, "GET /metrics", ok=ok)
