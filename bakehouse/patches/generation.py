"""The same generation for two servers: what is asked, and what came of it.

Greedy, from a fixed seed, several rounds, and without the engine's own prompt cache, so that a
request meets the same work each time. Never raises for what a server does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bakehouse.patches.evidence import Spoken
from bakehouse.probe import images
from bakehouse.probe.reply import Told, said_of
from bakehouse.probe.suites.speculation import TEXTS
from bakehouse.probe.talk import Talk
from bakehouse.recipe.gate import Request

ROUNDS = 3
"""Enough to see how much one server differs from itself."""
SEED = 1
PICTURE = 7
"""Seed of the picture that is shown: the same one to both."""


@dataclass(frozen=True)
class Item:
    """One request of the generation."""

    name: str
    mode: Literal["chat", "completion"]
    what: Mapping[str, Any] = field(default_factory=dict)
    """The part of the request that asks."""


def items(*, vision: bool = False) -> tuple[Item, ...]:
    """Give what is asked: prose and code, a text that begins again, a picture if it can see."""
    found = [
        _chat("prose", "Write three paragraphs about the harbour of a small town in winter."),
        _chat("code", "Write a Python function that merges two sorted lists, and explain it."),
        Item("repetition", "completion", {"prompt": TEXTS["a text begun again"]}),
    ]
    if vision:
        picture = images.make(PICTURE).printed
        text = {"type": "text", "text": "Describe this picture, then write a story about it."}
        message = {"role": "user", "content": [picture.part, text]}
        found.append(Item("image", "chat", {"messages": [message]}))
    return tuple(found)


def _chat(name: str, text: str) -> Item:
    return Item(name, "chat", {"messages": [{"role": "user", "content": text}]})


def generate(
    talk: Talk, request: Request, asked: tuple[Item, ...], tokens: int, rounds: int = ROUNDS
) -> tuple[tuple[Spoken, ...], ...]:
    """Ask everything, `rounds` times; `tokens` is the budget of each answer.

    Where nobody answers any more, the rounds end early.
    """
    done: list[tuple[Spoken, ...]] = []
    with talk.progress.bar("generation", "answers") as bar:
        for _ in range(rounds):
            said: list[Spoken] = []
            for item in asked:
                spoken, lost = _ask(talk, request, item, tokens)
                said.append(spoken)
                bar.update(len(done) * len(asked) + len(said), rounds * len(asked), item.name)
                if lost:
                    return (*done, tuple(said))
            done.append(tuple(said))
    return tuple(done)


_PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


def _ask(talk: Talk, request: Request, item: Item, tokens: int) -> tuple[Spoken, bool]:
    """Ask once; also give whether nobody was there to answer."""
    body: dict[str, Any] = {
        "model": talk.endpoint.model or "default", **item.what, "max_tokens": tokens,
        "temperature": 0, "seed": SEED, "stream": False,
    }  # fmt: skip
    if request.reasoning_effort and item.mode == "chat":
        body["reasoning_effort"] = request.reasoning_effort
    if talk.endpoint.engine == "llama.cpp":
        body["cache_prompt"] = False
    told = talk.post(_PATHS[item.mode], body, tokens=tokens)
    return read(item, told), told.lost


def read(item: Item, told: Told) -> Spoken:
    """Read an answer: its text, and how it was made where the engine tells."""
    said = said_of(told, item.mode)
    if said.problem:
        return Spoken(item=item.name, problem=said.problem)
    text = f"{said.reasoning}\n\n{said.content}" if said.reasoning else said.content
    timings = told.data.get("timings") if isinstance(told.data, dict) else None
    if not isinstance(timings, dict):
        return Spoken(item=item.name, text=text, tokens=said.tokens, seconds=said.seconds)
    drafted = _count(timings.get("draft_n")) or 0
    spent = timings.get("predicted_ms")
    timed = isinstance(spent, int | float) and not isinstance(spent, bool) and 0 < spent < 1e12
    return Spoken(
        item=item.name, text=text, tokens=_count(timings.get("predicted_n")),
        seconds=float(spent or 0) / 1000 if timed else None, drafted=drafted,
        accepted=_count(timings.get("draft_n_accepted")) or 0,
    )  # fmt: skip


def _count(value: Any) -> int | None:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if good else None
