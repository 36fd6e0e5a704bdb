"""Signatures and findings: types, and the order of findings, first cause first."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from bakehouse.errors import NotCorrect, NotHealthy
from bakehouse.models import Frozen

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
    """One signature. `pattern` is a template (see `catalogue.py`), or several spellings of it.

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


_NUMBERS = re.compile(r"\d+")
_BOUND = re.compile(r"(version )?(<=|>=|==|!=|<|>) ?(\S+)")
_ASIDE = re.compile(r" \(([^()]*\{\w+[^()]*)\)")
_SLOT = re.compile(r"\{(\w+)(?:/(\w+))?\}")


@dataclass
class Hit:
    """What one row has shown so far in a log."""

    line_number: int
    line: str
    caught: dict[str, str]
    """What the templates caught, of the first line that shows it."""
    count: int = 1
    last: int = 0
    latest: dict[str, str] = field(default_factory=dict)
    """The same of the latest line."""


def number(text: str) -> float:
    """Read a number as logs write it (`1,024`, `101.9.`); NaN, which no bound accepts, if none."""
    try:
        return float(text.replace(",", "").rstrip("."))
    except ValueError:
        return float("nan")


def version(text: str) -> tuple[int, ...]:
    """Give all whole numbers of a version."""
    return tuple(int(part) for part in _NUMBERS.findall(text)[:6])


def within(where: Mapping[str, str], caught: Mapping[str, str]) -> bool:
    """Whether everything that was caught lies within its bounds; another catch may be one."""
    return all(
        name in caught and _holds(caught[name], bound, caught) for name, bound in where.items()
    )


@lru_cache(maxsize=256)
def bound(text: str) -> tuple[bool, str, str]:
    """Read `< 10` or `version < 11.7`: whether versions are meant, the relation, the limit."""
    found = _BOUND.fullmatch(text)
    if not found:
        raise ValueError(f"'{text}' is not a bound; write for example \"< 10\"")
    return found[1] is not None, found[2], found[3]


def _holds(text: str, limited: str, caught: Mapping[str, str]) -> bool:
    versions, relation, limit = bound(limited)
    limit = caught.get(limit, limit)
    if versions:
        return _ordered(version(text), relation, version(limit))
    return _ordered(number(text), relation, number(limit))


def _ordered(left: float | tuple[int, ...], relation: str, right: float | tuple[int, ...]) -> bool:
    below = left < right  # type: ignore[operator]  # both sides are of one kind
    above = left > right  # type: ignore[operator]
    same = left == right
    return {
        "<": below, "<=": below or same, "==": same,
        ">": above, ">=": above or same, "!=": not same,
    }[relation]  # fmt: skip


def compared(comparison: Comparison, hits: Mapping[str, Hit]) -> Hit | None:
    """Judge two facts; the later of their lines shows what is wrong."""
    sides = []
    for side in (comparison.left, comparison.right):
        fact, _, name = side.rpartition(".")
        if fact not in hits or name not in hits[fact].latest:
            return None
        sides.append((hits[fact], hits[fact].latest[name]))
    (left, one), (right, other) = sides
    wrong = {
        "differ": one != other,
        "differ-minor": version(one)[:2] != version(other)[:2],
        "no-code-for": "".join(map(str, version(one))) + "0" not in _NUMBERS.findall(other),
    }[comparison.op]
    later = max(left, right, key=lambda hit: hit.line_number)
    caught = {"left": one, "right": other}
    return Hit(later.line_number, later.line, caught, 1, later.line_number) if wrong else None


def filled(text: str, caught: Mapping[str, str]) -> str:
    """Put what was caught into a sentence; `{free/total}` is a quotient, cut to two digits.

    An aside in parentheses is left out where what it tells was not caught.
    """

    def value(found: re.Match[str]) -> str:
        name, divisor = found.groups()
        if divisor is None:
            return caught.get(name, "?").rstrip(".,")
        above, below = number(caught.get(name, "")), number(caught.get(divisor, ""))
        return f"{math.floor(100 * above / below) / 100:.2f}" if below > 0 <= above else "?"

    def aside(found: re.Match[str]) -> str:
        names = {name for slot in _SLOT.findall(found[1]) for name in slot if name}
        return found[0] if names <= caught.keys() else ""

    return _SLOT.sub(value, _ASIDE.sub(aside, text))


@dataclass(frozen=True)
class _Judged:
    row: Row
    hit: Hit
    severity: Severity


def _judge(row: Row, hits: Mapping[str, Hit], *, complete: bool) -> _Judged | None:
    hit = compared(row.compare, hits) if row.compare else hits.get(row.id)
    if hit is None or row.role == "fact" or hit.count < row.min_count:
        return None
    if row.at_end and not complete:
        return None
    backed = all(name in hits for name in row.needs)
    if backed and not any(name in hits for name in row.unless):
        return _Judged(row, hit, row.severity)
    return _Judged(row, hit, row.otherwise) if row.otherwise else None


def judge(
    rows: Mapping[str, Row], hits: Mapping[str, Hit], stage: str | None, *, complete: bool
) -> tuple[Finding, ...]:
    """Give the findings, first cause first, then its consequences, then what does no harm.

    Where a fatal consequence has no fatal cause that we know, the first unknown error before it is
    the cause, or where there is none the first one after it: better the right line without an
    explanation than `see root cause above`.
    """
    hits = {**hits, **_comparisons(rows, hits)}
    judged = [j for row in rows.values() if (j := _judge(row, hits, complete=complete))]
    told = {j.hit.line_number for j in judged if j.row.role == "cause" and j.severity in BAD}
    judged = [j for j in judged if j.row.role != "consequence" or j.hit.line_number not in told]
    ends = [j.hit.line_number for j in judged if _is(j, "consequence")]
    causes = [j.hit.line_number for j in judged if _is(j, "cause") or _is(j, "unknown")]
    if ends and not any(line <= min(ends) for line in causes):
        every = [j for j in judged if j.row.role == "unknown"]
        # vLLM's workers say that they failed, and print the traceback below that.
        unknown = [j for j in every if j.hit.line_number <= min(ends)] or every
        if unknown:
            first = min(unknown, key=lambda j: j.hit.line_number)
            judged[judged.index(first)] = _Judged(first.row, first.hit, Severity.FATAL)
    judged.sort(key=_order(judged))
    return tuple(_finding(j, stage) for j in judged)


def _comparisons(rows: Mapping[str, Row], hits: Mapping[str, Hit]) -> dict[str, Hit]:
    made = {row.id: compared(row.compare, hits) for row in rows.values() if row.compare}
    return {id_: hit for id_, hit in made.items() if hit}


def _is(judged: _Judged, role: str) -> bool:
    return judged.row.role == role and judged.severity is Severity.FATAL


_BELOW = 8
"""Lines within which a message that we know explains one that only says `error`."""


def _order(judged: list[_Judged]) -> Callable[[_Judged], tuple[int, float]]:
    known = [j.hit.line_number for j in judged if j.severity in BAD and j.row.role == "cause"]

    def key(one: _Judged) -> tuple[int, float]:
        line = one.hit.line_number
        if one.severity in BAD:
            if one.row.role == "unknown":
                below = [other for other in known if line <= other <= line + _BELOW]
                return 0, max(below) + 0.5 if below else line
            return (1 if one.row.role == "consequence" else 0), line
        return (3 if one.severity is Severity.HARMLESS else 2), line

    return key


def _finding(judged: _Judged, stage: str | None) -> Finding:
    row, hit = judged.row, judged.hit
    return Finding(
        id=row.id,
        engine=row.engine[0] if row.engine else "any",
        stage=stage if stage in row.stage else row.stage[0],
        severity=judged.severity,
        line_number=hit.line_number,
        line=hit.line,
        cause=filled(row.cause, hit.caught),
        mend=filled(row.mend, hit.caught),
        source=", ".join(row.source),
        count=hit.count,
    )
