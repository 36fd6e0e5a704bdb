"""Checkpoints of the shipped recipes' architectures, tiny and random: nothing they say is right.

Shapes and names of tensors as vLLM 0.32 reads them. Random weights load, run and answer HTTP 200.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 64, 128, 4, 4, 2, 32
VOCABULARY = 49152
"""SmolLM2's, whose tokenizer is used."""
LENGTH = 32768
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
    "max_position_embeddings": LENGTH, "torch_dtype": "float32", "rope_theta": 500000.0,
    "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
DFLASH = {"mask_token_id": 3, "target_layer_ids": [1, 3]}
Tensors = dict[str, np.ndarray[Any, Any]]


def _layer(at: str, rng: np.random.Generator, norms: Mapping[str, int]) -> Tensors:
    """One layer: attention, MLP, and norms of the sizes given, as ones."""
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    made = {f"{at}.{name}.weight": _random(rng, *shape) for name, shape in shapes.items()}
    return {**made, **{f"{at}.{n}.weight": np.ones(s, np.float32) for n, s in norms.items()}}


def _random(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return (rng.standard_normal(shape) * 0.05).astype(np.float32)


def _whole(at: str, rng: np.random.Generator) -> Tensors:
    return {
        f"{at}embed_tokens.weight": _random(rng, VOCABULARY, HIDDEN),
        "lm_head.weight": _random(rng, VOCABULARY, HIDDEN),
        f"{at}norm.weight": np.ones(HIDDEN, np.float32),
    }


def _write(folder: Path, config: Mapping[str, Any], tensors: Tensors, tokenizer: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer / name, folder)
    return folder


def glimmer(folder: Path, tokenizer: Path) -> Path:
    """MuseGlimmerForConditionalGeneration without a vision tower."""
    rng = np.random.default_rng(1)
    at = "model.language_model."
    tensors = _whole(at, rng)
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    for number in range(LAYERS):
        layer = f"{at}layers.{number}"
        tensors |= _layer(layer, rng, {f"{name}_layernorm": HIDDEN for name in norms})
        tensors[f"{layer}.self_attn.gate_proj.weight"] = _random(rng, HEADS * HEAD, HIDDEN)
    text = {**BASE, "model_type": "muse_glimmer_text", "num_hidden_layers": LAYERS}
    config = {
        "architectures": ["MuseGlimmerForConditionalGeneration"], "model_type": "muse_glimmer",
        "text_config": text, "has_vision": False, "image_token_index": 5,
        "torch_dtype": "float32",
    }  # fmt: skip
    return _write(folder, config, tensors, tokenizer)


def qwen(folder: Path, tokenizer: Path) -> Path:
    """Qwen3ForCausalLM, of the same shape."""
    rng = np.random.default_rng(2)
    tensors = _whole("model.", rng)
    for number in range(LAYERS):
        tensors |= _layer(f"model.layers.{number}", rng, _QWEN_NORMS)
    config = {
        **BASE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
        "num_hidden_layers": LAYERS, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    return _write(folder, config, tensors, tokenizer)


_QWEN_NORMS = {
    "input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN,
    "self_attn.q_norm": HEAD, "self_attn.k_norm": HEAD,
}  # fmt: skip


def drafter(architecture: str, model_type: str) -> dict[str, bytes]:
    """A DFlash drafter, by file: two layers, fed by two layers of its target."""
    rng = np.random.default_rng(3)
    tensors: Tensors = {
        "fc.weight": _random(rng, HIDDEN, 2 * HIDDEN),
        "hidden_norm.weight": np.ones(HIDDEN, np.float32),
        "norm.weight": np.ones(HIDDEN, np.float32),
    }
    for number in range(2):
        tensors |= _layer(f"layers.{number}", rng, _QWEN_NORMS)
    config = {
        **BASE, "architectures": [architecture], "model_type": model_type, "hidden_act": "silu",
        "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "block_size": 16,
        "tie_word_embeddings": False, "dflash_config": DFLASH,
    }  # fmt: skip
    return {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": save(tensors, {"format": "pt"}),
    }
