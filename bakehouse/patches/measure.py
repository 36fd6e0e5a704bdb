"""Takes one server's evidence: asks it while it serves, and reads its log once it has ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bakehouse.checks import check
from bakehouse.context import Context
from bakehouse.engines.counters import Counters, read_counters
from bakehouse.patches.evidence import Grave, Side, Spoken
from bakehouse.patches.generation import ROUNDS, Item, generate, items
from bakehouse.patches.kinds import Kind, Kinds
from bakehouse.patches.manifest import Expect
from bakehouse.probe.prove import conclude, prove
from bakehouse.probe.talk import Talk
from bakehouse.probe.types import Endpoint, Known, Proof, SuiteProof
from bakehouse.recipe.gate import Probe
from bakehouse.recipe.model import Recipe
from bakehouse.signatures.scanner import Scanner

_BLOCK = 1 << 18
_LINE = 1 << 12
TOKENS = 96
"""Of each answer of the generation; the suite `fluency` may say another number."""


@dataclass(frozen=True)
class Wants:
    """What both servers are asked."""

    probe: Probe
    items: tuple[Item, ...]
    tokens: int
    """Of each answer of the generation."""
    patterns: tuple[str, ...] = ()
    """Regular expressions whose lines in the log are counted."""
    rounds: int = ROUNDS


def wants(recipe: Recipe, expect: Expect) -> Wants:
    """Give what is asked of both servers: the recipe's suites, those of the patch, and text."""
    asked = recipe.asked
    suites = tuple(dict.fromkeys((*(asked.suites or ()), *expect.suites)))
    patterns = (*expect.must_appear, *expect.must_not_appear)
    tokens = asked.fluency.max_tokens if "max_tokens" in asked.fluency.model_fields_set else TOKENS
    return Wants(
        asked.model_copy(update={"suites": suites}),
        items(vision=recipe.weights.projector is not None),
        tokens,
        tuple(dict.fromkeys(p.pattern for p in patterns)),
    )


@dataclass
class Measure:
    """What is asked of one server while it serves; `__call__` is its proof."""

    ctx: Context
    wants: Wants
    speed_only: bool = False
    """Whether only the generation is asked for, as in a second serving."""
    asked: bool = False
    proof: Proof | None = None
    rounds: tuple[tuple[Spoken, ...], ...] = ()
    counted: tuple[int, int] | None = None
    requests: int = 0

    def __call__(self, endpoint: Endpoint, known: Known) -> Proof:
        """Ask everything; never raises for what a server does."""
        self.asked = True
        if not self.speed_only:
            self.proof = prove(self.ctx, endpoint, self.wants.probe, known=known)
            self.requests = sum(s.cost.requests for s in self.proof.suites)
        talk = Talk(self.ctx, endpoint)
        before = read_counters(talk.text("/metrics"))
        self.rounds = generate(
            talk, self.wants.probe.request, self.wants.items, self.wants.tokens, self.wants.rounds
        )
        self.counted = _drafts(before, read_counters(talk.text("/metrics")))
        self.requests += talk.cost.requests
        return self.proof or _alone(self.rounds)


def _alone(rounds: Sequence[Sequence[Spoken]]) -> Proof:
    """Give the proof of a generation alone: everything was answered."""
    said = [s for each in rounds for s in each]
    bad = next((s for s in said if s.problem), None)
    seen = f"{bad.item}: {bad.problem}" if bad else f"{len(said)} answers"
    one = check("patch.generation", "every request answered", seen, "generation", ok=not bad)
    return conclude([SuiteProof("generation", "unstable" if bad else "true", seen, (one,))])


def _drafts(before: Counters | None, after: Counters | None) -> tuple[int, int] | None:
    if before is None or after is None or after.draft_tokens is None:
        return None
    since = after.since(before)
    return int(since.draft_tokens or 0), int(since.accepted or 0)


@dataclass
class Read:
    """What a log shows."""

    kinds: tuple[Kind, ...] = ()
    lines: int = 0
    beyond: int = 0
    graves: tuple[Grave, ...] = ()
    matches: dict[str, int] = field(default_factory=dict)


def read_log(
    path: Path, engine: str, patterns: Sequence[str], own: Sequence[str], asked: frozenset[str]
) -> Read:
    """Read a log once, whatever its size: kinds, known faults, and lines that patterns match.

    `own` are names that belong to one run alone; `asked` are signatures of what is asked for.
    """
    kinds, scanner, matches = Kinds(own), Scanner(engine=engine), _Matches(patterns)
    try:
        with path.open("rb") as log:
            while data := log.read(_BLOCK):
                kinds.feed(data)
                scanner.feed_bytes(data)
                matches.feed(data)
    except OSError:
        return Read(matches=dict.fromkeys(patterns, 0))
    graves = tuple(
        Grave(id=f.id, severity=str(f.severity), count=f.count, line_number=f.line_number,
              line=f.line)
        for f in scanner.finish()
        if f.bad and f.id not in asked
    )  # fmt: skip
    found = kinds.finish()
    return Read(found, kinds.lines, kinds.beyond, graves, matches.finish())


class _Matches:
    """Counts the lines that each of some regular expressions matches."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = {p: re.compile(p) for p in patterns}
        self._counts = dict.fromkeys(patterns, 0)
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Read data as it comes."""
        if not self._patterns:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[: 2 * _LINE]
        for line in lines:
            self._line(line)

    def _line(self, line: bytes) -> None:
        text = line[:_LINE].decode(errors="replace")
        for pattern, compiled in self._patterns.items():
            self._counts[pattern] += compiled.search(text) is not None

    def finish(self) -> dict[str, int]:
        """Take the log as complete."""
        if self._rest:
            self._line(self._rest)
        return self._counts


def side(name: str, build: str, heard: Measure, log: Path, read: Read, problem: str | None) -> Side:
    """Put together what was seen of one server."""
    return Side(
        name=name, build=build, problem=problem, asked=heard.asked,
        suites=tuple(s.record() for s in heard.proof.suites) if heard.proof else (),
        rounds=heard.rounds, counted=heard.counted, log=str(log), lines=read.lines,
        kinds=read.kinds, beyond=read.beyond, graves=read.graves, matches=read.matches,
        requests=heard.requests,
    )  # fmt: skip


def longer(one: Side, again: Measure) -> Side:
    """Add the rounds of a second serving: speed and texts, nothing else."""
    return one.model_copy(update={"rounds": (*one.rounds, *again.rounds)})
