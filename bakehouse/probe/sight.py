"""Judges what a model says of images whose content is known. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bakehouse.probe.images import COLOURS
from bakehouse.probe.reply import Said, split_thoughts
from bakehouse.probe.text import normal, tokens

LONGEST = 2000
"""Characters of an answer that are looked at: a transcription is no longer than what it copies."""
NAMES = frozenset({*COLOURS, "orange", "purple", "violet", "pink", "brown", "grey", "gray", "cyan",
                   "magenta", "turquoise"})  # fmt: skip
"""Words that name a colour; one that is not shown speaks against an answer."""


@dataclass(frozen=True)
class Seen:
    """What came of one question about images."""

    verdict: Literal["right", "wrong", "never started", "unanswered"]
    why: str


def levenshtein(wanted: str, text: str) -> int:
    """Give the least edits, in characters, between `wanted` and any piece of `text`."""
    above = [0] * (len(text) + 1)
    for row, char in enumerate(wanted, start=1):
        here = [row]
        for column, other in enumerate(text, start=1):
            here.append(min(above[column] + 1, here[-1] + 1, above[column - 1] + (char != other)))
        above = here
    return min(above)


def answer_of(said: Said) -> str:
    """Give what was answered, without raw thinking; not longer than is looked at."""
    return split_thoughts(said.content)[0].strip()[:LONGEST]


def colours(said: Said, wanted: Sequence[str]) -> Seen:
    """Judge an answer that should name these colours, in this order, and no other."""
    if early := _early(said):
        return early
    text = normal(answer_of(said))
    named = [word for a, b in tokens(text) if (word := text[a:b]) in NAMES]
    once = [word for n, word in enumerate(named) if n == 0 or word != named[n - 1]]
    heard = ", ".join(once) or "no colour"
    if once == list(wanted):
        return Seen("right", f"named {heard}")
    return Seen("wrong", f"named {heard} where {', '.join(wanted)} is shown")


def reading(said: Said, line: str, most: int) -> Seen:
    """Judge a transcription by its Levenshtein distance; capitals and line breaks do not count.

    What stands around it does not count either, as long as it is not much longer than the line.
    """
    if early := _early(said):
        return early
    text = normal(answer_of(said))
    wanted = normal(line)
    if len(text) > 3 * len(wanted) + 200:
        return Seen("wrong", f"an answer of {len(text)} characters to a line of {len(wanted)}")
    distance = levenshtein(wanted, text)
    why = f"Levenshtein distance {distance} to {line!r}"
    return Seen("right" if distance <= most else "wrong", why)


def _early(said: Said) -> Seen | None:
    """What can be said before the content counts: nothing came, or only thinking."""
    if said.problem is not None:
        return Seen("unanswered", said.problem)
    if answer_of(said):
        return None
    if said.finish_reason == "length":
        return Seen("never started", "the budget ended before any answer")
    return Seen("wrong", "the answer is empty")
