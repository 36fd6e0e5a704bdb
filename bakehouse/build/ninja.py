"""Progress of a build, read from what Ninja prints."""

from __future__ import annotations

import re

from bakehouse.progress import Bar

_STATUS = re.compile(r"\[(\d+)/(\d+) ([\d.]+)\] (.*)")
"""As `plan.build.NINJA_STATUS` has it: finished, in all, seconds so far, what."""


class NinjaWatch:
    """Takes a build's lines and moves a bar; time left is judged by steps so far."""

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
        self._bar.update(self.done, self.total, note=left(self.done, self.total, float(found[3])))


def left(done: int, total: int, seconds: float) -> str:
    """Say how long a build still takes, going by its pace so far; empty where that is a guess."""
    if done < 5 or seconds < 1 or done >= total:
        return ""
    more = seconds / done * (total - done)
    return f"{more:.0f} s left" if more < 90 else f"{more / 60:.0f} min left"
