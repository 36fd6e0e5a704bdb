"""From the bytes that a server sent to what it said; every bad reply gets a name. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from bakehouse.ports.http import Reply
from bakehouse.probe.events import Unended, document_of


@dataclass(frozen=True)
class Said:
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
class Told:
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


def read_json(reply: Reply) -> Told:
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
        return Told(data, reply.seconds, reply.status, f"{status}{bad}", lost)
    return Told(data, reply.seconds, reply.status)


def said_of(told: Told, mode: Literal["chat", "completion"]) -> Said:
    """Read what a server said out of a document of the completions APIs."""
    said = Said(
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
