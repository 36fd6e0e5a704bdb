"""Safetensors headers: tensor offsets read without loading a tensor.

The rules are those of the safetensors library (0.7): a header of at most 100 MB, tensors that fill
the file without gaps. Files that the library refuses are refused here, with the cause.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bakehouse.checkpoints.gguf import SAFETENSORS_BITS, Tensor
from bakehouse.checkpoints.reader import ByteSource, damaged, wrong_format
from bakehouse.errors import CheckpointError

MAX_HEADER = 100_000_000
"""Bytes: the limit of the format."""
MAX_TENSORS = 500_000
MAX_PUNCTUATION = 16 * MAX_TENSORS
"""Brackets and commas in a header: each may cost an object, and a tensor needs about nine."""


@dataclass(frozen=True)
class SafetensorsHeader:
    """What a safetensors file declares; tensors in the order of their offsets."""

    name: str
    file_size: int
    metadata: dict[str, str]
    tensors: tuple[Tensor, ...]
    data_start: int


def read_safetensors(source: ByteSource) -> SafetensorsHeader:
    """Read a header. Raises CheckpointError that names the cause."""
    first = source.read(0, min(512, source.size))
    length = int.from_bytes(first[:8], "little")
    if len(first) < 9 or first[8:9] != b"{" or length > MAX_HEADER:
        raise wrong_format(source, "safetensors", first)
    if length > source.size - 8:
        raise _corrupt(
            source, f"truncated: its header takes {length} bytes, the file has {source.size}"
        )
    raw = source.read(8, length)
    if len(raw) < length:
        raise _corrupt(source, "truncated: the file ends before its size says so")
    entries = _parse(source, raw)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _corrupt(source, "its __metadata__ is not a map of text to text")
    for text in (*entries, *metadata, *metadata.values()):
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            raise _corrupt(source, f"the name {text[:60]!r} is not text")
    start = 8 + length
    tensors = sorted(
        (_tensor(source, name, entry, start) for name, entry in entries.items()),
        key=lambda t: (t.offset, t.size),
    )
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            kind = "overlaps another one" if tensor.offset < end else "leaves a gap before it"
            raise _corrupt(source, f"the tensor {tensor.name!r} {kind}")
        end += tensor.size
    if end > source.size:
        raise _corrupt(
            source, f"truncated: its tensors end at byte {end}, the file has {source.size}"
        )
    if end < source.size:
        raise _corrupt(source, f"{source.size - end} bytes follow its last tensor")
    return SafetensorsHeader(source.name, source.size, metadata, tuple(tensors), start)


def _parse(source: ByteSource, raw: bytes) -> dict[str, Any]:
    if sum(raw.count(mark) for mark in (b",", b"[", b"{")) > MAX_PUNCTUATION:
        raise _corrupt(source, f"its header describes more than {MAX_TENSORS} tensors")
    try:
        entries = json.loads(raw.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _corrupt(source, f"its header is not JSON: {str(error)[:120]}") from error
    if not isinstance(entries, dict):
        raise _corrupt(source, "its header is not a JSON object")
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key!r}")
            seen.add(key)
    return made


def _whole_numbers(value: Any) -> bool:
    # bool is a subclass of int, and `true` is not a length
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _tensor(source: ByteSource, name: str, entry: Any, start: int) -> Tensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _corrupt(source, f"the tensor {name!r} needs dtype, shape and data_offsets only")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = SAFETENSORS_BITS.get(kind) if isinstance(kind, str) else None
    if bits is None:
        raise _corrupt(source, f"the tensor {name!r} has the unknown type {kind!r}")
    if not _whole_numbers(shape) or not _whole_numbers(offsets) or len(offsets) != 2:
        raise _corrupt(source, f"shape or data_offsets of tensor {name!r} are not whole numbers")
    total = bits
    for dimension in shape:
        total *= dimension
        if total >= 2**64:
            raise _corrupt(source, f"the tensor {name!r} has an impossible shape")
    begin, end = offsets
    if total % 8 or end - begin != total // 8:
        raise _corrupt(
            source,
            f"the tensor {name!r} takes {end - begin} bytes, its shape and type {total / 8:g}",
        )
    return Tensor(name, tuple(shape), kind, start + begin, end - begin)


def _corrupt(source: ByteSource, what: str) -> CheckpointError:
    return damaged(source, "safetensors", what)
