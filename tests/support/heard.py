"""Progress that remembers what was said."""

from __future__ import annotations

from bakehouse.progress import Silent


class Heard(Silent):
    """Keeps each line."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)
