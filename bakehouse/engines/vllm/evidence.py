"""What vLLM's endpoints and log say, and whether that is what was asked for. Pure.

Shapes as vLLM 0.32 gives them. A field that is missing or of another type is "nothing observed",
which is unknown and never passed. What the engine settled on stands in one line of the log,
`Initializing a V1 LLM engine (vVERSION) with config: …`, whatever the command said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bakehouse.checks import Check, check
from bakehouse.engines.counters import samples
from bakehouse.engines.vllm.server import Features

ARCHITECTURE = re.compile(r"Resolved architecture: (\w+)")
SETTLED = re.compile(r"Initializing a V\d LLM engine \(v(\S+)\) with config: (.*)")
FALLBACK = "Transformers"
"""What the classes of the generic implementation are called, to begin with."""
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


def model_names(body: Any) -> tuple[str, ...]:
    """Ids in an answer of `/v1/models`; empty where it has another shape."""
    found = (entry.get("id") for entry in _entries(body))
    return tuple(dict.fromkeys(name for name in found if isinstance(name, str)))


def stage(line: str) -> str | None:
    """Give what a log line says about loading, in words; None for every other line."""
    if found := SHARDS.search(line):
        return f"loading shards, {found[2]} of {found[3]}"
    return next((word for pattern, word in _STAGES if pattern.search(line)), None)


def settled(log: Sequence[str]) -> tuple[int, dict[str, str]]:
    """Give the line, from 1, at which the engine says what it settled on, and its plain settings.

    Only settings at the top level are read: `dtype=torch.float32` is, what stands inside
    `ObservabilityConfig(…)` is not. Line 0 and nothing where there is no such line.
    """
    for number, line in enumerate(log, start=1):
        if found := SETTLED.search(line):
            return number, {"version": found[1], **_settings(found[2])}
    return 0, {}


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


def judge(
    asked: Features, *, models: Any, metrics: str, log: Sequence[str], version: Any = None
) -> tuple[Check, ...]:
    """Judge what was asked for against what the endpoints and the log show."""
    line, engine = settled(log)
    where = f"server.log:{line}" if line else "server.log"
    mine = next((e for e in _entries(models) if e.get("id") == asked.name), {})
    checks = [
        check("model-name", asked.name, ", ".join(model_names(models)) or None, "GET /v1/models",
              ok=asked.name in model_names(models)),
        _equal("model-path", asked.model_path, mine.get("root"), "GET /v1/models root"),
        _implementation(asked, log),
    ]  # fmt: skip
    if asked.context:
        checks += [_length(asked.context, mine), _cache_room(asked.context, log)]
    if asked.dtype:
        seen = engine.get("dtype", "").removeprefix("torch.") or None
        wanted = {"half": "float16", "float": "float32"}.get(asked.dtype, asked.dtype)
        checks.append(check("dtype", wanted, seen, where, ok=seen == wanted))
    if asked.kv_cache:
        seen = engine.get("kv_cache_dtype")
        checks.append(check("kv-cache", asked.kv_cache, seen, where, ok=seen == asked.kv_cache))
    checks.append(_speculation(asked, engine, where, metrics))
    if asked.version:
        told = version.get("version") if isinstance(version, Mapping) else None
        checks.append(_equal("version", asked.version, told, "GET /version"))
    return tuple(checks)


def _entries(body: Any) -> list[Mapping[str, Any]]:
    data = body.get("data") if isinstance(body, Mapping) else None
    return [e for e in data if isinstance(e, Mapping)] if isinstance(data, list) else []


def _equal(name: str, wanted: str, seen: Any, where: str) -> Check:
    text = seen if isinstance(seen, str) and seen else None
    return check(name, wanted, text, where, ok=text == wanted)


def _implementation(asked: Features, log: Sequence[str]) -> Check:
    """The generic implementation runs what it does not know, and was seen to run it wrongly."""
    number, found = _search(ARCHITECTURE, log)
    seen = found[1] if found else None
    if seen and seen.startswith(FALLBACK):
        seen = f"{seen}: the Transformers fallback, which is no support"
    own = bool(found) and not found[1].startswith(FALLBACK) if found else False
    return check(
        "implementation",
        "any, as the recipe asks for the fallback" if asked.fallback else "one of vLLM's own",
        seen, f"server.log:{number}" if found else "server.log", ok=own or asked.fallback,
    )  # fmt: skip


def _length(wanted: int, mine: Mapping[str, Any]) -> Check:
    seen = mine.get("max_model_len")
    whole = seen if isinstance(seen, int) and not isinstance(seen, bool) else None
    return check("context", f"{wanted} tokens in one sequence", str(whole) if whole else None,
                 "GET /v1/models max_model_len", ok=whole == wanted)  # fmt: skip


def _cache_room(wanted: int, log: Sequence[str]) -> Check:
    number, found = _search(CACHE_SIZE, log)
    tokens = int(found[1].replace(",", "")) if found else 0
    where = f"server.log:{number}" if found else "server.log"
    return check("cache-size", f"room for {wanted} tokens or more",
                 f"{tokens} tokens" if found else None, where, ok=tokens >= wanted)  # fmt: skip


def _speculation(asked: Features, engine: Mapping[str, str], where: str, metrics: str) -> Check:
    """On, as asked: the settled configuration names the method, and its counters are published.

    That they move is for the suite `speculation` to see: nothing was asked yet.
    """
    told = engine.get("speculative_config")
    seen = None if told is None else "off"
    if told and told != "None":
        method = re.search(r"method='([^']*)'", told)
        drafts = re.search(r"num_spec(?:ulative)?_tokens=(\d+)", told)
        seen = f"{method[1] if method else 'on'}, {drafts[1] if drafts else '?'} tokens"
    counts = {s.name for s in samples(metrics)}
    published = "vllm:spec_decode_num_drafts_total" in counts
    if asked.speculation is None:
        return check("speculation", "off", seen, where, ok=seen == "off" and not published)
    tokens = f", {asked.draft_tokens} tokens" if asked.draft_tokens else ""
    wanted = f"{asked.speculation}{tokens}"
    if seen and not published:
        seen += "; no counters of drafts in /metrics"
    ok = bool(seen) and (seen or "").startswith(wanted) and published
    return check("speculation", wanted, seen, f"{where}, GET /metrics", ok=ok)


def _search(pattern: re.Pattern[str], log: Sequence[str]) -> tuple[int, re.Match[str] | None]:
    for number, line in enumerate(log, start=1):
        if found := pattern.search(line):
            return number, found
    return 0, None
