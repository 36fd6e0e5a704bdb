"""What a server's command asks for, as far as memory depends on it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bakehouse.engines.engine import engine_of
from bakehouse.recipe.model import Recipe

SHARE = 0.92
"""Of all memory, where a command names no share: vLLM 0.32's own default."""


@dataclass(frozen=True)
class Demand:
    """Settings that memory depends on; the defaults are the engines' own."""

    engine: str
    context: int | None = None
    """Tokens over all sequences (llama.cpp) or of the longest one (vLLM); None: the model's."""
    sequences: int = 1
    unified_cache: bool = False
    """One stream of cells for all sequences (llama.cpp)."""
    keys: str = "f16"
    values: str = "f16"
    batch: int = 512
    """Tokens that are computed at once."""
    flash: bool = True
    mmap: bool = True
    gpu_layers: int | None = None
    """Layers that the GPU holds; None for all."""
    cache_on_gpu: bool = True
    full_window: bool = False
    """Whether sliding-window layers keep the whole context."""
    share: float | None = None
    """Share of the total memory that the engine takes (vLLM)."""
    mtp: bool = False
    """Whether the model's own MTP layers draft, with a cache of their own."""


def demand_of(recipe: Recipe, argv: Sequence[str] = ()) -> Demand:
    """Read a recipe's demand: from the rendered command where there is one.

    Without `argv`, the recipe's own command is read as far as it holds no templates, and its
    fields fill the rest. Never raises: a value that cannot be read is left to the field.
    """
    words = tuple(argv) or tuple(recipe.serve.command.split())
    flags = {flag: value or "" for flag, value in engine_of(recipe.engine).arguments(words)}
    if recipe.engine == "vllm":
        return _vllm(recipe, flags)
    return _llama(recipe, flags)


def _text(flags: dict[str, str], *names: str) -> str | None:
    for name in names:
        if (value := flags.get(name)) and "{" not in value:
            return value
    return None


def _number(flags: dict[str, str], *names: str) -> int | None:
    value = _text(flags, *names)
    found = re.fullmatch(r"(\d{1,12})([kKmM]?)", value or "")
    if not found:
        return None
    factors = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}
    return int(found[1]) * factors[found[2]]


def _llama(recipe: Recipe, flags: dict[str, str]) -> Demand:
    serve = recipe.serve
    cache = serve.kv_cache or "f16"
    spec = _text(flags, "--spec-type") or serve.speculation or ""
    layers = _number(flags, "-ngl", "--gpu-layers", "--n-gpu-layers")
    if layers is None and not {"-ngl", "--gpu-layers", "--n-gpu-layers"} & flags.keys():
        layers = serve.gpu_layers
    flash = _text(flags, "-fa", "--flash-attn") or serve.flash_attn or "auto"
    load = _text(flags, "-lm", "--load-mode") or ""
    return Demand(
        engine="llama.cpp",
        context=_number(flags, "-c", "--ctx-size") or serve.context,
        sequences=_number(flags, "-np", "--parallel") or serve.slots,
        unified_cache=bool({"-kvu", "--kv-unified"} & flags.keys()),
        keys=(_text(flags, "-ctk", "--cache-type-k") or cache).lower(),
        values=(_text(flags, "-ctv", "--cache-type-v") or cache).lower(),
        batch=_number(flags, "-ub", "--ubatch-size") or 512,
        flash=flash != "off",
        mmap="--no-mmap" not in flags and (not load or "mmap" in load or load == "auto"),
        gpu_layers=layers,
        cache_on_gpu=not {"-nkvo", "--no-kv-offload"} & flags.keys(),
        full_window="--swa-full" in flags,
        mtp="draft-mtp" in spec.split(","),
    )


def _vllm(recipe: Recipe, flags: dict[str, str]) -> Demand:
    serve = recipe.serve
    cache = (_text(flags, "--kv-cache-dtype") or serve.kv_cache or "auto").lower()
    share = _text(flags, "--gpu-memory-utilization")
    readable = share and re.fullmatch(r"0?\.\d{1,6}|1(\.0{1,6})?", share)
    fraction = float(share) if share and readable else SHARE
    config = " ".join(v for k, v in flags.items() if k.startswith("--speculative"))
    streaming = {"fastsafetensors", "runai_streamer"}
    return Demand(
        engine="vllm",
        context=_number(flags, "--max-model-len") or serve.context,
        sequences=_number(flags, "--max-num-seqs") or 1,
        keys=cache,
        values=cache,
        batch=_number(flags, "--max-num-batched-tokens") or 8192,
        mmap=_text(flags, "--load-format") not in streaming,
        share=fraction,
        mtp='"mtp"' in config,
    )
