"""What a server's command needs, and the size of its KV cache.

Formulas of llama.cpp (build 11434, src/llama-kv-cache*.cpp, src/llama-memory-recurrent.cpp); for
vLLM they give the minimum that the context needs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from bakehouse.checkpoints.gguf import GGML_BY_NAME
from bakehouse.checkpoints.model_shape import Layer, LayerKind, ModelShape
from bakehouse.engines.base import engine_of
from bakehouse.models import Check, Frozen, check
from bakehouse.recipe.models import Recipe
from bakehouse.util.text import size_text as gib

GIB = 2**30


class Basis(StrEnum):
    """Where a number comes from."""

    MEASURED = "measured"
    COMPUTED = "computed"
    """From sizes that files declare."""
    ASSUMED = "assumed"
    """A rule of thumb; see its source."""


class Pool(StrEnum):
    """The memory that a line counts against."""

    SYSTEM = "memory"
    """The machine's memory, which on unified machines the GPU shares."""
    GPU = "GPU memory"


class Phase(StrEnum):
    """When memory is held."""

    ALWAYS = "always"
    LOADING = "while loading"
    SERVING = "once loaded"


class Line(Frozen):
    """One number of a budget, in bytes."""

    item: str
    bytes: int
    formula: str
    source: str
    basis: Basis
    pool: Pool = Pool.SYSTEM
    phase: Phase = Phase.ALWAYS


class PoolUsage(Frozen):
    """What a pool has and what is needed of it, in bytes."""

    pool: Pool
    total: int
    available: int
    reserve: int
    loading: int
    """Maximum while weights are loaded."""
    serving: int
    """While the server runs."""

    @property
    def need(self) -> int:
        """The larger of both."""
        return max(self.loading, self.serving)

    @property
    def left(self) -> int:
        """Available memory left while the server runs; negative if it is short."""
        return self.available - self.serving

    @property
    def fits(self) -> bool:
        """Whether the reserve stays free in both phases."""
        return self.available - self.need >= self.reserve


class Budget(Frozen):
    """The memory that a recipe needs on a machine."""

    machine: str
    context: int | None
    """Tokens, over all sequences."""
    lines: tuple[Line, ...]
    purses: tuple[PoolUsage, ...]
    unknown: tuple[str, ...] = ()
    """What could not be counted; if any, whether it fits is unproven."""
    lacking: tuple[str, ...] = ()
    """Problems that more free memory does not solve."""

    @property
    def fits(self) -> bool:
        """Whether every pool is large enough, as far as it could be counted."""
        return not self.lacking and all(purse.fits for purse in self.purses)

    def checks(self) -> tuple[Check, ...]:
        """One check per pool and per lack; unknown, not passed, if anything was not counted."""
        made = []
        for purse in self.purses:
            phase = "while loading" if purse.loading > purse.serving else "once loaded"
            observed = (
                f"{gib(purse.need)} needed {phase} of {gib(purse.available)} available, "
                f"{gib(purse.available - purse.need)} left"
            )
            if self.unknown:
                observed += "; not counted: " + "; ".join(self.unknown)
            ok = purse.fits if not (purse.fits and self.unknown) else None
            name = "memory-fits-gpu" if purse.pool is Pool.GPU else "memory-fits"
            wanted = f"at least {gib(purse.reserve)} of {purse.pool.value} stay free"
            made.append(check(name, wanted, observed, self.machine, ok=ok))
        for lack in self.lacking:
            wanted = "memory for the cache of the served context"
            made.append(check("memory-cache", wanted, lack, self.machine, ok=False))
        return tuple(made)


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


_VLLM_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}
_GGML_CACHES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""Values of llama.cpp's -ctk and -ctv."""
CELL_PAD = 256
"""llama.cpp rounds a cache's cells up to a multiple of this."""


def cache_types(engine: str) -> tuple[str, ...]:
    """Cache types that an engine supports."""
    return (*_VLLM_BYTES, "fp8") if engine == "vllm" else _GGML_CACHES


def row_bytes(width: int, kind: str, engine: str) -> int | None:
    """Bytes of `width` elements of a cache type; None for an unknown type."""
    if engine == "vllm":
        size = 1 if kind.startswith("fp8") else _VLLM_BYTES.get(kind)
        return None if size is None else width * size
    known = GGML_BY_NAME.get(kind)
    return None if known is None else -(-width // known.block) * known.size


def context_of(shape: ModelShape, demand: Demand) -> int | None:
    """Tokens to serve: the requested context, or the model's limit."""
    return demand.context or shape.context_limit


def cache_lines(shape: ModelShape, demand: Demand, context: int, pool: Pool) -> list[Line] | None:
    """The cache for `context` tokens, one line per layer kind; None for an unknown cache type.

    `context` counts tokens over all sequences, like llama.cpp's -c.
    """
    lines: list[Line] = []

    def add(item: str, size: int, formula: str, source: str) -> None:
        lines.append(Line(item=item, bytes=size, formula=formula, source=source, pool=pool,
                          basis=Basis.COMPUTED, phase=Phase.SERVING))  # fmt: skip

    for title, layers in (("", shape.layers), ("MTP ", shape.mtp if demand.mtp else ())):
        for kind in (LayerKind.FULL, LayerKind.LATENT, LayerKind.SLIDING):
            chosen = [layer for layer in layers if layer.kind is kind]
            if not chosen:
                continue
            cells = _cells(shape, demand, context, kind)
            per_cell = _per_cell(chosen, demand)
            if per_cell is None:
                return None
            one_type = kind is LayerKind.LATENT or demand.keys == demand.values
            types = demand.keys if one_type else f"{demand.keys}/{demand.values}"
            add(f"{title}cache, {kind.value}", cells * per_cell,
                f"{cells} cells x {per_cell} B ({len(chosen)} layers, {types})",
                "layers, KV heads and head sizes from the model's header")  # fmt: skip
        if state := sum(layer.state for layer in layers):
            count = sum(layer.state > 0 for layer in layers)
            add(f"{title}state, {LayerKind.RECURRENT.value}", state * 4 * demand.sequences,
                f"{state} elements in {count} layers x 4 B x {demand.sequences} sequences",
                "the model's header")  # fmt: skip
    return lines


def _per_cell(layers: list[Layer], demand: Demand) -> int | None:
    total = 0
    for layer in layers:
        keys = row_bytes(layer.keys, demand.keys, demand.engine)
        values = row_bytes(layer.values, demand.values, demand.engine)
        index = row_bytes(layer.index, demand.keys, demand.engine)
        if keys is None or values is None or index is None:
            return None
        total += keys + values + index
    return total


def _padded(cells: int) -> int:
    return -(-cells // CELL_PAD) * CELL_PAD


def _cells(shape: ModelShape, demand: Demand, context: int, kind: LayerKind) -> int:
    """Tokens that layers of a kind keep, over all sequences."""
    if demand.engine == "vllm":
        window = shape.window or context
        return min(context, window + demand.batch) if kind is LayerKind.SLIDING else context
    streams = 1 if demand.unified_cache else demand.sequences
    each = _padded(-(-_padded(context) // streams))
    if kind is LayerKind.SLIDING and shape.window and not demand.full_window:
        reach = shape.window * (demand.sequences if demand.unified_cache else 1)
        each = min(each, _padded(min(each, reach + demand.batch)))
    return each * streams
