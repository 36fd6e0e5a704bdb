"""The suite `concurrency`: questions whose answers are known, several at once.

What is right alone must be right in company: a server that mixes up its slots, or whose batched
kernels are wrong, passes every other suite.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bakehouse.checks import check
from bakehouse.probe import facts
from bakehouse.probe.ask import Asker
from bakehouse.probe.suite import Suite
from bakehouse.probe.suites.facts import one
from bakehouse.probe.talk import Talk
from bakehouse.probe.types import Given, SuiteProof
from bakehouse.recipe.gate import Question
from bakehouse.records.model import Answer, SuiteVerdict


@dataclass(frozen=True)
class Pair:
    """One question's answer alone and in company."""

    alone: Answer
    together: Answer


def ask(talk: Talk, given: Given) -> tuple[Pair, ...]:
    """Ask every question alone, then all of them, `at_once` at a time."""
    asked = facts.questions(given.probe.facts)
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


def judge(pairs: Sequence[Pair], given: Given) -> SuiteProof:
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


SUITE = Suite("concurrency", ask, judge)
