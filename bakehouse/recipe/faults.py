"""The place of a recipe's value, and the wording of its faults."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bakehouse.errors import Fault
from bakehouse.redact import clean

MAX_MESSAGE = 400
MAX_PATH = 4096


@dataclass(frozen=True, slots=True)
class Origin:
    """The place of a value: a file, or `--set KEY` with line 0; line and column count from 1."""

    file: str
    line: int = 0
    column: int = 0
    body: int = 0
    """For a `|` block: the line of the file with its first line; 0 for other text."""
    indent: int = 0
    """For a `|` block: columns of indentation."""

    def at(self, line: int, column: int = 1) -> Origin:
        """Return the place of a line and column inside this value, if its style allows."""
        if not self.body:
            return self
        return Origin(self.file, self.body + max(line, 1) - 1, self.indent + max(column, 1))

    def fault(self, message: str, hint: str | None = None) -> Fault:
        """Return a fault at this place, with control characters escaped."""
        return Fault(
            self.file, self.line, self.column, printable(message), printable(hint) if hint else None
        )


def printable(text: str, limit: int = MAX_MESSAGE) -> str:
    """Escape control characters, and cut long text."""
    safe = clean(text[: 4 * limit], one_line=True)
    return safe if len(safe) <= limit else safe[: limit - 1] + "…"


def kind(value: Any) -> str:
    """Describe a value in a recipe's own terms."""
    if isinstance(value, str):
        return f"the text '{printable(value, 60)}'"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {printable(str(value), 40)}"
    words = {type(None): "null", list: "a list", tuple: "a list", dict: "a map"}
    return words.get(type(value), type(value).__name__)


def dotted(path: Iterable[str | int]) -> str:
    """Return a key path as `--set` takes it, with list positions in brackets."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def shown(path: Path) -> str:
    """Return a path relative to the current folder if possible, safe to print."""
    try:
        here = Path.cwd()
    except OSError:
        return printable(str(path), MAX_PATH)
    absolute = Path(os.path.normpath(here / path))
    short = absolute.relative_to(here) if absolute.is_relative_to(here) else absolute
    return printable(str(short), MAX_PATH)
