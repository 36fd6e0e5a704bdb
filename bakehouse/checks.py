"""A check: what was expected, what was observed, where, and the verdict.

Build acceptance, readiness and probe suites all use it. Unknown never counts as passed.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from bakehouse.base import Frozen


class Verdict(StrEnum):
    """Result of a check."""

    PASSED = "passed"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Check(Frozen):
    """One check. `where` is a file and line, or a request and its response."""

    id: str
    expected: str
    observed: str
    where: str
    verdict: Verdict

    @property
    def passed(self) -> bool:
        """Whether there is positive evidence."""
        return self.verdict is Verdict.PASSED


def check(id: str, expected: str, observed: str | None, where: str, *, ok: bool | None) -> Check:  # noqa: A002
    """Make a check; `ok=None`, or nothing observed, is unknown."""
    if ok is None or observed is None:
        verdict = Verdict.UNKNOWN
    else:
        verdict = Verdict.PASSED if ok else Verdict.FAILED
    return Check(
        id=id, expected=expected, observed=observed or "nothing", where=where, verdict=verdict
    )


def not_passed(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Those that failed or are unknown."""
    return tuple(c for c in checks if not c.passed)


def all_passed(checks: Iterable[Check]) -> bool:
    """Whether every check passed, and there is at least one."""
    seen = tuple(checks)
    return bool(seen) and not not_passed(seen)
