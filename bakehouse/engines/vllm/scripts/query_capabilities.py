"""What a vLLM image is asked: this file's text runs in the image's own Python, and only there.

It imports nothing of Bakehouse, needs no GPU and no network, and takes the sentinel between two of
which it prints one JSON document, since importing vLLM writes to standard output, and then the
architectures whose code it is to import.
Every part is asked on its own: what one version of vLLM calls otherwise does not hide the rest.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

REGISTRY = "vllm.model_executor.models.registry"
PARSERS = {
    "reasoning_parsers": (("vllm.reasoning", "ReasoningParserManager"),),
    "tool_parsers": (
        ("vllm.tool_parsers", "ToolParserManager"),
        ("vllm.entrypoints.openai.tool_parsers", "ToolParserManager"),
    ),
}
"""Where the parsers are registered, the newest place first."""


def versions() -> dict[str, str]:
    """Versions of what matters, as installed."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("vllm", "torch", "transformers", "flashinfer-python", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["vllm"] = str(getattr(importlib.import_module("vllm"), "__version__", found.get("vllm")))
    return found


def cuda() -> dict[str, Any]:
    """The CUDA release that torch was built with, and for which compute capabilities."""
    torch = importlib.import_module("torch")
    flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()  # noqa: SLF001 - no public way
    return {"version": torch.version.cuda, "architectures": (flags or "").split()}


def tools() -> dict[str, str]:
    """Compilers that kernels are made with while serving, where there are any."""
    found = {name: path for name in ("nvcc", "ninja", "gcc") if (path := shutil.which(name))}
    if spec := importlib.util.find_spec("triton"):
        for own in Path(spec.origin or "").parent.glob("backends/nvidia/bin/ptxas*"):
            asked = subprocess.run([str(own), "--version"], capture_output=True, check=False)
            found[own.name] = asked.stdout.decode(errors="replace").strip().splitlines()[-1]
    return found


def architectures() -> dict[str, str]:
    """Every registered architecture, with the module and class that stand behind it."""
    registry = importlib.import_module(REGISTRY).ModelRegistry
    return {
        str(name): ":".join(
            str(getattr(registry.models[name], part, "?")) for part in ("module_name", "class_name")
        )
        for name in registry.get_supported_archs()
    }


def lacking(names: list[str]) -> dict[str, str]:
    """Architectures whose code needs a Python package that is not there, and what is said of it.

    What is registered is only imported when it is served. Other errors may come of there being no
    GPU here, and say nothing.
    """
    registry = importlib.import_module(REGISTRY).ModelRegistry
    found: dict[str, str] = {}
    for name in names:
        if name not in registry.models:
            continue
        try:
            importlib.import_module(registry.models[name].module_name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "vllm":
                found[name] = str(error)
        except BaseException:  # noqa: S112
            continue
    return found


def fallbacks() -> list[str]:
    """Classes of the Transformers backend, which serve what vLLM has no code of its own for."""
    registry = importlib.import_module(REGISTRY)
    backend = getattr(registry, "_TRANSFORMERS_BACKEND_MODELS", {})
    return sorted({str(name) for pair in backend.values() for name in pair[1:]})


def parsers(kind: str) -> list[str]:
    """Parsers by name."""
    for module, name in PARSERS[kind]:
        try:
            manager = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        known: set[str] = set()
        for table in (kind, "lazy_parsers"):
            known |= set(getattr(manager, table, {}))
        return sorted(known)
    raise ImportError(f"no {kind} where they were looked for")


def speculation() -> list[str]:
    """Methods of speculative decoding: a Literal of words and of further Literals."""
    found: list[str] = []

    def walk(kind: Any) -> None:
        for one in get_args(kind):
            if isinstance(one, str):
                found.append(one)
            else:
                walk(one)

    walk(importlib.import_module("vllm.config.speculative").SpeculativeMethod)
    return sorted(set(found))


def answer() -> dict[str, Any]:
    """Everything, and what could not be had."""
    parts: dict[str, Callable[[], Any]] = {
        "versions": versions,
        "cuda": cuda,
        "tools": tools,
        "architectures": architectures,
        "lacking": lambda: lacking(sys.argv[2:]),
        "fallbacks": fallbacks,
        "reasoning_parsers": lambda: parsers("reasoning_parsers"),
        "tool_parsers": lambda: parsers("tool_parsers"),
        "speculation": speculation,
    }
    said: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name, ask in parts.items():
        try:
            said[name] = ask()
        except BaseException as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return {**said, "errors": errors}


if __name__ == "__main__":
    text = json.dumps(answer())
    sys.stdout.flush()
    sys.stdout.write(f"\n{sys.argv[1]}{text}{sys.argv[1]}\n")
    sys.stdout.flush()
