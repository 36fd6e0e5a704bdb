"""What a probe is given, and what it brings back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bakehouse.checks import Check, Verdict
from bakehouse.records.model import Answer


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

    @property
    def passed(self) -> bool:
        """Whether the server answered correctly."""
        return self.verdict is Verdict.PASSED
