"""A server that streams whatever it is asked for: its events as one document. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

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
