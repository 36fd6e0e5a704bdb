"""Asks any OpenAI-compatible server a question, within bounds of time and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bakehouse.ports.clock import Clock
from bakehouse.ports.http import Http, Reply, Unreachable
from bakehouse.probe.reply import BUSY, Said, message_of, read_reply
from bakehouse.probe.types import Endpoint
from bakehouse.recipe.model import Question, Request


@dataclass(frozen=True)
class Patience:
    """How long a server may take. Seconds, unless said otherwise.

    One request gets `base` plus `per_token` for each token that it may produce, never more than
    `most`: enough for 4 tokens a second after kernels were compiled with the first request.
    """

    base: float = 60.0
    per_token: float = 0.3
    most: float = 900.0
    attempts: int = 4
    """Requests in all where the server is busy (429, 503) or the connection broke."""
    longest_wait: float = 5.0
    """Between two of them, whatever Retry-After says."""
    max_bytes: int = 2**20
    """Of one reply."""

    def timeout(self, max_tokens: int) -> float:
        """Seconds for one request."""
        return min(self.base + self.per_token * max_tokens, self.most)


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
    """Puts questions to one server."""

    def __init__(
        self,
        http: Http,
        clock: Clock,
        endpoint: Endpoint,
        request: Request,
        patience: Patience = Patience(),
    ) -> None:
        self._http = http
        self._clock = clock
        self._endpoint = endpoint
        self._request = request
        self._patience = patience
        self._limit_name = "max_tokens"

    def ask(self, question: Question, max_tokens: int | None = None) -> Said:
        """Ask once; busy servers and broken connections are tried again, within bounds."""
        budget = max_tokens or first_budget(question, self._request)
        said = self._patiently(question, budget)
        if self._wants_other_name(said):
            self._limit_name = "max_completion_tokens"
            said = self._patiently(question, budget)
        return said

    def _patiently(self, question: Question, budget: int) -> Said:
        import tenacity  # only a probe needs it

        waits: list[float] = []

        def attempt() -> Said:
            said, retry_after = self._once(question, budget)
            waits.append(retry_after)
            return said

        def wait(state: tenacity.RetryCallState) -> float:
            seconds = max(waits[-1], 0.2 * float(2**state.attempt_number))
            return min(seconds, self._patience.longest_wait)

        def last(state: tenacity.RetryCallState) -> Said:
            said: Said = state.outcome.result() if state.outcome else Said(problem="not asked")
            return replace(said, problem=f"{said.problem} (asked {state.attempt_number} times)")

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self._patience.attempts),
            wait=wait,
            retry=tenacity.retry_if_result(_worth_another_try),
            retry_error_callback=last,
            sleep=self._clock.sleep,
        )
        said: Said = retrying(attempt)
        return said

    def _once(self, question: Question, budget: int) -> tuple[Said, float]:
        """Send one request; give what was said, and the seconds of Retry-After."""
        began = self._clock.monotonic()
        try:
            reply = self._http.ask(
                "POST",
                self._endpoint.url.rstrip("/") + _PATHS[question.mode],
                json=self._body(question, budget),
                headers=self._endpoint.headers,
                timeout=self._patience.timeout(budget),
                max_bytes=self._patience.max_bytes,
            )
        except Unreachable as error:
            seconds = self._clock.monotonic() - began
            broken = not error.refused and error.why.startswith(_BROKEN)
            said = Said(problem=error.why, lost=True, broken=broken, seconds=seconds)
            return said, 0.0
        said = read_reply(reply, question.mode)
        return said, _retry_after(reply.headers) if said.problem else 0.0

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
            "model": self._endpoint.model or "default",
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


_BROKEN = ("connection", "the answer was cut off")
"""How the HTTP port's reasons begin where a connection was made and then lost."""

_PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


def _worth_another_try(said: Said) -> bool:
    """Whether the same request may fare better: a busy server, a connection that broke.

    Not after a time-out, and not where nobody listens: those would only wait again.
    """
    return said.http_status in BUSY or said.broken


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that the server asks to wait; 0 where it does not say, or says a date."""
    value = next((v for k, v in headers.items() if k.lower() == "retry-after"), "0")
    try:
        return max(0.0, float(value))
    except ValueError:
        return 0.0


def list_models(http: Http, endpoint: Endpoint, *, timeout: float = 10.0) -> tuple[str, ...]:
    """Give the ids that `/v1/models` lists. Raises Unreachable, also for an answer of no use."""
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
    return tuple(str(r["id"]) for r in rows if isinstance(r, dict) and r.get("id"))
