"""A verdict in words, for people and for the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bakehouse.lock import Lock, PatchPin
from bakehouse.patches.contrast import Change
from bakehouse.patches.evidence import Side
from bakehouse.patches.judge import Judged
from bakehouse.redact import clean
from bakehouse.signatures.model import Severity

KEPT = 20
"""Kinds of errors that go into the manifest; all of them are in the record."""
SHOWN = 12


def evidence(judged: Judged, without: Side, patched: Side) -> dict[str, Any]:
    """Give the figures behind a verdict, short enough for a manifest."""
    errors = [c for c in judged.changes if c.level == "error" and c.worse]
    found: dict[str, Any] = {
        "builds": {"without": without.build[:16], "with": patched.build[:16]},
        "suites": {
            s.suite: f"{s.verdict}, without {_verdict(without, s.suite)}" for s in patched.suites
        },
        "answers": {
            c.id.rpartition(".")[2]: c.observed
            for c in judged.checks
            if c.id.startswith("patch.answers.")
        },
        "acceptance": next((c.observed for c in judged.checks if c.id == "patch.acceptance"), ""),
        "speed": str(judged.speed) if judged.speed else "not known",
        "losses": sorted(losses(without, patched)),
        "errors": [
            {"line": c.text, "with": c.patched, "without": c.without} for c in errors[:KEPT]
        ],
    }
    return {key: value for key, value in found.items() if value}


def losses(without: Side, patched: Side) -> set[str]:
    """Give the ids of known losses that only the patched log shows."""
    lost = {g.id for g in patched.graves if g.severity == Severity.LOST}
    return lost - {g.id for g in without.graves}


def _verdict(one: Side, suite: str) -> str:
    found = one.suite(suite)
    return found.verdict if found else "not asked"


def lines(
    name: str, pin: PatchPin, lock: Lock, judged: Judged, sides: tuple[Side, Side]
) -> list[str]:
    """Give what is printed beside the checks. Untrusted text is cleaned."""
    without, patched = sides
    base = lock.stamp.partition("-")[0] or str(lock.base)[:19]
    told = [
        f"patch       {name}, sha256 {pin.file.sha256[:16]}, on {base}",
        f"without     build {without.build[:16]}, {_how(without)}",
        f"with        build {patched.build[:16]}, {_how(patched)}",
        *_changes(judged.changes),
        "",
        *_word(judged),
    ]
    return [clean(line, one_line=True) for line in told]


def _how(one: Side) -> str:
    return one.problem or f"{one.requests} requests, {one.lines:,} lines of log"


def _changes(changes: Sequence[Change]) -> list[str]:
    if not changes:
        return ["log         every kind of line as often with the patch as without"]
    kinds = (
        "1 kind of line differs" if len(changes) == 1 else f"{len(changes)} kinds of lines differ"
    )
    rows = [f"log         {kinds}; how often with the patch, and without:"]
    for one in changes[:SHOWN]:
        rows.append(f"  {one.level:8} {one.patched:>9,} {one.without:>9,}  {one.text}"[:200])
    if len(changes) > SHOWN:
        rows.append(f"  and {len(changes) - SHOWN} more, in the record")
    return rows


def _word(judged: Judged) -> list[str]:
    word = (judged.word or "not judged").upper()
    first, *more = judged.reasons
    return [f"{word}: {first}", *(f"    {reason}" for reason in more)]
