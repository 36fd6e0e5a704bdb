"""Progress of long operations: messages and bars, on standard error.

`cli` decides whether that is a bar on a terminal, plain lines in a log, or nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Bar(Protocol):
    """One piece of work with a known or unknown size."""

    def update(self, done: float, total: float | None = None, note: str = "") -> None:
        """Set what is done so far, of what total, in the bar's unit."""


class Progress(Protocol):
    """Where a long operation reports to."""

    def say(self, text: str) -> None:
        """Print one line that stays."""

    def bar(self, title: str, unit: str = "") -> AbstractContextManager[Bar]:
        """Open a bar for the length of a `with` block; unit is `B` for bytes or a word."""


class _SilentBar:
    def update(self, done: float, total: float | None = None, note: str = "") -> None:
        """Say nothing."""


class Silent:
    """Progress that says nothing: for tests, and for callers that want only the result."""

    def say(self, text: str) -> None:
        """Say nothing."""

    @contextmanager
    def bar(self, title: str, unit: str = "") -> Iterator[Bar]:  # noqa: ARG002
        """Open a bar that shows nothing."""
        yield _SilentBar()
