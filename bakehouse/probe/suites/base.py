"""What a suite is: a part that asks, and a part that judges what was heard.

The asking part talks to a server and never judges; the judging part is pure, so that it is tested
on recorded answers. Neither raises for what a server does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from bakehouse.probe.client import DEFAULT_LIMITS, Client, ProbeContext, RequestLimits
from bakehouse.probe.models import SuiteInput, SuiteProof
from bakehouse.recipe.models import SuiteName

Heard = TypeVar("Heard")


@dataclass(frozen=True)
class Suite(Generic[Heard]):
    """One suite, by the name that recipes call it."""

    name: SuiteName
    ask: Callable[[Client, SuiteInput], Heard]
    judge: Callable[[Heard, SuiteInput], SuiteProof]


def run_suite(
    ctx: ProbeContext,
    suite: Suite[Heard],
    given: SuiteInput,
    patience: RequestLimits = DEFAULT_LIMITS,
) -> SuiteProof:
    """Ask and judge one suite; the proof says what it cost."""
    talk = Client(ctx, given.endpoint, patience)
    heard = suite.ask(talk, given)
    cost = talk.cost
    return replace(suite.judge(heard, given), cost=cost)
