"""The suite `fluency`: a text of some length is judged for degenerate output."""

from __future__ import annotations

from dataclasses import dataclass

from bakehouse.models import check
from bakehouse.probe.answers import never_started
from bakehouse.probe.client import Asker, Client, Completion, larger_budget, split_thoughts
from bakehouse.probe.models import SuiteInput, SuiteProof
from bakehouse.probe.suites.base import Suite
from bakehouse.probe.text_quality import LOOPS, find_defects, normal, tokens, without_echo
from bakehouse.recipe.models import Question
from bakehouse.runs.store import Answer, SuiteVerdict

TASKS = (
    "Write a short paragraph about the sea.",
    "Explain in a few sentences how bread is made.",
    "Tell a very short story about a fox and a well.",
    "Describe a walk through a quiet town in winter.",
    "Say in a few sentences what a clock does.",
)
BEGUN = (
    "The sea was calm that morning, and",
    "To make bread, you first",
    "A fox came to a well one evening and",
    "In winter the town was quiet, and",
    "A clock on the wall",
)
"""For a model that goes on with texts."""
SPARE = 1
"""So many more texts are asked for where texts did nothing worse than repeat themselves: greedy
decoding leads a small healthy model into a loop now and then (SmolLM2-135M, with one of the tasks
above, when only flash attention is switched off); a broken one loops with every task."""
ENOUGH = 5
"""So many words a text that was asked for must have."""


@dataclass(frozen=True)
class Wrote:
    """What was written for one task, with a budget of `asked` tokens."""

    task: str
    said: Completion
    asked: int


def ask(talk: Client, given: SuiteInput) -> tuple[Wrote, ...]:
    """Let texts be written; once more with more room where the budget ended before any."""
    wanted = given.probe.fluency
    asker = Asker(talk, given.probe.request)
    wrote: list[Wrote] = []
    with talk.progress.bar("probe", "texts") as bar:
        for task in TASKS if wanted.mode == "chat" else BEGUN:
            loops = sum(map(_only_loops, wrote))
            if len(wrote) >= wanted.texts + min(loops, SPARE):
                break
            question = Question(ask=task, answers=("any text",), mode=wanted.mode)
            wrote.append(_write(asker, question, wanted.max_tokens, given))
            bar.update(len(wrote), wanted.texts, "fluency")
            if wrote[-1].said.lost:
                break
    return tuple(wrote)


def _write(asker: Asker, question: Question, budget: int, given: SuiteInput) -> Wrote:
    task = question.ask
    said = asker.ask(question, budget)
    larger = larger_budget(budget, given.endpoint.context)
    if said.problem or _text(said).strip() or not larger or not never_started(said, "", budget):
        return Wrote(task, said, budget)
    return Wrote(task, asker.ask(question, larger), larger)


def _only_loops(wrote: Wrote) -> bool:
    """Whether all that is wrong with a text is that it repeats itself."""
    found = {flaw.id for flaw in find_defects(_text(wrote.said))}
    return bool(found) and found <= LOOPS


def _text(said: Completion) -> str:
    """What was written: the answer, else the thoughts, which must be as fluent."""
    answer, thoughts = split_thoughts(said.content)
    return answer if answer.strip() else said.reasoning or thoughts


def judge(wrote: tuple[Wrote, ...], given: SuiteInput) -> SuiteProof:
    """Judge the form of all texts."""
    answers = tuple(judged(one, given.probe.fluency.mode) for one in wrote)
    good = sum(a.verdict == "right" for a in answers)
    enough = good >= given.probe.fluency.texts
    bad = [
        answer
        for answer, one in zip(answers, wrote, strict=True)
        if answer.verdict == "wrong" and not (enough and _only_loops(one))
    ]
    mute = [a for a in answers if a.verdict in ("never started", "unanswered")]
    first = (bad or mute or [a for a in answers if a.verdict == "right"])[0]
    text = " ".join((first.content or first.reasoning).split())
    ok = False if bad else (None if mute else True)
    shown = f'"{text[:160]}"' if text else f"nothing in answer to {first.question!r}"
    form = check("probe.fluency", "fluent text", first.why, shown, ok=ok)
    verdict: SuiteVerdict = "true"
    summary = f"{good} text{'s' if good > 1 else ''} well formed"
    if good < len(answers):
        summary += f", {len(answers) - good} repeated itself"
    hint = None
    if bad:
        verdict, summary = "wrong", f"degenerate text: {first.why}"
    elif mute:
        verdict = "unstable" if first.verdict == "unanswered" else "never started"
        summary = first.why
        hint = "look at the server's log for what it made of the request"
        if verdict == "never started":
            hint = "set probe.request.reasoning_effort: low, or raise probe.fluency.max_tokens"
    return SuiteProof(
        "fluency", verdict, summary, (form,), answers,
        {"texts": len(answers), "words": [len(tokens(a.content)) for a in answers]},
        hint=hint, lost=any(one.said.lost for one in wrote),
    )  # fmt: skip


def judged(wrote: Wrote, mode: str = "chat") -> Answer:
    """Judge one text."""
    said, verdict, why = wrote.said, "right", ""
    text = _text(said)
    words = len(tokens(text))
    if said.problem is not None:
        verdict, why = "unanswered", said.problem
    elif not text.strip() and never_started(said, "", wrote.asked):
        verdict, why = "never started", f"{wrote.asked} tokens ended before any text"
    elif found := find_defects(text):
        verdict, why = "wrong", "; ".join(flaw.what for flaw in found)
    elif len(tokens(without_echo(normal(text), normal(wrote.task)))) < min(ENOUGH, words):
        verdict, why = "wrong", "the task, said again"
    elif words < ENOUGH:
        verdict, why = "wrong", f"{words} words where a paragraph was asked for"
    else:
        why = f"{words} words"
    return Answer(
        question=wrote.task, mode=mode, wanted=("fluent text",), content=said.content,
        reasoning=said.reasoning, finish_reason=said.finish_reason, verdict=verdict, why=why,
        tokens=said.tokens, seconds=round(said.seconds, 3), http_status=said.http_status,
    )  # fmt: skip


SUITE = Suite("fluency", ask, judge)
