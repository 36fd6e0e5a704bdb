"""Client of an OpenAI-compatible server.

Every suite asks through a `Talk`, which counts what was asked. Safe to use from several threads.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from bakehouse.probe.models import Endpoint
from bakehouse.progress import Progress
from bakehouse.recipe.models import Question, Request
from bakehouse.runs.store import Cost
from bakehouse.system.clock import Clock
from bakehouse.system.http import Http, Reply, Unreachable
from bakehouse.util.retry import Retry, TransientError, retry_after

_LINES = re.compile(r"\r\n|\n|\r")
"""What ends a line of a stream; JSON may hold other characters that end lines elsewhere."""
_DONE = "[DONE]"
_TOLD = ("content", "reasoning_content", "reasoning", "refusal")
"""What the deltas of a chat may hold of its message."""


class Unended(ValueError):
    """A stream that does not come to its end."""


def document_of(stream: str) -> dict[str, Any]:
    """Put the events of a completion together. ValueError where they are none, or have no end.

    Gives what the same request would have been answered with as one document: the first choice's
    message, text and finish reason, and what the last events say besides (usage, timings).
    """
    message: dict[str, str] = {}
    text: list[str] = []
    whole: dict[str, Any] = {}
    finish: str | None = None
    heard = ended = False
    for data in _payloads(stream):
        if data == _DONE:
            ended = True
            break
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError("an event that is no object")
        if event.get("error"):
            return event
        whole |= {k: v for k, v in event.items() if k != "choices" and v is not None}
        if (choice := _first(event)) is None:
            continue
        heard = True
        delta: Any = choice.get("delta", choice.get("message"))
        for name in _TOLD if isinstance(delta, dict) else ():
            if isinstance(delta.get(name), str):
                message[name] = message.get(name, "") + delta[name]
        if isinstance(piece := choice.get("text"), str):
            text.append(piece)
        finish = choice.get("finish_reason") or finish
    if not heard:
        raise ValueError("no event holds a choice")
    if not ended and finish is None:
        raise Unended("the stream stops before its end")
    choice = {"index": 0, "message": message, "text": "".join(text), "finish_reason": finish}
    return {**whole, "choices": [choice]}


def _payloads(stream: str) -> Iterator[str]:
    for line in _LINES.split(stream):
        if line.startswith("data:"):
            yield line[5:].strip()


def _first(event: dict[str, Any]) -> dict[str, Any] | None:
    choices = event.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else None


@dataclass(frozen=True)
class Completion:
    """What a server said to one question, or why it said nothing that can be read.

    `content` and `reasoning` are as they came; `problem` is None where there is an answer.
    `lost` marks problems of the connection or of an overloaded server, which another question
    would most likely meet as well; `broken` a connection that was made and then lost.
    """

    content: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    tokens: int | None = None
    seconds: float = 0.0
    http_status: int | None = None
    problem: str | None = None
    lost: bool = False
    broken: bool = False


BUSY = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses after which the same request may succeed a little later."""


@dataclass(frozen=True)
class JsonResponse:
    """A server's JSON document, or why there is none that can be read.

    `problem` is None where `data` is the document of a request that succeeded; `lost` and `broken`
    are those of `Said`.
    """

    data: Any = None
    seconds: float = 0.0
    http_status: int | None = None
    problem: str | None = None
    lost: bool = False
    broken: bool = False


def read_json(reply: Reply) -> JsonResponse:
    """Read any reply that should be JSON. An error inside HTTP 200 is a problem as well."""
    data = None
    try:
        data = _parse(reply)
        if reply.status != 200:
            raise _Bad(message_of(data) or "no message")
        if isinstance(data, dict) and data.get("error"):
            raise _Bad(f"HTTP 200 with an error inside: {message_of(data)}")
    except _Bad as bad:
        status = "" if reply.status == 200 else f"HTTP {reply.status}: "
        lost = reply.status in BUSY
        return JsonResponse(data, reply.seconds, reply.status, f"{status}{bad}", lost)
    return JsonResponse(data, reply.seconds, reply.status)


def said_of(told: JsonResponse, mode: Literal["chat", "completion"]) -> Completion:
    """Read what a server said out of a document of the completions APIs."""
    said = Completion(
        seconds=told.seconds, http_status=told.http_status, problem=told.problem, lost=told.lost,
        broken=told.broken,
    )  # fmt: skip
    if told.problem is not None:
        return said
    try:
        content, reasoning, finish = _read(told.data, mode)
    except _Bad as bad:
        return replace(said, problem=str(bad))
    return replace(
        said, content=content, reasoning=reasoning, finish_reason=finish, tokens=_tokens(told.data)
    )


class _Bad(Exception):
    """A reply in which there is no answer; says why."""


def _read(data: Any, mode: Literal["chat", "completion"]) -> tuple[str, str, str | None]:
    """Content, reasoning and finish reason of an answer's document."""
    if not isinstance(data, dict):
        raise _Bad(f"the answer is JSON, but not an object: {_short(json.dumps(data))}")
    choices = data.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise _Bad("the answer holds no choices")
    finish = choice.get("finish_reason")
    finish = finish if isinstance(finish, str) else None
    if mode == "completion":
        return _text_of(choice.get("text")), "", finish
    message = choice.get("message")
    if not isinstance(message, dict):
        raise _Bad("the answer's choice holds no message")
    return *_of_message(message), finish


def _parse(reply: Reply) -> Any:
    """Parse the body."""
    start = reply.body.lstrip()[:200].lower()
    if reply.status in range(300, 400):
        raise _Bad(f"a redirect to {_short(_location(reply))}, which no question follows")
    if not start:
        raise _Bad("the answer is empty")
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<!--")):
        raise _Bad(f"HTML in place of JSON: {_short(_title(reply.text))}")
    if start.startswith((b"data:", b"event:", b": ")):
        return _of_stream(reply)
    try:
        text = reply.body.decode("utf-8-sig")
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise _Bad(f"the answer is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise _Bad("the answer is JSON nested without end") from None
    except json.JSONDecodeError as error:
        how = "cut off" if _at_end(error) else "malformed"
        raise _Bad(f"the answer is {how} JSON: {_short(text)}") from None
    except ValueError as error:
        raise _Bad(f"the answer is JSON that cannot be read: {error}") from None


def _of_stream(reply: Reply) -> Any:
    """Read the events of a server that streams although it was asked not to."""
    try:
        return document_of(reply.body.decode())
    except Unended as error:
        raise _Bad(f"a stream of events: {error}") from None
    except (ValueError, RecursionError):
        raise _Bad("a stream of events where one JSON document was asked for") from None


def _location(reply: Reply) -> str:
    return next((v for k, v in reply.headers.items() if k.lower() == "location"), "nowhere")


def _at_end(error: json.JSONDecodeError) -> bool:
    """Whether the parser ran out of text, as in half a document."""
    return error.pos >= len(error.doc.rstrip()) - 1 or error.msg.startswith("Unterminated string")


def message_of(data: Any) -> str:
    """Give the message of an error document, in whichever of the usual places it stands."""
    if not isinstance(data, dict):
        return ""
    error = data.get("error", data)
    if isinstance(error, dict):
        found = error.get("message") or error.get("detail") or error.get("msg") or error
    else:
        found = error
    return _short(found if isinstance(found, str) else json.dumps(found, default=str))


def _of_message(message: dict[str, Any]) -> tuple[str, str]:
    """Content and reasoning of a chat message; a refusal counts as content."""
    content, thoughts = message.get("content"), []
    for key in ("reasoning_content", "reasoning", "thinking", "reasoning_details"):
        if (text := _text_of(message.get(key))) and text not in thoughts:
            thoughts.append(text)
    if isinstance(content, list):
        parts = [p for p in content if isinstance(p, dict)]
        thinking = [p for p in parts if str(p.get("type")) in ("thinking", "reasoning")]
        thoughts += filter(None, map(_text_of, thinking))
        content = [p for p in content if p not in thinking]
    return _text_of(content) or _text_of(message.get("refusal")), "\n".join(thoughts)


def _text_of(value: Any, depth: int = 0) -> str:
    """Give the text of a string, of a list of parts, or of one part, whatever its key is called."""
    if isinstance(value, str):
        return value
    if depth > 4:
        return ""
    if isinstance(value, list):
        return "".join(_text_of(item, depth + 1) for item in value)
    if isinstance(value, dict):
        for key in ("text", "content", "thinking", "reasoning", "summary"):
            if text := _text_of(value.get(key), depth + 1):
                return text
    return ""


def _tokens(data: dict[str, Any]) -> int | None:
    usage = data.get("usage")
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) else None


def _title(html: str) -> str:
    found = re.search(r"<title[^>]*>([^<]{1,200})", html[:5000], re.IGNORECASE)
    return found[1] if found else html


def _short(text: str) -> str:
    flat = " ".join(text[:1000].split())
    return flat if len(flat) <= 160 else f"{flat[:157]}..."


_TAG = r"(?:\w{1,20}:)?(?:think|thinking|thought|reasoning)"
_OPEN = re.compile(
    rf"<(?:{_TAG})>|\[THINK\]|◁think▷|<\|channel\|>analysis|<\|channel>thought|(?:\A\s*(?:<\|\w+\|>\s*)*to=self\b)",
    re.IGNORECASE,
)
_CLOSE = re.compile(rf"</(?:{_TAG})>|\[/THINK\]|◁/think▷", re.IGNORECASE)
_CLOSE_OPENED = re.compile(
    rf"{_CLOSE.pattern}|<\|channel\|>final(?:<\|message\|>)?|<channel\|>|<\|eom\|>|\bto=user\b",
    re.IGNORECASE,
)


def split_thoughts(content: str) -> tuple[str, str]:
    """Part raw thinking from the answer where both came as content: (answer, thinking).

    Knows `<think>…</think>` and its kin, also with only the closing mark (a template that opens the
    thought itself) or only the opening one (cut off while thinking), and `to=self`.
    """
    opened = _OPEN.search(content)
    closed = list((_CLOSE_OPENED if opened else _CLOSE).finditer(content))
    before = content[: opened.start()] if opened else ""
    if closed:
        end = closed[-1]
        return f"{before}{content[end.end() :]}", content[len(before) : end.start()]
    if opened:
        return before, content[opened.start() :]
    return content, ""


class ProbeContext(Protocol):
    """What a probe needs of the context."""

    @property
    def http(self) -> Http: ...  # noqa: D102
    @property
    def clock(self) -> Clock: ...  # noqa: D102
    @property
    def progress(self) -> Progress: ...  # noqa: D102


@dataclass(frozen=True)
class RequestLimits:
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

    def timeout(self, tokens: int) -> float:
        """Seconds for one request."""
        return min(self.base + self.per_token * tokens, self.most)


DEFAULT_LIMITS = RequestLimits()
TEXT_S = 10.0

_BROKEN = ("connection", "the answer was cut off")
"""How the HTTP port's reasons begin where a connection was made and then lost."""


class Client:
    """Asks one server."""

    def __init__(
        self, ctx: ProbeContext, endpoint: Endpoint, patience: RequestLimits = DEFAULT_LIMITS
    ) -> None:
        self.progress = ctx.progress
        self.endpoint = endpoint
        self._http = ctx.http
        self._clock = ctx.clock
        self._patience = patience
        self._lock = threading.Lock()
        self._cost = Cost()
        self._began = ctx.clock.monotonic()

    @property
    def cost(self) -> Cost:
        """What was asked so far, and the seconds since this talk began."""
        with self._lock:
            seconds = round(self._clock.monotonic() - self._began, 3)
            return self._cost.model_copy(update={"seconds": seconds})

    @property
    def spent(self) -> bool:
        """Whether all requests together took as long as a single one may take at most."""
        return self.cost.seconds > self._patience.most

    def get(self, path: str) -> JsonResponse:
        """Ask for a document; see `post`."""
        return self._patiently("GET", path, None, 0)

    def text(self, path: str) -> str | None:
        """Ask once for a document that is no JSON; None where there is none to be had."""
        url = self.endpoint.url.rstrip("/") + path
        try:
            reply = self._http.ask(
                "GET", url, headers=self.endpoint.headers, timeout=TEXT_S,
                max_bytes=self._patience.max_bytes,
            )  # fmt: skip
        except Unreachable:
            return None
        return reply.text if reply.status == 200 else None

    def post(self, path: str, body: Mapping[str, Any], *, tokens: int = 0) -> JsonResponse:
        """Send a document; busy servers and broken connections are tried again, within bounds.

        `tokens` is how many may be read or produced: it gives the time. Never raises for what a
        server does.
        """
        return self._patiently("POST", path, dict(body), tokens)

    def _patiently(self, method: str, path: str, body: Any, tokens: int) -> JsonResponse:
        def once() -> JsonResponse:
            told, after = self._once(method, path, body, tokens)
            if _worth_another_try(told):
                after = None if after is None else min(after, self._patience.longest_wait)
                raise TransientError(told.problem or "busy", after, reply=told)
            return told

        attempts = self._patience.attempts
        try:
            return Retry(self._clock.sleep, attempts=attempts, first_pause=0.4).call(once)
        except TransientError as error:
            told: JsonResponse = error.reply
            return replace(told, problem=f"{told.problem} (asked {attempts} times)")

    def _once(
        self, method: str, path: str, body: Any, tokens: int
    ) -> tuple[JsonResponse, float | None]:
        """Send one request; give what was told, and the seconds of Retry-After."""
        began = self._clock.monotonic()
        try:
            reply = self._http.ask(
                method,
                self.endpoint.url.rstrip("/") + path,
                json=body,
                headers=self.endpoint.headers,
                timeout=self._patience.timeout(tokens),
                max_bytes=self._patience.max_bytes,
            )
        except Unreachable as error:
            seconds = self._clock.monotonic() - began
            broken = not error.refused and error.why.startswith(_BROKEN)
            self._count({})
            return JsonResponse(problem=error.why, lost=True, broken=broken, seconds=seconds), None
        told = read_json(reply)
        self._count(told.data)
        return told, retry_after(reply.headers) if told.problem else None

    def _count(self, data: Any) -> None:
        """Count a request, and the tokens that its answer says it took."""
        decoded, read = _tokens_talk(data)
        with self._lock:
            cost = self._cost
            self._cost = Cost(
                requests=cost.requests + 1,
                tokens=cost.tokens + decoded,
                prompt_tokens=cost.prompt_tokens + read,
            )


def _tokens_talk(data: Any) -> tuple[int, int]:
    """Tokens decoded and read; what came from a cache is not counted where the server tells."""
    if not isinstance(data, dict):
        return 0, 0
    usage, timings = (
        part if isinstance(part := data.get(key), dict) else {} for key in ("usage", "timings")
    )
    decoded = (timings.get("predicted_n"), usage.get("completion_tokens"))
    read = (timings.get("prompt_n"), usage.get("prompt_tokens"))
    return _first_count(*decoded), _first_count(*read)


def _first_count(*values: Any) -> int:
    good = (v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)
    return next(good, 0)


def _worth_another_try(told: JsonResponse) -> bool:
    """Whether the same request may fare better: a busy server, a connection that broke.

    Not after a time-out, and not where nobody listens: those would only wait again.
    """
    return told.http_status in BUSY or told.broken


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

    def __init__(self, talk: Client, request: Request) -> None:
        self._talk = talk
        self._request = request
        self._limit_name = "max_tokens"

    def ask(self, question: Question, max_tokens: int | None = None, **more: Any) -> Completion:
        """Ask once; `more` are further fields of the request."""
        budget = max_tokens or first_budget(question, self._request)
        said = self._once(question, budget, more)
        if self._wants_other_name(said):
            self._limit_name = "max_completion_tokens"
            said = self._once(question, budget, more)
        return said

    def _once(self, question: Question, budget: int, more: dict[str, Any]) -> Completion:
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

    def _wants_other_name(self, said: Completion) -> bool:
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
