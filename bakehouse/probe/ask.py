"""Asks any OpenAI-compatible server a question, or which models it serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bakehouse.ports.http import Http, Reply, Unreachable
from bakehouse.probe.reply import Said, message_of, said_of
from bakehouse.probe.talk import Talk
from bakehouse.probe.types import Endpoint
from bakehouse.recipe.gate import Question, Request

LARGER = 8
AT_LEAST = 2048
"""A budget that was too small is multiplied, and is at least so many tokens the second time."""
PROMPT = 256
"""Tokens of a known context that are left for the prompt."""
SENTENCE = 32
"""Tokens of a plain completion: only its first sentence is judged."""


def first_budget(question: Question, request: Request) -> int:
    """Give the tokens that a question is asked with the first time."""
    whole = request.max_tokens
    return min(whole, SENTENCE) if question.mode == "completion" else whole


def larger_budget(max_tokens: int, context: int | None) -> int | None:
    """Give the budget of the second try, in tokens; None where the context has no more room."""
    budget = max(LARGER * max_tokens, AT_LEAST)
    if context is not None:
        budget = min(budget, context - PROMPT)
    return budget if budget > max_tokens else None


class Asker:
    """Puts questions to one server, as a chat or as a text to go on with."""

    def __init__(self, talk: Talk, request: Request) -> None:
        self._talk = talk
        self._request = request
        self._limit_name = "max_tokens"

    def ask(self, question: Question, max_tokens: int | None = None, **more: Any) -> Said:
        """Ask once; `more` are further fields of the request."""
        budget = max_tokens or first_budget(question, self._request)
        said = self._once(question, budget, more)
        if self._wants_other_name(said):
            self._limit_name = "max_completion_tokens"
            said = self._once(question, budget, more)
        return said

    def _once(self, question: Question, budget: int, more: dict[str, Any]) -> Said:
        body = {**self._body(question, budget), **more}
        told = self._talk.post(_PATHS[question.mode], body, tokens=budget)
        return said_of(told, question.mode)

    def _body(self, question: Question, budget: int) -> dict[str, Any]:
        request = self._request
        what: dict[str, Any] = (
            {"prompt": question.ask}
            if question.mode == "completion"
            else {"messages": [{"role": "user", "content": question.ask}]}
        )
        if request.reasoning_effort and question.mode == "chat":
            what["reasoning_effort"] = request.reasoning_effort
        return {
            "model": self._talk.endpoint.model or "default",
            **what,
            self._limit_name: budget,
            "temperature": request.temperature,
            "stream": False,
        }

    def _wants_other_name(self, said: Said) -> bool:
        """Whether the server knows the token limit by its newer name only."""
        return (
            said.http_status == 400
            and self._limit_name == "max_tokens"
            and "max_completion_tokens" in (said.problem or "")
        )


_PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


@dataclass(frozen=True)
class Served:
    """What a server says of itself: the names it answers to, and its engine where it tells."""

    models: tuple[str, ...]
    engine: str | None


_OWNERS = {"llamacpp": "llama.cpp", "vllm": "vllm"}
"""Who owns a model, as each engine says it."""


def served(http: Http, endpoint: Endpoint, *, timeout: float = 10.0) -> Served:
    """Read `/v1/models`. Raises Unreachable, also for an answer of no use."""
    url = endpoint.url.rstrip("/") + "/v1/models"
    reply: Reply = http.ask("GET", url, headers=endpoint.headers, timeout=timeout, max_bytes=2**20)
    try:
        data = reply.json()
    except (ValueError, RecursionError):
        data = None
    if reply.status != 200:
        raise Unreachable(f"HTTP {reply.status} {message_of(data)}".strip())
    rows = data.get("data") if isinstance(data, dict) else None
    if not isinstance(rows, list):
        raise Unreachable("the answer of /v1/models is no list of models")
    named = [r for r in rows if isinstance(r, dict) and r.get("id")]
    owners = (_OWNERS.get(str(r.get("owned_by"))) for r in named)
    return Served(tuple(str(r["id"]) for r in named), next(filter(None, owners), None))
