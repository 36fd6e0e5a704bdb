"""Score texts, and decode greedily.

A request for one token ends before a draft could be made: llama.cpp (build 11434) has no switch for
it in a request, drafts at most one token fewer than are still to come, and says so by leaving
`draft_n` out of its timings; in vLLM the first token after a prompt is the model's own.

Natural logarithms throughout. Three ways, by what the server has:

- `prompt_logprobs` of vLLM's completions API: one request, nothing is decoded.
- llama-server, one request: a grammar of token ids (`<[1000]>`) lets only the text through, and
  the probabilities are those before any sampler, grammar included, touched them.
- llama-server, a request a token: the wanted token is forced by `logit_bias`, which does not touch
  the returned probability either. For servers that know no token ids in grammars, and for those
  that speculate, which return no probabilities for accepted drafts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bakehouse.probe.client import Client, JsonResponse

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


def speak(talk: Client, prompt: str, max_tokens: int) -> Spoken:
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


def step(talk: Client, prompt: Prompt) -> Step:
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


def _llamacpp_step(told: JsonResponse) -> Step:
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


def _named(talk: Client, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": talk.endpoint.model or "default", **body}


def _choice(told: JsonResponse) -> dict[str, Any]:
    choices = told.data.get("choices") if isinstance(told.data, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else {}


def _vllm_spoken(prompt: str, told: JsonResponse) -> Spoken:
    """Read `token_ids`; the prompt becomes `prompt_token_ids`, to which they can be joined."""
    choice = _choice(told)
    tokens, before = _ids(choice.get("token_ids")), _ids(choice.get("prompt_token_ids"))
    if told.problem or not tokens or not before:
        return Spoken([prompt], problem=told.problem or "the answer holds no ids of tokens")
    return Spoken(list(before), tokens, str(choice.get("text", "")))


def _vllm_step(told: JsonResponse) -> Step:
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


FLOOR = -104.0
"""Probabilities below what single precision holds come as 0, -9999 or the lowest float."""
SLACK = 1e-3
"""So far above 0 a log-probability may be by rounding."""
BIAS = 1000.0
"""Added to the wanted token's logit: more than any two logits of a sound model differ by."""
STRONGER = 1e30
"""More than any two finite logits differ by."""

Trouble = Literal["unable", "lost", "numbers", "reply"]
Top = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Scored:
    """What a server makes of a text.

    `logprobs[i]` belongs to `tokens[i + 1]`: the first token has no probability. `top[i]`, where
    asked for, holds the likeliest tokens at the same place. `trouble` says what kind of thing stood
    in the way: a capability that is missing, nobody who answers, a probability that is none, or a
    reply of no use.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[Top, ...] = field(default=(), repr=False)
    how: str = ""
    problem: str | None = None
    trouble: Trouble | None = None


class _NoNumber(Exception):
    """A probability that is missing, null, NaN or above 1."""


class _NoUse(Exception):
    """A reply that does not hold what was asked for."""


def score_text(talk: Client, text: str, *, top: int = 0) -> Scored:
    """Give the log-probabilities of a text's tokens, and at each place the `top` likeliest."""
    engine = talk.endpoint.engine
    if engine == "vllm":
        return _prompt_logprobs(talk, text, top)
    told = talk.post("/tokenize", {"content": text, "add_special": True})
    if engine is None and told.http_status in (404, 405, 501):
        return _prompt_logprobs(talk, text, top)
    if told.problem is not None:
        return _trouble(told, "tokenizing")
    tokens = _tokens_of(told, text)
    if len(tokens) < 2:
        return Scored(problem="the answer of /tokenize is no list of tokens", trouble="reply")
    return score_tokens(talk, tokens, top=top)


SPECIAL = 16
"""So many tokens at most stand for no byte of a text."""


def _tokens_of(told: JsonResponse, text: str) -> list[int]:
    """Read the tokens of a text; none where they are none, or more than it has bytes."""
    tokens = told.data.get("tokens") if isinstance(told.data, dict) else None
    if not isinstance(tokens, list) or len(tokens) > len(text.encode()) + SPECIAL:
        return []
    return tokens if all(map(_is_id, tokens)) else []


def score_tokens(talk: Client, tokens: Sequence[int], *, top: int = 0) -> Scored:
    """Give the log-probabilities of all tokens but the first."""
    if talk.endpoint.engine == "vllm":
        return _prompt_logprobs(talk, list(tokens), top)
    at_once = _at_once(talk, tokens, top)
    return at_once if at_once else _one_by_one(talk, tokens, top)


def _prompt_logprobs(talk: Client, prompt: str | list[int], top: int) -> Scored:
    body = {
        "model": talk.endpoint.model or "default", "prompt": prompt, "max_tokens": 1,
        "temperature": 0, "prompt_logprobs": top, "return_token_ids": True, "stream": False,
    }  # fmt: skip
    told = talk.post("/v1/completions", body, tokens=len(prompt))
    if told.problem is not None:
        if "JSON compliant" in told.problem:
            return Scored(problem=f"not a number: {told.problem}", trouble="numbers")
        return _trouble(told, "prompt_logprobs")
    choices = told.data.get("choices") if isinstance(told.data, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    rows = choice.get("prompt_logprobs") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(rows, list) or len(rows) < 2:
        return Scored(problem="the reply holds no prompt_logprobs", trouble="unable")
    ids = choice.get("prompt_token_ids")
    try:
        tokens = _ids_of(rows, ids)
        read = [_row(row, token, top) for row, token in zip(rows[1:], tokens[1:], strict=True)]
    except _NoNumber as error:
        return Scored(problem=str(error), trouble="numbers")
    except _NoUse as error:
        return Scored(problem=str(error), trouble="reply")
    return Scored(
        tokens, tuple(n for n, _ in read), tuple(t for _, t in read) if top else (),
        "prompt_logprobs",
    )  # fmt: skip


def _ids_of(rows: list[Any], ids: Any) -> tuple[int, ...]:
    """Which tokens the rows belong to: as told, or by the first entry of each row."""
    if isinstance(ids, list):
        if len(ids) != len(rows) or not all(map(_is_id, ids)):
            raise _NoUse("prompt_logprobs and prompt_token_ids do not belong together")
        return tuple(ids)
    found = [-1]
    for row in rows[1:]:
        if not isinstance(row, dict) or not row:
            raise _NoUse("a row of prompt_logprobs is empty")
        found.append(_id(next(iter(row))))
    return tuple(found)


def _row(row: Any, token: int, top: int) -> tuple[float, Top]:
    """Read one row of prompt_logprobs: the token's own number, and the likeliest."""
    if not isinstance(row, dict):
        raise _NoUse("a row of prompt_logprobs is no object")
    read = {
        _id(key): logprob(value.get("logprob") if isinstance(value, dict) else None)
        for key, value in row.items()
    }
    if token not in read:
        raise _NoUse("a row of prompt_logprobs lacks its own token")
    best = sorted(read.items(), key=lambda pair: -pair[1])[:top]
    return read[token], tuple(best)


def _at_once(talk: Client, tokens: Sequence[int], top: int) -> Scored | None:
    """Score by one request with a grammar of token ids; None where the server cannot."""
    wanted = list(tokens[1:])
    body = {
        "prompt": list(tokens[:1]), "n_predict": len(wanted), "n_probs": max(1, top),
        "grammar": "root ::= " + " ".join(f"<[{token}]>" for token in wanted),
        "temperature": 0, "samplers": [], "cache_prompt": False, "stream": False,
    }  # fmt: skip
    told = talk.post("/completion", body, tokens=len(wanted))
    if told.problem is not None:
        return _trouble(told, "/completion") if told.lost or told.http_status in _ABSENT else None
    timings = told.data.get("timings") if isinstance(told.data, dict) else None
    drafted = timings.get("draft_n") if isinstance(timings, dict) else None
    try:
        rows = _rows(told)
        if drafted or [row.get("id") for row in rows] != wanted:
            return None
        return _read(tokens, rows, top, "grammar")
    except _NoUse:
        return None


def _one_by_one(talk: Client, tokens: Sequence[int], top: int) -> Scored:
    rows: list[dict[str, Any]] = []
    with talk.progress.bar("probe", "tokens") as bar:
        for place in range(1, len(tokens)):
            body = {
                "prompt": list(tokens[:place]), "n_predict": 1, "n_probs": max(1, top),
                "logit_bias": [[tokens[place], BIAS]], "temperature": 0, "cache_prompt": True,
                "stream": False,
            }  # fmt: skip
            told = talk.post("/completion", body, tokens=place)
            if told.problem is not None:
                return _trouble(told, "/completion")
            try:
                row = _rows(told)[0]
                logprob(row.get("logprob"))
            except _NoUse as error:
                return Scored(problem=str(error), trouble="unable")
            except _NoNumber as error:
                return Scored(problem=f"token {place}: {error}", trouble="numbers")
            if row.get("id") != tokens[place]:
                return _refused(talk, body, tokens[place], place)
            rows.append(row)
            bar.update(place, len(tokens) - 1)
            if talk.spent:
                why = f"{place} of {len(tokens) - 1} tokens took {talk.cost.seconds:.0f} s"
                return Scored(problem=why, trouble="lost")
    return _read(tokens, rows, top, "logit_bias")


def _refused(talk: Client, body: dict[str, Any], wanted: int, place: int) -> Scored:
    """Say why a token was not taken: a server that forces none, or logits that are no model's.

    What `BIAS` does not bring about and `STRONGER` does is a difference of logits that only broken
    weights make.
    """
    told = talk.post("/completion", {**body, "logit_bias": [[wanted, STRONGER]]}, tokens=place)
    try:
        taken = told.problem is None and _rows(told)[0].get("id") == wanted
    except _NoUse:
        taken = False
    if taken:
        why = f"token {place}: another one is more than {BIAS:g} nats likelier than the text's own"
        return Scored(problem=why, trouble="numbers")
    return Scored(problem="the server would not take a forced token", trouble="unable")


def _read(tokens: Sequence[int], rows: Sequence[dict[str, Any]], top: int, how: str) -> Scored:
    try:
        numbers = tuple(logprob(row.get("logprob")) for row in rows)
        best = tuple(_best(row, top) for row in rows) if top else ()
    except _NoNumber as error:
        return Scored(problem=str(error), trouble="numbers")
    except _NoUse as error:
        return Scored(problem=str(error), trouble="reply")
    return Scored(tuple(tokens), numbers, best, how)


def _rows(told: JsonResponse) -> list[dict[str, Any]]:
    """Give the probabilities of what was generated, a row a token."""
    rows = told.data.get("completion_probabilities") if isinstance(told.data, dict) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) for r in rows):
        raise _NoUse("the reply of /completion holds no probabilities")
    return rows


def _best(row: dict[str, Any], top: int) -> Top:
    entries = row.get("top_logprobs")
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise _NoUse("the reply of /completion holds no likeliest tokens")
    pairs = [(_id(e.get("id")), logprob(e.get("logprob"))) for e in entries]
    return tuple(sorted(pairs, key=lambda pair: -pair[1])[:top])


def logprob(value: Any) -> float:
    """Read a log-probability. Raises where it is none: null, NaN, infinite upwards, above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _NoNumber(f"a probability is {'null' if value is None else repr(value)[:40]}")
    if math.isnan(value):
        raise _NoNumber("a probability is NaN")
    if value > SLACK:
        raise _NoNumber(f"a log-probability is {value:g}, above 0")
    return max(FLOOR, min(0.0, float(value)))


def _id(value: Any) -> int:
    if _is_id(value):
        return int(value)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12:
        return int(value)
    raise _NoUse("a token has no id")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_ABSENT = (401, 403, 404, 405, 501)


def _trouble(told: JsonResponse, what: str) -> Scored:
    """Name why a request brought nothing."""
    problem = f"{what}: {told.problem}"
    if told.lost:
        return Scored(problem=problem, trouble="lost")
    unable = told.http_status in (*_ABSENT, 400, 422)
    return Scored(problem=problem, trouble="unable" if unable else "reply")


def greedy(talk: Client, text: str, count: int) -> Scored:
    """Let the server go on with a text, always with its likeliest token; give all tokens.

    The first `len(tokens) - len(logprobs)` of them are the text's own. Probabilities are not read:
    a server that speculates gives none.
    """
    if talk.endpoint.engine == "vllm":
        return _greedy_vllm(talk, text, count)
    told = talk.post("/tokenize", {"content": text, "add_special": True})
    if told.problem is not None:
        return _trouble(told, "tokenizing")
    tokens = _tokens_of(told, text)
    if not tokens:
        return Scored(problem="the answer of /tokenize is no list of tokens", trouble="reply")
    body = {
        "prompt": tokens, "n_predict": count, "n_probs": 1, "temperature": 0,
        "cache_prompt": False, "stream": False,
    }  # fmt: skip
    told = talk.post("/completion", body, tokens=count)
    if told.problem is not None:
        return _trouble(told, "/completion")
    try:
        chosen = [_id(row.get("id")) for row in _rows(told)]
    except _NoUse as error:
        return Scored(problem=str(error), trouble="unable")
    return Scored((*tokens, *chosen), (0.0,) * len(chosen), how="greedy")


def _greedy_vllm(talk: Client, text: str, count: int) -> Scored:
    body = {
        "model": talk.endpoint.model or "default", "prompt": text, "max_tokens": count,
        "temperature": 0, "return_token_ids": True, "stream": False,
    }  # fmt: skip
    told = talk.post("/v1/completions", body, tokens=count)
    if told.problem is not None:
        return _trouble(told, "/v1/completions")
    choices = told.data.get("choices") if isinstance(told.data, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    lists = [choice.get(k) if isinstance(choice, dict) else None for k in _TOKEN_LISTS]
    if not all(isinstance(ids, list) and ids and all(map(_is_id, ids)) for ids in lists):
        return Scored(problem="the reply holds no token ids", trouble="unable")
    prompt, chosen = (tuple(ids or ()) for ids in lists)
    return Scored((*prompt, *chosen), (0.0,) * len(chosen), how="greedy")


_TOKEN_LISTS = ("prompt_token_ids", "token_ids")
