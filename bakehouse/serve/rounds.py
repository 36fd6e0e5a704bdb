"""Rounds of a watch: is it still the server that was proven, and is it still right?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from bakehouse.checks import Check, Verdict, not_passed
from bakehouse.context import Context
from bakehouse.errors import BakehouseError, NotCorrect, NotHealthy
from bakehouse.probe.prove import SUSPECTS, explain
from bakehouse.probe.sample import Baseline, Sampled, first_look, look_again, wrong
from bakehouse.probe.types import Endpoint, Known
from bakehouse.progress import Silent
from bakehouse.recipe.gate import Probe
from bakehouse.records.model import Answer
from bakehouse.serve.bring import log_since_proof
from bakehouse.serve.control import look
from bakehouse.serve.proof import ServerHandle, identity
from bakehouse.serve.stall import counters, progress, stalled

STALL_S = 120.0
"""How long the counters may stand still, where no recipe says."""


@dataclass(frozen=True)
class Watched:
    """What is watched."""

    endpoint: Endpoint
    probe: Probe
    server: ServerHandle | None = None
    """Where it is ours."""
    known: Known | None = None
    stall: float = STALL_S
    identify: Callable[[Endpoint], Endpoint] | None = None
    """Asks a stranger's server which models it serves. Raises NotHealthy where it does not say."""


@dataclass(frozen=True)
class Round:
    """One round. Seconds of wall time; `busy` could not be judged, and is no failure."""

    number: int
    at: str
    seconds: float
    word: Literal["right", "busy", "failed"]
    says: str
    checks: tuple[Check, ...] = ()
    answers: tuple[Answer, ...] = ()
    error: BakehouseError | None = None

    def to_data(self) -> dict[str, Any]:
        """Plain data for the record; the judgements are kept beside it."""
        return {
            "number": self.number, "at": self.at, "seconds": self.seconds, "word": self.word,
            "says": self.says,
        }  # fmt: skip


class _Busy(Exception):
    """Nothing can be said now: others have the server."""


class Rounds:
    """Looks at one server, round after round. The first round judges all that later ones sample."""

    def __init__(self, ctx: Context, what: Watched) -> None:
        self._ctx = replace(ctx, progress=Silent())  # a line a round is enough
        self._what = what
        self._endpoint: Endpoint | None = None
        self._baseline: Baseline | None = None
        self._number = 0
        self._checks: list[Check] = []
        self._answers: tuple[Answer, ...] = ()

    def one(self) -> Round:
        """Judge once. Never raises for what a server does."""
        clock = self._ctx.clock
        at, began = clock.now(), clock.monotonic()
        self._number += 1
        self._checks, self._answers = [], ()
        error: BakehouseError | None = None
        word: Literal["right", "busy", "failed"] = "right"
        try:
            says = self._judge()
        except _Busy as busy:
            word, says = "busy", f"not judged: {busy}"
        except (NotHealthy, NotCorrect) as failed:
            word, says, error = "failed", failed.what, failed
        return Round(
            self._number, at.isoformat(timespec="seconds"), round(clock.monotonic() - began, 3),
            word, says, tuple(self._checks), self._answers, error,
        )  # fmt: skip

    def _judge(self) -> str:
        if self._what.server:
            self._is_ours(self._what.server)
        if self._endpoint is None:
            asked = self._what.endpoint
            self._endpoint = self._what.identify(asked) if self._what.identify else asked
        endpoint = self._endpoint
        moves = progress(self._ctx, endpoint, self._what.stall)
        if moves:
            self._checks.append(moves)
        if moves and moves.verdict is Verdict.FAILED:
            raise self._unhealthy(moves)
        before = counters(self._ctx, endpoint)
        began = self._ctx.clock.monotonic()
        if self._baseline is None:
            return self._first(endpoint)
        seen = look_again(self._ctx, endpoint, self._what.probe, self._baseline, self._number)
        self._checks += seen.checks
        self._answers = seen.answers
        if bad := wrong(seen.checks):
            raise NotCorrect(
                f"{bad.id}: expected {bad.expected}; observed {bad.observed}", where=bad.where,
                hint=SUSPECTS, checks=self._checks,
            )  # fmt: skip
        if seen.problem:
            now = counters(self._ctx, endpoint) if before else None
            seconds = self._ctx.clock.monotonic() - began
            stall = stalled(before, now, seconds) if before else None
            raise self._unanswered(seen, stall, working=bool(now and now.busy))
        return "; ".join(c.observed for c in seen.checks)

    def _first(self, endpoint: Endpoint) -> str:
        what = self._what
        proof, baseline = first_look(self._ctx, endpoint, what.probe, what.known)
        self._checks += proof.checks
        self._answers = proof.answers
        if error := explain(proof, endpoint.url):
            raise error
        self._baseline = baseline
        return proof.summary

    def _is_ours(self, server: ServerHandle) -> None:
        """Judge that what was proven still runs, answers, and logs nothing grave."""
        seen = look(server.folder)
        state = seen.state
        if state is None or state.server != server.process or not seen.alive:
            how = state.ended.says if state and state.ended else seen.word
            raise NotHealthy(
                f"the server is gone: {how}", where=str(server.log), id="server-ended",
                hint="invoke serve starts it again; --on-failure restart would have",
            )  # fmt: skip
        self._checks += identity(self._ctx, server)
        self._checks.append(log_since_proof(server.folder, state.findings))
        if missing := not_passed(self._checks):
            one = missing[0]
            silent = one.id == "log-since-proof" and one.observed.startswith("silent")
            raise (NotCorrect if silent else NotHealthy)(
                f"{one.id}: expected {one.expected}; observed {one.observed}", where=one.where,
                hint=f"the server's log is {server.log}", checks=self._checks,
            )  # fmt: skip

    def _unhealthy(self, moves: Check) -> NotHealthy:
        return NotHealthy(
            f"/health is green, and {moves.observed}", where=moves.where, id="deadlock",
            hint="the engine hangs; restart it, and look for the last request in its log",
            checks=self._checks,
        )  # fmt: skip

    def _unanswered(
        self, seen: Sampled, stall: Check | None, *, working: bool
    ) -> NotHealthy | _Busy:
        """Tell a deadlock from a server that is busy with others, and both from an error."""
        if stall and working:
            self._checks.append(stall)
            if stall.verdict is Verdict.FAILED:
                return self._unhealthy(stall)
            if stall.passed and seen.lost:
                return _Busy(f"{seen.problem}; {stall.observed}")
        return NotHealthy(
            f"a question that was answered before is not: {seen.problem}",
            where=self._what.endpoint.url, hint="look at the server's log", checks=self._checks,
        )  # fmt: skip
