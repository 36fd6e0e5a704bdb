"""The suites `json` and `tools`: an answer bound by a schema, and a forced tool call."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bakehouse.models import check
from bakehouse.probe.answers import THINK_LESS, Judgement, record_answer
from bakehouse.probe.client import Client, JsonResponse, find_in, split_thoughts
from bakehouse.probe.models import SuiteInput, SuiteProof
from bakehouse.probe.suites.base import Suite
from bakehouse.recipe.models import SuiteName
from bakehouse.runs.store import SuiteVerdict

BUDGET = 128
"""Tokens at least: a model that thinks takes what probe.request gives it."""

CITIES = ["Paris", "Oslo", "Lima"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": CITIES},
        "country": {"type": "string", "maxLength": 20},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "country", "capital"],
    "additionalProperties": False,
}
JSON_TASK = "Describe the city of Paris as JSON with the keys city, country and capital."
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather in a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": CITIES},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
"""`strict` binds the arguments to the schema: without it vLLM 0.32 takes what the model writes."""
TOOL_TASK = "What is the weather in Paris? Use celsius."


def _ask(talk: Client, given: SuiteInput, task: str, **more: Any) -> JsonResponse:
    request = given.probe.request
    budget = max(BUDGET, request.max_tokens)
    message = {"role": "user", "content": task}
    return talk.chat([message], request, budget, temperature=0, **more)


def ask_json(talk: Client, given: SuiteInput) -> JsonResponse:
    """Ask for an answer bound by a schema."""
    shape = {"name": "city", "strict": True, "schema": SCHEMA}
    form = {"type": "json_schema", "json_schema": shape}
    return _ask(talk, given, JSON_TASK, response_format=form)


@dataclass(frozen=True)
class Called:
    """The reply to a request with a tool, and whether the chat template supports tools at all.

    llama-server drops tools without a word if the template has no place for them.
    """

    reply: JsonResponse
    template_knows: bool | None


def ask_tools(talk: Client, given: SuiteInput) -> Called:
    """Ask for a tool call; `required` with one tool forces that one on every engine."""
    knows = None
    if talk.endpoint.engine == "llama.cpp":
        knows = talk.get("/props").find("chat_template_caps", "supports_tools")
    reply = _ask(talk, given, TOOL_TASK, tools=[TOOL], tool_choice="required")
    return Called(reply, knows if isinstance(knows, bool) else None)


def judge_json(reply: JsonResponse, given: SuiteInput) -> SuiteProof:
    """Check an answer that the schema binds."""
    del given  # the check does not depend on it
    if reply.problem is not None:
        return _unanswered("json", reply)
    answer, thoughts = split_thoughts(reply.content)
    if not answer.strip() and reply.finish_reason == "length":
        return _never_started("json", JSON_TASK, reply)
    fault = _json_fault(answer)
    if not fault and thoughts and reply.reasoning:
        fault = "the content holds raw thoughts although the server separates reasoning"
    return _proof("json", JSON_TASK, reply, fault, "an object that the schema allows")


def _json_fault(text: str) -> str | None:
    """Say what is wrong with a description of Paris; None if nothing is."""
    value = _parse(text)
    if value is None:
        return f"not a JSON object: {' '.join(text.split())[:80]}"
    properties: dict[str, Any] = SCHEMA["properties"]
    if set(value) != set(properties):
        return f"its keys are {', '.join(map(str, value))[:80] or 'none'}"
    if value["city"] != "Paris":
        return f"its city is {value['city']!r}"[:80]
    if not isinstance(value["country"], str) or len(value["country"]) > 20:
        return "its country is not a string of at most 20 characters"
    return None if isinstance(value["capital"], bool) else "its capital is neither true nor false"


def judge_tools(called: Called, given: SuiteInput) -> SuiteProof:
    """Check a forced tool call: the right tool, with arguments that its schema allows."""
    del given  # the check does not depend on it
    reply = called.reply
    if reply.problem is not None:
        return _unanswered("tools", reply)
    listed = reply.find("choices", 0, "message", "tool_calls")
    calls = listed if isinstance(listed, list) else []
    if not calls and called.template_knows is False:
        why = "the chat template has no place for tools"
        unknown = check("probe.tools", "a tool call", None, f"GET /props: {why}", ok=None)
        hint = "serve with a template that has (--chat-template-file), or leave tools out"
        return SuiteProof("tools", "unable", why, (unknown,), hint=hint)
    if not calls and reply.finish_reason == "length":
        return _never_started("tools", TOOL_TASK, reply)
    shown = json.dumps(calls, default=str)[:300] if calls else None
    expected = "a call of get_weather for Paris in celsius"
    return _proof("tools", TOOL_TASK, reply, _call_fault(calls), expected, shown)


def _call_fault(calls: list[Any]) -> str | None:
    if not calls:
        return "no tool was called"
    call = find_in(calls, 0, "function")
    if not isinstance(call, dict):
        return "the tool call holds no function"
    if call.get("name") != "get_weather":
        return f"the tool {str(call.get('name'))[:60]!r} was called"
    arguments = call.get("arguments")
    value = arguments if isinstance(arguments, dict) else _parse(str(arguments or ""))
    if value is None:
        return f"its arguments are not a JSON object: {str(arguments)[:80]}"
    wanted = {"city": "Paris", "unit": "celsius"}
    return None if value == wanted else f"its arguments are {json.dumps(value)[:120]}"


def _parse(text: str) -> dict[str, Any] | None:
    """Parse an object, also inside a Markdown fence."""
    bare = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
    try:
        value = json.loads(bare)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _proof(
    suite: SuiteName, task: str, reply: JsonResponse, fault: str | None, expected: str,
    shown: str | None = None,
) -> SuiteProof:  # fmt: skip
    text = shown or " ".join(reply.content.split())[:300] or "nothing"
    seen = check(f"probe.{suite}", expected, fault or "one", text, ok=fault is None)
    grade = Judgement("wrong" if fault else "right", fault or expected)
    answer = record_answer(task, reply, grade, _WANTED, content=reply.content or text)
    if fault is None:
        return SuiteProof(suite, "true", f"gives {expected}", (seen,), (answer,))
    hint = "suspect the grammar or guided decoding, the chat template and the tool parser"
    return SuiteProof(suite, "wrong", fault, (seen,), (answer,), hint=hint)


_WANTED = ("see the schema",)


def _never_started(suite: SuiteName, task: str, reply: JsonResponse) -> SuiteProof:
    why = "the budget ended before any answer"
    seen = check(f"probe.{suite}", "an answer", None, why, ok=None)
    answer = record_answer(task, reply, Judgement("never started", why), _WANTED)
    return SuiteProof(suite, "never started", why, (seen,), (answer,), hint=THINK_LESS)


def _unanswered(suite: SuiteName, reply: JsonResponse) -> SuiteProof:
    """A server that refuses the request lacks the capability; any other problem is its state."""
    refused = reply.http_status in (400, 404, 405, 422, 501)
    verdict: SuiteVerdict = "unable" if refused else "unstable"
    why = reply.problem or ""
    seen = check(f"probe.{suite}", "an answer", None, why, ok=None)
    hint = "look at the server's log"
    if refused:
        hint = f"start the engine with what {suite} needs (llama-server: --jinja; vLLM: a parser)"
    return SuiteProof(suite, verdict, why, (seen,), hint=hint, lost=reply.lost)


JSON = Suite("json", ask_json, judge_json)
TOOLS = Suite("tools", ask_tools, judge_tools)
