"""What llama-server's endpoints and log say, and whether that is what was asked for. Pure.

Shapes as llama.cpp build 11434 gives them. A field that is missing or of another type is
"nothing observed", which is unknown and never passed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bakehouse.checks import Check, check
from bakehouse.engines.llamacpp.server import Features

OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")
ATTENTION = re.compile(r"flash_attn\s*=\s*(enabled|disabled|auto)\b")
RESOLVED = re.compile(r"Flash Attention (?:was auto, set to )?(enabled|disabled|not supported)")
CONFIG = re.compile(r"using config file: (.*)")
LOADING = re.compile(r"load_tensors: loading model tensors|warming up|model loaded|loading model '")


def health_ok(status: int, body: Any) -> bool:
    """Whether `/health` is this engine's own yes: 200 and `{"status": "ok"}`."""
    return status == 200 and isinstance(body, Mapping) and body.get("status") == "ok"


def is_loading(status: int, body: Any) -> bool:
    """Whether this is the engine's own "Loading model" answer."""
    error = body.get("error") if isinstance(body, Mapping) else None
    return status == 503 and isinstance(error, Mapping) and error.get("code") == 503


def model_names(body: Any) -> tuple[str, ...]:
    """Ids and aliases in an answer of `/v1/models`; empty where it has another shape."""
    data = body.get("data") if isinstance(body, Mapping) else None
    found: list[str] = []
    for entry in data if isinstance(data, list) else []:
        if isinstance(entry, Mapping):
            aliases = entry.get("aliases")
            names = [entry.get("id"), *(aliases if isinstance(aliases, list) else [])]
            found += [name for name in names if isinstance(name, str)]
    return tuple(dict.fromkeys(found))


def is_router(models: Any, props: Any) -> bool:
    """Whether the server loads nothing itself: router mode, which answers 200 to everything."""
    if isinstance(props, Mapping) and props.get("role") == "router":
        return True
    return isinstance(models, Mapping) and models.get("data") == []


def stage(line: str) -> str | None:
    """Give what a log line says about loading, in words; None for every other line."""
    if "model loaded" in line:
        return "model loaded"
    if "warming up" in line:
        return "warming up"
    if "load_tensors: loading model tensors" in line:
        return "loading tensors"
    return "opening the model" if "loading model '" in line else None


def judge(
    asked: Features, *, models: Any, props: Any, slots: Any, log: Sequence[str]
) -> tuple[Check, ...]:
    """Judge what was asked for against what the endpoints and the log show."""
    props = props if isinstance(props, Mapping) else {}
    slots = [s for s in slots if isinstance(s, Mapping)] if isinstance(slots, list) else []
    checks = [
        _names(asked, models),
        _loaded(models, props),
        _equal("model-path", asked.model_path, props.get("model_path"), "GET /props model_path"),
        check(
            "slots", str(asked.slots), str(len(slots)) if slots else None, "GET /slots",
            ok=len(slots) == asked.slots,
        ),
        _config(log),
    ]  # fmt: skip
    if asked.build_info:
        checks.append(
            _equal("build", asked.build_info, props.get("build_info"), "GET /props build_info")
        )
    checks += _optional(asked, models, props, slots, log)
    return tuple(checks)


def _optional(
    asked: Features,
    models: Any,
    props: Mapping[str, Any],
    slots: Sequence[Mapping[str, Any]],
    log: Sequence[str],
) -> list[Check]:
    checks = []
    if asked.context:
        checks.append(_context(asked.context, slots))
    if asked.chat:
        template = props.get("chat_template")
        size = f"{len(template)} characters" if isinstance(template, str) and template else None
        checks.append(
            check("chat-template", "a chat template", size, "GET /props chat_template", ok=True)
        )
    if asked.multimodal:
        checks.append(_multimodal(models))
    if asked.speculation:
        states = [s.get("speculative") for s in slots]
        seen = None if not states or None in states else ", ".join(map(str, states)).lower()
        if seen and asked.speculation_lacks:
            seen = f"{seen}: {asked.speculation_lacks}"
        checks.append(
            check("speculation", f"{asked.speculation} on in every slot", seen,
                  "GET /slots speculative", ok=all(s is True for s in states))
        )  # fmt: skip
    if asked.gpu_layers:
        checks.append(_offload(asked.gpu_layers, log))
    if asked.flash_attn:
        checks.append(_attention(asked.flash_attn, log))
    return checks


def _equal(name: str, wanted: str, seen: Any, where: str) -> Check:
    text = seen if isinstance(seen, str) and seen else None
    return check(name, wanted, text, where, ok=text == wanted)


def _names(asked: Features, models: Any) -> Check:
    names = model_names(models)
    return check(
        "model-name", asked.name, ", ".join(names) or None, "GET /v1/models", ok=asked.name in names
    )


def _loaded(models: Any, props: Mapping[str, Any]) -> Check:
    router = is_router(models, props)
    seen = "router mode: nothing is loaded" if router else None
    seen = seen or ("a model" if model_names(models) else None)
    return check("model-loaded", "one model, loaded by this server itself", seen,
                 "GET /v1/models, GET /props", ok=not router)  # fmt: skip


def _context(wanted: int, slots: Sequence[Mapping[str, Any]]) -> Check:
    """Slots share the context evenly, or each may use it all (unified KV cache)."""
    sizes = [s.get("n_ctx") for s in slots]
    whole = [size for size in sizes if isinstance(size, int)]
    ok = bool(whole) and (sum(whole) >= wanted) if len(whole) == len(sizes) else None
    seen = f"{sum(whole)} ({' + '.join(map(str, whole))})" if whole else None
    return check("context", f"{wanted} tokens or more over all slots", seen, "GET /slots n_ctx",
                 ok=ok)  # fmt: skip


def _multimodal(models: Any) -> Check:
    listed = models.get("models") if isinstance(models, Mapping) else None
    first = listed[0] if isinstance(listed, list) and listed else None
    found = first.get("capabilities") if isinstance(first, Mapping) else None
    seen = ", ".join(map(str, found)) if isinstance(found, list) else None
    return check("multimodal", "multimodal among the capabilities", seen,
                 "GET /v1/models capabilities", ok="multimodal" in (seen or ""))  # fmt: skip


def _offload(wanted: int, log: Sequence[str]) -> Check:
    number, found = _search(OFFLOADED, log)
    expected = f"{wanted} layers, or all that there are, on the GPU"
    if found is None:
        return check("gpu-layers", expected, None, "server.log", ok=None)
    on, of = int(found[1]), int(found[2])
    return check("gpu-layers", expected, f"{on} of {of}", f"server.log:{number}",
                 ok=on >= min(wanted, of))  # fmt: skip


def _attention(wanted: str, log: Sequence[str]) -> Check:
    number, found = _search(RESOLVED, log)
    if found is None:
        number, found = _search(ATTENTION, log)
    if found is None or found[1] == "auto":
        return check("flash-attention", wanted, None, "server.log", ok=None)
    return check("flash-attention", wanted, found[1], f"server.log:{number}",
                 ok=(found[1] == "enabled") == (wanted == "on"))  # fmt: skip


def _config(log: Sequence[str]) -> Check:
    """A configuration file of the machine changes settings that no plan shows."""
    number, found = _search(CONFIG, log)
    seen = f"using config file {found[1]}" if found else "none"
    where = f"server.log:{number}" if found else "server.log"
    return check("no-config-file", "no configuration file beside the plan", seen, where,
                 ok=found is None if log else None)  # fmt: skip


def _search(pattern: re.Pattern[str], log: Sequence[str]) -> tuple[int, re.Match[str] | None]:
    """Give line number (from 1) and match of the first line that has the pattern."""
    for number, line in enumerate(log, start=1):
        if found := pattern.search(line):
            return number, found
    return 0, None
