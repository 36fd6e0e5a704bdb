"""Layers, heads and state of a model, from config.json.

Model families declare layers in a dozen ways. Layers of an unknown kind count as full attention,
which takes the most memory, and are listed in the assumptions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bakehouse.checkpoints.model_shape import MAX_LAYERS, Layer, LayerKind, ModelShape, Vision
from bakehouse.errors import CheckpointError

PATTERN = {"M": "linear", "*": "full", "-": "none", "E": "none"}
"""Letters of Nemotron-H's `hybrid_override_pattern`."""
PERIODS = {
    "gemma2": 2, "gemma3": 6, "gemma3_text": 6, "gemma3n_text": 5, "gemma4_text": 6, "cohere2": 4,
    "gpt_oss": 2,
}  # fmt: skip
"""Model type to every how many layers attention is full, if the config has no pattern."""
ALL_SLIDING = {"mistral", "phi3", "starcoder2"}
"""Model types in which every layer has the declared window."""
RECURRENT = {"mamba", "mamba2", "falcon_mamba"}
BOTH = {"falcon_h1"}
"""Model types in which every layer has both attention and a recurrent state."""
_LINEAR = ("linear", "mamba", "recurrent", "conv", "kda", "lightning")
_NOTHING = ("none", "mlp", "moe", "no_op")


class Config:
    """Typed access to the language model's part of a config."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.where = where
        for name in ("thinker_config", "text_config", "llm_config"):
            if isinstance(inner := config.get(name), dict):
                config = inner
        self.data: Mapping[str, Any] = config
        kind = self.data.get("model_type")
        self.model_type = kind if isinstance(kind, str) else ""

    def part(self, name: str) -> Config:
        """A nested map with the same access; empty if there is none."""
        inner = self.data.get(name)
        return Config(inner if isinstance(inner, dict) else {}, self.where)

    def number(self, *names: str, default: int = 0) -> int:
        """The first of several names that is present and not `auto`. Raises CheckpointError."""
        for name in names:
            value = self.data.get(name)
            if value is None or value == "auto":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**40:
                raise CheckpointError(
                    f"'{name}' in the model's config must be an integer, not {str(value)[:80]!r}",
                    where=self.where,
                    hint="fetch the config again, or correct it",
                )
            return value
        return default

    def largest(self, *names: str) -> int:
        """A length that may be a list of lengths; the largest, 0 if there is none."""
        for name in names:
            value = self.data.get(name)
            if isinstance(value, list) and value and all(type(v) is int for v in value):
                return int(max(value))
        return self.number(*(n for n in names if not isinstance(self.data.get(n), list | dict)))

    def items(self, *names: str) -> list[Any]:
        """The first of several names that is a non-empty list."""
        for name in names:
            if isinstance(value := self.data.get(name), list) and value:
                return value
        return []


def attention_layers(text: Config, total: int, assumptions: list[str]) -> list[Layer]:
    """Return the `total` layers of the trunk; adds to `assumptions` what had to be assumed."""
    names = _names(text, total)
    state = recurrent_state(text)
    if names is None:
        names = ["full"] * total
        if state:
            assumptions.append(
                "recurrent layers are declared, but not which: all are counted as full attention"
            )
        if text.number("sliding_window") and text.data.get("use_sliding_window") is not False:
            assumptions.append(
                "a sliding window is declared, but not for which layers: all are counted as full"
            )
    layers = [_layer(text, name, i, state) for i, name in enumerate(names)]
    needs = any(x.kind is LayerKind.RECURRENT for x in layers) or text.model_type in BOTH
    if needs and not state:
        assumptions.append("the size of the recurrent state is not declared; counted as 0")
    shared = min(text.number("num_kv_shared_layers"), total)
    return layers[: total - shared] + [Layer(LayerKind.NONE)] * shared


def attention(text: Config, *, full: bool = True) -> Layer:
    """An attention layer; `full` ones may have a head size of their own (Gemma 4)."""
    heads = text.number("num_attention_heads", "n_head")
    hidden = text.number("hidden_size", "n_embd")
    index = text.number("index_head_dim")
    if rank := text.number("kv_lora_rank"):
        width = rank + text.number("qk_rope_head_dim")
        return Layer(LayerKind.LATENT, keys=width, index=index)
    key = text.number("head_dim", "attention_head_dim") or (hidden // heads if heads else 0)
    value = text.number("v_head_dim", default=key)
    kv_heads = text.number("num_key_value_heads", default=heads)
    if full and (wide := text.number("global_head_dim")):
        key = value = wide
        kv_heads = text.number("num_global_key_value_heads", default=kv_heads)
    return Layer(LayerKind.FULL, keys=key * kv_heads, values=value * kv_heads, index=index)


def _layer(text: Config, name: str, number: int, state: int) -> Layer:
    name = name.lower()
    if name in _NOTHING:
        return Layer(LayerKind.NONE)
    if any(word in name for word in _LINEAR):
        return Layer(LayerKind.RECURRENT, state=state)
    sliding = "sliding" in name or "chunked" in name
    made = attention(text, full=not sliding)
    if sliding and made.kind is LayerKind.FULL:
        made = Layer(LayerKind.SLIDING, made.keys, made.values, made.index)
    blocks = text.items("block_configs")
    if blocks and isinstance(blocks[number], dict):  # Nemotron NAS: heads for each layer
        group = Config(blocks[number], text.where).part("attention").number("n_heads_in_group")
        heads = text.number("num_attention_heads")
        if group and heads:
            width = text.number("head_dim", default=text.number("hidden_size") // heads)
            made = Layer(LayerKind.FULL, keys=width * (heads // group),
                         values=width * (heads // group))  # fmt: skip
    if "hybrid" in name or text.model_type in BOTH:
        made = Layer(made.kind, made.keys, made.values, made.index, state)
    return made


def layer_count(text: Config) -> int:
    """Number of layers of the trunk; some configs give only their names."""
    pattern = text.data.get("hybrid_override_pattern")
    names = text.items("layer_types", "layers_block_type") or (
        list(pattern) if isinstance(pattern, str) else []
    )
    return text.number("num_hidden_layers", "n_layer", "n_layers", default=len(names))


def _names(text: Config, total: int) -> list[str] | None:
    """The name of each layer's kind, from lists or rules; None if the config has neither."""
    if text.model_type in RECURRENT:
        return ["linear"] * total
    named = text.items("layer_types", "layers_block_type")
    if len(named) >= total > 0:
        return [str(name) for name in named[:total]]
    pattern = text.data.get("hybrid_override_pattern")
    if isinstance(pattern, str) and len(pattern) >= total > 0:
        return [PATTERN.get(letter, "full") for letter in pattern[:total]]
    kinds = text.items("attn_type_list")
    if len(kinds) >= total > 0:
        return ["full" if kind == 1 else "linear" for kind in kinds[:total]]
    blocks = text.items("block_configs")
    if len(blocks) >= total > 0:
        parts = [Config(b if isinstance(b, dict) else {}, text.where) for b in blocks[:total]]
        no_op = [part.part("attention").data.get("no_op") is True for part in parts]
        return ["none" if flag else "full" for flag in no_op]
    return _by_rule(text, total)


def _by_rule(text: Config, total: int) -> list[str] | None:
    """Names from a number or a list of numbers."""
    of = range(total)
    if linear := text.part("linear_attn_config").items("kda_layers"):
        return ["linear" if i + 1 in linear else "full" for i in of]  # counted from 1
    if period := text.number("attn_layer_period"):
        offset = text.number("attn_layer_offset", default=4)
        return ["full" if i % period == offset else "linear" for i in of]
    for name in ("attn_layer_indices", "full_attn_idxs"):
        if full := text.items(name):
            return ["full" if i in full else "linear" for i in of]
    if cycle := text.items("block_types", "_block_types"):
        return [str(cycle[i % len(cycle)]) for i in of]
    if interval := text.number("full_attention_interval"):
        return ["linear" if (i + 1) % interval else "full" for i in of]
    return _windows(text, total)


def _windows(text: Config, total: int) -> list[str] | None:
    """Names from sliding or chunked windows."""
    of = range(total)
    if text.number("attention_chunk_size"):
        chunked = text.items("no_rope_layers")  # 1 where positions are rotated, and in chunks
        if len(chunked) >= total:
            return ["chunked" if flag else "full" for flag in chunked[:total]]
        period = text.number("no_rope_layer_interval", default=4)
        return ["chunked" if period and (i + 1) % period else "full" for i in of]
    if not text.number("sliding_window"):
        return None if recurrent_state(text) and text.model_type not in BOTH else ["full"] * total
    # some configs give text, one letter per layer
    pattern = text.data.get("sliding_window_pattern", text.data.get("_sliding_window_pattern"))
    period = pattern if type(pattern) is int and pattern > 0 else PERIODS.get(text.model_type, 0)
    if period:
        return ["sliding" if (i + 1) % period else "full" for i in of]
    if text.data.get("use_sliding_window") is True:
        first = text.number("max_window_layers")
        return ["sliding" if i >= first else "full" for i in of]
    return ["sliding"] * total if text.model_type in ALL_SLIDING else None


def recurrent_state(text: Config) -> int:
    """Elements of a recurrent layer's state for one sequence: convolution history and state."""
    hidden = text.number("hidden_size")
    kda = text.part("linear_attn_config")
    if size := kda.number("head_dim") or text.number("linear_head_dim"):
        heads = kda.number("num_heads") or text.number("linear_num_heads")
        taps = kda.number("short_conv_kernel_size") or text.number("linear_conv_kernel_dim")
        taps = max((taps or 4) - 1, 0)
        return 3 * taps * heads * size + heads * size * size
    if length := text.number("conv_L_cache"):
        return hidden * max(length - 1, 0)
    if text.items("attn_type_list") or text.model_type == "minimax":
        heads = text.number("num_attention_heads")
        size = text.number("head_dim", default=hidden // heads if heads else 0)
        return heads * size * size
    if value_heads := text.number("linear_num_value_heads"):
        value, key = text.number("linear_value_head_dim"), text.number("linear_key_head_dim")
        mixed = 2 * text.number("linear_num_key_heads") * key + value_heads * value
        taps = max(text.number("linear_conv_kernel_dim") - 1, 0)
        return taps * mixed + value_heads * key * value
    return _mamba_state(text, hidden)


def _mamba_state(text: Config, hidden: int) -> int:
    """The state of Mamba, or of Mamba 2 (with heads), whose convolution includes the groups."""
    wide = text.number("mamba_d_state", "ssm_state_size", "state_size")
    taps = max(text.number("mamba_d_conv", "conv_kernel", default=4) - 1, 0)
    own = text.model_type in RECURRENT
    heads = text.number("mamba_n_heads", "mamba_num_heads")
    each = text.number("mamba_d_head", "mamba_head_dim")
    if own and text.model_type == "mamba2":
        heads, each = text.number("num_heads"), text.number("head_dim")
    groups = text.number("mamba_n_groups", "n_groups", default=1) if heads else 0
    inner = text.number("mamba_d_ssm") or heads * each
    if own:
        inner = inner or text.number("intermediate_size")
    inner = inner or text.number("mamba_expand", "expand", default=2) * hidden
    return taps * (inner + 2 * groups * wide) + inner * wide if wide else 0


MAX_CONFIG = 4 * 2**20
"""Maximum bytes of a config.json."""


def parse_config(raw: bytes, where: str) -> dict[str, Any]:
    """Parse a config.json. Raises CheckpointError."""
    try:
        config = json.loads(raw.decode())
        if not isinstance(config, dict):
            raise TypeError("it is not an object")
    except (ValueError, RecursionError, TypeError) as error:
        raise CheckpointError(
            f"the model's config is not a JSON object: {str(error)[:120]}",
            where=where,
            hint="fetch it again",
        ) from error
    return config


def hf_shape(config: Mapping[str, Any], where: str) -> ModelShape:
    """Read the shape; `where` is the file's name. Raises CheckpointError for invalid fields."""
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
    names = config.get("architectures")
    architecture = config.get("model_type")
    if isinstance(names, list) and names and isinstance(names[0], str):
        architecture = names[0]
    assumptions: list[str] = []
    return ModelShape(
        architecture=architecture if isinstance(architecture, str) else "",
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


def _vision(config: Any, where: str) -> Vision | None:
    """The vision encoder, with the names that model families use."""
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
