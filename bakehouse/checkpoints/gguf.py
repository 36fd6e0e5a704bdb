"""GGUF headers and tensor types.

Any input gives a header or a CheckpointError, in time and memory bounded by `MAX_HEADER`: no length
is trusted before it fits in the rest of the file. Format: ggml/docs/gguf.md; limits on keys,
dimensions and alignment: llama.cpp's gguf.cpp.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from bakehouse.checkpoints.reader import ByteSource, damaged, wrong_format
from bakehouse.errors import CheckpointError


class Tensor(NamedTuple):
    """One tensor: shape in elements in the order of the file, offset and size in bytes."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    """From the start of the file."""
    size: int
    """Bytes."""

    @property
    def elements(self) -> int:
        """Number of values (for packed formats, of stored ones)."""
        return math.prod(self.shape)


class GgmlType(NamedTuple):
    """A ggml element type: `block` elements take `size` bytes."""

    name: str
    block: int
    size: int


GGML_TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 36),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
    42: GgmlType("Q2_0", 64, 18),
}
"""By number in the file; from ggml/include/ggml.h and ggml-common.h, llama.cpp build 11434."""

GGML_BY_NAME = {kind.name.lower(): kind for kind in GGML_TYPES.values()}

REMOVED_GGML_TYPES = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip
"""Types that llama.cpp once wrote and no longer reads."""

SAFETENSORS_BITS: dict[str, int] = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
"""Bits per element; the types of the safetensors format, version 0.7."""


MAX_HEADER = 256 * 2**20
"""Bytes: the largest tokenizers take about 20 MiB."""
MAX_TENSORS = 500_000
MAX_STRING = 4 * 2**20
"""Bytes of one string; the longest chat templates take about 0.1 MiB."""
MAX_KEYS = 65_536
"""Metadata keys; files have about 50."""
MAX_KEPT = 4096
"""Maximum elements of an array that is kept; of longer ones only type and length are."""
MAX_KEPT_IN_ALL = 2**18
"""Maximum elements of all kept arrays together; later arrays are skipped like long ones."""
MAX_KEY = 65_535
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_COUNTS = struct.Struct("<QQ")


class Array(NamedTuple):
    """An array too long to keep: its element type's number and how many elements it has."""

    type: int
    length: int


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file declares."""

    name: str
    file_size: int
    version: int
    metadata: dict[str, Any]
    """Numbers, booleans, strings, lists of these, or an `Array`."""
    tensors: tuple[Tensor, ...]
    data_start: int
    data_end: int
    """One past the last tensor's last byte."""

    @property
    def trailing(self) -> int:
        """Bytes after the last tensor; more than padding means that something was appended."""
        return max(0, self.file_size - self.data_end)

    @property
    def split_count(self) -> int:
        """Number of files the model is split into, as declared; 1 by default."""
        count = self.metadata.get("split.count", 1)
        return count if isinstance(count, int) and count > 1 else 1

    @property
    def split_number(self) -> int:
        """This file's index among the splits, from 0."""
        number = self.metadata.get("split.no", 0)
        return number if isinstance(number, int) else 0


class _Cursor:
    """Reads a source forward through one window of bytes."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.limit = min(source.size, MAX_HEADER)
        self.may_keep = MAX_KEPT_IN_ALL
        self._window = b""
        self._base = 0
        self._at = 0

    @property
    def position(self) -> int:
        """Offset in the file of the next byte."""
        return self._base + self._at

    @property
    def left(self) -> int:
        """Bytes left of the file, or of the largest header allowed."""
        return self.limit - self.position

    def fail(self, what: str) -> CheckpointError:
        return damaged(self.source, "GGUF", what, self.position)

    def need(self, length: int, what: str) -> None:
        """Refuse a length that does not fit."""
        if length > self.left:
            if self.limit == self.source.size:
                raise self.fail(f"truncated: {what} needs {length} bytes, {self.left} are left")
            raise self.fail(f"{what} of {length} bytes exceeds the header limit of {MAX_HEADER}")

    def take(self, length: int, what: str) -> bytes:
        """Return the next bytes."""
        self.need(length, what)
        self.fill(length)
        start = self._at
        self._at += length
        return self._window[start : self._at]

    def fill(self, length: int) -> None:
        """Load at least `length` bytes into the window; the caller has checked that they exist."""
        if len(self._window) - self._at >= length:
            return
        at = self.position
        wanted = max(length, min(self.source.chunk, self.limit - at))
        window = self.source.read(at, wanted)
        while len(window) < length:
            more = self.source.read(at + len(window), wanted - len(window))
            if not more:
                raise self.fail("truncated: the file ends before its size says so")
            window += more
        self._window, self._base, self._at = window, at, 0

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def skip(self, length: int, what: str) -> None:
        """Skip bytes without reading those outside the window."""
        self.need(length, what)
        self._at += length
        if self._at > len(self._window):
            self._base, self._at, self._window = self.position, 0, b""

    def text(self, what: str, most: int) -> str:
        length = self.u64(what)
        if length > most:
            self.need(length, what)
            raise self.fail(f"{what} has {length} bytes, more than {most}")
        return self.take(length, what).decode(errors="replace")

    def skip_strings(self, count: int, what: str) -> None:
        """Skip `count` strings; this loop has to be fast (tokenizer tables)."""
        unpack = _U64.unpack_from
        while count:
            self.need(8 * count, what)
            self.fill(8)
            window, at = self._window, self._at
            last = len(window) - 8
            while count and at <= last:
                at += 8 + unpack(window, at)[0]
                count -= 1
            ahead, self._at = at - self._at, self._at
            self.skip(ahead, what)


def read_gguf(source: ByteSource) -> GgufHeader:
    """Read a header. Raises CheckpointError that names the cause."""
    cursor = _Cursor(source)
    head = source.read(0, 512)
    if head[:4] != b"GGUF":
        raise wrong_format(source, "GGUF", head)
    cursor.skip(4, "magic")
    version = _version(cursor)
    tensor_count, key_count = _COUNTS.unpack(cursor.take(16, "the counts"))
    if tensor_count > MAX_TENSORS or tensor_count * 24 > cursor.left:
        raise cursor.fail(f"{tensor_count} tensors are declared, more than the file can hold")
    if key_count > MAX_KEYS or key_count * 13 > cursor.left:
        raise cursor.fail(f"{key_count} metadata keys are declared, more than the file can hold")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text("a metadata key", MAX_KEY)
        if not key or key in metadata:
            raise cursor.fail(f"duplicate metadata key {key!r}" if key else "empty metadata key")
        metadata[key] = _value(cursor, key)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, not a power of two")
    relative: dict[str, Tensor] = {}
    for _ in range(tensor_count):
        tensor = _tensor(cursor, alignment)
        if tensor.name in relative:
            raise cursor.fail(f"duplicate tensor {tensor.name!r}")
        relative[tensor.name] = tensor
    start = cursor.position + -cursor.position % alignment
    tensors = tuple(t._replace(offset=start + t.offset) for t in relative.values())
    end = start if tensors else cursor.position
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.size)):
        if tensor.offset < end:
            raise damaged(source, "GGUF", f"the tensor {tensor.name!r} overlaps another one")
        end = tensor.offset + tensor.size
        if end > source.size:
            raise damaged(
                source,
                "GGUF",
                f"truncated: the tensor {tensor.name!r} ends at byte {end}, the file has "
                f"{source.size}",
            )
    return GgufHeader(source.name, source.size, version, metadata, tensors, start, end)


def _version(cursor: _Cursor) -> int:
    version = cursor.u32("the version")
    if version != 3:
        what = f"unsupported GGUF version {version}; only version 3 can be read"
        hint = "convert the model again with a current llama.cpp"
        if version and version & 0xFFFF == 0:
            what = "this GGUF file is big-endian; only little-endian files are supported"
            hint = "convert it with llama.cpp's gguf_convert_endian.py, or get the usual file"
        elif version > 3:
            hint = "this file is newer than this Bakehouse; use a version 3 file"
        raise CheckpointError(what, where=cursor.source.name, hint=hint)
    return version


def _value(cursor: _Cursor, key: str) -> Any:
    kind = cursor.u32(f"the type of {key!r}")
    if code := _SCALARS.get(kind):
        return _scalars(cursor, key, kind, code, 1)[0]
    if kind == _STRING:
        return cursor.text(f"the value of {key!r}", MAX_STRING)
    if kind != _ARRAY:
        raise cursor.fail(f"the metadata key {key!r} has the unknown type {kind}")
    element, count = cursor.u32(f"the type of {key!r}"), cursor.u64(f"the length of {key!r}")
    what = f"the array {key!r}"
    if code := _SCALARS.get(element):
        width = struct.calcsize("<" + code)
        cursor.need(count * width, what)
        if count <= min(MAX_KEPT, cursor.may_keep):
            cursor.may_keep -= count
            return _scalars(cursor, key, element, code, count)
        cursor.skip(count * width, what)
    elif element == _STRING:
        cursor.need(count * 8, what)
        if count <= min(64, cursor.may_keep):
            cursor.may_keep -= count
            return [cursor.text(what, MAX_STRING) for _ in range(count)]
        cursor.skip_strings(count, what)
    else:
        raise cursor.fail(f"{what} has elements of type {element}, which arrays cannot hold")
    return Array(element, count)


def _scalars(cursor: _Cursor, key: str, kind: int, code: str, count: int) -> list[Any]:
    form = struct.Struct(f"<{count}{code}")
    values = form.unpack(cursor.take(form.size, f"the value of {key!r}"))
    if kind == _BOOL:
        if any(v > 1 for v in values):
            raise cursor.fail(f"the metadata key {key!r} has a boolean that is neither 0 nor 1")
        return [bool(v) for v in values]
    return list(values)


def _tensor(cursor: _Cursor, alignment: int) -> Tensor:
    """Read one entry; its offset counts from the start of the data section."""
    name = cursor.text("a tensor's name", MAX_KEY)
    dimensions = cursor.u32(f"the shape of {name!r}")
    if dimensions > MAX_DIMENSIONS:
        raise cursor.fail(f"the tensor {name!r} has {dimensions} dimensions")
    shape = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions, f"the shape of {name!r}"))
    number = cursor.u32(f"the type of {name!r}")
    offset = cursor.u64(f"the offset of {name!r}")
    kind = GGML_TYPES.get(number)
    if kind is None:
        raise CheckpointError(
            f"the tensor {name!r} has the type {REMOVED_GGML_TYPES[number]}, which llama.cpp no "
            "longer reads"
            if number in REMOVED_GGML_TYPES
            else f"the tensor {name!r} has the unknown type {number}",
            where=f"{cursor.source.name}, byte {cursor.position}",
            hint="use another quantisation, or one made with a current llama.cpp",
        )
    elements, row = math.prod(shape), shape[0] if shape else 1
    if elements >= 2**63:
        raise cursor.fail(f"the tensor {name!r} has the impossible shape {list(shape)}")
    if row % kind.block:
        raise cursor.fail(
            f"the tensor {name!r} has rows of {row}, not whole {kind.name} blocks of {kind.block}"
        )
    if offset % alignment:
        raise cursor.fail(f"the tensor {name!r} is at {offset}, not a multiple of {alignment}")
    return Tensor(name, shape, kind.name, offset, elements // kind.block * kind.size)
