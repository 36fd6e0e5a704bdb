"""Suites `concurrency` and `determinism`.

What is right alone must be right in company: a server that mixes up its slots, or whose batched
kernels are wrong, passes every other suite.

Engines that batch, or whose kernels add up in any order, may well differ; that is reported, and
fails only where the recipe asks for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bakehouse.models import check
from bakehouse.probe import answers
from bakehouse.probe.client import Asker, Client, Completion
from bakehouse.probe.models import SuiteInput, SuiteProof
from bakehouse.probe.suites.base import Suite
from bakehouse.probe.suites.facts import one
from bakehouse.recipe.models import Question
from bakehouse.runs.store import Answer, SuiteVerdict


@dataclass(frozen=True)
class Pair:
    """One question's answer alone and in company."""

    alone: Answer
    together: Answer


def ask_concurrency(talk: Client, given: SuiteInput) -> tuple[Pair, ...]:
    """Ask every question alone, then all of them, `at_once` at a time."""
    asked = answers.questions(given.probe.facts)
    asker = Asker(talk, given.probe.request)
    alone: list[Answer] = []

    def put(question: Question) -> tuple[Answer, bool]:
        return one(asker, given, question, [q for q in asked if q is not question])

    with talk.progress.bar("probe", "questions") as bar:
        for question in asked:
            answer, lost = put(question)
            alone.append(answer)
            bar.update(len(alone), 2 * len(asked), "alone")
            if lost:
                return tuple(Pair(a, a) for a in alone)
        if not any(a.verdict == "right" for a in alone):
            return tuple(Pair(a, a) for a in alone)  # in company nothing would be right either
        with ThreadPoolExecutor(given.probe.concurrency.at_once) as pool:
            together = [answer for answer, _ in pool.map(put, asked)]
        bar.update(2 * len(asked), 2 * len(asked), "together")
    return tuple(map(Pair, alone, together))


def judge_concurrency(pairs: Sequence[Pair], given: SuiteInput) -> SuiteProof:
    """What is right alone must be right together; another text is reported, or fails if asked."""
    wanted = given.probe.concurrency
    lost = [p for p in pairs if "unanswered" in (p.alone.verdict, p.together.verdict)]
    turned = [p for p in pairs if p.alone.verdict == "right" and p.together.verdict == "wrong"]
    other = [p for p in pairs if _text(p.alone) != _text(p.together)]
    right = sum(p.together.verdict == "right" for p in pairs)
    able = sum(p.alone.verdict == "right" for p in pairs)
    mute = not able and any(p.alone.verdict == "never started" for p in pairs)
    enough = check(
        "probe.concurrency", f"right {wanted.at_once} at once where right alone ({able})",
        f"{len(turned)} turned wrong" if turned else f"{right} right",
        _show(turned[0] if turned else (lost[0] if lost else pairs[0])),
        ok=False if turned else (None if lost or mute else able > 0),
    )  # fmt: skip
    same = check(
        "probe.concurrency.same", "the same text as alone",
        f"another text for {len(other)} of {len(pairs)}" if other else "the same",
        _show(other[0] if other else pairs[0]),
        ok=not other if wanted.required else True,
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
        verdict, hint = "never started", "set probe.request.reasoning_effort: low"
    elif not able:
        verdict, hint = "wrong", "nothing is right alone either: see facts"
    return SuiteProof(
        "concurrency", verdict, summary, (enough, same), tuple(p.together for p in pairs),
        {"at_once": wanted.at_once, "other_text": len(other), "turned_wrong": len(turned)},
        hint=hint, lost=len(lost) == len(pairs),
    )  # fmt: skip


def _text(answer: Answer) -> tuple[str, str]:
    return answer.content, answer.reasoning


def _show(pair: Pair) -> str:
    said = (" ".join(a.content.split())[:80] for a in (pair.alone, pair.together))
    alone, together = said
    return f'"{pair.alone.question[:60]}" alone "{alone}", together "{together}"'


CONCURRENCY = Suite("concurrency", ask_concurrency, judge_concurrency)


TASK = "Write two sentences about the moon."


def ask_determinism(talk: Client, given: SuiteInput) -> tuple[Completion, ...]:
    """Ask the same thing `times` times, one after the other, at temperature 0."""
    wanted = given.probe.determinism
    asker = Asker(talk, given.probe.request.model_copy(update={"temperature": 0.0}))
    question = Question(ask=TASK, answers=("any text",), mode=given.probe.fluency.mode)
    said: list[Completion] = []
    with talk.progress.bar("probe", "answers") as bar:
        for _ in range(wanted.times):
            said.append(asker.ask(question, wanted.max_tokens, seed=1))
            bar.update(len(said), wanted.times, "determinism")
            if said[-1].problem:
                break
    return tuple(said)


def judge_determinism(said: tuple[Completion, ...], given: SuiteInput) -> SuiteProof:
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


def _digest(said: Completion) -> str:
    return hashlib.sha256(f"{said.content}\0{said.reasoning}".encode()).hexdigest()


DETERMINISM = Suite("determinism", ask_determinism, judge_determinism)
