"""What a suite is: a part that asks, and a part that judges what was heard.

The asking part talks to a server and never judges; the judging part is pure, so that it is tested
on recorded answers. Neither raises for what a server does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from bakehouse.probe.talk import PATIENT, Around, Patience, Talk
from bakehouse.probe.types import Given, SuiteProof
from bakehouse.recipe.gate import SuiteName

Heard = TypeVar("Heard")


@dataclass(frozen=True)
class Suite(Generic[Heard]):
    """One suite, by the name that recipes call it."""

    name: SuiteName
    ask: Callable[[Talk, Given], Heard]
    judge: Callable[[Heard, Given], SuiteProof]


def run_suite(
    ctx: Around, suite: Suite[Heard], given: Given, patience: Patience = PATIENT
) -> SuiteProof:
    """Ask and judge one suite; the proof says what it cost."""
    talk = Talk(ctx, given.endpoint, patience)
    heard = suite.ask(talk, given)
    cost = talk.cost
    return replace(suite.judge(heard, given), cost=cost)
