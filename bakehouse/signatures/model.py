"""Types of the signatures: a row of the data files, and a finding in a log."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from bakehouse.base import Frozen
from bakehouse.errors import NotCorrect, NotHealthy

ENGINES = ("llama.cpp", "vllm", "cmake", "docker", "git")
"""Whose log it can be said to be; rows of no engine of its own are tried in every log."""

STAGES = (
    "fetch", "pull", "patch", "configure", "build", "preflight",
    "launch", "load", "ready", "probe", "steady",
)  # fmt: skip

Stage = Literal[
    "fetch", "pull", "patch", "configure", "build", "preflight",
    "launch", "load", "ready", "probe", "steady",
]  # fmt: skip


class Severity(StrEnum):
    """What a line means for whoever relies on the result."""

    FATAL = "fatal"
    """The step failed or the server cannot serve."""
    SILENT = "silent"
    """It goes on, and what it makes or answers is wrong."""
    LOST = "lost"
    """It goes on without something that was asked for: the GPU, speculation, kernels."""
    DEGRADED = "degraded"
    FLAKY = "flaky"
    HARMLESS = "harmless"


BAD = frozenset({Severity.FATAL, Severity.SILENT, Severity.LOST})


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _plain_text(value: Any) -> Any:
    return " ".join(value.split()) if isinstance(value, str) else value


Sentence = Annotated[str, BeforeValidator(_plain_text), Field(min_length=8)]
Several = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class Comparison(Frozen):
    """A judgement on two values that facts caught: `left` and `right` are `fact-id.name`.

    `differ` compares texts, `differ-minor` the first two numbers of two versions, `no-code-for`
    whether the compute capability on the left (12.1) is missing in the list of compiled
    architectures on the right (890,1200).
    """

    op: Literal["differ", "differ-minor", "no-code-for"]
    left: str
    right: str


class Row(Frozen):
    """One signature. `pattern` is a template (see `pattern.py`), or several spellings of it.

    `needs` and `unless` name other rows of the same log: without all of the first, or with any of
    the second, the row's severity is `otherwise`, or the row is dropped. `where` sets bounds on
    what a template caught (`rate: "< 10"`). A row of the role `fact` is never reported itself; a
    `consequence` never leads the report while its cause is known; an `unknown` becomes the cause
    when a fatal consequence has no other.
    """

    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    engine: Several = ()
    stage: Annotated[tuple[Stage, ...], BeforeValidator(_listed)] = Field(min_length=1)
    severity: Severity = Severity.HARMLESS
    role: Literal["cause", "consequence", "unknown", "fact"] = "cause"
    pattern: Several = ()
    compare: Comparison | None = None
    where: dict[str, str] = Field(default_factory=dict)
    needs: Several = ()
    unless: Several = ()
    otherwise: Severity | None = None
    at_end: bool = False
    """Judged only when the log is complete: in a growing log the next line may refute it."""
    min_count: int = 1
    cause: Sentence = "a fact that other rows rely on"
    mend: Sentence = "nothing to mend"
    source: Several = Field(min_length=1)

    @model_validator(mode="after")
    def _whole(self) -> Row:
        if bool(self.pattern) == bool(self.compare):
            raise ValueError("a row has either a pattern or a comparison")
        unknown = set(self.engine) - set(ENGINES)
        if unknown:
            raise ValueError(f"unknown engine {', '.join(sorted(unknown))}")
        if self.role != "fact" and not {"cause", "mend", "severity"} <= self.model_fields_set:
            raise ValueError("severity, cause and mend are wanted")
        return self


class Finding(Frozen):
    """What a log says: one signature, the first line that shows it, and how often it shows."""

    id: str
    engine: str
    """Whose message it is, `any` where it is nobody's own."""
    stage: str
    severity: Severity
    line_number: int
    """Counts from 1."""
    line: str
    """Colours and control characters are taken out, long lines are cut."""
    cause: str
    mend: str
    source: str
    count: int
    """Lines of this log that show it."""

    @property
    def bad(self) -> bool:
        """Whether somebody has to act: fatal, silent corruption or a lost feature."""
        return self.severity in BAD


def exit_code(findings: Iterable[Finding]) -> int:
    """Give 7 where anything is fatal, 8 for silent corruption or a lost feature, else 0.

    That is what a log alone comes to. `serve` knows the recipe: a feature that it asks for and that
    is lost makes the server not healthy, 7; a silent fault makes it not correct, 8.
    """
    severities = {finding.severity for finding in findings}
    if Severity.FATAL in severities:
        return NotHealthy.exit_code
    return NotCorrect.exit_code if severities & BAD else 0
