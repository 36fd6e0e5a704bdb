"""A program for a vLLM image: it makes safetensors of a GGUF file, by the image's Transformers.

`/input` is the folder of the file, whose name is the argument; `/out` is the model's folder.
"""

from __future__ import annotations

CONVERT = """\
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

name = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(
    "/input", gguf_file=name, dtype=torch.float32,
    quantization_config=GgufConfig(gguf_file=name, dequantize=True),
)
model.save_pretrained("/out", max_shard_size="250MB")
AutoTokenizer.from_pretrained("/input", gguf_file=name).save_pretrained("/out")
"""
