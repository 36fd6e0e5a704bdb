"""How large the cache of a model is: keys, values, indexer keys and recurrent state.

The formulas are those by which llama.cpp (build 11434, src/llama-kv-cache*.cpp,
src/llama-memory-recurrent.cpp) allocates; for vLLM they give the least that the context needs.
"""

from __future__ import annotations

from bakehouse.checkpoints.shape import Layer, LayerKind, ModelShape
from bakehouse.checkpoints.tensors import GGML_BY_NAME
from bakehouse.memory.demand import Demand
from bakehouse.memory.types import Basis, Line, Phase, Pool

_VLLM_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "float32": 4}
_GGML_CACHES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""What llama.cpp takes for -ctk and -ctv."""
CELL_PAD = 256
"""llama.cpp rounds a cache's cells up to a multiple of this."""


def cache_types(engine: str) -> tuple[str, ...]:
    """Types that an engine's cache may have."""
    return (*_VLLM_BYTES, "fp8") if engine == "vllm" else _GGML_CACHES


def row_bytes(width: int, kind: str, engine: str) -> int | None:
    """Bytes of `width` elements of a cache type; None for a type that is not known."""
    if engine == "vllm":
        size = 1 if kind.startswith("fp8") else _VLLM_BYTES.get(kind)
        return None if size is None else width * size
    known = GGML_BY_NAME.get(kind)
    return None if known is None else -(-width // known.block) * known.size


def context_of(shape: ModelShape, demand: Demand) -> int | None:
    """The tokens that are asked for: the demand's, or all that the model declares."""
    return demand.context or shape.context_limit


def cache_lines(shape: ModelShape, demand: Demand, context: int, pool: Pool) -> list[Line] | None:
    """The cache for `context` tokens, a line a kind of layer; None for an unknown cache type.

    `context` counts tokens over all sequences, as llama.cpp's -c does.
    """
    lines = []
    for title, layers in (("", shape.layers), ("MTP ", shape.mtp if demand.mtp else ())):
        for kind in (LayerKind.FULL, LayerKind.LATENT, LayerKind.SLIDING):
            chosen = [layer for layer in layers if layer.kind is kind]
            if not chosen:
                continue
            cells = _cells(shape, demand, context, kind)
            per_cell = _per_cell(chosen, demand)
            if per_cell is None:
                return None
            lines.append(
                Line(
                    item=f"{title}cache, {kind.value}",
                    bytes=cells * per_cell,
                    formula=f"{cells} cells x {per_cell} B ({len(chosen)} layers, "
                    f"{_types(demand, kind)})",
                    source="layers, KV heads and head sizes from the model's header",
                    basis=Basis.COMPUTED,
                    pool=pool,
                    phase=Phase.SERVING,
                )
            )
        if state := sum(layer.state for layer in layers):
            lines.append(_state_line(title, layers, state, demand, pool))
    return lines


def _types(demand: Demand, kind: LayerKind) -> str:
    if kind is LayerKind.LATENT or demand.keys == demand.values:
        return demand.keys
    return f"{demand.keys}/{demand.values}"


def _state_line(
    title: str, layers: tuple[Layer, ...], state: int, demand: Demand, pool: Pool
) -> Line:
    count = sum(layer.state > 0 for layer in layers)
    return Line(
        item=f"{title}state, {LayerKind.RECURRENT.value}",
        bytes=state * 4 * demand.sequences,
        formula=f"{state} elements in {count} layers x 4 B x {demand.sequences} sequences",
        source="the model's header",
        basis=Basis.COMPUTED,
        pool=pool,
        phase=Phase.SERVING,
    )


def _per_cell(layers: list[Layer], demand: Demand) -> int | None:
    total = 0
    for layer in layers:
        for width, kind in (
            (layer.keys, demand.keys),
            (layer.values, demand.values),
            (layer.index, demand.keys),
        ):
            size = row_bytes(width, kind, demand.engine)
            if size is None:
                return None
            total += size
    return total


def _padded(cells: int) -> int:
    return -(-cells // CELL_PAD) * CELL_PAD


def _cells(shape: ModelShape, demand: Demand, context: int, kind: LayerKind) -> int:
    """Tokens that a kind of layer keeps, over all sequences."""
    if demand.engine == "vllm":
        window = shape.window or context
        return min(context, window + demand.batch) if kind is LayerKind.SLIDING else context
    streams = 1 if demand.unified_cache else demand.sequences
    each = _padded(-(-_padded(context) // streams))
    if kind is LayerKind.SLIDING and shape.window and not demand.full_window:
        reach = shape.window * (demand.sequences if demand.unified_cache else 1)
        each = min(each, _padded(min(each, reach + demand.batch)))
    return each * streams
