"""A GGUF file as numbers that can be changed in place, and rewritten in another element type.

Places come from `bakehouse.checkpoints`; what the packed types mean comes from the `gguf` package.
"""

from __future__ import annotations

import fnmatch
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from bakehouse.checkpoints.gguf import GGML_BY_NAME, GGML_TYPES, GgufHeader, Tensor, read_gguf
from bakehouse.checkpoints.reader import FileSource

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def header_of(path: Path) -> GgufHeader:
    """Read a file's header."""
    with FileSource(path) as source:
        return read_gguf(source)


class Weights:
    """One GGUF file, mapped: to read it, to change it, or to change only what is in memory."""

    def __init__(self, path: Path, mode: Literal["r", "r+", "c"] = "r") -> None:
        self.path = path
        self.header = header_of(path)
        self.tensors = {tensor.name: tensor for tensor in self.header.tensors}
        self.bytes: Bytes = np.memmap(path, np.uint8, mode)

    def names(self, pattern: str) -> list[str]:
        """Names that fit a glob; at least one, since an edit that changes nothing is no mutant."""
        names = fnmatch.filter(self.tensors, pattern)
        if not names:
            raise LookupError(f"no tensor fits {pattern}")
        return names

    def raw(self, name: str) -> Bytes:
        """The bytes of a tensor, one row of the matrix a row (a vector is one row)."""
        tensor = self.tensors[name]
        rows = tensor.shape[1] if len(tensor.shape) > 1 else 1
        return self.bytes[tensor.offset : tensor.offset + tensor.size].reshape(rows, -1)

    def scales(self, name: str) -> NDArray[np.float16]:
        """Scale and minimum of each block of a Q4_1 tensor: (rows, blocks, 2).

        A view: 20 bytes a block, of which the first four are two half floats.
        """
        raw = self._of_type(name, "Q4_1")
        return np.ndarray(
            (raw.shape[0], raw.shape[1] // 20, 2), np.float16, raw.data, 0, (raw.shape[1], 20, 2)
        )

    def nibbles(self, name: str) -> Bytes:
        """The packed 4-bit values of a Q4_1 tensor: (rows, blocks, 16). A view."""
        raw = self._of_type(name, "Q4_1")
        return raw.reshape(raw.shape[0], -1, 20)[:, :, 4:]

    def vector(self, name: str) -> Floats:
        """The values of an F32 tensor. A view."""
        return self._of_type(name, "F32").reshape(-1).view(np.float32)

    def values(self, name: str) -> Floats:
        """The values of any tensor, a copy: (rows, columns)."""
        return _values(self, self.tensors[name])

    def put(self, name: str, values: Floats) -> None:
        """Write values back in the tensor's own type."""
        self.raw(name)[:] = quantize(values, _type(self.tensors[name].type)).view(np.uint8)

    def _of_type(self, name: str, kind: str) -> Bytes:
        if self.tensors[name].type != kind:
            raise LookupError(f"{name} is {self.tensors[name].type}, not {kind}")
        return self.raw(name)

    def data(self) -> Bytes:
        """All tensor data. A view."""
        return self.bytes[self.header.data_start : self.header.data_end]

    def token_at(self, text: str) -> int:
        """Offset in the file of a token's text in the vocabulary."""
        return self._find(text) + 8

    def token_types(self) -> NDArray[np.int32]:
        """The kind of each token: 1 normal, 3 control. A view; the array follows its key."""
        start = self._find("tokenizer.ggml.token_type")
        start += 8 + len("tokenizer.ggml.token_type")
        kind, element, count = struct.unpack_from("<IIQ", self.bytes.data, start)
        if (kind, element) != (9, 5):
            raise LookupError("the token types are no array of int32")
        return np.ndarray((count,), np.int32, self.bytes.data, start + 16)

    def _find(self, text: str) -> int:
        """Offset of a string with its length before it, in the header."""
        head = self.bytes[: self.header.data_start].tobytes()
        encoded = text.encode()
        found = head.find(struct.pack("<Q", len(encoded)) + encoded)
        if found < 0:
            raise LookupError(text)
        return found


def _type(name: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[name]


def _values(weights: Weights, tensor: Tensor) -> Floats:
    raw = weights.raw(tensor.name)
    if tensor.type == "F32":
        return raw.view(np.float32).copy()
    values: Floats = dequantize(raw, _type(tensor.type)).astype(np.float32)
    return values


def rewrite(source: Path, target: Path, kind: str) -> None:
    """Write a model again with all its matrices in another element type; norms stay F32."""
    weights = Weights(source)
    head, infos, offset = _metadata(weights), b"", 0
    number = next(n for n, known in GGML_TYPES.items() if known.name == kind)
    new = GGML_BY_NAME[kind.lower()]
    for tensor in weights.header.tensors:
        vector = len(tensor.shape) == 1
        name = tensor.name.encode()
        shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        infos += struct.pack("<Q", len(name)) + name + shape
        infos += struct.pack("<IQ", 0 if vector else number, offset)
        size = tensor.size if vector else tensor.elements // new.block * new.size
        offset += size + -size % 32
    with target.open("wb") as out:
        out.write(head + infos)
        out.write(bytes(-out.tell() % 32))
        for block in _converted(weights, kind):
            out.write(block)
            out.write(bytes(-len(block) % 32))


def _metadata(weights: Weights) -> bytes:
    """Everything before the list of tensors, as it stands."""
    first = weights.header.tensors[0].name.encode()
    head = weights.bytes[: weights.header.data_start].tobytes()
    return head[: head.index(struct.pack("<Q", len(first)) + first)]


def _converted(weights: Weights, kind: str) -> Iterator[bytes]:
    for tensor in weights.header.tensors:
        if len(tensor.shape) == 1:
            yield weights.raw(tensor.name).tobytes()
        else:
            yield quantize(weights.values(tensor.name), _type(kind)).tobytes()


def requantise(tool: Path, source: Path, target: Path, kind: str) -> None:
    """Let llama-quantize make another quantisation, with one thread."""
    argv = (str(tool), "--allow-requantize", str(source), str(target), kind, "1")
    subprocess.run(argv, check=True, capture_output=True, timeout=300)
