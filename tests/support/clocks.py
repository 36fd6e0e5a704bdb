"""A clock that does not wait, and remembers how long it would have waited."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from bakehouse.sources.files import SETTLED_NS


class ImpatientClock:
    """Real time, but no waiting."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def settle() -> None:
    """Let files that were written just now count as settled: their hashes are remembered."""
    time.sleep(1.2 * SETTLED_NS / 1e9)
