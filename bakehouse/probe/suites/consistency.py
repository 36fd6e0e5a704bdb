"""Suites `concurrency` and `determinism`.

An answer that is right alone must be right in company: a server that mixes up its slots, or whose
batched kernels are wrong, passes every other suite.

Engines that batch, or whose kernels add up in any order, may well differ; that is reported, and
fails only if the recipe asks for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bakehouse.models import check
from bakehouse.probe import answers
from bakehouse.probe.answers import THINK_LESS
from bakehouse.probe.client import Client, JsonResponse
from bakehouse.probe.models import SuiteInput, SuiteProof
from bakehouse.probe.suites.base import Suite
from bakehouse.probe.suites.facts import ask_one
from bakehouse.recipe.models import Question
from bakehouse.runs.store import Answer, SuiteVerdict


@dataclass(frozen=True)
class Pair:
    """One question's answer alone and in company."""

    alone: Answer
    together: Answer

    @property
    def same_text(self) -> bool:
        """Whether both answers have the same words."""
        one, other = self.alone, self.together
        return (one.content, one.reasoning) == (other.content, other.reasoning)

    def __str__(self) -> str:
        """Quote the question and both answers."""
        alone, together = (
            " ".join(a.content.split())[:80] for a in (self.alone, self.together)
        )  # fmt: skip
        return f'"{self.alone.question[:60]}" alone "{alone}", together "{together}"'


def ask_concurrency(talk: Client, given: SuiteInput) -> tuple[Pair, ...]:
    """Ask every question alone, then all of them, `at_once` at a time."""
    questions = answers.questions(given.probe.facts)
    alone: list[Answer] = []

    def put(question: Question) -> tuple[Answer, bool]:
        return ask_one(talk, given, question, [q for q in questions if q is not question])

    with talk.progress.bar("probe", "questions") as bar:
        for question in questions:
            answer, lost = put(question)
            alone.append(answer)
            bar.update(len(alone), 2 * len(questions), "alone")
            if lost:
                return tuple(Pair(a, a) for a in alone)
        if not any(a.verdict == "right" for a in alone):
            return tuple(Pair(a, a) for a in alone)  # in company nothing would be right either
        with ThreadPoolExecutor(given.probe.concurrency.at_once) as pool:
            together = [answer for answer, _ in pool.map(put, questions)]
        bar.update(2 * len(questions), 2 * len(questions), "together")
    return tuple(map(Pair, alone, together))


def judge_concurrency(pairs: Sequence[Pair], given: SuiteInput) -> SuiteProof:
    """Check that answers right alone are right together; other words fail only if asked for."""
    wanted = given.probe.concurrency
    lost = [p for p in pairs if "unanswered" in (p.alone.verdict, p.together.verdict)]
    turned = [p for p in pairs if p.alone.verdict == "right" and p.together.verdict == "wrong"]
    other = [p for p in pairs if not p.same_text]
    right = sum(p.together.verdict == "right" for p in pairs)
    able = sum(p.alone.verdict == "right" for p in pairs)
    mute = not able and any(p.alone.verdict == "never started" for p in pairs)
    enough = check(
        "probe.concurrency", f"right {wanted.at_once} at once where right alone ({able})",
        f"{len(turned)} turned wrong" if turned else f"{right} right",
        str((turned or lost or pairs)[0]),
        ok=False if turned else (None if lost or mute else able > 0),
    )  # fmt: skip
    same = check(
        "probe.concurrency.same", "the same text as alone",
        f"another text for {len(other)} of {len(pairs)}" if other else "the same",
        str((other or pairs)[0]), ok=not other if wanted.required else True,
    )  # fmt: skip
    verdict: SuiteVerdict = "true"
    summary = f"{right} right of {len(pairs)}, {wanted.at_once} at once"
    if other:
        summary += f", {len(other)} in other words than alone"
    hint = None
    if turned or (other and wanted.required):
        verdict, hint = "wrong", "suspect slots, the unified KV cache and batched kernels"
    elif lost:
        first = next(a for a in (lost[0].alone, lost[0].together) if a.verdict == "unanswered")
        verdict, summary, hint = "unstable", f"{summary}; {first.why}", "look at the server's log"
    elif mute:
        verdict, hint = "never started", THINK_LESS
    elif not able:
        verdict, hint = "wrong", "nothing is right alone either: see facts"
    return SuiteProof(
        "concurrency", verdict, summary, (enough, same), tuple(p.together for p in pairs),
        {"at_once": wanted.at_once, "other_text": len(other), "turned_wrong": len(turned)},
        hint=hint, lost=len(lost) == len(pairs),
    )  # fmt: skip


CONCURRENCY = Suite("concurrency", ask_concurrency, judge_concurrency)


TASK = "Write two sentences about the moon."


def ask_determinism(talk: Client, given: SuiteInput) -> tuple[JsonResponse, ...]:
    """Send the same request `times` times, one after the other, at temperature 0."""
    wanted, request = given.probe.determinism, given.probe.request
    question = Question(ask=TASK, answers=("any text",), mode=given.probe.fluency.mode)
    replies: list[JsonResponse] = []
    with talk.progress.bar("probe", "answers") as bar:
        for _ in range(wanted.times):
            replies.append(talk.ask(question, request, wanted.max_tokens, temperature=0.0, seed=1))
            bar.update(len(replies), wanted.times, "determinism")
            if replies[-1].problem:
                break
    return tuple(replies)


def judge_determinism(replies: tuple[JsonResponse, ...], given: SuiteInput) -> SuiteProof:
    """Compare the answers by their sha256."""
    wanted = given.probe.determinism
    last = replies[-1]
    if last.problem:
        unknown = check("probe.determinism", "answers", None, last.problem, ok=None)
        return SuiteProof(
            "determinism", "unstable", last.problem, (unknown,), hint="look at the server's log",
            lost=last.lost,
        )  # fmt: skip
    digests = [
        hashlib.sha256(f"{one.content}\0{one.reasoning}".encode()).hexdigest() for one in replies
    ]
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
        "determinism", "true" if checked.passed else "unstable", f"{seen} in {wanted.times}",
        (checked,), figures={"sha256": digests, "different": different},
        hint=None if same else "suspect batching, speculation and kernels that add in any order",
    )  # fmt: skip


DETERMINISM = Suite("determinism", ask_determinism, judge_determinism)
