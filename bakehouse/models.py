"""Base of the types that are written to disk, canonical JSON, digests, and the one check type.

Build acceptance, readiness and probe suites all use it. Unknown never counts as passed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """An immutable value that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def to_data(self) -> dict[str, Any]:
        """Plain data for JSON, with the key names that files use."""
        return self.model_dump(mode="json", by_alias=True)


def to_json(data: Any) -> str:
    """Render JSON for people and for git: sorted keys, two spaces, UTF-8, one final newline."""
    if isinstance(data, Frozen):
        data = data.to_data()
    return json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def digest(data: Any) -> str:
    """Give the sha256, in hex, of a value's canonical JSON (sorted keys, no spaces, ASCII)."""
    if isinstance(data, Frozen):
        data = data.to_data()
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def plain(value: Any) -> Any:
    """Convert to data that JSON can hold: no NaN or infinity, only plain types, keys as text."""
    if hasattr(value, "to_data"):
        return plain(value.to_data())
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


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
