"""Time, which tests replace so that nothing has to wait."""

from __future__ import annotations

import time
from datetime import UTC, datetime


class Clock:
    """Wall time, monotonic time and sleep."""

    def now(self) -> datetime:
        """Wall time, in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds that only grow."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)
