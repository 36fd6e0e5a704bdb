"""The suite `speculation`: drafting is active, and the text is the one without drafts.

Speculation is lossless by its promise: at temperature 0 each token must be the one that the model
alone would say after the same text. Batches of other sizes round otherwise, so two tokens that are
nearly as likely may change places; anything more is a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bakehouse.engines.base import Counters, read_counters
from bakehouse.models import Check, Verdict, check
from bakehouse.probe import answers
from bakehouse.probe.answers import grade_answer, overall
from bakehouse.probe.client import Client, JsonResponse, find_in
from bakehouse.probe.logprobs import Generated, NextToken, Prompt, generate, next_token
from bakehouse.probe.models import SuiteInput, SuiteProof
from bakehouse.probe.suites.base import Suite
from bakehouse.recipe.models import Question, Speculation
from bakehouse.runs.store import SuiteVerdict


@dataclass(frozen=True)
class Text:
    """A text generated with speculation, and what the model alone says at each place."""

    name: str
    generated: Generated
    steps: tuple[NextToken, ...] = ()


@dataclass(frozen=True)
class Again:
    """A question that was answered wrongly with speculation, and how it went without."""

    question: str
    wrong: str
    """What was said with speculation."""
    alone: str
    """What was said without."""
    right_alone: bool


@dataclass(frozen=True)
class Parting:
    """The first place of a text at which the model alone would say something else."""

    text: str
    place: int
    """Tokens before it."""
    said: str
    alone: str
    gap: float
    """Nats by which the model's own token is likelier; a lower bound with `at_least`."""
    at_least: bool
    """Whether the token that was said is not even among the likeliest."""

    def __str__(self) -> str:
        """Give it in words."""
        least = "at least " if self.at_least else ""
        return (
            f"{self.text}, token {self.place + 1}: {self.said!r} where the model alone says "
            f"{self.alone!r}, {least}{self.gap:.3f} nats likelier"
        )


def gaps(text: Text) -> list[Parting | None]:
    """Compare each token with the model's own choice; None if they are the same."""
    found: list[Parting | None] = []
    for place, (token, chosen) in enumerate(zip(text.generated.tokens, text.steps, strict=False)):
        if chosen.best is None or token == chosen.best[0]:
            found.append(None)
            continue
        best = chosen.best
        own = next((row for row in chosen.likely if row[0] == token), None)
        value = own[2] if own else chosen.likely[-1][2]
        said = own[1] if own else f"token {token}"
        found.append(Parting(text.name, place, said, best[1], best[2] - value, own is None))
    return found


def on(flags: Sequence[bool | None] | None, where: str) -> Check | None:
    """Check what an engine reports of speculation in its slots; None if it reports nothing."""
    if flags is None:
        return None
    seen = ", ".join("unknown" if f is None else str(f).lower() for f in flags) or None
    return check(
        "probe.speculation.on", "speculation on in every slot", seen, where,
        ok=all(f is True for f in flags),
    )  # fmt: skip


def drafted(texts: Sequence[Text], counted: Counters | None) -> tuple[int | None, int | None]:
    """Give draft tokens made and accepted: by the answers themselves, else by the counters."""
    said = [t.generated for t in texts if t.generated.drafted is not None]
    if said:
        return sum(s.drafted or 0 for s in said), sum(s.accepted or 0 for s in said)
    if counted is None or counted.draft_tokens is None:
        return None, None
    return int(counted.draft_tokens), int(counted.accepted or 0)


def acceptance(
    texts: Sequence[Text], counted: Counters | None, wanted: Speculation
) -> tuple[Check, Check]:
    """Judge whether drafts are made, and whether the share that is accepted can be right."""
    made, kept = drafted(texts, counted)
    where = "timings of POST /completion" if made is not None and texts and (
        texts[0].generated.drafted is not None
    ) else "GET /metrics"  # fmt: skip
    makes = check(
        "probe.speculation.drafts", "draft tokens are made",
        None if made is None else f"{made} in {len(texts)} texts", where,
        ok=None if made is None else made > 0,
    )  # fmt: skip
    low = "any at all" if wanted.min_acceptance is None else f"{wanted.min_acceptance:.0%}"
    expected = f"{low} to {wanted.max_acceptance:.0%} of the draft tokens accepted"
    if not made or kept is None:
        return makes, check("probe.speculation.acceptance", expected, None, where, ok=None)
    share = kept / made
    enough = kept > 0 if wanted.min_acceptance is None else share >= wanted.min_acceptance
    seen = f"{kept} of {made} ({share:.1%}){_by_position(counted)}"
    return makes, check(
        "probe.speculation.acceptance", expected, seen, where,
        ok=enough and share <= wanted.max_acceptance,
    )  # fmt: skip


def _by_position(counted: Counters | None) -> str:
    shown = [f"{n:.0f}" for n in (counted.per_position if counted else ())]
    more = " ..." if len(shown) > 8 else ""
    return f"; by position {' '.join(shown[:8])}{more}" if shown else ""


def sameness(texts: Sequence[Text], wanted: Speculation) -> tuple[Check, Check]:
    """Judge the text itself: token by token, and by what it loses in likelihood over all."""
    where = "POST /completion, one token a request"
    expected = f"each token the model's own, or within {wanted.near_tie:g} nats of it"
    mean = f"at most {wanted.loss:g} nats a token less likely than the model's own"
    found = [(text, gaps(text)) for text in texts]
    judged = sum(len(g) for _, g in found)
    whole = all(len(g) == len(t.generated.tokens) for t, g in found)
    broken = any(step.problem for text in texts for step in text.steps)
    if not judged or not whole or broken:
        why = next((s.problem for t in texts for s in t.steps if s.problem), None)
        where = f"{where}: {why}" if why else where
        return (
            check("probe.speculation.same", expected, None, where, ok=None),
            check("probe.speculation.loss", mean, None, where, ok=None),
        )
    partings = [p for _, g in found for p in g if p]
    bad = [p for p in partings if p.gap > wanted.near_tie]
    seen = f"{judged - len(partings)} of {judged} tokens the same"
    if partings:
        kind = "" if bad else "a near-tie at "
        seen = f"{seen}; {kind}{bad[0] if bad else partings[0]}"
    loss = sum(p.gap for p in partings) / judged
    return (
        check("probe.speculation.same", expected, seen, where, ok=not bad),
        check("probe.speculation.loss", mean, f"{loss:.4f} nats a token", where,
              ok=loss <= wanted.loss),
    )  # fmt: skip


def facts_loss(again: Sequence[Again], answered: bool) -> Check:
    """Judge whether speculation cost a right answer; `answered` says that all were answered."""
    lost = [a for a in again if a.right_alone]
    seen = f"{len(again)} answered wrongly, none of them rightly alone" if answered else None
    if lost:
        seen = f"{lost[0].question!r} got {lost[0].wrong[:80]!r}, alone {lost[0].alone[:80]!r}"
    return check(
        "probe.speculation.facts", "no question answered rightly only without speculation", seen,
        "POST /v1/chat/completions, then one token a request", ok=not lost,
    )  # fmt: skip


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
"""Texts for the server to continue. The first gives n-gram modes what they look for: 30 tokens that
stood there before; the second is for drafters that are models themselves."""
AGAIN = 2
"""Maximum number of wrongly answered questions to ask again without speculation."""
LONGEST = 64
"""Tokens of an answer that is decoded one by one."""


@dataclass(frozen=True)
class Heard:
    """Everything that the server replied."""

    flags: tuple[bool | None, ...] | None
    """Whether each slot speculates, where the engine says so."""
    texts: tuple[Text, ...] = ()
    counted: Counters | None = None
    """What the engine counted meanwhile, for all who asked."""
    answered: bool = False
    """Whether every question was answered with speculation."""
    again: tuple[Again, ...] = ()


def ask(talk: Client, given: SuiteInput) -> Heard:
    """Generate texts, compare each token with the model alone, then ask the facts."""
    rows = talk.get("/slots").data if given.endpoint.engine != "vllm" else None
    flags = None  # not a list: the engine does not answer there
    if isinstance(rows, list) and rows:
        shown = [find_in(row, "speculative") for row in rows]
        flags = tuple(value if isinstance(value, bool) else None for value in shown)
    before = read_counters(talk.text("/metrics"))
    budget = given.probe.speculation.max_tokens
    with talk.progress.bar("speculation", "tokens") as bar:
        texts: list[Text] = []
        for name, prompt in TEXTS.items():
            length = budget if prompt.startswith(_STORY) else budget // 2
            made = generate(talk, [prompt], length)
            steps: list[NextToken] = []
            for place in range(len(made.tokens)):
                steps.append(next_token(talk, [*made.prompt, *made.tokens[:place]]))
                bar.update(sum(len(t.steps) for t in texts) + len(steps), budget * 3 // 2)
                if steps[-1].problem:
                    break
            texts.append(Text(name, made, tuple(steps)))
    after = read_counters(talk.text("/metrics"))
    counted = after.since(before) if before and after else after
    if all(text.generated.problem for text in texts):
        return Heard(flags, tuple(texts), counted)
    answered, again = _facts(talk, given)
    return Heard(flags, tuple(texts), counted, answered, again)


def _facts(talk: Client, given: SuiteInput) -> tuple[bool, tuple[Again, ...]]:
    """Ask the facts; wrong answers are asked again without speculation."""
    questions = answers.questions(given.probe.facts)
    again: list[Again] = []
    budget = given.probe.request.max_tokens
    for question in questions:
        reply = talk.ask(question, given.probe.request)
        if reply.problem:
            return False, tuple(again)
        others = [q for q in questions if q is not question]
        wrong = grade_answer(question, reply, others, asked_tokens=budget).verdict == "wrong"
        if wrong and len(again) < AGAIN:
            alone = _alone(talk, question, budget)
            right = grade_answer(question, JsonResponse(content=alone), others).verdict == "right"
            again.append(Again(question.ask, reply.content, alone, right))
    return True, tuple(again)


def _alone(talk: Client, question: Question, max_tokens: int) -> str:
    """Answer a question one token a request."""
    prompt: Prompt = [question.ask]
    if question.mode == "chat":
        messages = {"messages": [{"role": "user", "content": question.ask}]}
        shown = talk.post("/apply-template", messages).find("prompt")
        if not isinstance(shown, str):
            return ""
        prompt = [shown]
    text = ""
    for _ in range(min(max_tokens, LONGEST)):
        one = next_token(talk, prompt)
        if one.problem or one.ended or one.best is None:
            break
        prompt = [*prompt, one.best[0]]
        text += one.best[1]
    return text


def conclude(heard: Heard, given: SuiteInput) -> SuiteProof:
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
    problems = [t.generated.problem for t in heard.texts if t.generated.problem]
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
        problem = next((t.generated.problem for t in heard.texts if t.generated.problem), None)
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
        "texts": {t.name: t.generated.content for t in heard.texts},
        "wrong_with_speculation": [
            {
                "question": a.question, "with": a.wrong, "without": a.alone,
                "right_without": a.right_alone,
            }
            for a in heard.again
        ],
    }  # fmt: skip


SUITE = Suite("speculation", ask, conclude)
