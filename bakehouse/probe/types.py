"""What a probe is given, and what it brings back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bakehouse.checks import Check, Verdict
from bakehouse.recipe.gate import Probe
from bakehouse.records.model import Answer, Cost, SuiteRecord, SuiteVerdict


@dataclass(frozen=True)
class Endpoint:
    """A server that speaks the OpenAI API."""

    url: str
    """Scheme, host and port, and whatever stands before `/v1`."""
    model: str | None = None
    """The name to ask for; None takes the first that `/v1/models` lists."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with each request; an API key stands here and nowhere else."""
    engine: str | None = None
    """`llama.cpp`, `vllm`, or None where it is not known."""
    context: int | None = None
    """Tokens that prompt and answer share, where that is known."""


@dataclass(frozen=True)
class Known:
    """What is known of the model that a server serves, beside its answers."""

    weights16: str
    """The first 16 hex digits of the digest over the pins of its weights."""
    kv_cache: str
    """The type of its KV cache, as the engine names it."""
    backend: str
    """What computes: `cpu`, `cuda`."""
    goldens: Path
    """The folder of golden values."""


@dataclass(frozen=True)
class Given:
    """What a suite is told: whom it asks, what the recipe wants, and what is known already."""

    endpoint: Endpoint
    probe: Probe
    known: Known | None = None


GOOD: frozenset[SuiteVerdict] = frozenset({"true", "true (provisional)"})


@dataclass(frozen=True)
class SuiteProof:
    """What one suite came to; `checks` are its evidence."""

    suite: str
    verdict: SuiteVerdict
    summary: str
    """One sentence, in words of its own: it is read behind the suite's name."""
    checks: tuple[Check, ...] = ()
    answers: tuple[Answer, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What was measured, as plain data; units stand in the names."""
    cost: Cost = field(default_factory=Cost)
    hint: str | None = None
    """What to do about it, where it is not good."""
    lost: bool = False
    """Whether nobody answered at all, so that no other suite would fare better."""

    @property
    def good(self) -> bool:
        """Whether there is positive evidence."""
        return self.verdict in GOOD

    def record(self) -> SuiteRecord:
        """Give what is kept of it; checks and answers are kept beside it."""
        return SuiteRecord(
            suite=self.suite, verdict=self.verdict, summary=self.summary,
            figures=dict(self.figures), cost=self.cost,
        )  # fmt: skip


@dataclass(frozen=True)
class Proof:
    """What a server proved.

    `verdict` is passed, failed (it answers, wrongly) or unknown (too little was answered to tell);
    only passed is proof. `checks` are the gates: all of them passed exactly when `verdict` is.
    """

    checks: tuple[Check, ...]
    answers: tuple[Answer, ...]
    verdict: Verdict
    summary: str
    """One sentence."""
    suites: tuple[SuiteProof, ...] = ()
    word: SuiteVerdict = "unstable"
    """The verdict over all suites."""

    @property
    def passed(self) -> bool:
        """Whether the server answered correctly."""
        return self.verdict is Verdict.PASSED
