"""A clock that does not wait, and remembers how long it would have waited."""

from __future__ import annotations

import time

from bakehouse.sources.files import SETTLED_NS
from bakehouse.system.process import Clock


class ImpatientClock(Clock):
    """Real time, but no waiting."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def settle() -> None:
    """Let files that were written just now count as settled: their hashes are remembered."""
    time.sleep(1.2 * SETTLED_NS / 1e9)
