"""llama-server: the command's rules are in `command.py`; here what a running server has to show.

Shapes as in llama.cpp build 11434. A field that is missing or of another type counts as nothing
observed: the check is unknown, never passed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bakehouse.engines.base import Answer, Requirements, as_features, check_text, first_match
from bakehouse.engines.llamacpp import command
from bakehouse.engines.llamacpp.command import Features
from bakehouse.models import Check, check
from bakehouse.recipe.template import Paths

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
ON_THE_CPU = frozenset({"no-layers-offloaded", "cuda-disabled"})
"""Signatures of a model that runs on the CPU, which a recipe may ask for."""


class LlamaCpp:
    """See `engines.base.Engine`."""

    name = "llama.cpp"
    server = "llama-server"
    health = 'HTTP 200: {"status": "ok"}'
    evidence: tuple[str, ...] = ("/v1/models", "/props", "/slots")
    guarded = "/props"
    inside_port = 8080
    key_variable = "LLAMA_API_KEY"
    environment: Mapping[str, str] = {}
    forced_environment: Mapping[str, str] = {}

    arguments = staticmethod(command.flags)
    refuse = staticmethod(command.refuse)
    additions = staticmethod(command.additions)
    features = staticmethod(command.features)
    expectations = staticmethod(command.expectations)

    def served(self, weights: Paths) -> str:
        """Give the file that it names in /props."""
        return weights.first

    def healthy(self, answer: Answer) -> bool:
        """Whether it is 200 and `{"status": "ok"}`."""
        body = answer.body
        return answer.status == 200 and isinstance(body, Mapping) and body.get("status") == "ok"

    def model_names(self, body: Any) -> tuple[str, ...]:
        """Ids and aliases in a response of `/v1/models`; empty if it has another shape."""
        data = body.get("data") if isinstance(body, Mapping) else None
        found: list[str] = []
        for entry in data if isinstance(data, list) else []:
            if isinstance(entry, Mapping):
                aliases = entry.get("aliases")
                names = [entry.get("id"), *(aliases if isinstance(aliases, list) else [])]
                found += [name for name in names if isinstance(name, str)]
        return tuple(dict.fromkeys(found))

    def stage(self, line: str) -> str | None:
        """Describe the loading stage that a log line reports; None for every other line."""
        return next((words for text, words in STAGES.items() if text in line), None)

    def check_features(
        self, requirements: Requirements, answers: Mapping[str, Answer], log: Sequence[str]
    ) -> tuple[Check, ...]:
        """Check `/v1/models`, `/props`, `/slots` and the log."""
        wanted = as_features(requirements, Features)
        models, props, slots = (answers[path].body for path in self.evidence)
        props = props if isinstance(props, Mapping) else {}
        slots = [s for s in slots if isinstance(s, Mapping)] if isinstance(slots, list) else []
        names = self.model_names(models)
        # Router mode loads nothing itself, and answers 200 to everything.
        empty = isinstance(models, Mapping) and models.get("data") == []
        router = empty or props.get("role") == "router"
        loaded = "router mode: nothing is loaded" if router else "a model" if names else None
        # A configuration file of the machine changes settings that no plan shows.
        at, config = first_match(CONFIG, log)
        file = f"using config file {config[1]}" if config else "none"
        checks = [
            check("model-name", wanted.name, ", ".join(names) or None, "GET /v1/models",
                  ok=wanted.name in names),
            check("model-loaded", "one model, loaded by this server itself", loaded,
                  "GET /v1/models, GET /props", ok=not router),
            check_text("model-path", wanted.model_path, props.get("model_path"),
                       "GET /props model_path"),
            check("slots", str(wanted.slots), str(len(slots)) if slots else None, "GET /slots",
                  ok=len(slots) == wanted.slots),
            check("no-config-file", "no configuration file outside the plan", file, at,
                  ok=config is None if log else None),
        ]  # fmt: skip
        if wanted.build_info:
            build = props.get("build_info")
            checks.append(check_text("build", wanted.build_info, build, "GET /props build_info"))
        if wanted.context:
            checks.append(_context(wanted.context, slots))
        if wanted.chat:
            template = props.get("chat_template")
            size = f"{len(template)} characters" if isinstance(template, str) and template else None
            where = "GET /props chat_template"
            checks.append(check("chat-template", "a chat template", size, where, ok=True))
        if wanted.multimodal:
            listed = models.get("models") if isinstance(models, Mapping) else None
            first = listed[0] if isinstance(listed, list) and listed else None
            found = first.get("capabilities") if isinstance(first, Mapping) else None
            text = ", ".join(map(str, found)) if isinstance(found, list) else None
            checks.append(
                check("multimodal", "multimodal among the capabilities", text,
                      "GET /v1/models capabilities", ok="multimodal" in (text or ""))
            )  # fmt: skip
        if wanted.speculation:
            states = [s.get("speculative") for s in slots]
            text = None if not states or None in states else ", ".join(map(str, states)).lower()
            if text and wanted.speculation_lacks:
                text = f"{text}: {wanted.speculation_lacks}"
            checks.append(
                check("speculation", f"{wanted.speculation} on in every slot", text,
                      "GET /slots speculative", ok=all(s is True for s in states))
            )  # fmt: skip
        if wanted.gpu_layers:
            at, line = first_match(OFFLOADED, log)
            on, of = (int(line[1]), int(line[2])) if line else (0, 0)
            expected = f"{wanted.gpu_layers} layers, or all that there are, on the GPU"
            ok = on >= min(wanted.gpu_layers, of)
            checks.append(
                check("gpu-layers", expected, f"{on} of {of}" if line else None, at, ok=ok)
            )
        if wanted.flash_attn:
            at, line = first_match(RESOLVED, log)
            if line is None:
                at, line = first_match(ATTENTION, log)
            if line is None or line[1] == "auto":
                at, line = "server.log", None
            state = line[1] if line else None
            ok = (state == "enabled") == (wanted.flash_attn == "on")
            checks.append(check("flash-attention", wanted.flash_attn, state, at, ok=ok))
        return tuple(checks)

    def expected_signatures(self, requirements: Requirements) -> frozenset[str]:
        """Signatures of a model on the CPU, if the recipe asks for that."""
        return ON_THE_CPU if as_features(requirements, Features).cpu else frozenset()


def _context(wanted: int, slots: Sequence[Mapping[str, Any]]) -> Check:
    """Slots share the context evenly, or each may use all of it (unified KV cache)."""
    sizes = [s.get("n_ctx") for s in slots]
    whole = [size for size in sizes if isinstance(size, int)]
    ok = bool(whole) and (sum(whole) >= wanted) if len(whole) == len(sizes) else None
    total = f"{sum(whole)} ({' + '.join(map(str, whole))})" if whole else None
    return check("context", f"{wanted} tokens or more over all slots", total, "GET /slots n_ctx",
                 ok=ok)  # fmt: skip
