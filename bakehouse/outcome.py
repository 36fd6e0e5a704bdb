"""What a command returns; `cli` prints it as text or as one JSON document."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bakehouse.checks import Check
from bakehouse.errors import BakehouseError


@dataclass(frozen=True)
class Outcome:
    """A command's result. `text` is for people and goes to standard output."""

    result: dict[str, Any]
    text: str = ""
    checks: tuple[Check, ...] = field(default=())
    exit: int = 0
    lines: Iterable[str] = ()
    """Streamed text, such as a followed log, printed line by line after `text`; not read with
    `--json`."""
    error: BakehouseError | None = None
    """An error beside the result; its exit code is then used."""
    told: bool = False
    """Whether `text` contains the checks already, so that they are not printed again."""
