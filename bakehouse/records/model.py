"""The record of one run, as it lies in `runs/<id>/record.json`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from bakehouse.base import Frozen
from bakehouse.checks import Check


class StepRecord(Frozen):
    """One step as it went. Seconds of wall time; `code` as the process port gives it."""

    id: str
    argv: tuple[str, ...] = ()
    started: str
    seconds: float
    code: int | None = None
    log: str | None = None
    """Relative to the run's folder."""


class Answer(Frozen):
    """What a server said to one question, whole."""

    question: str
    mode: str
    wanted: tuple[str, ...]
    content: str
    reasoning: str = ""
    finish_reason: str | None = None
    verdict: str
    """`right`, `wrong`, `never started` or `unanswered`."""
    why: str = ""
    """What was found, or what stood in the way."""
    found_in: str | None = None
    """`content` or `reasoning`, where the answer was found."""
    tokens: int | None = None
    """Completion tokens, as the server counts them."""
    seconds: float
    retried: bool = False
    http_status: int | None = None


class Cost(Frozen):
    """What a suite took. Seconds of wall time."""

    requests: int = 0
    tokens: int = 0
    """Decoded, as the server counts them."""
    prompt_tokens: int = 0
    """Read by the model and not taken from its cache, as the server counts them."""
    seconds: float = 0.0


SuiteVerdict = Literal[
    "true", "true (provisional)", "wrong", "never started", "unable", "unstable"
]  # fmt: skip
"""What a suite came to. *never started*: the budget ended before an answer; *unable*: the server
lacks what the suite needs; *unstable*: no answers of use, or not the same ones twice."""


class SuiteRecord(Frozen):
    """One suite as it went."""

    suite: str
    verdict: SuiteVerdict
    summary: str
    """One sentence for a person."""
    figures: dict[str, Any] = {}
    """What was measured; units stand in the names."""
    cost: Cost = Cost()


class Failure(Frozen):
    """Why a run did not do what was asked."""

    id: str
    what: str
    where: str | None = None
    hint: str | None = None


class Record(Frozen):
    """One run of a task."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    id: str
    task: str
    recipe: str | None
    started: str
    """UTC, ISO 8601."""
    ended: str
    seconds: float
    ok: bool
    exit: int
    verdict: str
    """One sentence for a person."""
    lock: str | None = None
    build: str | None = None
    versions: dict[str, str] = {}
    host: dict[str, Any] = {}
    steps: tuple[StepRecord, ...] = ()
    checks: tuple[Check, ...] = ()
    answers: tuple[Answer, ...] = ()
    suites: tuple[SuiteRecord, ...] = ()
    facts: dict[str, Any] = {}
    """What else was seen: URL, process id, memory, the engine's own properties."""
    error: Failure | None = None
