"""A suite: one function sends requests, another checks the replies.

The first talks to a server and never checks; the second is pure, so that it is tested on recorded
replies. Neither raises for what a server does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from bakehouse.probe.client import DEFAULT_LIMITS, Client, ProbeContext, RequestLimits
from bakehouse.probe.models import SuiteInput, SuiteProof
from bakehouse.recipe.models import SuiteName

Replies = TypeVar("Replies")


@dataclass(frozen=True)
class Suite(Generic[Replies]):
    """One suite, by the name that recipes call it."""

    name: SuiteName
    ask: Callable[[Client, SuiteInput], Replies]
    judge: Callable[[Replies, SuiteInput], SuiteProof]


def run_suite(
    ctx: ProbeContext,
    suite: Suite[Replies],
    given: SuiteInput,
    patience: RequestLimits = DEFAULT_LIMITS,
) -> SuiteProof:
    """Run one suite; the proof says what it cost."""
    talk = Client(ctx, given.endpoint, patience)
    replies = suite.ask(talk, given)
    cost = talk.cost
    return replace(suite.judge(replies, given), cost=cost)
