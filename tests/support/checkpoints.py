"""Weight files made for tests, byte by byte, so that each field can also be made wrong."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bakehouse.errors import BakehouseError

Entry = tuple[str, Sequence[int], int, bytes]
"""Tensor name, shape (fastest dimension first), ggml type, data."""


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


_NUMBERS = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}


def gguf_value(value: Any) -> bytes:
    """Type and value, the type told from the Python type."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if not isinstance(value, list):
        number, code = _NUMBERS[type(value)]
        return struct.pack("<I" + code, number, value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    number, code = _NUMBERS[type(value[0])]
    return struct.pack(f"<IIQ{len(value)}{code}", 9, number, len(value), *value)


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Sequence[Entry] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    offsets: Sequence[int] | None = None,
) -> bytes:
    """A GGUF file; `offsets` stand in place of the right ones."""
    head = bytearray(b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)))
    for key, value in metadata.items():
        head += text(key) + gguf_value(value)
    data = bytearray()
    for i, (name, shape, kind, raw) in enumerate(tensors):
        offset = offsets[i] if offsets else len(data)
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        data += raw + b"\0" * (-len(raw) % alignment)
    return bytes(head) + b"\0" * (-len(head) % alignment) + bytes(data)


def f32(name: str, *shape: int) -> Entry:
    """A tensor of zeros."""
    return name, shape, 0, bytes(4 * math.prod(shape))


def llama_metadata(**changes: Any) -> dict[str, Any]:
    """A small llama's metadata, complete with tokenizer and chat template."""
    base: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 2048,
        "llama.embedding_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.feed_forward_length": 128,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["a", "b", "c"],
        "tokenizer.chat_template": "{{ messages }}",
    }
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return {k: v for k, v in {**base, **named}.items() if v is not None}


def safetensors_bytes(
    tensors: Mapping[str, tuple[str, Sequence[int], bytes]],
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """A safetensors file: name to dtype, shape and data."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {
            "dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(raw)]
        }  # fmt: skip
        at += len(raw)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + b"".join(raw for _, _, raw in tensors.values())


def explained(call: Callable[[], object]) -> None:
    """Make a call that may give a value or an error of ours with a hint, and nothing else."""
    error: BakehouseError | None = None
    try:
        call()
    except BakehouseError as raised:
        error = raised
    assert error is None or (error.what and error.hint)


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path
