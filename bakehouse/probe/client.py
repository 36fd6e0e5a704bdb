"""Client of an OpenAI-compatible server.

Every suite sends its requests through a `Client`, which counts them. Safe to use from several
threads.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from bakehouse.probe.models import Endpoint
from bakehouse.progress import Progress
from bakehouse.recipe.models import Question, Request
from bakehouse.runs.store import Cost
from bakehouse.system.http import Http, Reply, Unreachable
from bakehouse.system.process import Clock
from bakehouse.util.retry import Retry, TransientError, retry_after

BUSY = frozenset({408, 425, 429, 502, 503, 504})
"""HTTP statuses after which the same request may succeed a little later."""


@dataclass(frozen=True)
class JsonResponse:
    """A server's reply to one request, or why it is of no use.

    `problem` is None if the request succeeded. `lost` marks problems of the connection or of an
    overloaded server, which another request would most likely meet as well; `broken` a connection
    that was made and then lost. The text of a completion (see `said_of`) is kept as it came.
    """

    data: Any = None
    """The JSON document."""
    seconds: float = 0.0
    http_status: int | None = None
    problem: str | None = None
    lost: bool = False
    broken: bool = False
    content: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    tokens: int | None = None
    """Tokens of the completion, if the server counts them."""

    def find(self, *path: str | int) -> Any:
        """Follow keys and positions into the document; None if one is missing."""
        return find_in(self.data, *path)


def find_in(data: Any, *path: str | int) -> Any:
    """Follow keys and positions into JSON; None if one is missing."""
    for key in path:
        if isinstance(key, str):
            data = data.get(key) if isinstance(data, dict) else None
        else:
            data = data[key] if isinstance(data, list) and len(data) > key else None
    return data


def count_of(value: Any) -> int | None:
    """Read a whole number from 0 up; None for anything else."""
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if good else None


def read_json(reply: Reply) -> JsonResponse:
    """Read any reply that should be JSON. An error inside HTTP 200 is a problem as well."""
    data = None
    problem = None
    try:
        data = _parse(reply)
        if reply.status != 200:
            problem = message_of(data) or "no message"
        elif isinstance(data, dict) and data.get("error"):
            problem = f"HTTP 200 with an error inside: {message_of(data)}"
    except _Bad as bad:
        problem = str(bad)
    if problem and reply.status != 200:
        problem = f"HTTP {reply.status}: {problem}"
    lost = problem is not None and reply.status in BUSY
    return JsonResponse(data, reply.seconds, reply.status, problem, lost)


def said_of(reply: JsonResponse, mode: Literal["chat", "completion"]) -> JsonResponse:
    """Fill in the text, finish reason and tokens of a completion, or the problem with it."""
    if reply.problem is not None:
        return reply
    choice = reply.find("choices", 0)
    message = find_in(choice, "message")
    if not isinstance(reply.data, dict):
        found = _short(json.dumps(reply.data))
        return replace(reply, problem=f"the reply is JSON, but not an object: {found}")
    if not isinstance(choice, dict):
        return replace(reply, problem="the reply has no choices")
    if mode == "completion":
        content, reasoning = _text_of(choice.get("text")), ""
    elif isinstance(message, dict):
        content, reasoning = _of_message(message)
    else:
        return replace(reply, problem="the choice in the reply has no message")
    finish = choice.get("finish_reason")
    return replace(
        reply, content=content, reasoning=reasoning,
        finish_reason=finish if isinstance(finish, str) else None,
        tokens=count_of(reply.find("usage", "completion_tokens")),
    )  # fmt: skip


class _Bad(Exception):
    """A body that holds no JSON document; says why."""


def _parse(reply: Reply) -> Any:
    """Parse the body."""
    start = reply.body.lstrip()[:200].lower()
    if reply.status in range(300, 400):
        to = next((v for k, v in reply.headers.items() if k.lower() == "location"), "nowhere")
        raise _Bad(f"a redirect to {_short(to)}, which a probe does not follow")
    if not start:
        raise _Bad("the reply is empty")
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<!--")):
        title = re.search(r"<title[^>]*>([^<]{1,200})", reply.text[:5000], re.IGNORECASE)
        raise _Bad(f"HTML instead of JSON: {_short(title[1] if title else reply.text)}")
    if start.startswith((b"data:", b"event:", b": ")):
        try:
            return document_of(reply.body.decode())
        except Unended as error:
            raise _Bad(f"a stream of events instead of one JSON document: {error}") from None
        except (ValueError, RecursionError):
            raise _Bad("a stream of events instead of one JSON document") from None
    try:
        text = reply.body.decode("utf-8-sig")
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise _Bad(f"the reply is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise _Bad("the reply is JSON that is nested too deeply") from None
    except json.JSONDecodeError as error:
        ran_out = error.pos >= len(error.doc.rstrip()) - 1
        half = ran_out or error.msg.startswith("Unterminated string")
        how = "cut off" if half else "malformed"
        raise _Bad(f"the reply is {how} JSON: {_short(text)}") from None
    except ValueError as error:
        raise _Bad(f"the reply is JSON that cannot be read: {error}") from None


class Unended(ValueError):
    """A stream that stops before its end."""


_LINES = re.compile(r"\r\n|\n|\r")
"""Line ends of a stream of events; JSON may hold other characters that end lines elsewhere."""
_DELTAS = ("content", "reasoning_content", "reasoning", "refusal")
"""Parts of a message that the deltas of a chat may hold."""


def document_of(stream: str) -> dict[str, Any]:
    """Join the server-sent events of a completion, for servers that always stream.

    Returns the document that the same request would get without streaming: the first choice's
    message, text and finish reason, and what the last events add (usage, timings). Raises
    ValueError if these are no such events, Unended if they stop early.
    """
    message: dict[str, str] = {}
    text: list[str] = []
    whole: dict[str, Any] = {}
    finish: str | None = None
    any_choice = ended = False
    for line in _LINES.split(stream):
        if not line.startswith("data:"):
            continue
        if (data := line[5:].strip()) == "[DONE]":
            ended = True
            break
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError("an event that is not an object")
        if event.get("error"):
            return event
        whole |= {k: v for k, v in event.items() if k != "choices" and v is not None}
        if not isinstance(choice := find_in(event, "choices", 0), dict):
            continue
        any_choice = True
        delta = choice.get("delta", choice.get("message"))
        for name in _DELTAS:
            if isinstance(piece := find_in(delta, name), str):
                message[name] = message.get(name, "") + piece
        if isinstance(piece := choice.get("text"), str):
            text.append(piece)
        finish = choice.get("finish_reason") or finish
    if not any_choice:
        raise ValueError("no event holds a choice")
    if not ended and finish is None:
        raise Unended("the stream stops before its end")
    choice = {"index": 0, "message": message, "text": "".join(text), "finish_reason": finish}
    return {**whole, "choices": [choice]}


def message_of(data: Any) -> str:
    """Give the message of an error document, whichever of the usual keys holds it."""
    if not isinstance(data, dict):
        return ""
    error = data.get("error", data)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error.get("msg") or error
    return _short(error if isinstance(error, str) else json.dumps(error, default=str))


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
    """Split content that holds raw thinking into (answer, thinking).

    Knows `<think>…</think>` and the like, also with only the closing mark (a template that opens
    the thought itself) or only the opening one (cut off while thinking), and `to=self`.
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


LARGER = 8
AT_LEAST = 2048
"""A budget that was too small is multiplied, and is at least this many tokens the second time."""
PROMPT = 256
"""Tokens of a known context that are left for the prompt."""
SENTENCE = 32
"""Tokens of a plain completion: only its first sentence is graded."""


def first_budget(question: Question, request: Request) -> int:
    """Tokens that a question gets the first time."""
    whole = request.max_tokens
    return min(whole, SENTENCE) if question.mode == "completion" else whole


def larger_budget(max_tokens: int, context: int | None) -> int | None:
    """Tokens of the second try; None if the context has no more room."""
    budget = max(LARGER * max_tokens, AT_LEAST)
    if context is not None:
        budget = min(budget, context - PROMPT)
    return budget if budget > max_tokens else None


@dataclass(frozen=True)
class Served:
    """Models that a server lists, and its engine if it names one."""

    models: tuple[str, ...]
    engine: str | None


_OWNERS = {"llamacpp": "llama.cpp", "vllm": "vllm"}
"""`owned_by` of a model, for each engine."""


def served(http: Http, endpoint: Endpoint, *, timeout: float = 10.0) -> Served:
    """Read `/v1/models`. Raises Unreachable, also for a reply of no use."""
    url = endpoint.url.rstrip("/") + "/v1/models"
    reply = http.ask("GET", url, headers=endpoint.headers, timeout=timeout, max_bytes=2**20)
    try:
        data = reply.json()
    except (ValueError, RecursionError):
        data = None
    if reply.status != 200:
        raise Unreachable(f"HTTP {reply.status} {message_of(data)}".strip())
    if not isinstance(rows := find_in(data, "data"), list):
        raise Unreachable("the reply of /v1/models is not a list of models")
    named = [r for r in rows if isinstance(r, dict) and r.get("id")]
    owners = (_OWNERS.get(str(r.get("owned_by"))) for r in named)
    return Served(tuple(str(r["id"]) for r in named), next(filter(None, owners), None))


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
    """How long a server may take. Seconds, unless a field says otherwise.

    One request gets `base` plus `per_token` for each token that it may produce, never more than
    `most`: enough for 4 tokens a second after kernels were compiled with the first request.
    """

    base: float = 60.0
    per_token: float = 0.3
    most: float = 900.0
    attempts: int = 4
    """Requests in all if the server is busy (429, 503) or the connection broke."""
    longest_wait: float = 5.0
    """Between two attempts, whatever Retry-After asks for."""
    max_bytes: int = 2**20
    """Of one reply."""


DEFAULT_LIMITS = RequestLimits()
TEXT_S = 10.0
"""Timeout of a document that is not JSON."""

_BROKEN = ("connection", "the answer was cut off")
"""How the HTTP port's reasons begin if a connection was made and then lost."""
_PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


class Client:
    """Sends requests to one server. Never raises for what the server does."""

    def __init__(
        self, ctx: ProbeContext, endpoint: Endpoint, patience: RequestLimits = DEFAULT_LIMITS
    ) -> None:
        self.progress = ctx.progress
        self.endpoint = endpoint
        self.model = endpoint.model or "default"
        self._http = ctx.http
        self._clock = ctx.clock
        self._patience = patience
        self._limit_name = "max_tokens"
        self._lock = threading.Lock()
        self._cost = Cost()
        self._began = ctx.clock.monotonic()

    @property
    def cost(self) -> Cost:
        """Requests and tokens so far, and the seconds since this client was made."""
        with self._lock:
            seconds = round(self._clock.monotonic() - self._began, 3)
            return self._cost.model_copy(update={"seconds": seconds})

    @property
    def spent(self) -> bool:
        """Whether all requests together took as long as a single one may take at most."""
        return self.cost.seconds > self._patience.most

    def ask(
        self, question: Question, request: Request, max_tokens: int | None = None, **more: Any
    ) -> JsonResponse:
        """Ask a question once, as a chat or as a text to continue.

        `max_tokens` is by default the budget of a first try; `more` are further fields.
        """
        budget = max_tokens or first_budget(question, request)
        if question.mode == "completion":
            return self._complete("completion", {"prompt": question.ask, **more}, request, budget)
        return self.chat([{"role": "user", "content": question.ask}], request, budget, **more)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], request: Request, max_tokens: int, **more: Any
    ) -> JsonResponse:
        """Send a chat once; `more` are further fields, which override those of `request`."""
        body: dict[str, Any] = {"messages": list(messages), **more}
        if request.reasoning_effort:
            body["reasoning_effort"] = request.reasoning_effort
        return self._complete("chat", body, request, max_tokens)

    def _complete(
        self, mode: Literal["chat", "completion"], what: dict[str, Any], request: Request,
        max_tokens: int,
    ) -> JsonResponse:  # fmt: skip
        body = {"model": self.model, "temperature": request.temperature, "stream": False, **what}
        limit = self._limit_name
        reply = self.post(_PATHS[mode], {**body, limit: max_tokens}, tokens=max_tokens)
        newer = "max_completion_tokens"  # the only name that some servers accept
        if reply.http_status == 400 and limit != newer and newer in (reply.problem or ""):
            self._limit_name = newer
            reply = self.post(_PATHS[mode], {**body, newer: max_tokens}, tokens=max_tokens)
        return said_of(reply, mode)

    def get(self, path: str) -> JsonResponse:
        """Get a JSON document; see `post`."""
        return self._send("GET", path, None, 0)

    def post(self, path: str, body: Mapping[str, Any], *, tokens: int = 0) -> JsonResponse:
        """Send a JSON document; busy servers and broken connections are tried again.

        `tokens` is how many may be read or produced: it sets the timeout.
        """
        return self._send("POST", path, dict(body), tokens)

    def text(self, path: str) -> str | None:
        """Get a document that is not JSON, without another attempt; None if there is none."""
        try:
            reply = self._http.ask(
                "GET", self.endpoint.url.rstrip("/") + path, headers=self.endpoint.headers,
                timeout=TEXT_S, max_bytes=self._patience.max_bytes,
            )  # fmt: skip
        except Unreachable:
            return None
        return reply.text if reply.status == 200 else None

    def _send(self, method: str, path: str, body: Any, tokens: int) -> JsonResponse:
        limits = self._patience

        def once() -> JsonResponse:
            began = self._clock.monotonic()
            after = None
            try:
                reply = self._http.ask(
                    method, self.endpoint.url.rstrip("/") + path, json=body,
                    headers=self.endpoint.headers, max_bytes=limits.max_bytes,
                    timeout=min(limits.base + limits.per_token * tokens, limits.most),
                )  # fmt: skip
                told = read_json(reply)
                after = retry_after(reply.headers) if told.problem else None
            except Unreachable as error:
                seconds = self._clock.monotonic() - began
                broken = not error.refused and error.why.startswith(_BROKEN)
                told = JsonResponse(problem=error.why, lost=True, broken=broken, seconds=seconds)
            self._count(told)
            # Not after a timeout, nor if nobody listens: another attempt would only wait again.
            if told.http_status in BUSY or told.broken:
                after = None if after is None else min(after, limits.longest_wait)
                raise TransientError(told.problem or "busy", after, reply=told)
            return told

        try:
            return Retry(self._clock.sleep, attempts=limits.attempts, first_pause=0.4).call(once)
        except TransientError as error:
            last: JsonResponse = error.reply
            return replace(last, problem=f"{last.problem} (asked {limits.attempts} times)")

    def _count(self, told: JsonResponse) -> None:
        """Count a request and its tokens; those from a cache are left out if the server says so."""
        decoded = count_of(told.find("timings", "predicted_n"))
        if decoded is None:
            decoded = count_of(told.find("usage", "completion_tokens")) or 0
        read = count_of(told.find("timings", "prompt_n"))
        if read is None:
            read = count_of(told.find("usage", "prompt_tokens")) or 0
        with self._lock:
            cost = self._cost
            self._cost = Cost(
                requests=cost.requests + 1,
                tokens=cost.tokens + decoded,
                prompt_tokens=cost.prompt_tokens + read,
            )
