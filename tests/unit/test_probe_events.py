"""Streams of events as one document; whatever the events hold, nothing but ValueError is raised."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bakehouse.probe.client import Unended, document_of

KEYS = st.sampled_from(["choices", "delta", "message", "text", "content", "finish_reason", "error"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def stream(*events: Any, done: bool = True) -> str:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join(lines) + "data: [DONE]\n\n" * done


def test_a_chat_and_a_text() -> None:
    chat = document_of(stream(*({"choices": [{"delta": {"content": c}}]} for c in "Paris")))
    assert chat["choices"][0]["message"] == {"content": "Paris"}
    text = document_of(stream({"choices": [{"text": "Pa"}]}, {"choices": [{"text": "ris"}]}))
    assert text["choices"][0]["text"] == "Paris"


def test_streams_split_lines_at_newlines_only() -> None:
    chars = "\u2028\x85\x0b\u00e9"
    event = {"choices": [{"delta": {"content": chars}, "finish_reason": "stop"}]}
    for newline in ("\n", "\r\n", "\r"):
        data = f"data: {json.dumps(event, ensure_ascii=False)}{newline}{newline}"
        assert document_of(data)["choices"][0]["message"]["content"] == chars


def test_an_end_is_a_mark_or_a_reason() -> None:
    event: Any = {"choices": [{"delta": {"content": "x"}, "finish_reason": "length"}]}
    assert document_of(stream(event, done=False))["choices"][0]["finish_reason"] == "length"
    event["choices"][0]["finish_reason"] = None
    with pytest.raises(Unended):
        document_of(stream(event, done=False))


@given(st.lists(JSON, max_size=4), st.booleans())
def test_any_events(events: list[Any], done: bool) -> None:
    try:
        told = document_of(stream(*events, done=done))
    except ValueError:
        return
    assert told.get("error") or isinstance(told["choices"][0]["message"], dict)
