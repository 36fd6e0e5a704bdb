"""The suite `speculation`: drafts are made, accepted, and cost nothing of what the model says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bakehouse.checks import Verdict
from bakehouse.engines.counters import Counters, read_counters
from bakehouse.probe import facts
from bakehouse.probe.ask import Asker
from bakehouse.probe.drafts import (
    Again,
    Text,
    acceptance,
    drafted,
    facts_loss,
    gaps,
    on,
    sameness,
)
from bakehouse.probe.greedy import Prompt, Step, speak, step
from bakehouse.probe.judge import judge, overall
from bakehouse.probe.reply import Said
from bakehouse.probe.suite import Suite
from bakehouse.probe.talk import Talk
from bakehouse.probe.types import Given, SuiteProof
from bakehouse.recipe.gate import Question
from bakehouse.records.model import SuiteVerdict

_STORY = (
    "The harbour master keeps a list of every boat that comes in. He writes down the name of the "
    "boat, the colour of its hull, the number of people on board and the hour at which it passed "
    "the old stone pier. When a boat leaves, he draws a line through its name. At the end of the "
    "year he counts the lines and sends the total to the town hall, where it is printed in a small "
    "blue book.\n\n"
)
TEXTS = {
    "a text begun again": _STORY + _STORY[:163],
    "a new sentence": "The sun is a star at the centre of",
}
"""What the server goes on with. The first gives n-gram modes what they look for: 30 tokens that
stood there before; the second is for drafters that are models themselves."""
AGAIN = 2
"""So many wrongly answered questions at most are asked again without speculation."""
LONGEST = 64
"""Tokens of an answer that is decoded one by one."""


@dataclass(frozen=True)
class Heard:
    """All that was heard."""

    flags: tuple[bool | None, ...] | None
    """Whether each slot speculates, where the engine says so."""
    texts: tuple[Text, ...] = ()
    counted: Counters | None = None
    """What the engine counted meanwhile, for all who asked."""
    answered: bool = False
    """Whether every question was answered with speculation."""
    again: tuple[Again, ...] = ()


def ask(talk: Talk, given: Given) -> Heard:
    """Let it speak at length, hold each token against the model alone, then ask the facts."""
    flags = _flags(talk) if given.endpoint.engine != "vllm" else None
    before = read_counters(talk.text("/metrics"))
    budget = given.probe.speculation.max_tokens
    with talk.progress.bar("speculation", "tokens") as bar:
        texts: list[Text] = []
        for name, prompt in TEXTS.items():
            spoken = speak(talk, prompt, budget if prompt.startswith(_STORY) else budget // 2)
            steps: list[Step] = []
            for place in range(len(spoken.tokens)):
                steps.append(step(talk, [*spoken.prompt, *spoken.tokens[:place]]))
                bar.update(sum(len(t.steps) for t in texts) + len(steps), budget * 3 // 2)
                if steps[-1].problem:
                    break
            texts.append(Text(name, spoken, tuple(steps)))
    after = read_counters(talk.text("/metrics"))
    counted = after.since(before) if before and after else after
    if all(text.spoken.problem for text in texts):
        return Heard(flags, tuple(texts), counted)
    answered, again = _facts(talk, given)
    return Heard(flags, tuple(texts), counted, answered, again)


def _flags(talk: Talk) -> tuple[bool | None, ...] | None:
    """What llama.cpp says at `/slots`; None where it does not answer there."""
    rows = talk.get("/slots").data
    if not isinstance(rows, list) or not rows:
        return None
    shown = [row.get("speculative") if isinstance(row, dict) else None for row in rows]
    return tuple(value if isinstance(value, bool) else None for value in shown)


def _facts(talk: Talk, given: Given) -> tuple[bool, tuple[Again, ...]]:
    """Ask what is known; what is answered wrongly is asked again without speculation."""
    asker = Asker(talk, given.probe.request)
    questions = facts.questions(given.probe.facts)
    again: list[Again] = []
    budget = given.probe.request.max_tokens
    for question in questions:
        said = asker.ask(question)
        if said.problem:
            return False, tuple(again)
        others = [q for q in questions if q is not question]
        wrong = judge(question, said, others, asked_tokens=budget).verdict == "wrong"
        if wrong and len(again) < AGAIN:
            alone = _alone(talk, question, budget)
            right = judge(question, Said(content=alone), others).verdict == "right"
            again.append(Again(question.ask, said.content, alone, right))
    return True, tuple(again)


def _alone(talk: Talk, question: Question, max_tokens: int) -> str:
    """Answer a question one token a request."""
    prompt: Prompt = [question.ask]
    if question.mode == "chat":
        messages = {"messages": [{"role": "user", "content": question.ask}]}
        data = talk.post("/apply-template", messages).data
        shown = data.get("prompt") if isinstance(data, dict) else None
        if not isinstance(shown, str):
            return ""
        prompt = [shown]
    text = ""
    for _ in range(min(max_tokens, LONGEST)):
        one = step(talk, prompt)
        if one.problem or one.ended or one.best is None:
            break
        prompt = [*prompt, one.best[0]]
        text += one.best[1]
    return text


def conclude(heard: Heard, given: Given) -> SuiteProof:
    """Judge what was heard."""
    wanted = given.probe.speculation
    flags = on(heard.flags, "GET /slots speculative")
    checks = (
        *([flags] if flags else []),
        *acceptance(heard.texts, heard.counted, wanted),
        *sameness(heard.texts, wanted),
        facts_loss(heard.again, heard.answered),
    )
    made, kept = drafted(heard.texts, heard.counted)
    problems = [t.spoken.problem for t in heard.texts if t.spoken.problem]
    verdict, summary, hint = _verdict(heard, {c.id: c.verdict for c in checks}, made, kept)
    return SuiteProof(
        suite="speculation", verdict=verdict, summary=summary, checks=checks,
        figures=_figures(heard, made, kept), hint=hint,
        lost=len(problems) == len(heard.texts) and overall(checks) is Verdict.UNKNOWN,
    )  # fmt: skip


def _verdict(
    heard: Heard, seen: dict[str, Verdict], made: int | None, kept: int | None
) -> tuple[SuiteVerdict, str, str | None]:
    """Give the verdict, the one sentence, and what to do."""
    short = {name.rpartition(".")[2]: verdict for name, verdict in seen.items()}
    failed = [name for name, verdict in short.items() if verdict is Verdict.FAILED]
    if {"same", "loss", "facts"} & {*failed}:
        parting = next((p for t in heard.texts for p in gaps(t) if p), None)
        says = f"says something else than the model alone ({parting or 'in its answers'})"
        return (
            "wrong",
            says,
            "serve without speculation; drafts are accepted that were not verified",
        )
    if {"on", "drafts"} & {*failed}:
        return "unable", "is asked for, and no drafts are made", NOT_SPECULATING
    if "acceptance" in failed:
        return "unable", f"{kept} of {made} draft tokens accepted, outside the recipe's bounds", (
            "check that the drafter belongs to this model, and the log for a draft context that "
            "fails; or set probe.speculation to what was measured"
        )  # fmt: skip
    if Verdict.UNKNOWN in short.values():
        problem = next((t.spoken.problem for t in heard.texts if t.spoken.problem), None)
        return "unstable", f"cannot be judged: {problem or 'the server does not tell enough'}", None
    tokens = sum(len(t.steps) for t in heard.texts)
    return "true", f"{kept} of {made} draft tokens accepted, {tokens} tokens as without", None


NOT_SPECULATING = (
    "llama.cpp serves without speculation where -md stands without --spec-type, or a draft mode "
    "without -md: give both, and look for draft_n in the timings"
)


def _figures(heard: Heard, made: int | None, kept: int | None) -> dict[str, Any]:
    counted = heard.counted
    partings = [str(p) for t in heard.texts for p in gaps(t) if p]
    return {
        "draft_tokens": made,
        "accepted": kept,
        "acceptance": round(kept / made, 4) if made and kept is not None else None,
        "accepted_per_position": list(counted.per_position) if counted else [],
        "drafts": counted.drafts if counted else None,
        "tokens_compared": sum(len(t.steps) for t in heard.texts),
        "partings": partings[:20],
        "texts": {t.name: t.spoken.content for t in heard.texts},
        "wrong_with_speculation": [_again(a) for a in heard.again],
    }


def _again(again: Again) -> dict[str, Any]:
    return {
        "question": again.question, "with": again.wrong, "without": again.alone,
        "right_without": again.right_alone,
    }  # fmt: skip


SUITE = Suite("speculation", ask, conclude)
