"""Token by token: how likely a server finds a known text, and what it generates greedily.

Natural logarithms throughout. A text is scored in one of three ways, by what the server supports:

- `prompt_logprobs` of vLLM's completions API: one request, nothing is decoded.
- llama-server, one request: a grammar of token ids (`<[1000]>`) lets only the text through, and
  the probabilities are those before any sampler, grammar included, touched them.
- llama-server, a request a token: the token is forced by `logit_bias`, which does not touch the
  returned probability either. For servers that support no token ids in grammars, and for those
  that speculate, which return no probabilities for accepted drafts.

No engine speculates in a request for one token: it ends before a draft could be made. llama.cpp
(build 11434) has no switch for it in a request, drafts at most one token fewer than are still to
come, and then leaves `draft_n` out of its timings; in vLLM the first token after a prompt is the
model's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal, ParamSpec

from bakehouse.probe.client import Client, JsonResponse, count_of, find_in

FLOOR = -104.0
"""Probabilities below what single precision holds come as 0, -9999 or the lowest float."""
SLACK = 1e-3
"""How far above 0 a log-probability may be by rounding."""
BIAS = 1000.0
"""Added to the wanted token's logit: more than any two logits of a sound model differ by."""
STRONGER = 1e30
"""More than any two finite logits differ by."""
SPECIAL = 16
"""Maximum number of tokens that stand for no byte of a text."""
ALTERNATIVES = 10
"""How many of the likeliest tokens to ask for at each position."""

Trouble = Literal["unable", "lost", "numbers", "reply"]
Top = tuple[tuple[int, float], ...]
Prompt = Sequence[str | int]
"""Pieces of text and ids of tokens, in order."""
_P = ParamSpec("_P")


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of a text.

    `logprobs[i]` belongs to `tokens[i + 1]`: the first token has no probability. `top[i]`, if asked
    for, holds the likeliest tokens at the same place. `trouble` is the kind of problem: a missing
    capability, nobody who answers, a number that is not a probability, or a reply of no use.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top: tuple[Top, ...] = field(default=(), repr=False)
    how: str = ""
    problem: str | None = None
    trouble: Trouble | None = None


@dataclass(frozen=True)
class Generated:
    """Tokens that a server generated after a prompt; drafts as the reply itself counts them."""

    prompt: Prompt
    tokens: tuple[int, ...] = ()
    content: str = ""
    drafted: int | None = None
    accepted: int | None = None
    problem: str | None = None


@dataclass(frozen=True)
class NextToken:
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


class _Failed(Exception):
    """A request that brought no numbers."""

    def __init__(self, trouble: Trouble, problem: str) -> None:
        super().__init__(problem)
        self.trouble = trouble


def _scoring(job: Callable[_P, Scored]) -> Callable[_P, Scored]:
    """Return a problem as a `Scored`."""

    @wraps(job)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> Scored:
        try:
            return job(*args, **kwargs)
        except _Failed as error:
            return Scored(problem=str(error), trouble=error.trouble)

    return run


@_scoring
def score_text(talk: Client, text: str, *, top: int = 0) -> Scored:
    """Give the log-probabilities of a text's tokens, and at each place the `top` likeliest."""
    engine = talk.endpoint.engine
    if engine == "vllm":
        return _prompt_logprobs(talk, text, top)
    reply = talk.post("/tokenize", {"content": text, "add_special": True})
    if engine is None and reply.http_status in (404, 405, 501):
        return _prompt_logprobs(talk, text, top)
    return score_tokens(talk, _tokens_of(reply, text), top=top)


@_scoring
def score_tokens(talk: Client, tokens: Sequence[int], *, top: int = 0) -> Scored:
    """Give the log-probabilities of all tokens but the first."""
    if talk.endpoint.engine == "vllm":
        return _prompt_logprobs(talk, list(tokens), top)
    return _at_once(talk, tokens, top) or _one_by_one(talk, tokens, top)


def _tokens_of(reply: JsonResponse, text: str) -> tuple[int, ...]:
    """Read the reply of /tokenize; no text has more tokens than bytes."""
    tokens = _ids(_good(reply, "tokenizing").find("tokens"))
    if not 2 <= len(tokens) <= len(text.encode()) + SPECIAL:
        raise _Failed("reply", "the reply of /tokenize is not a list of tokens")
    return tokens


def _prompt_logprobs(talk: Client, prompt: str | list[int], top: int) -> Scored:
    body = _vllm(talk, prompt, 1, prompt_logprobs=top, return_token_ids=True)
    reply = talk.post("/v1/completions", body, tokens=len(prompt))
    if "JSON compliant" in (reply.problem or ""):
        raise _Failed("numbers", f"not a number: {reply.problem}")
    rows = _good(reply, "prompt_logprobs").find("choices", 0, "prompt_logprobs")
    if not isinstance(rows, list) or len(rows) < 2:
        raise _Failed("unable", "the reply holds no prompt_logprobs")
    ids = reply.find("choices", 0, "prompt_token_ids")
    if not isinstance(ids, list):  # an older vLLM puts a row's own token first
        tokens = (-1, *(_id(next(iter(row), None) if isinstance(row, dict) else None)
                        for row in rows[1:]))  # fmt: skip
    elif len(ids) != len(rows) or not (tokens := _ids(ids)):
        raise _Failed("reply", "prompt_logprobs and prompt_token_ids do not belong together")
    numbers: list[float] = []
    best: list[Top] = []
    for row, token in zip(rows[1:], tokens[1:], strict=True):
        if not isinstance(row, dict):
            raise _Failed("reply", "a row of prompt_logprobs is not an object")
        read = {_id(key): logprob(find_in(value, "logprob")) for key, value in row.items()}
        if token not in read:
            raise _Failed("reply", "a row of prompt_logprobs lacks its own token")
        numbers.append(read[token])
        best.append(tuple(sorted(read.items(), key=lambda pair: -pair[1])[:top]))
    return Scored(tokens, tuple(numbers), tuple(best) if top else (), "prompt_logprobs")


def _at_once(talk: Client, tokens: Sequence[int], top: int) -> Scored | None:
    """Score by one request with a grammar of token ids; None if the server cannot."""
    wanted = list(tokens[1:])
    body = _llamacpp(
        tokens[:1], len(wanted), n_probs=max(1, top), samplers=[], cache_prompt=False,
        grammar="root ::= " + " ".join(f"<[{token}]>" for token in wanted),
    )  # fmt: skip
    reply = talk.post("/completion", body, tokens=len(wanted))
    if reply.problem is not None and not reply.lost and reply.http_status not in _ABSENT:
        return None
    try:
        rows = _rows(reply)
    except _Failed:
        if reply.problem is not None:
            raise
        return None
    if reply.find("timings", "draft_n") or [row.get("id") for row in rows] != wanted:
        return None
    return _read(tokens, rows, top, "grammar")


def _one_by_one(talk: Client, tokens: Sequence[int], top: int) -> Scored:
    rows: list[dict[str, Any]] = []
    with talk.progress.bar("probe", "tokens") as bar:
        for place in range(1, len(tokens)):
            wanted = tokens[place]
            body = _llamacpp(tokens[:place], 1, n_probs=max(1, top), logit_bias=[[wanted, BIAS]])
            row = _rows(talk.post("/completion", body, tokens=place))[0]
            try:
                logprob(row.get("logprob"))
            except _Failed as error:
                raise _Failed("numbers", f"token {place}: {error}") from None
            if row.get("id") != wanted:
                raise _refused(talk, body, wanted, place)
            rows.append(row)
            bar.update(place, len(tokens) - 1)
            if talk.spent:
                why = f"{place} of {len(tokens) - 1} tokens took {talk.cost.seconds:.0f} s"
                raise _Failed("lost", why)
    return _read(tokens, rows, top, "logit_bias")


def _refused(talk: Client, body: dict[str, Any], wanted: int, place: int) -> _Failed:
    """Say why a token was not taken: the server forces none, or the logits are broken.

    A token that needs `STRONGER` and not only `BIAS` shows a difference of logits that only broken
    weights make.
    """
    reply = talk.post("/completion", {**body, "logit_bias": [[wanted, STRONGER]]}, tokens=place)
    if reply.problem is None and reply.find("completion_probabilities", 0, "id") == wanted:
        why = f"token {place}: another one is more than {BIAS:g} nats likelier than the text's own"
        return _Failed("numbers", why)
    return _Failed("unable", "the server does not accept a forced token")


def _read(tokens: Sequence[int], rows: Sequence[dict[str, Any]], top: int, how: str) -> Scored:
    numbers = tuple(logprob(row.get("logprob")) for row in rows)
    best: list[Top] = []
    for row in rows if top else ():
        entries = row.get("top_logprobs")
        if not isinstance(entries, list):
            raise _Failed("reply", "the reply of /completion holds no likeliest tokens")
        pairs = [(_id(find_in(e, "id")), logprob(find_in(e, "logprob"))) for e in entries]
        best.append(tuple(sorted(pairs, key=lambda pair: -pair[1])[:top]))
    return Scored(tuple(tokens), numbers, tuple(best), how)


def _rows(reply: JsonResponse) -> list[dict[str, Any]]:
    """Give the probabilities of the generated tokens, a row a token."""
    rows = _good(reply, "/completion").find("completion_probabilities")
    if not isinstance(rows, list) or not rows or not all(isinstance(r, dict) for r in rows):
        raise _Failed("unable", "the reply of /completion holds no probabilities")
    return rows


def logprob(value: Any) -> float:
    """Read a log-probability, in nats. Raises for null, NaN, or a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        found = "null" if value is None else repr(value)[:40]
        raise _Failed("numbers", f"a probability is {found}")
    if math.isnan(value):
        raise _Failed("numbers", "a probability is NaN")
    if value > SLACK:
        raise _Failed("numbers", f"a log-probability is {value:g}, above 0")
    return max(FLOOR, min(0.0, float(value)))


def _id(value: Any) -> int:
    """Read a token's id, also as text."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12:
        return int(value)
    if (number := count_of(value)) is None:
        raise _Failed("reply", "a token has no id")
    return number


def _ids(value: Any) -> tuple[int, ...]:
    """Read a list of token ids; empty for anything else."""
    good = isinstance(value, list) and all(count_of(v) is not None for v in value)
    return tuple(value) if good else ()


_ABSENT = (401, 403, 404, 405, 501)
"""HTTP statuses of a server that does not have a route."""


def _good(reply: JsonResponse, what: str) -> JsonResponse:
    """Return a reply that succeeded. Raises with the kind of its problem."""
    if reply.problem is None:
        return reply
    unable = reply.http_status in (*_ABSENT, 400, 422)
    trouble: Trouble = "lost" if reply.lost else ("unable" if unable else "reply")
    raise _Failed(trouble, f"{what}: {reply.problem}")


def _llamacpp(prompt: Prompt, tokens: int, **more: Any) -> dict[str, Any]:
    """Body of a greedy request to /completion."""
    text = len(prompt) == 1 and isinstance(prompt[0], str)
    return {"prompt": prompt[0] if text else list(prompt), "n_predict": tokens, "temperature": 0,
            "cache_prompt": True, "stream": False, **more}  # fmt: skip


def _vllm(talk: Client, prompt: str | Prompt, tokens: int, **more: Any) -> dict[str, Any]:
    """Body of a greedy request to /v1/completions."""
    text = not isinstance(prompt, str) and len(prompt) == 1 and isinstance(prompt[0], str)
    return {"model": talk.model, "prompt": prompt[0] if text else prompt, "max_tokens": tokens,
            "temperature": 0, "stream": False, **more}  # fmt: skip


def generate(talk: Client, prompt: Prompt, max_tokens: int, *, cache: bool = True) -> Generated:
    """Let the server continue a prompt at temperature 0; vLLM's prompt comes back as ids."""
    if talk.endpoint.engine == "vllm":
        body = _vllm(talk, prompt, max_tokens, return_token_ids=True)
        reply = talk.post("/v1/completions", body, tokens=max_tokens)
        tokens, before = (
            _ids(reply.find("choices", 0, key)) for key in ("token_ids", "prompt_token_ids")
        )
        if reply.problem or not tokens or not before:
            return Generated(prompt, problem=reply.problem or "the reply holds no token ids")
        return Generated(before, tokens, str(reply.find("choices", 0, "text")))
    body = _llamacpp(prompt, max_tokens, return_tokens=True, cache_prompt=cache)
    reply = talk.post("/completion", body, tokens=max_tokens)
    tokens = _ids(reply.find("tokens"))
    if reply.problem or not tokens:
        return Generated(prompt, problem=reply.problem or "the reply holds no token ids")
    drafted, accepted = (
        count_of(reply.find("timings", key)) or 0 for key in ("draft_n", "draft_n_accepted")
    )
    return Generated(prompt, tokens, str(reply.find("content") or ""), drafted, accepted)


def greedy(talk: Client, text: str, count: int) -> Generated:
    """Let the server continue a text, always with its likeliest token; the prompt comes as ids."""
    if talk.endpoint.engine == "vllm":
        return generate(talk, [text], count)
    try:
        prompt = _tokens_of(talk.post("/tokenize", {"content": text, "add_special": True}), text)
    except _Failed as error:
        return Generated([text], problem=str(error))
    return generate(talk, prompt, count, cache=False)


def next_token(talk: Client, prompt: Prompt) -> NextToken:
    """Ask for the one token that comes next; an end-of-text token has an id like any other."""
    likely: list[tuple[Any, str, Any]] = []
    if talk.endpoint.engine == "vllm":
        more = {"logprobs": ALTERNATIVES, "return_tokens_as_token_ids": True}
        reply = talk.post("/v1/completions", _vllm(talk, prompt, 1, **more), tokens=1)
        top = reply.find("choices", 0, "logprobs", "top_logprobs", 0)
        for name, value in top.items() if isinstance(top, dict) else ():
            if (number := str(name).removeprefix("token_id:")).isdecimal():
                likely.append((int(number), name, value))
        ended = reply.find("choices", 0, "finish_reason") == "stop"
    else:
        reply = talk.post("/completion", _llamacpp(prompt, 1, n_probs=ALTERNATIVES), tokens=1)
        rows = reply.find("completion_probabilities", 0, "top_logprobs")
        for row in rows if isinstance(rows, list) else ():
            text = str(find_in(row, "token") or "")
            likely.append((find_in(row, "id"), text, find_in(row, "logprob")))
        ended = reply.find("stop_type") == "eos"
    if reply.problem:
        return NextToken(problem=reply.problem)
    good = [
        (token, text, float(value))
        for token, text, value in likely
        if count_of(token) is not None and isinstance(value, int | float) and math.isfinite(value)
    ]
    if not good or len(good) != len(likely):
        return NextToken(problem="the reply holds no log-probabilities that are numbers")
    return NextToken(tuple(sorted(good, key=lambda row: -row[2])), ended)
