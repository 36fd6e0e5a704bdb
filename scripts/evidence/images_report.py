"""The evidence of `scripts/evidence/images` as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from scripts.evidence.report import checks_table, code, error_of, machine_of, result_of, table

Found = Mapping[str, Any]
SERVED = {
    "llama serve": "llama.cpp, built in a container, served from its image on the GPU",
    "llama without a GPU": "The same image, served without a GPU",
    "vllm serve": "vLLM in bfloat16, eager, with n-gram speculation",
    "vllm rope": "vLLM with rotary positions of another base",
    "vllm compiled": "vLLM in bfloat16, compiled, with CUDA graphs",
    "vllm f32": "vLLM in float32",
}
REFUSED = {
    "llama wrong architecture": "llama.cpp for an architecture that nvcc does not know",
    "vllm budget": "vLLM, DFlash with more draft tokens than the batch budget",
    "vllm method": "vLLM, a method of speculation that the image does not have",
}


def markdown(evidence: Found) -> str:
    """Write what was found; what is missing is said to be missing."""
    parts = [
        "# Images on a real GPU",
        "Made by `scripts/evidence/images` from what the commands below printed.",
        *machine_of(evidence),
        *_images(evidence),
        *_built(evidence, "llama build", "llama.cpp with CUDA, built in a container"),
        *_built(evidence, "vllm build", "The vLLM image, asked what it supports"),
    ]
    for step, title in SERVED.items():
        parts += _served(evidence.get(step), title)
    parts.append("## Refused")
    for step, title in REFUSED.items():
        said = evidence.get(step)
        parts += [f"### {title}", f"exit {said['exit']}" if said else "not run"]
        if said:
            parts += [*error_of(said), *(code(fault) for fault in _faults(said))]
            parts += [checks_table(c) for c in [_checks(said)] if c]
    failed = [f"- {name}: `{said}`" for name, said in evidence.items() if name.endswith(" failed")]
    if failed:
        parts += ["## Steps that failed", "\n".join(failed)]
    return "\n\n".join(parts) + "\n"


def _checks(said: Found) -> list[Found]:
    return list((said.get("document") or {}).get("checks") or ())


def _faults(said: Found) -> list[str]:
    return [
        f"{fault['file']}:{fault['line']}: {fault['message']}"
        for recipe in result_of(said).get("recipes", ())
        for fault in recipe.get("faults", ())
    ]


def _images(evidence: Found) -> Iterable[str]:
    rows = [
        (name.removeprefix("import "), said["exit"], f"{said['seconds']} s")
        for name, said in evidence.items()
        if name.startswith("import ") and isinstance(said, Mapping)
    ]
    docker = str((evidence.get("docker") or {}).get("out", ""))
    wanted = ("Server Version", "Storage Driver", "CDI", "Runtimes", "Cgroup", "Kernel Version")
    lines = [line for line in docker.splitlines() if line.strip().startswith(wanted)]
    parts = ["## Engine and base images", code("\n".join(lines) or "no engine")]
    parts.append(
        "The base images are the machine's own root file system: it was made from NVIDIA's "
        "development image."
    )
    return [*parts, table(("image", "exit", "took"), rows)]


def _built(evidence: Found, step: str, title: str) -> Iterable[str]:
    said = evidence.get(step)
    if not said:
        return [f"## {title}", "not run"]
    parts = [f"## {title}", f"exit {said['exit']}, {said['seconds']} s", *error_of(said)]
    result = result_of(said)
    rows = [(name, result[name]) for name in ("image", "id", "content", "size", "seconds")
            if name in result]  # fmt: skip
    parts += [table(("", ""), rows)] if rows else []
    return [*parts, *(checks_table(c) for c in [_checks(said)] if c)]


def _served(said: Found | None, title: str) -> Iterable[str]:
    if not said:
        return [f"## {title}", "not run"]
    result = result_of(said)
    parts = [f"## {title}", f"exit {said['exit']}, {said['seconds']} s", *error_of(said)]
    if "loading_seconds" in result:
        parts.append(
            f"Ready after {result.get('loading_seconds')} s, proven in "
            f"{result.get('proving_seconds')} s: {result.get('summary')}."
        )
    rates = [f"{s['timings']['predicted_per_second']:.0f}" for s in said.get("speed", ())]
    if rates:
        parts.append(f"256 tokens from a prompt of a few: {', then '.join(rates)} tokens/s.")
    if gpu := (said.get("gpu") or {}).get("out"):
        parts.append(code(gpu))
    parts += [checks_table(c) for c in [_checks(said)] if c]
    after = [(name, said[name]["exit"], f"{said[name]['seconds']} s")
             for name in ("status", "logs", "accept", "probe", "stop") if name in said]  # fmt: skip
    return [*parts, table(("then `invoke`", "exit", "took"), after)]
