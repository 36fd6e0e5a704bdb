"""llama-server: command rules, added flags, and the check against --help.

Shapes as in llama.cpp build 11434. A field that is missing or of another type counts as nothing
observed: the check is unknown, never passed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bakehouse.engines.base import Answer, Requirements
from bakehouse.engines.llamacpp import command as rules
from bakehouse.engines.llamacpp.command import Features
from bakehouse.models import Check, check
from bakehouse.recipe.models import Recipe, WeightPaths

OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")
ATTENTION = re.compile(r"flash_attn\s*=\s*(enabled|disabled|auto)\b")
RESOLVED = re.compile(r"Flash Attention (?:was auto, set to )?(enabled|disabled|not supported)")
CONFIG = re.compile(r"using config file: (.*)")
STAGES = {
    "model loaded": "model loaded",
    "warming up": "warming up",
    "load_tensors: loading model tensors": "loading tensors",
    "loading model '": "opening the model",
}
"""Text of a log line to the loading stage that it reports."""


def health_ok(status: int, body: Any) -> bool:
    """Whether `/health` responded with 200 and `{"status": "ok"}`."""
    return status == 200 and isinstance(body, Mapping) and body.get("status") == "ok"


def model_names(body: Any) -> tuple[str, ...]:
    """Ids and aliases in a response of `/v1/models`; empty if it has another shape."""
    data = body.get("data") if isinstance(body, Mapping) else None
    found: list[str] = []
    for entry in data if isinstance(data, list) else []:
        if isinstance(entry, Mapping):
            aliases = entry.get("aliases")
            names = [entry.get("id"), *(aliases if isinstance(aliases, list) else [])]
            found += [name for name in names if isinstance(name, str)]
    return tuple(dict.fromkeys(found))


def stage(line: str) -> str | None:
    """Describe the loading stage that a log line reports; None for every other line."""
    return next((words for text, words in STAGES.items() if text in line), None)


def judge(
    asked: Features, *, models: Any, props: Any, slots: Any, log: Sequence[str]
) -> tuple[Check, ...]:
    """Compare what was asked for with the responses of the endpoints and with the log."""
    props = props if isinstance(props, Mapping) else {}
    slots = [s for s in slots if isinstance(s, Mapping)] if isinstance(slots, list) else []
    names = model_names(models)
    checks = [
        check(
            "model-name", asked.name, ", ".join(names) or None, "GET /v1/models",
            ok=asked.name in names,
        ),
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
        checks.append(_speculation(asked, slots))
    if asked.gpu_layers:
        checks.append(_offload(asked.gpu_layers, log))
    if asked.flash_attn:
        checks.append(_attention(asked.flash_attn, log))
    return tuple(checks)


def _equal(name: str, wanted: str, seen: Any, where: str) -> Check:
    text = seen if isinstance(seen, str) and seen else None
    return check(name, wanted, text, where, ok=text == wanted)


def _loaded(models: Any, props: Mapping[str, Any]) -> Check:
    """Router mode loads nothing itself, and answers 200 to everything."""
    empty = isinstance(models, Mapping) and models.get("data") == []
    router = empty or props.get("role") == "router"
    seen = "router mode: nothing is loaded" if router else None
    seen = seen or ("a model" if model_names(models) else None)
    return check("model-loaded", "one model, loaded by this server itself", seen,
                 "GET /v1/models, GET /props", ok=not router)  # fmt: skip


def _speculation(asked: Features, slots: Sequence[Mapping[str, Any]]) -> Check:
    states = [s.get("speculative") for s in slots]
    seen = None if not states or None in states else ", ".join(map(str, states)).lower()
    if seen and asked.speculation_lacks:
        seen = f"{seen}: {asked.speculation_lacks}"
    return check("speculation", f"{asked.speculation} on in every slot", seen,
                 "GET /slots speculative", ok=all(s is True for s in states))  # fmt: skip


def _context(wanted: int, slots: Sequence[Mapping[str, Any]]) -> Check:
    """Slots share the context evenly, or each may use all of it (unified KV cache)."""
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
    return check("no-config-file", "no configuration file outside the plan", seen, where,
                 ok=found is None if log else None)  # fmt: skip


def _search(pattern: re.Pattern[str], log: Sequence[str]) -> tuple[int, re.Match[str] | None]:
    """Find the first line that matches: its number (from 1) and the match."""
    for number, line in enumerate(log, start=1):
        if found := pattern.search(line):
            return number, found
    return 0, None


ON_THE_CPU = frozenset({"no-layers-offloaded", "cuda-disabled"})
"""Signatures of a model that runs on the CPU, which a recipe may ask for."""


class LlamaCpp:
    """See `engines.engine.Engine`."""

    name = "llama.cpp"
    server = "llama-server"
    health = 'HTTP 200: {"status": "ok"}'
    evidence: tuple[str, ...] = ("/v1/models", "/props", "/slots")
    guarded = "/props"
    inside_port = 8080
    key_variable = "LLAMA_API_KEY"
    environment: Mapping[str, str] = {}
    forced_environment: Mapping[str, str] = {}

    arguments = staticmethod(rules.flags)
    refuse = staticmethod(rules.refuse)
    features = staticmethod(rules.features)
    model_names = staticmethod(model_names)
    stage = staticmethod(stage)

    def served(self, weights: WeightPaths) -> str:
        """Give the file that it names in /props."""
        return weights.first

    def additions(
        self, command: Sequence[str], recipe: Recipe, *, host: str, port: int, key_file: str | None
    ) -> tuple[tuple[str, ...], int]:
        """Give the arguments that readiness needs, and the index of the alias among them."""
        return rules.additions(
            command, name=recipe.name, host=host, port=port, slots=recipe.serve.slots,
            key_file=key_file,
        )  # fmt: skip

    def expectations(self, asked: Requirements) -> tuple[str, ...]:
        """Describe the checks of readiness."""
        return rules.expectations(_own(asked))

    def healthy(self, answer: Answer) -> bool:
        """Whether it is 200 and `{"status": "ok"}`."""
        return health_ok(answer.status, answer.body)

    def judge(
        self, asked: Requirements, answers: Mapping[str, Answer], log: Sequence[str]
    ) -> tuple[Check, ...]:
        """Check `/v1/models`, `/props`, `/slots` and the log."""
        return judge(
            _own(asked), models=answers["/v1/models"].body, props=answers["/props"].body,
            slots=answers["/slots"].body, log=log,
        )  # fmt: skip

    def asked_for(self, asked: Requirements) -> frozenset[str]:
        """Signatures of a model on the CPU, if the recipe asks for that."""
        return ON_THE_CPU if _own(asked).cpu else frozenset()


def _own(asked: Requirements) -> Features:
    if not isinstance(asked, Features):
        raise TypeError(f"llama.cpp cannot check {type(asked).__name__}")
    return asked
