"""A clock that does not wait, and remembers how long it would have waited."""

from __future__ import annotations

import time
from datetime import UTC, datetime


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
