"""The first cause of trouble in a server's log, not the last: what came after it is its echo."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bakehouse.checks import Check, check
from bakehouse.redact import clean

LOG_BYTES = 32 << 20
"""So much of a log's beginning is read, in bytes: what went wrong first stands there."""
_ERROR = re.compile(
    r"^[\d.]+ E |\berror\b|\bfailed\b|\bfatal\b|\bcannot\b|GGML_ASSERT|\babort|terminate called",
    re.IGNORECASE,
)
GRAVE = ("fatal", "silent")


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


def grave(lines: Sequence[str], engine: str) -> tuple[Cause, ...]:
    """Give the lines with a fatal or silent signature, first one first."""
    scan: Any = getattr(importlib.import_module("bakehouse.signatures"), "scan", None)
    found = scan(lines, engine=engine) if scan else ()
    return tuple(
        Cause(f.line_number, f.line, str(f.severity), f.cause, f.mend)
        for f in sorted(found, key=lambda f: f.line_number)
        if str(f.severity) in GRAVE
    )


def first_cause(lines: Sequence[str], engine: str) -> Cause | None:
    """Give the first line with a grave signature; else the first that speaks of an error."""
    if known := grave(lines, engine):
        return known[0]
    for number, line in enumerate(lines, start=1):
        if _ERROR.search(line):
            return Cause(number, line)
    return None


def signature_check(lines: Sequence[str], engine: str) -> tuple[Check, Cause | None]:
    """Judge a log by its signatures; an empty log is no evidence."""
    found = grave(lines, engine)
    first = found[0] if found else None
    seen = f"{first.severity}: {first.meaning}" if first else f"none in {len(lines)} lines"
    where = first.where if first else "server.log"
    ok = None if not lines else first is None
    return check("log", "no fatal and no silent fault in the log", seen, where, ok=ok), first
