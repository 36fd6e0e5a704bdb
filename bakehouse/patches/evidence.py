"""What was measured of one server: the same for the one with a patch and the one without."""

from __future__ import annotations

from statistics import median

from bakehouse.base import Frozen
from bakehouse.patches.kinds import Kind
from bakehouse.records.model import SuiteRecord, SuiteVerdict

GOOD: frozenset[SuiteVerdict] = frozenset({"true", "true (provisional)"})


class Spoken(Frozen):
    """One answer of the generation. `rate` in tokens a second of decoding."""

    item: str
    text: str = ""
    tokens: int | None = None
    seconds: float | None = None
    """Of decoding, as the engine tells; else of the whole request."""
    drafted: int | None = None
    accepted: int | None = None
    problem: str | None = None


class Grave(Frozen):
    """A known signature in the log, of those that are fatal, silent or a loss."""

    id: str
    severity: str
    count: int
    line_number: int
    line: str


class Side(Frozen):
    """One of the two servers, as it was seen."""

    name: str
    """`with` or `without`."""
    build: str
    """Digest of the artifact; empty where there is none."""
    problem: str | None = None
    """Why it could not be measured, or how it ended; None where all of it was."""
    asked: bool = False
    """Whether it came as far as being asked."""
    suites: tuple[SuiteRecord, ...] = ()
    rounds: tuple[tuple[Spoken, ...], ...] = ()
    """The generation, repeated: the same items in each round."""
    counted: tuple[int, int] | None = None
    """Draft tokens made and accepted meanwhile, by the engine's own counters."""
    log: str = "server.log"
    """Where its log is kept."""
    lines: int = 0
    kinds: tuple[Kind, ...] = ()
    beyond: int = 0
    """Lines of kinds beyond those that are counted apart."""
    graves: tuple[Grave, ...] = ()
    matches: dict[str, int] = {}
    """Lines of the log that a pattern of the expectation matches."""
    requests: int = 0

    def suite(self, name: str) -> SuiteRecord | None:
        """Give what a suite came to; None where it was not asked."""
        return next((s for s in self.suites if s.suite == name), None)

    def good(self, name: str) -> bool | None:
        """Whether a suite passed; None where it was not asked."""
        found = self.suite(name)
        return found.verdict in GOOD if found else None

    def said(self, item: str) -> tuple[Spoken, ...]:
        """Give the answers to one item, one a round."""
        return tuple(s for each in self.rounds for s in each if s.item == item)

    @property
    def items(self) -> tuple[str, ...]:
        """Names of what was asked for in the generation."""
        return tuple(dict.fromkeys(s.item for each in self.rounds for s in each))

    def drafts(self, items: frozenset[str]) -> tuple[int, int] | None:
        """Draft tokens made and accepted in these items; None where the engine does not tell.

        An engine that tells of no single answer is taken by its counters, over all items.
        """
        told = [s for each in self.rounds for s in each if not s.problem]
        counted = [s for s in told if s.item in items and s.drafted is not None]
        if not counted:
            return self.counted if all(s.drafted is None for s in told) else None
        return sum(s.drafted or 0 for s in counted), sum(s.accepted or 0 for s in counted)

    def rates(self, items: frozenset[str]) -> tuple[float, ...]:
        """Give the speed of each round over these items, in tokens a second."""
        found = []
        for each in self.rounds:
            told = [(s.tokens, s.seconds) for s in each if s.item in items and not s.problem]
            tokens = sum(t for t, s in told if t and s)
            seconds = sum(s for t, s in told if t and s)
            if seconds > 0:
                found.append(tokens / seconds)
        return tuple(found)


class Speed(Frozen):
    """Decoding of two servers, in tokens a second: medians, and the whole spread of the rounds."""

    without: float
    without_spread: tuple[float, float]
    patched: float
    patched_spread: tuple[float, float]

    @property
    def ratio(self) -> float:
        """The patched one's speed as a share of the other's."""
        return self.patched / self.without

    @property
    def apart(self) -> bool:
        """Whether even the nearest rounds of the two differ: else the difference is noise."""
        low, high = self.patched_spread, self.without_spread
        return low[1] < high[0] or low[0] > high[1]

    @property
    def at_best(self) -> float:
        """The ratio of the patched one's fastest round to the other's slowest."""
        return self.patched_spread[1] / self.without_spread[0]

    @property
    def at_worst(self) -> float:
        """The ratio of the patched one's slowest round to the other's fastest."""
        return self.patched_spread[0] / self.without_spread[1]

    def __str__(self) -> str:
        """Give it in words."""
        (low, high), (a, b) = self.patched_spread, self.without_spread
        kind = "" if self.apart else ", inside the noise"
        return (
            f"x{self.ratio:.2f}{kind}: {self.patched:.1f} ({low:.1f} to {high:.1f}) tok/s, "
            f"{self.without:.1f} ({a:.1f} to {b:.1f}) without"
        )


def answered(*sides: Side) -> frozenset[str]:
    """Give the items that each of some servers answered in every round."""
    return frozenset(
        item
        for item in sides[0].items
        if all(side.said(item) and not any(s.problem for s in side.said(item)) for side in sides)
    )


def speed_of(without: Side, patched: Side) -> Speed | None:
    """Compare two servers over what both answered; None where one of them cannot be measured."""
    both = answered(without, patched)
    old, new = without.rates(both), patched.rates(both)
    if not old or not new:
        return None
    return Speed(
        without=median(old), without_spread=(min(old), max(old)),
        patched=median(new), patched_spread=(min(new), max(new)),
    )  # fmt: skip
