"""A vision projector of random weights, small, that llama.cpp loads beside SmolLM2."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

TEXT = 576
"""Width of SmolLM2-135M's embeddings."""
WIDTH, FEED, HEADS = 32, 64, 2
PIXELS, PATCH = 128, 16


def write_projector(path: Path, seed: int = 0) -> Path:
    """Write a LLaVA-style projector (`mlp`): one vision layer, two layers to the text."""
    dice = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_file_type(0)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    writer.add_string("clip.projector_type", "mlp")
    for key, value in {
        "embedding_length": WIDTH, "feed_forward_length": FEED, "block_count": 1,
        "attention.head_count": HEADS, "projection_dim": TEXT, "image_size": PIXELS,
        "patch_size": PATCH,
    }.items():  # fmt: skip
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5] * 3)
    writer.add_array("clip.vision.image_std", [0.5] * 3)
    square = {
        f"v.blk.0.{name}": (WIDTH, WIDTH) for name in ("attn_q", "attn_k", "attn_v", "attn_out")
    }
    layers: dict[str, tuple[int, ...]] = {
        "v.patch_embd": (WIDTH, 3, PATCH, PATCH),
        "v.position_embd": ((PIXELS // PATCH) ** 2, WIDTH),
        **square, "v.blk.0.ln1": (WIDTH,), "v.blk.0.ln2": (WIDTH,),
        "v.blk.0.ffn_up": (FEED, WIDTH), "v.blk.0.ffn_down": (WIDTH, FEED), "v.post_ln": (WIDTH,),
        "mm.0": (TEXT, WIDTH), "mm.2": (TEXT, TEXT),
    }  # fmt: skip
    for name, shape in layers.items():
        scale = 1.0 if len(shape) == 1 else 0.02
        weights = (dice.standard_normal(shape) * scale).astype(np.float32)
        writer.add_tensor(f"{name}.weight", weights)
        if name != "v.position_embd":
            bias = "v.patch_embd.bias" if name == "v.patch_embd" else f"{name}.bias"
            writer.add_tensor(bias, np.zeros(shape[0], dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_spoiled(model: Path, path: Path) -> Path:
    """Copy a model with one feed-forward matrix of a middle layer zeroed: it drafts other words."""
    path.write_bytes(model.read_bytes())
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path, "r+").tensors}
    for layer in (8, 10, 12):
        tensors[f"blk.{layer}.ffn_down.weight"].data[:] = 0
    return path
