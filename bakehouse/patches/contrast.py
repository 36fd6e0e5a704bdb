"""What one log shows and another does not: kinds of lines, by how often each came. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from bakehouse.base import Frozen
from bakehouse.patches.kinds import LEVELS, Kind, Level

How = Literal["new", "raised", "gone", "lowered"]
HOWS: tuple[How, ...] = ("new", "raised", "gone", "lowered")
CHANCE = 1e-4
"""A count that chance alone would give less often than this has changed."""
FACTOR = 1.5
"""And it has to change by so much: two logs of thousands of lines are never quite alike."""
_EXACT = 4000


class Change(Frozen):
    """A kind whose count differs between two logs; `line` is the first such line of either."""

    how: How
    level: Level
    text: str
    without: int
    patched: int
    line_number: int
    line: str

    @property
    def worse(self) -> bool:
        """Whether the second log has more of it."""
        return self.how in ("new", "raised")

    def __str__(self) -> str:
        """Give it in words."""
        before = "never without" if self.how == "new" else f"{self.without:,} without"
        return f"{self.patched:,} times, {before}: {self.text}"


def contrast(
    without: Sequence[Kind], patched: Sequence[Kind], *, share: float = 0.5
) -> tuple[Change, ...]:
    """Compare the log of a run without a patch with that of one with it.

    `share` is the part of all the work of both that the second one did. Errors come first, then
    what is new, then what came most often.
    """
    before = {(k.level, k.text): k for k in without}
    after = {(k.level, k.text): k for k in patched}
    changes = []
    for key in dict.fromkeys((*after, *before)):
        old, new = before.get(key), after.get(key)
        counts = (old.count if old else 0, new.count if new else 0)
        how = _how(*counts, share)
        kind = new or old
        if how and kind:
            changes.append(
                Change(how=how, level=kind.level, text=kind.text, without=counts[0],
                       patched=counts[1], line_number=kind.line_number, line=kind.line)
            )  # fmt: skip
    changes.sort(
        key=lambda c: (LEVELS.index(c.level), HOWS.index(c.how), -max(c.patched, c.without), c.text)
    )
    return tuple(changes)


def _how(without: int, patched: int, share: float) -> How | None:
    if not without:
        return "new"
    if not patched:
        return "gone"
    odds = share / (1 - share)
    if patched >= FACTOR * without * odds and tail(patched, without, share) < CHANCE:
        return "raised"
    if without * odds >= FACTOR * patched and tail(without, patched, 1 - share) < CHANCE:
        return "lowered"
    return None


def tail(more: int, less: int, share: float) -> float:
    """Give the probability that of `more + less` events at least `more` fall on one side.

    Each falls there with probability `share`: two Poisson counts, given their sum.
    """
    total = more + less
    if total > _EXACT:
        deviation = math.sqrt(total * share * (1 - share))
        return 0.5 * math.erfc((more - 0.5 - total * share) / deviation / math.sqrt(2))
    logs = (
        math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
        + k * math.log(share) + (total - k) * math.log1p(-share)
        for k in range(more, total + 1)
    )  # fmt: skip
    return min(1.0, math.fsum(map(math.exp, logs)))
