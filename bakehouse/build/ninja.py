"""Progress of a build, from the output of Ninja."""

from __future__ import annotations

import re

from bakehouse.progress import Bar

_STATUS = re.compile(r"\[(\d+)/(\d+) [\d.]+\] ")
"""As in `plan.build.NINJA_STATUS`: finished, total, seconds so far."""


class NinjaWatch:
    """Moves a progress bar by the lines of a build."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar

    def line(self, text: str) -> None:
        """Take one line of Ninja's output."""
        if found := _STATUS.match(text):
            self._bar.update(int(found[1]), int(found[2]))
