"""Progress of a build, read from what Ninja prints."""

from __future__ import annotations

import re

from bakehouse.progress import Bar

_STATUS = re.compile(r"\[(\d+)/(\d+) [\d.]+\] ")
"""As `plan.build.NINJA_STATUS` has it: finished, in all, seconds so far."""


class NinjaWatch:
    """Takes a build's lines and moves a bar, which judges the time left by its pace."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self.done = 0
        self.total = 0

    def line(self, text: str) -> None:
        """Take one line of Ninja's output."""
        found = _STATUS.match(text)
        if not found:
            return
        self.done, self.total = int(found[1]), int(found[2])
        self._bar.update(self.done, self.total)
