"""The first cause of trouble in a server's log, not the last: what came after it is its echo."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bakehouse.checks import Check, check
from bakehouse.redact import clean
from bakehouse.signatures.model import Severity
from bakehouse.signatures.scanner import scan

LOG_BYTES = 32 << 20
"""So much of a log's beginning is read, in bytes: what went wrong first stands there."""
_ERROR = re.compile(
    r"^[\d.]+ E |\berror\b|\bfailed\b|\bfatal\b|\bcannot\b|GGML_ASSERT|\babort|terminate called",
    re.IGNORECASE,
)

_NO_ERROR = re.compile(r"\b(?:DEBUG|INFO|WARNING) +\d")
"""A line that its logger calls less than an error: vLLM warns of errors that may come."""


@dataclass(frozen=True)
class Cause:
    """A line of a log, numbered from 1, and what it means where that is known."""

    line_number: int
    line: str
    severity: str | None = None
    meaning: str | None = None
    mend: str | None = None

    @property
    def where(self) -> str:
        """For people."""
        return f"server.log:{self.line_number}: {clean(self.line, one_line=True)[:300]}"


def read_log(path: Path) -> list[str]:
    """Give the lines of a log; empty where there is none."""
    try:
        with path.open("rb") as file:
            text = file.read(LOG_BYTES).decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()


def grave(
    lines: Sequence[str], engine: str, asked_for: frozenset[str] = frozenset()
) -> tuple[Cause, ...]:
    """Give the lines that show a fatal, silent or lost-feature signature, first cause first.

    `asked_for` are ids of signatures that say what the recipe itself asks for.
    """
    return tuple(
        Cause(f.line_number, f.line, str(f.severity), f.cause, f.mend)
        for f in scan(lines, engine=engine)
        if f.bad and f.id not in asked_for
    )


def first_cause(lines: Sequence[str], engine: str, *, died: bool = False) -> Cause | None:
    """Give the line that explains best: a grave signature, else the first that speaks of an error.

    A server that `died` is explained by a fatal line, not by one that it went on after.
    """
    known = [c for c in grave(lines, engine) if c.severity == Severity.FATAL or not died]
    if known:
        return known[0]
    for number, line in enumerate(lines, start=1):
        if _ERROR.search(line) and not _NO_ERROR.search(line):
            return Cause(number, line)
    return None


def last_words(lines: Sequence[str]) -> Cause | None:
    """Give the last line that says anything: what there is where nothing explains an end."""
    for number in range(len(lines), 0, -1):
        if lines[number - 1].strip():
            return Cause(number, lines[number - 1])
    return None


def signature_check(
    lines: Sequence[str], engine: str, asked_for: frozenset[str] = frozenset()
) -> Check:
    """Judge a log by its signatures; an empty log is no evidence."""
    first = next(iter(grave(lines, engine, asked_for)), None)
    seen = f"{first.severity}: {first.meaning}" if first else f"none in {len(lines)} lines"
    where = first.where if first else "server.log"
    ok = first is None if lines else None
    return check("log", "no fatal fault, no silent one, nothing lost", seen, where, ok=ok)
