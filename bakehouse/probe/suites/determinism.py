"""The suite `determinism`: the same greedy request several times.

Engines that batch, or whose kernels add up in any order, may well differ; that is reported, and
fails only where the recipe asks for it.
"""

from __future__ import annotations

import hashlib

from bakehouse.checks import check
from bakehouse.probe.ask import Asker
from bakehouse.probe.reply import Said
from bakehouse.probe.suite import Suite
from bakehouse.probe.talk import Talk
from bakehouse.probe.types import Given, SuiteProof
from bakehouse.recipe.gate import Question

TASK = "Write two sentences about the moon."


def ask(talk: Talk, given: Given) -> tuple[Said, ...]:
    """Ask the same thing `times` times, one after the other, at temperature 0."""
    wanted = given.probe.determinism
    asker = Asker(talk, given.probe.request.model_copy(update={"temperature": 0.0}))
    question = Question(ask=TASK, answers=("any text",), mode=given.probe.fluency.mode)
    said: list[Said] = []
    with talk.progress.bar("probe", "answers") as bar:
        for _ in range(wanted.times):
            said.append(asker.ask(question, wanted.max_tokens, seed=1))
            bar.update(len(said), wanted.times, "determinism")
            if said[-1].problem:
                break
    return tuple(said)


def judge(said: tuple[Said, ...], given: Given) -> SuiteProof:
    """Compare the answers by their sha256."""
    wanted = given.probe.determinism
    if problem := next((one.problem for one in said if one.problem), None):
        unknown = check("probe.determinism", "answers", None, problem, ok=None)
        return SuiteProof(
            "determinism", "unstable", problem, (unknown,), hint="look at the server's log",
            lost=said[-1].lost,
        )  # fmt: skip
    digests = [_digest(one) for one in said]
    different = len(set(digests))
    same = different == 1
    expected = f"the same answer {wanted.times} times"
    if not wanted.required:
        expected += ", or a difference to report"
    seen = "the same" if same else f"{different} different answers"
    checked = check(
        "probe.determinism", expected, seen, ", ".join(d[:12] for d in digests),
        ok=same or not wanted.required,
    )  # fmt: skip
    return SuiteProof(
        "determinism",
        "true" if same or not wanted.required else "unstable",
        f"{seen} in {wanted.times}",
        (checked,),
        figures={"sha256": digests, "different": different},
        hint=None if same else "suspect batching, speculation and kernels that add in any order",
    )


def _digest(said: Said) -> str:
    return hashlib.sha256(f"{said.content}\0{said.reasoning}".encode()).hexdigest()


SUITE = Suite("determinism", ask, judge)
