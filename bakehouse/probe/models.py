"""Types of a probe: endpoint, golden values, suite results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from bakehouse.models import Check, Frozen, Verdict
from bakehouse.recipe.models import Probe
from bakehouse.runs.store import Answer, Cost, SuiteRecord, SuiteVerdict


@dataclass(frozen=True)
class Endpoint:
    """A server with an OpenAI-compatible API."""

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
class ServedModel:
    """What is known of the model that a server serves, beside its answers."""

    weights16: str
    """The first 16 hex digits of the digest over the pins of its weights."""
    kv_cache: str
    """The type of its KV cache, as the engine names it."""
    backend: str
    """What computes: `cpu`, `cuda`."""
    identity: str
    """Digest of the server as started: build, command, environment, lock; empty where unknown."""
    goldens: Path
    """The folder of golden values."""


Token = Annotated[int, Field(ge=0)]
LogProb = Annotated[float, Field(ge=-1000, le=0.001, allow_inf_nan=False)]
"""Nats."""


class GoldenText(Frozen):
    """A text's tokens, and the log-probability of each but the first, in nats."""

    tokens: Annotated[tuple[Token, ...], Field(min_length=2)]
    logprobs: tuple[LogProb, ...]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if len(self.logprobs) != len(self.tokens) - 1:
            raise ValueError("each token but the first has one probability")
        return self


class GoldenPlace(Frozen):
    """One place of a reference run: the likeliest tokens, best first, and their nats."""

    tokens: Annotated[tuple[Token, ...], Field(min_length=1)]
    logprobs: tuple[LogProb, ...]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if len(self.logprobs) != len(self.tokens):
            raise ValueError("each token has one probability")
        return self


class Golden(Frozen):
    """What a proven server answered."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    weights16: str
    kv_cache: str
    backend: str
    """What computed it: a bound is tight only for the same one."""
    identity: str = ""
    """Digest of the server that they were taken from; see `ServedModel.identity`."""
    version: str = ""
    """The engine's own word for its build."""
    texts: Annotated[dict[str, GoldenText], Field(min_length=1)]
    """By name, as in `texts.yaml`."""
    data: str
    """Digest over the texts, 16 hex digits: golden values of other texts say nothing."""
    prompt: tuple[Token, ...] = ()
    """Tokens that the reference run goes on from."""
    places: tuple[GoldenPlace, ...] = ()
    """The reference run, greedy: at each place the first token was taken."""


@dataclass(frozen=True)
class SuiteInput:
    """Input of a suite: the server, the recipe's `probe:` section, and what is known already."""

    endpoint: Endpoint
    probe: Probe
    known: ServedModel | None = None
    golden: Golden | None = None


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
