"""Checks of vLLM's endpoints and log against the expected features. Pure.

Shapes as in vLLM 0.32. A field that is missing or of another type makes a check unknown. The
settings in effect are in one line of the log,
`Initializing a V1 LLM engine (vVERSION) with config: …`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bakehouse.checks import Check, check
from bakehouse.engines.counters import samples
from bakehouse.engines.engine import Asked

ARCHITECTURE = re.compile(r"Resolved architecture: (\w+)")
SETTINGS = re.compile(r"Initializing a V\d LLM engine \(v(\S+)\) with config: (.*)")
FALLBACK = "Transformers"
"""Prefix of the classes of the generic implementation."""
CACHE_SIZE = re.compile(r"KV cache size: ([\d,]+) tokens")
SHARDS = re.compile(r"Loading \w+ checkpoint shards: +(\d+)% Completed \| (\d+)/(\d+)")
_STAGES = (
    (re.compile(r"Application startup complete"), "started"),
    (re.compile(r"Starting vLLM server on"), "starting the API"),
    (re.compile(r"init engine \("), "engine initialised"),
    (re.compile(r"KV cache size|Available KV cache memory"), "making the KV cache"),
    (re.compile(r"Capturing (?:CUDA|CPU) graph|Graph capturing"), "capturing graphs"),
    (
        re.compile(r"Dynamo bytecode transform|Compiling a graph|torch\.compile (?:takes|took)"),
        "compiling",
    ),
    (re.compile(r"Loading drafter model"), "loading the drafter"),
    (re.compile(r"Model loading took|Loading weights took"), "weights loaded"),
    (re.compile(r"Starting to load model"), "opening the model"),
    (re.compile(r"Initializing a V\d LLM engine"), "initialising"),
)


class Features(Asked):
    """Expected features of a vLLM server. The context is of the longest sequence, in tokens."""

    draft_tokens: int | None = None
    dtype: str | None = None
    kv_cache: str | None = None
    fallback: bool = False
    """Whether the recipe itself asks for the generic implementation of Transformers."""


def model_names(body: Any) -> tuple[str, ...]:
    """Return the ids in an answer of `/v1/models`; empty for another shape."""
    found = (entry.get("id") for entry in _entries(body))
    return tuple(dict.fromkeys(name for name in found if isinstance(name, str)))


def stage(line: str) -> str | None:
    """Return the loading stage that a log line shows; None for other lines."""
    if found := SHARDS.search(line):
        return f"loading shards, {found[2]} of {found[3]}"
    return next((word for pattern, word in _STAGES if pattern.search(line)), None)


def engine_settings(log: Sequence[str]) -> tuple[int, dict[str, str]]:
    """Return the line, from 1, at which the engine logs its settings, and the plain ones.

    Only settings at the top level count: `dtype=torch.float32`, but nothing inside
    `ObservabilityConfig(…)`. Without such a line it is 0 and an empty dict.
    """
    number, found = _search(SETTINGS, log)
    return number, {"version": found[1], **_settings(found[2])} if found else {}


def _settings(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    depth, begin = 0, 0
    quote = ""
    for at, letter in enumerate(f"{text},"):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{<":
            depth += 1
        elif letter in ")]}>":
            depth -= 1
        elif letter == "," and depth == 0:
            name, equals, value = text[begin:at].strip().partition("=")
            if equals and name.isidentifier():
                found[name] = value.strip("'\"")
            begin = at + 1
    return found


def check_features(
    asked: Features, *, models: Any, metrics: str, log: Sequence[str], version: Any = None
) -> tuple[Check, ...]:
    """Compare the expected features with the endpoints and the log."""
    line, engine = engine_settings(log)
    where = f"server.log:{line}" if line else "server.log"
    names = model_names(models)
    mine = next((e for e in _entries(models) if e.get("id") == asked.name), {})
    checks = [
        check("model-name", asked.name, ", ".join(names) or None, "GET /v1/models",
              ok=asked.name in names),
        _equal("model-path", asked.model_path, mine.get("root"), "GET /v1/models root"),
        _implementation(asked, log),
    ]  # fmt: skip
    if asked.context:
        checks += [_length(asked.context, mine), _cache_room(asked.context, log)]
    if asked.dtype:
        dtype = {"half": "float16", "float": "float32"}.get(asked.dtype, asked.dtype)
        checks.append(_equal("dtype", dtype, engine.get("dtype", "").removeprefix("torch."), where))
    if asked.kv_cache:
        checks.append(_equal("kv-cache", asked.kv_cache, engine.get("kv_cache_dtype"), where))
    checks.append(_speculation(asked, engine, where, metrics))
    if asked.version:
        reported = version.get("version") if isinstance(version, Mapping) else None
        checks.append(_equal("version", asked.version, reported, "GET /version"))
    return tuple(checks)


def _entries(body: Any) -> list[Mapping[str, Any]]:
    data = body.get("data") if isinstance(body, Mapping) else None
    return [e for e in data if isinstance(e, Mapping)] if isinstance(data, list) else []


def _equal(name: str, expected: str, observed: Any, where: str) -> Check:
    text = observed if isinstance(observed, str) and observed else None
    return check(name, expected, text, where, ok=text == expected)


def _implementation(asked: Features, log: Sequence[str]) -> Check:
    """The generic implementation also runs unknown models, and may run them wrongly."""
    number, found = _search(ARCHITECTURE, log)
    observed = found[1] if found else None
    generic = observed is not None and observed.startswith(FALLBACK)
    return check(
        "implementation",
        "any, since the recipe asks for the fallback" if asked.fallback else "vLLM's own",
        f"{observed}: the Transformers fallback, which is no support" if generic else observed,
        f"server.log:{number}" if found else "server.log",
        ok=asked.fallback or not generic,
    )


def _length(wanted: int, mine: Mapping[str, Any]) -> Check:
    value = mine.get("max_model_len")
    tokens = value if isinstance(value, int) and not isinstance(value, bool) else None
    return check("context", f"{wanted} tokens in one sequence", str(tokens) if tokens else None,
                 "GET /v1/models max_model_len", ok=tokens == wanted)  # fmt: skip


def _cache_room(wanted: int, log: Sequence[str]) -> Check:
    number, found = _search(CACHE_SIZE, log)
    tokens = int(found[1].replace(",", "")) if found else 0
    where = f"server.log:{number}" if found else "server.log"
    return check("cache-size", f"room for {wanted} tokens or more",
                 f"{tokens} tokens" if found else None, where, ok=tokens >= wanted)  # fmt: skip


def _speculation(asked: Features, engine: Mapping[str, str], where: str, metrics: str) -> Check:
    """The settings name the method, and its counters are published.

    The suite `speculation` checks later that they move.
    """
    setting = engine.get("speculative_config")
    observed = None if setting is None else "off"
    if setting and setting != "None":
        method = re.search(r"method='([^']*)'", setting)
        drafts = re.search(r"num_spec(?:ulative)?_tokens=(\d+)", setting)
        observed = f"{method[1] if method else 'on'}, {drafts[1] if drafts else '?'} tokens"
    published = any(s.name == "vllm:spec_decode_num_drafts_total" for s in samples(metrics))
    if asked.speculation is None:
        ok = observed == "off" and not published
        return check("speculation", "off", observed, where, ok=ok)
    tokens = f", {asked.draft_tokens} tokens" if asked.draft_tokens else ""
    expected = f"{asked.speculation}{tokens}"
    ok = (observed or "").startswith(expected) and published
    if observed and not published:
        observed += "; no counters of drafts in /metrics"
    return check("speculation", expected, observed, f"{where}, GET /metrics", ok=ok)


def _search(pattern: re.Pattern[str], log: Sequence[str]) -> tuple[int, re.Match[str] | None]:
    for number, line in enumerate(log, start=1):
        if found := pattern.search(line):
            return number, found
    return 0, None
