"""The record of one run: `runs/<id>/record.json`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from bakehouse.base import Frozen
from bakehouse.checks import Check


class StepRecord(Frozen):
    """One step. `seconds` of wall time; `code` is the exit code, negative for a signal."""

    id: str
    argv: tuple[str, ...] = ()
    started: str
    seconds: float
    code: int | None = None
    log: str | None = None
    """Relative to the run's folder."""


class Answer(Frozen):
    """A server's whole answer to one question."""

    question: str
    mode: str
    wanted: tuple[str, ...]
    content: str
    reasoning: str = ""
    finish_reason: str | None = None
    verdict: str
    """`right`, `wrong`, `never started` or `unanswered`."""
    why: str = ""
    """What was found, or why nothing was."""
    found_in: str | None = None
    """`content` or `reasoning`: where the answer was found."""
    tokens: int | None = None
    """Completion tokens, by the server's count."""
    seconds: float
    retried: bool = False
    http_status: int | None = None


class Cost(Frozen):
    """Cost of a suite. `seconds` of wall time."""

    requests: int = 0
    tokens: int = 0
    """Decoded tokens, by the server's count."""
    prompt_tokens: int = 0
    """Prompt tokens not taken from the cache, by the server's count."""
    seconds: float = 0.0


SuiteVerdict = Literal[
    "true", "true (provisional)", "wrong", "never started", "unable", "unstable"
]  # fmt: skip
"""Result of a suite. *never started*: the token budget ended before an answer; *unable*: the server
lacks a feature that the suite needs; *unstable*: unusable answers, or different ones each time."""


class SuiteRecord(Frozen):
    """Result of one suite."""

    suite: str
    verdict: SuiteVerdict
    summary: str
    """One sentence."""
    figures: dict[str, Any] = {}
    """Measurements, with units in their names."""
    cost: Cost = Cost()


class Failure(Frozen):
    """Why a run failed."""

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
    """One sentence."""
    lock: str | None = None
    build: str | None = None
    versions: dict[str, str] = {}
    host: dict[str, Any] = {}
    steps: tuple[StepRecord, ...] = ()
    checks: tuple[Check, ...] = ()
    answers: tuple[Answer, ...] = ()
    suites: tuple[SuiteRecord, ...] = ()
    facts: dict[str, Any] = {}
    """Other observations: URL, process ID, memory, the engine's properties."""
    error: Failure | None = None
