"""From a Hugging Face `config.json` to the model's shape, as vLLM and transformers read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bakehouse.checkpoints.gguf_shape import MAX_LAYERS
from bakehouse.checkpoints.hf_layers import Config, attention, attention_layers, layer_count
from bakehouse.checkpoints.shape import ModelShape, Vision
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


def hf_shape(config: Mapping[str, Any], where: str) -> ModelShape:
    """Read the shape. Raises CheckpointError where a field holds what cannot be right."""
    text = Config(config, where)
    total = layer_count(text)
    mtp = text.number("num_nextn_predict_layers", "mtp_num_hidden_layers")
    if total > MAX_LAYERS or mtp > MAX_LAYERS:
        raise CheckpointError(
            f"the model's config declares {max(total, mtp)} layers",
            where=where,
            hint="fetch the config again",
        )
    heads = text.number("num_attention_heads", "n_head")
    hidden = text.number("hidden_size", "n_embd")
    key = text.number("head_dim", "attention_head_dim") or (hidden // heads if heads else 0)
    assumptions: list[str] = []
    return ModelShape(
        architecture=_architecture(config),
        layers=tuple(attention_layers(text, total, assumptions)),
        mtp=(attention(text),) * mtp,
        heads=heads,
        kv_heads=text.number("num_key_value_heads", default=heads),
        key_length=key,
        value_length=text.number("v_head_dim", default=key),
        embedding=hidden,
        feed_forward=max(
            text.largest("intermediate_size"),
            text.largest("moe_intermediate_size") * text.number("num_experts_per_tok"),
        ),
        vocabulary=text.number("vocab_size"),
        context_limit=text.number("max_position_embeddings", "n_positions") or None,
        window=text.number("sliding_window", "attention_chunk_size") or None,
        experts=text.number("n_routed_experts", "num_experts", "num_local_experts"),
        experts_used=text.number("num_experts_per_tok", "top_k_experts", "moe_topk"),
        experts_shared=text.number("n_shared_experts", "num_shared_experts"),
        vision=isinstance(config.get("vision_config"), dict),
        pictures=_vision(config.get("vision_config"), where),
        assumptions=tuple(assumptions),
    )


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    kind = config.get("model_type")
    return kind if isinstance(kind, str) else ""


def _vision(config: Any, where: str) -> Vision | None:
    """The vision tower, by the names that its families use."""
    if not isinstance(config, dict):
        return None
    part = Config(config, where)
    return Vision(
        layers=part.largest("num_hidden_layers", "depth", "layers"),
        width=part.largest("hidden_size", "embed_dim", "width"),
        image=part.largest("image_size", "img_size"),
        patch=part.largest("patch_size"),
        projected=part.number("out_hidden_size", "projection_dim"),
    )
