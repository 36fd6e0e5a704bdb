"""Greedy decoding one token a request, which no engine speculates in, and decoding at length.

A request for one token ends before a draft could be made: llama.cpp (build 11434) has no switch for
it in a request, drafts at most one token fewer than are still to come, and says so by leaving
`draft_n` out of its timings; in vLLM the first token after a prompt is the model's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bakehouse.probe.reply import Told
from bakehouse.probe.talk import Talk

ALTERNATIVES = 10
"""So many of the likeliest tokens are asked for at each position."""

Prompt = Sequence[str | int]
"""Pieces of text and ids of tokens, in order."""


@dataclass(frozen=True)
class Step:
    """The next token as the model alone would choose it.

    `likely` are the likeliest tokens, the best first: id, text, log-probability in nats. `ended`
    means that the model would rather end here.
    """

    likely: tuple[tuple[int, str, float], ...] = ()
    ended: bool = False
    problem: str | None = None

    @property
    def best(self) -> tuple[int, str, float] | None:
        """The likeliest token."""
        return self.likely[0] if self.likely else None


@dataclass(frozen=True)
class Spoken:
    """What a server went on with, at length; drafts as the answer itself counts them."""

    prompt: Prompt
    tokens: tuple[int, ...] = ()
    content: str = ""
    drafted: int | None = None
    accepted: int | None = None
    problem: str | None = None


def speak(talk: Talk, prompt: str, max_tokens: int) -> Spoken:
    """Let the server go on with a text at temperature 0."""
    if talk.endpoint.engine == "vllm":
        body = {**_vllm([prompt], max_tokens), "return_token_ids": True}
        return _vllm_spoken(prompt, talk.post("/v1/completions", _named(talk, body)))
    body = {**_llamacpp([prompt], max_tokens), "return_tokens": True}
    told = talk.post("/completion", body, tokens=max_tokens)
    data = told.data if isinstance(told.data, dict) else {}
    tokens = _ids(data.get("tokens"))
    if told.problem or not tokens:
        return Spoken([prompt], problem=told.problem or "the answer holds no ids of tokens")
    timings = data.get("timings")
    timings = timings if isinstance(timings, dict) else {}
    return Spoken(
        [prompt], tokens, str(data.get("content", "")),
        _count(timings.get("draft_n")) or 0, _count(timings.get("draft_n_accepted")) or 0,
    )  # fmt: skip


def step(talk: Talk, prompt: Prompt) -> Step:
    """Ask for the one token that comes next."""
    if talk.endpoint.engine == "vllm":
        body = {**_vllm(prompt, 1), "logprobs": ALTERNATIVES, "return_tokens_as_token_ids": True}
        return _vllm_step(talk.post("/v1/completions", _named(talk, body), tokens=1))
    body = {**_llamacpp(prompt, 1), "n_probs": ALTERNATIVES}
    return _llamacpp_step(talk.post("/completion", body, tokens=1))


def _llamacpp(prompt: Prompt, tokens: int) -> dict[str, Any]:
    pieces = list(prompt)
    whole: Any = pieces[0] if len(pieces) == 1 and isinstance(pieces[0], str) else pieces
    return {"prompt": whole, "n_predict": tokens, "temperature": 0, "cache_prompt": True,
            "stream": False}  # fmt: skip


def _llamacpp_step(told: Told) -> Step:
    """Read `completion_probabilities`; an end-of-text token has an id like any other."""
    if told.problem:
        return Step(problem=told.problem)
    data = told.data if isinstance(told.data, dict) else {}
    rows = data.get("completion_probabilities")
    first = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
    top = first.get("top_logprobs")
    rows = [r for r in top if isinstance(r, dict)] if isinstance(top, list) else []
    likely = [(r.get("id"), str(r.get("token", "")), r.get("logprob")) for r in rows]
    return _step(likely, ended=data.get("stop_type") == "eos")


def _vllm(prompt: Prompt, tokens: int) -> dict[str, Any]:
    pieces = list(prompt)
    whole: Any = pieces[0] if len(pieces) == 1 else pieces
    return {"prompt": whole, "max_tokens": tokens, "temperature": 0, "stream": False}


def _named(talk: Talk, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": talk.endpoint.model or "default", **body}


def _choice(told: Told) -> dict[str, Any]:
    choices = told.data.get("choices") if isinstance(told.data, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else {}


def _vllm_spoken(prompt: str, told: Told) -> Spoken:
    """Read `token_ids`; the prompt becomes `prompt_token_ids`, to which they can be joined."""
    choice = _choice(told)
    tokens, before = _ids(choice.get("token_ids")), _ids(choice.get("prompt_token_ids"))
    if told.problem or not tokens or not before:
        return Spoken([prompt], problem=told.problem or "the answer holds no ids of tokens")
    return Spoken(list(before), tokens, str(choice.get("text", "")))


def _vllm_step(told: Told) -> Step:
    """Read `logprobs.top_logprobs`, whose keys are `token_id:N`."""
    if told.problem:
        return Step(problem=told.problem)
    choice = _choice(told)
    shown = choice.get("logprobs")
    top = shown.get("top_logprobs") if isinstance(shown, dict) else None
    first = top[0] if isinstance(top, list) and top and isinstance(top[0], dict) else {}
    likely: list[tuple[Any, str, Any]] = [
        (int(number), name, value)
        for name, value in first.items()
        if (number := str(name).removeprefix("token_id:")).isdecimal()
    ]
    return _step(likely, ended=choice.get("finish_reason") == "stop")


def _step(likely: list[tuple[Any, str, Any]], *, ended: bool) -> Step:
    good = [
        (token, text, float(value))
        for token, text, value in likely
        if _count(token) is not None and isinstance(value, int | float) and math.isfinite(value)
    ]
    if not good or len(good) != len(likely):
        return Step(problem="the answer holds no log-probabilities that are numbers")
    return Step(tuple(sorted(good, key=lambda row: -row[2])), ended)


def _count(value: Any) -> int | None:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if good else None


def _ids(value: Any) -> tuple[int, ...]:
    """Give ids of tokens; empty where they are none."""
    if not isinstance(value, list) or any(_count(v) is None for v in value):
        return ()
    return tuple(value)
