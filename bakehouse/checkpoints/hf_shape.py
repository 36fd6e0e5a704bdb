"""From a Hugging Face `config.json` to the model's shape, as vLLM and transformers read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bakehouse.checkpoints.gguf_shape import MAX_LAYERS
from bakehouse.checkpoints.shape import Layer, LayerKind, ModelShape
from bakehouse.errors import CheckpointError

MAX_CONFIG = 4 * 2**20
"""Bytes of a config.json that are read."""


def parse_config(raw: bytes, where: str) -> dict[str, Any]:
    """Parse a config.json. Raises CheckpointError."""
    try:
        config = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the model's config is not JSON: {str(error)[:120]}",
            where=where,
            hint="fetch it again",
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(
            "the model's config is not a JSON object", where=where, hint="fetch it again"
        )
    return config


class _Config:
    """The language model's part of a config, with typed access."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.where = where
        inner = config.get("text_config") or config.get("llm_config")
        self.data: Mapping[str, Any] = inner if isinstance(inner, dict) else config

    def number(self, *names: str, default: int = 0) -> int:
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**40:
                raise CheckpointError(
                    f"'{name}' in the model's config is {str(value)[:80]!r}, a whole number is "
                    "wanted",
                    where=self.where,
                    hint="fetch the config again, or correct it",
                )
            return value
        return default


def hf_shape(config: Mapping[str, Any], where: str) -> ModelShape:
    """Read the shape. Raises CheckpointError where a field holds what cannot be right."""
    text = _Config(config, where)
    total = text.number("num_hidden_layers", "n_layer", "n_layers")
    mtp = text.number("num_nextn_predict_layers", "mtp_num_hidden_layers")
    if total > MAX_LAYERS or mtp > MAX_LAYERS:
        raise CheckpointError(
            f"the model's config declares {max(total, mtp)} layers",
            where=where,
            hint="fetch the config again",
        )
    heads = text.number("num_attention_heads", "n_head")
    hidden = text.number("hidden_size", "n_embd")
    key = text.number("head_dim", default=hidden // heads if heads else 0)
    value = text.number("v_head_dim", default=key)
    kv_heads = text.number("num_key_value_heads", default=heads)
    assumptions: list[str] = []
    attention = _attention_layer(text, key, value, kv_heads)
    return ModelShape(
        architecture=_architecture(config),
        layers=tuple(_layers(text, total, attention, assumptions)),
        mtp=(attention,) * mtp,
        heads=heads,
        kv_heads=kv_heads,
        key_length=key,
        value_length=value,
        embedding=hidden,
        feed_forward=max(
            text.number("intermediate_size"),
            text.number("moe_intermediate_size") * text.number("num_experts_per_tok"),
        ),
        vocabulary=text.number("vocab_size"),
        context_limit=text.number("max_position_embeddings", "n_positions") or None,
        window=text.number("sliding_window", "attention_chunk_size") or None,
        experts=text.number("n_routed_experts", "num_experts", "num_local_experts"),
        experts_used=text.number("num_experts_per_tok", "top_k_experts", "moe_topk"),
        experts_shared=text.number("n_shared_experts", "num_shared_experts"),
        vision=isinstance(config.get("vision_config"), dict),
        assumptions=tuple(assumptions),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    kind = config.get("model_type")
    return kind if isinstance(kind, str) else ""


def _attention_layer(text: _Config, key: int, value: int, kv_heads: int) -> Layer:
    index = text.number("index_head_dim")
    if rank := text.number("kv_lora_rank"):
        width = rank + text.number("qk_rope_head_dim")
        return Layer(LayerKind.LATENT, keys=width, index=index)
    return Layer(LayerKind.FULL, keys=key * kv_heads, values=value * kv_heads, index=index)


def _layers(text: _Config, total: int, attention: Layer, assumptions: list[str]) -> list[Layer]:
    types = text.data.get("layer_types")
    interval = text.number("full_attention_interval")
    recurrent = Layer(LayerKind.RECURRENT, state=_state(text))
    if isinstance(types, list) and len(types) >= total:
        names = [str(t) for t in types[:total]]
    elif interval:
        names = ["linear" if (i + 1) % interval else "full" for i in range(total)]
    else:
        names = ["full"] * total
        if text.number("sliding_window") and text.data.get("use_sliding_window") is not False:
            assumptions.append(
                "a sliding window is declared, but not for which layers: all are counted as full"
            )
    if any("linear" in n or "mamba" in n for n in names) and not recurrent.state:
        assumptions.append("the size of the recurrent state is not declared and counted as 0")
    return [_layer(name, attention, recurrent) for name in names]


def _layer(name: str, attention: Layer, recurrent: Layer) -> Layer:
    if any(word in name for word in ("linear", "mamba", "recurrent", "conv", "kda")):
        return recurrent
    if ("sliding" in name or "chunked" in name) and attention.kind is LayerKind.FULL:
        return Layer(LayerKind.SLIDING, attention.keys, attention.values, attention.index)
    return attention


def _state(text: _Config) -> int:
    """Elements of a linear-attention layer's state: convolution history and memory matrix."""
    value_heads = text.number("linear_num_value_heads")
    key_heads = text.number("linear_num_key_heads")
    key, value = text.number("linear_key_head_dim"), text.number("linear_value_head_dim")
    kernel = text.number("linear_conv_kernel_dim")
    mixed = 2 * key_heads * key + value_heads * value
    return max(kernel - 1, 0) * mixed + value_heads * key * value
