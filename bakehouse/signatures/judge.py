"""From what a log showed to what it means: corroboration, first causes, order."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from bakehouse.signatures.model import BAD, Comparison, Finding, Row, Severity

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
