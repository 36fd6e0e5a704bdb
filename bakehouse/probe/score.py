"""How likely a server finds a known text: log-probabilities of its tokens, one after another.

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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bakehouse.probe.reply import Told
from bakehouse.probe.talk import Talk

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


def score_text(talk: Talk, text: str, *, top: int = 0) -> Scored:
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


def _tokens_of(told: Told, text: str) -> list[int]:
    """Read the tokens of a text; none where they are none, or more than it has bytes."""
    tokens = told.data.get("tokens") if isinstance(told.data, dict) else None
    if not isinstance(tokens, list) or len(tokens) > len(text.encode()) + SPECIAL:
        return []
    return tokens if all(map(_is_id, tokens)) else []


def score_tokens(talk: Talk, tokens: Sequence[int], *, top: int = 0) -> Scored:
    """Give the log-probabilities of all tokens but the first."""
    if talk.endpoint.engine == "vllm":
        return _prompt_logprobs(talk, list(tokens), top)
    at_once = _at_once(talk, tokens, top)
    return at_once if at_once else _one_by_one(talk, tokens, top)


def _prompt_logprobs(talk: Talk, prompt: str | list[int], top: int) -> Scored:
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


def _at_once(talk: Talk, tokens: Sequence[int], top: int) -> Scored | None:
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


def _one_by_one(talk: Talk, tokens: Sequence[int], top: int) -> Scored:
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


def _refused(talk: Talk, body: dict[str, Any], wanted: int, place: int) -> Scored:
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


def _rows(told: Told) -> list[dict[str, Any]]:
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


def _trouble(told: Told, what: str) -> Scored:
    """Name why a request brought nothing."""
    problem = f"{what}: {told.problem}"
    if told.lost:
        return Scored(problem=problem, trouble="lost")
    unable = told.http_status in (*_ABSENT, 400, 422)
    return Scored(problem=problem, trouble="unable" if unable else "reply")


def greedy(talk: Talk, text: str, count: int) -> Scored:
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


def _greedy_vllm(talk: Talk, text: str, count: int) -> Scored:
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
