"""Model shapes from GGUF metadata and config.json, compared with values worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bakehouse.checkpoints.checkpoint import read_path
from bakehouse.checkpoints.hf_config import hf_shape, parse_config
from bakehouse.checkpoints.model_shape import Layer, LayerKind, Vision, gguf_shape
from bakehouse.errors import CheckpointError
from tests.support.checkpoints import explained, llama_metadata, safetensors_bytes, write


def shape_of(architecture: str, **keys: Any) -> Any:
    metadata = {f"{architecture}.{k.replace('__', '.')}": v for k, v in keys.items()}
    return gguf_shape({"general.architecture": architecture, **metadata}, "m.gguf")


def test_gguf_shape_dense() -> None:
    shape = gguf_shape(llama_metadata(), "m.gguf")
    assert shape.layers == (Layer(LayerKind.FULL, keys=32, values=32),) * 2
    assert (shape.heads, shape.kv_heads, shape.context_limit) == (4, 2, 2048)


def test_gguf_shape_kv_heads_for_each_layer() -> None:
    shape = shape_of(
        "deci", block_count=3, embedding_length=64, attention__head_count=4,
        attention__head_count_kv=[4, 0, 1],
    )  # fmt: skip
    assert [layer.keys for layer in shape.layers] == [64, 0, 16]
    assert shape.layers[1].kind is LayerKind.NONE


def test_gguf_shape_sliding_windows() -> None:
    rows: list[tuple[str, Any, list[int]]] = [
        ("gemma3", None, [5, 11]),
        ("gpt-oss", None, [1, 3, 5, 7, 9, 11]),
        ("smallthinker", None, [0, 4, 8]),
        ("gemma3", 4, [3, 7, 11]),
        ("gemma4", [True] * 11 + [False], [11]),
        ("unheard-of", None, list(range(12))),
    ]
    found = []
    for architecture, pattern, _ in rows:
        more = {} if pattern is None else {"attention__sliding_window_pattern": pattern}
        shape = shape_of(
            architecture, block_count=12, embedding_length=64, attention__head_count=4,
            attention__sliding_window=512, **more,
        )  # fmt: skip
        full = [i for i, layer in enumerate(shape.layers) if layer.kind is LayerKind.FULL]
        found.append((architecture, pattern, full))
        assert bool(shape.assumptions) == (architecture == "unheard-of")
    assert found == rows


def test_gguf_shape_glm_5_3_flash() -> None:
    # 45 layers, three linear to one sparse, one MTP layer behind them, MLA with an indexer
    heads = [1 if (i + 1) % 4 == 0 or i == 45 else 0 for i in range(46)]
    shape = shape_of(
        "glm5-next", block_count=46, nextn_predict_layers=1, embedding_length=4096,
        context_length=1_048_576, attention__head_count=32, attention__head_count_kv=heads,
        attention__key_length=512, attention__value_length=512, attention__key_length_mla=192,
        attention__value_length_mla=128, attention__kv_lora_rank=512,
        attention__indexer__key_length=128, kda__head_dim=128, ssm__conv_kernel=4,
        expert_count=288, expert_used_count=8, expert_shared_count=1,
    )  # fmt: skip
    assert len(shape.layers) == 45
    assert shape.count(LayerKind.LATENT) == 11
    assert shape.count(LayerKind.RECURRENT) == 34
    assert shape.layers[3] == Layer(LayerKind.LATENT, keys=512, index=128)
    state = 3 * 3 * 32 * 128 + 128 * 128 * 32
    assert shape.layers[0] == Layer(LayerKind.RECURRENT, state=state)
    assert shape.mtp == (Layer(LayerKind.LATENT, keys=512, index=128),)
    assert (shape.experts, shape.experts_used, shape.latent) == (288, 8, True)


def test_gguf_shape_hybrid_by_interval_and_nemotron() -> None:
    shape = shape_of(
        "qwen3next", block_count=8, embedding_length=64, attention__head_count=4,
        attention__head_count_kv=2, attention__key_length=32, attention__value_length=32,
        ssm__conv_kernel=4, ssm__inner_size=128, ssm__state_size=16, ssm__group_count=2,
    )  # fmt: skip
    kinds = [layer.kind for layer in shape.layers]
    assert kinds == [*[LayerKind.RECURRENT] * 3, LayerKind.FULL] * 2
    assert shape.layers[0].state == 3 * (128 + 2 * 2 * 16) + 16 * 128
    nemotron = shape_of(
        "nemotron_h", block_count=3, embedding_length=64, attention__head_count=4,
        attention__head_count_kv=[0, 0, 2], feed_forward_length=[0, 128, 0],
        ssm__conv_kernel=4, ssm__inner_size=128, ssm__state_size=16, ssm__group_count=2,
    )  # fmt: skip
    assert [x.kind for x in nemotron.layers] == [
        LayerKind.RECURRENT, LayerKind.NONE, LayerKind.FULL
    ]  # fmt: skip


def test_gguf_shape_names_an_invalid_key() -> None:
    invalid: list[tuple[str, Any]] = [
        ("llama.block_count", 10**6),
        ("llama.block_count", "two"),
        ("llama.block_count", True),
        ("llama.block_count", 1.5),
        ("llama.attention.head_count_kv", [1]),
        ("llama.attention.head_count_kv", ["a", "b"]),
        ("llama.nextn_predict_layers", 2),
        ("llama.embedding_length", 2**63),
    ]
    for key, value in invalid:
        with pytest.raises(CheckpointError, match=key):
            gguf_shape({**llama_metadata(), key: value}, "m.gguf")


KEYS = st.sampled_from(
    ["block_count", "attention.head_count", "attention.head_count_kv", "nextn_predict_layers",
     "attention.sliding_window", "attention.sliding_window_pattern", "attention.key_length",
     "full_attention_interval", "ssm.conv_kernel", "shortconv.l_cache", "vocab_size",
     "attention.indexer.types", "attention.shared_kv_layers", "attention.recurrent_layers"]
)  # fmt: skip
VALUES = st.integers(-3, 2**64) | st.text(max_size=3) | st.booleans() | st.floats()
ARCHITECTURES = st.sampled_from(
    ["llama", "gemma3", "qwen3next", "nemotron_h", "mamba", "minimax-01", "glm5-next", "", "x"]
)


@given(ARCHITECTURES, st.dictionaries(KEYS, VALUES | st.lists(VALUES | st.integers(0, 4))))
def test_gguf_shape_any_metadata_gives_a_shape_or_a_clear_error(
    architecture: str, keys: dict[str, Any]
) -> None:
    metadata = {f"{architecture}.{k}": v for k, v in keys.items()}
    explained(lambda: gguf_shape({"general.architecture": architecture, **metadata}, "m.gguf"))


GLM_CONFIG: dict[str, Any] = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "model_type": "glm5_next",
    "vision_config": {"depth": 24},
    "text_config": {
        "num_hidden_layers": 45, "num_nextn_predict_layers": 1, "hidden_size": 4096,
        "num_attention_heads": 32, "num_key_value_heads": 32, "n_routed_experts": 288,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "max_position_embeddings": 1048576,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128,
        "layer_types": (["linear_attention"] * 3 + ["deepseek_sparse_attention"]) * 11
        + ["linear_attention"],
    },
}  # fmt: skip


def test_hf_shape_text_vision_hybrid_layers_and_mtp() -> None:
    shape = hf_shape(GLM_CONFIG, "config.json")
    assert shape.architecture == "Glm5NextForConditionalGeneration"
    assert (len(shape.layers), len(shape.mtp), shape.vision) == (45, 1, True)
    assert shape.count(LayerKind.LATENT) == 11
    assert shape.layers[3] == Layer(LayerKind.LATENT, keys=576, index=128)
    assert (shape.experts, shape.experts_used, shape.experts_shared) == (288, 8, 1)
    assert shape.context_limit == 1_048_576
    assert any("recurrent state" in a for a in shape.assumptions)


def test_hf_shape_glm_5_3_flash() -> None:
    text = {
        **GLM_CONFIG["text_config"], "head_dim": 0, "linear_head_dim": 128, "linear_num_heads": 64,
        "linear_conv_kernel_dim": 4, "moe_intermediate_size": 1536,
    }  # fmt: skip
    vision = {"depth": 24, "hidden_size": 1024, "image_size": 336, "patch_size": [14, 14],
              "out_hidden_size": 1536}  # fmt: skip
    shape = hf_shape({**GLM_CONFIG, "text_config": text, "vision_config": vision}, "config.json")
    state = 3 * 3 * 64 * 128 + 64 * 128 * 128
    assert shape.layers[0] == Layer(LayerKind.RECURRENT, state=state)
    assert (shape.count(LayerKind.RECURRENT), shape.assumptions) == (34, ())
    assert (shape.key_length, shape.feed_forward) == (128, 1536 * 8)
    assert shape.pictures == Vision(24, 1024, 336, 14, 1536)


PLAIN = {"num_hidden_layers": 8, "hidden_size": 64, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 100}  # fmt: skip
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": "auto", "mamba_d_state": 16, "mamba_expand": 2,
          "mamba_n_groups": 1, "mamba_d_conv": 4}  # fmt: skip
IN_MAMBA2 = 3 * (128 + 2 * 16) + 128 * 16
WINDOW = {"sliding_window": 128}


FAMILIES: list[tuple[dict[str, Any], str, int]] = [
    ({}, "FFFFFFFF", 0),
    ({"layer_types": ["full_attention", "linear_attention"] * 4, "linear_num_value_heads": 4,
      "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
      "linear_conv_kernel_dim": 4}, "FRFRFRFR", 3 * (2 * 2 * 16 + 4 * 8) + 4 * 16 * 8),
    ({"full_attention_interval": 4, "linear_num_value_heads": 1, "linear_value_head_dim": 1,
      "linear_key_head_dim": 1}, "RRRFRRRF", 1),
    ({"hybrid_override_pattern": "M-M*E-M*", "mamba_num_heads": 8, "mamba_head_dim": 16,
      "ssm_state_size": 32, "n_groups": 2, "conv_kernel": 4},
     "RNRFNNRF", 3 * (128 + 2 * 2 * 32) + 128 * 32),
    ({"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2,
      "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 2,
      "conv_kernel": 4, "num_hidden_layers": None},
     "RNFNRNFN", 3 * (128 + 2 * 2 * 32) + 128 * 32),
    ({"attn_layer_period": 4, "attn_layer_offset": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
      "mamba_expand": 2}, "RFRRRFRR", 3 * 128 + 128 * 16),
    ({"attn_layer_indices": [2, 5], **MAMBA2}, "RRFRRFRR", IN_MAMBA2),
    ({"layer_types": ["mamba"] * 7 + ["attention"], **MAMBA2}, "RRRRRRRF", IN_MAMBA2),
    ({"model_type": "falcon_h1", **MAMBA2, "mamba_d_ssm": 96}, "FFFFFFFF",
     3 * (96 + 2 * 16) + 96 * 16),
    ({"layer_types": ["conv", "conv", "full_attention", "conv"] * 2, "conv_L_cache": 3},
     "RRFRRRFR", 128),
    ({"full_attn_idxs": [2, 6], "conv_L_cache": 3}, "RRFRRRFR", 128),
    ({"attn_type_list": [0, 0, 0, 1] * 2, "head_dim": 32}, "RRRFRRRF", 4 * 32 * 32),
    ({"linear_attn_config": {"kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8],
                             "head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4}},
     "RRRFRRRF", 3 * 3 * 64 + 4 * 256),
    ({"model_type": "mamba", "state_size": 16, "conv_kernel": 4, "expand": 2}, "RRRRRRRR",
     3 * 128 + 128 * 16),
    ({"block_types": ["recurrent", "recurrent", "attention"]}, "RRFRRFRR", 0),
    ({**WINDOW, "sliding_window_pattern": 4}, "SSSFSSSF", 0),
    ({**WINDOW, "model_type": "gemma3_text"}, "SSSSSFSS", 0),
    ({**WINDOW, "model_type": "gpt_oss"}, "SFSFSFSF", 0),
    ({**WINDOW, "model_type": "mistral"}, "SSSSSSSS", 0),
    ({"model_type": "mistral", "sliding_window": None}, "FFFFFFFF", 0),
    ({**WINDOW, "use_sliding_window": False}, "FFFFFFFF", 0),
    ({**WINDOW, "use_sliding_window": True, "max_window_layers": 6}, "FFFFFFSS", 0),
    ({"attention_chunk_size": 512, "no_rope_layers": [1, 1, 1, 0] * 2}, "SSSFSSSF", 0),
    ({"attention_chunk_size": 512}, "SSSFSSSF", 0),
    ({**WINDOW, "model_type": "gemma3n_text", "num_kv_shared_layers": 3}, "SSSSFNNN", 0),
    ({"block_configs": [{"attention": {"no_op": i % 2 == 1}} for i in range(8)]},
     "FNFNFNFN", 0),
    ({"kv_lora_rank": 32, "qk_rope_head_dim": 8}, "LLLLLLLL", 0),
]  # fmt: skip
"""Fields of a config, the kind of each of 8 layers, and elements of state in a recurrent layer."""


def test_hf_shape_layers_of_each_family() -> None:
    letters = {LayerKind.FULL: "F", LayerKind.SLIDING: "S", LayerKind.RECURRENT: "R",
               LayerKind.LATENT: "L", LayerKind.NONE: "N"}  # fmt: skip
    found = []
    for config, _, _ in FAMILIES:
        shape = hf_shape({**PLAIN, **config}, "config.json")
        kinds = "".join(letters[layer.kind] for layer in shape.layers)
        state = max(layer.state for layer in shape.layers)
        found.append((config, kinds, state))
        assert bool(shape.assumptions) == ("R" in kinds and not state)
    assert found == FAMILIES


def test_hf_shape_counts_unknown_layers_in_full() -> None:
    for config in (
        {"sliding_window": 128},
        {"mamba_d_state": 16, "mamba_expand": 2},
        {"linear_num_value_heads": 4, "linear_value_head_dim": 8, "linear_key_head_dim": 8},
    ):
        shape = hf_shape({**PLAIN, **config}, "config.json")
        assert shape.count(LayerKind.FULL) == 8
        assert any("all are counted as full" in a for a in shape.assumptions)


def test_hf_shape_full_layers_with_their_own_heads() -> None:
    shape = hf_shape(
        {**PLAIN, **WINDOW, "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32,
         "num_global_key_value_heads": 1}, "config.json",
    )  # fmt: skip
    assert shape.layers[0] == Layer(LayerKind.SLIDING, keys=32, values=32)
    assert shape.layers[5] == Layer(LayerKind.FULL, keys=32, values=32)
    groups = [{"attention": {"n_heads_in_group": n}} for n in (1, 2, 4, 1, 1, 1, 1, 1)]
    nas = hf_shape({**PLAIN, "block_configs": groups}, "config.json")
    assert [layer.keys for layer in nas.layers[:3]] == [64, 32, 16]


def test_hf_shape_uses_the_largest_of_several_widths() -> None:
    text = {**PLAIN, "intermediate_size": [128, 256] * 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": [96, 32], "num_experts": 8}  # fmt: skip
    shape = hf_shape({"thinker_config": {"text_config": text}}, "config.json")
    assert (len(shape.layers), shape.feed_forward, shape.experts) == (8, 256, 8)


def test_hf_shape_plain_config_and_layer_types() -> None:
    plain = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 100}  # fmt: skip
    assert hf_shape(plain, "c").layers == (Layer(LayerKind.FULL, keys=32, values=32),) * 2
    sliding = {**plain, "sliding_window": 128,
               "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    assert [x.kind for x in hf_shape(sliding, "c").layers] == [LayerKind.SLIDING, LayerKind.FULL]


def test_hf_config_must_be_a_json_object() -> None:
    for raw in (b"[]", b"{", b"\xff", b"[" * 10**5):
        with pytest.raises(CheckpointError):
            parse_config(raw, "config.json")


@given(
    st.dictionaries(
        st.sampled_from(
            [
                *GLM_CONFIG["text_config"],
                *GLM_CONFIG,
                "sliding_window",
                "head_dim",
                *MAMBA2,
                "hybrid_override_pattern",
                "attn_type_list",
                "block_configs",
                "linear_attn_config",
                "attn_layer_period",
                "attn_layer_offset",
                "attn_layer_indices",
                "block_types",
                "sliding_window_pattern",
                "attention_chunk_size",
                "no_rope_layers",
                "image_size",
                "num_kv_shared_layers",
                "global_head_dim",
                "thinker_config",
                "intermediate_size",
                "full_attention_interval",
                "no_rope_layer_interval",
                "linear_num_value_heads",
            ]
        ),
        VALUES | st.none() | st.lists(VALUES) | st.dictionaries(st.text(max_size=3), VALUES),
    )
)
def test_hf_shape_any_config_gives_a_shape_or_a_clear_error(config: dict[str, Any]) -> None:
    explained(lambda: hf_shape(config, "config.json"))


def test_checkpoint_counts_packed_weights(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.up_proj.qweight": ("I32", [8, 16], bytes(512)),
        "model.layers.0.mlp.up_proj.scales": ("F16", [1, 16], bytes(32)),
        "model.layers.0.mlp.experts.1.w": ("F16", [10], bytes(20)),
        "model.embed_tokens.weight": ("F16", [10], bytes(20)),
        "lm_head.weight": ("F16", [10], bytes(20)),
    }
    write(tmp_path / "model.safetensors", safetensors_bytes(tensors))
    config = {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 1,
              "quantization_config": {"bits": 4}}  # fmt: skip
    write(tmp_path / "config.json", json.dumps(config).encode())
    checkpoint = read_path(tmp_path)
    assert checkpoint.parameters == 8 * 16 * 8 + 30
    assert checkpoint.bytes_per_token == 512 + 32 + 20 // 4 + 20
    assert checkpoint.quantisation == "I32"
