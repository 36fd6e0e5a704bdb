"""The suite `fluency`: a text of some length is judged for degenerate output."""

from __future__ import annotations

from dataclasses import dataclass

from bakehouse.models import check
from bakehouse.probe.answers import Judgement, out_of_tokens, record_answer
from bakehouse.probe.client import Client, JsonResponse, larger_budget, split_thoughts
from bakehouse.probe.models import SuiteInput, SuiteProof
from bakehouse.probe.suites.base import Suite
from bakehouse.probe.text_quality import LOOPS, find_defects, normal, tokens, without_echo
from bakehouse.recipe.models import Question
from bakehouse.runs.store import SuiteVerdict

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
"""For a model that continues texts."""
SPARE = 1
"""How many more texts to ask for if texts did nothing worse than repeat themselves: greedy
decoding leads a small healthy model into a loop now and then (SmolLM2-135M, with one of the tasks
above, when only flash attention is switched off); a broken one loops with every task."""
ENOUGH = 5
"""Words that a text must have at least."""


@dataclass(frozen=True)
class Wrote:
    """The reply to one task, which had a budget of `asked` tokens."""

    task: str
    reply: JsonResponse
    asked: int

    @property
    def text(self) -> str:
        """The answer, else the thoughts, which must be as fluent."""
        answer, thoughts = split_thoughts(self.reply.content)
        return answer if answer.strip() else self.reply.reasoning or thoughts

    @property
    def only_loops(self) -> bool:
        """Whether repeating itself is all that is wrong with the text."""
        found = {flaw.id for flaw in find_defects(self.text)}
        return bool(found) and found <= LOOPS


def ask(talk: Client, given: SuiteInput) -> tuple[Wrote, ...]:
    """Ask for texts; once more with more room if the budget ended before any text."""
    wanted, request = given.probe.fluency, given.probe.request
    wrote: list[Wrote] = []
    with talk.progress.bar("probe", "texts") as bar:
        for task in TASKS if wanted.mode == "chat" else BEGUN:
            loops = sum(one.only_loops for one in wrote)
            if len(wrote) >= wanted.texts + min(loops, SPARE):
                break
            question = Question(ask=task, answers=("any text",), mode=wanted.mode)
            budget = wanted.max_tokens
            one = Wrote(task, talk.ask(question, request, budget), budget)
            larger = larger_budget(budget, given.endpoint.context)
            empty = one.reply.problem is None and not one.text.strip()
            if larger and empty and out_of_tokens(one.reply, budget):
                one = Wrote(task, talk.ask(question, request, larger), larger)
            wrote.append(one)
            bar.update(len(wrote), wanted.texts, "fluency")
            if one.reply.lost:
                break
    return tuple(wrote)


def judge(wrote: tuple[Wrote, ...], given: SuiteInput) -> SuiteProof:
    """Check the form of all texts."""
    mode = given.probe.fluency.mode
    answers = tuple(
        record_answer(one.task, one.reply, grade_text(one), ("fluent text",), mode=mode)
        for one in wrote
    )
    good = sum(a.verdict == "right" for a in answers)
    enough = good >= given.probe.fluency.texts
    bad = [
        answer
        for answer, one in zip(answers, wrote, strict=True)
        if answer.verdict == "wrong" and not (enough and one.only_loops)
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
        hint=hint, lost=any(one.reply.lost for one in wrote),
    )  # fmt: skip


def grade_text(wrote: Wrote) -> Judgement:
    """Grade one text by its form and length."""
    text = wrote.text
    words = len(tokens(text))
    if wrote.reply.problem is not None:
        return Judgement("unanswered", wrote.reply.problem)
    if not text.strip() and out_of_tokens(wrote.reply, wrote.asked):
        return Judgement("never started", f"{wrote.asked} tokens ended before any text")
    if found := find_defects(text):
        return Judgement("wrong", "; ".join(flaw.what for flaw in found))
    if len(tokens(without_echo(normal(text), normal(wrote.task)))) < min(ENOUGH, words):
        return Judgement("wrong", "it only repeats the task")
    if words < ENOUGH:
        return Judgement("wrong", f"{words} words instead of a paragraph")
    return Judgement("right", f"{words} words")


SUITE = Suite("fluency", ask, judge)
