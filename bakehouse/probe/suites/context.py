"""The suite `context`: a fact hidden at 10, 50 and 90% of a long prompt is asked for.

Attention that is wrong beyond some length, a KV cache that wraps, a RoPE scale that is off: short
questions never meet any of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from bakehouse.models import check
from bakehouse.probe.answers import grade_answer, record_answer
from bakehouse.probe.client import Client, JsonResponse
from bakehouse.probe.models import SuiteInput, SuiteProof
from bakehouse.probe.suites.base import Suite
from bakehouse.recipe.models import Question
from bakehouse.runs.store import Answer, SuiteVerdict

USUAL = 1024
"""Tokens of the prompt, where the recipe does not say and the context has room."""
MARGIN = 64
"""Tokens that are left for the chat template."""
SEED = 20
NEEDLES = (
    (10, "The secret word of the red house is walnut.", "the red house", "walnut"),
    (50, "The secret word of the blue house is lantern.", "the blue house", "lantern"),
    (90, "The secret word of the green house is pepper.", "the green house", "pepper"),
)
"""Depth in percent, the sentence, what is asked for, the answer."""

_WHO = ("A farmer", "The teacher", "An old sailor", "My neighbour", "The baker", "A young doctor")
_DID = ("walked to", "wrote about", "drove past", "talked of", "painted", "came back from")
_WHERE = ("the market", "the river", "the station", "a small village", "the bridge", "the hills")
_WHEN = ("in the morning", "after lunch", "on Monday", "last week", "before the rain", "at noon")
_WORDS = 8.0
"""Tokens of one sentence made of these, about; what they really were is in the record."""


@dataclass(frozen=True)
class Found:
    """The reply to one question about a needle."""

    depth: int
    question: Question
    reply: JsonResponse


def haystack(tokens: int, seed: int = SEED) -> list[str]:
    """Make sentences of about this many tokens in all; the same ones for the same seed."""
    chosen = random.Random(seed)  # noqa: S311 - text, not secrets
    parts = (_WHO, _DID, _WHERE, _WHEN)
    count = max(10, int(tokens / _WORDS))
    return [f"{' '.join(chosen.choice(part) for part in parts)}." for _ in range(count)]


def length(given: SuiteInput) -> int:
    """Tokens of the prompt: as the recipe says, within the context if it is known."""
    wanted, room = given.probe.context, given.endpoint.context
    free = room - given.probe.request.max_tokens - MARGIN if room else None
    if wanted.whole and free:
        return max(256, free)
    if wanted.tokens:
        return wanted.tokens
    return max(256, min(USUAL, free)) if free else USUAL


def prompt(tokens: int, depth: int, sentence: str, about: str) -> str:
    """Hide the sentence at that depth, and ask for it."""
    hay = haystack(tokens - 40)
    hay.insert(round(len(hay) * depth / 100), sentence)
    return f"{' '.join(hay)}\n\nWhat is the secret word of {about}? Answer with one word."


def ask(talk: Client, given: SuiteInput) -> tuple[Found, ...]:
    """Ask for each needle in a prompt of its own."""
    found: list[Found] = []
    with talk.progress.bar("probe", "needles") as bar:
        for depth, sentence, about, answer in NEEDLES:
            long = prompt(length(given), depth, sentence, about)
            reply = talk.ask(Question(ask=long, answers=(answer,)), given.probe.request)
            short = Question(ask=f"What is the secret word of {about}?", answers=(answer,))
            found.append(Found(depth, short, reply))
            bar.update(len(found), len(NEEDLES), "context")
            if reply.lost:
                break
    return tuple(found)


def judge(found: tuple[Found, ...], given: SuiteInput) -> SuiteProof:
    """Check that enough needles were found: all, unless the recipe says otherwise."""
    tokens = length(given)
    budget = given.probe.request.max_tokens
    answers: list[Answer] = []
    for one in found:
        others = [f.question for f in found if f is not one]
        grade = grade_answer(one.question, one.reply, others, asked_tokens=budget)
        if grade.verdict == "right":
            grade = replace(grade, why=f"{grade.why}, at {one.depth}%")
        question = f"{one.question.ask} (at {one.depth}% of about {tokens} tokens)"
        answers.append(record_answer(question, one.reply, grade, one.question.answers))
    missed = [a for a in answers if a.verdict == "wrong"]
    mute = [a for a in answers if a.verdict in ("unanswered", "never started")]
    first = (missed or mute or answers)[0]
    right = sum(a.verdict == "right" for a in answers)
    wanted = given.probe.context.must_find
    possible = right + len(mute) + len(NEEDLES) - len(answers)
    seen = check(
        "probe.context", f"{wanted} of {len(NEEDLES)} facts found in about {tokens} tokens",
        f"{right} found", f"{first.question}: {first.why}",
        ok=True if right >= wanted else (None if possible >= wanted else False),
    )  # fmt: skip
    summary = f"{right} of {len(NEEDLES)} facts found in about {tokens} tokens"
    verdict: SuiteVerdict = "true"
    hint = None
    if possible < wanted:
        verdict = "wrong"
        summary = f"{summary}, not the one at {found[answers.index(missed[0])].depth}%"
        hint = "suspect RoPE scaling, the attention kernels and the type of the KV cache"
    elif right < wanted:
        verdict = "never started" if first.verdict == "never started" else "unstable"
        if first.http_status == 400:
            verdict = "unable"
        summary = f"{summary}; {first.why}"
        hint = "compare probe.context.tokens with the served context, and look at the server's log"
    return SuiteProof(
        "context", verdict, summary, (seen,), tuple(answers),
        {"about_tokens": tokens, "found": right, "seed": SEED},
        hint=hint, lost=any(one.reply.lost for one in found),
    )  # fmt: skip


SUITE = Suite("context", ask, judge)
