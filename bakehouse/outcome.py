"""What a command gives back; `cli` prints it, for people or as one JSON document."""

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
    """Text that comes bit by bit, such as a followed log: printed line by line as it comes, after
    `text`. With `--json` it is not asked for."""
    error: BakehouseError | None = None
    """What stood in the way although there is a result; its exit code counts, then."""
    told: bool = False
    """Whether `text` tells the checks already; they are then not printed for people once more."""
