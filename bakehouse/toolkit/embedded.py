"""What a CUDA library holds: linked libraries, run path, and the architectures inside.

Read from the ELF file itself, since cuobjdump comes with some toolkits and not with others. The
fat binaries lie one after the other in section `.nv_fatbin`, each with a 16-byte header (magic
0xBA55ED50, version, header size, size), followed by entries: kind (1 PTX, 2 machine code), header
size, payload size; at byte 28 the architecture's number, and in the flags at byte 40 bit 20 for
`a` and bit 21 for `f`. The layout is not documented by NVIDIA: it was read off files that nvcc
13.0 made for known architectures (compressed ones too) and agrees with what cuobjdump lists.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bakehouse.elf import Dynamic, read_dynamic

MAGIC = 0xBA55ED50
FLAG_SPECIFIC, FLAG_FAMILY = 1 << 20, 1 << 21
PTX, MACHINE_CODE = 1, 2


class NotElf(Exception):
    """The file is no 64-bit little-endian ELF file, or is cut short."""


@dataclass(frozen=True)
class CudaFile:
    """An ELF file's dynamic links and embedded GPU code."""

    needed: tuple[str, ...]
    run_path: tuple[str, ...]
    embedded: frozenset[str]
    """`sm_90a` for machine code, `compute_90` for PTX."""


@dataclass(frozen=True)
class _Section:
    name: str
    offset: int
    size: int


def read_cuda_file(path: Path) -> CudaFile:
    """Read one ELF file; NotElf where it is none."""
    with path.open("rb") as file:
        if path.stat().st_size < 64:
            raise NotElf(f"{path} is too short for an ELF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                sections = _sections(data)
                embedded = frozenset(
                    name
                    for section in sections
                    if section.name == ".nv_fatbin"
                    for name in _architectures(data, section.offset, section.size)
                )
            except (struct.error, IndexError, ValueError) as error:
                raise NotElf(f"{path} is cut short or damaged: {error}") from error
    try:
        dynamic = read_dynamic(path) or Dynamic()
    except ValueError as error:
        raise NotElf(str(error)) from error
    run_path = tuple(entry for entry in (dynamic.run_path or "").split(":") if entry)
    return CudaFile(dynamic.needed, run_path, embedded)


def _sections(data: mmap.mmap) -> list[_Section]:
    if data[:6] != b"\x7fELF\x02\x01":
        raise NotElf("no 64-bit little-endian ELF file")
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, count, names_at = struct.unpack_from("<HHH", data, 58)
    rows = [struct.unpack_from("<IIQQQQII", data, offset + i * size) for i in range(count)]
    names = rows[names_at][4]
    return [_Section(_string(data, names + r[0]), r[4], r[5]) for r in rows]


def _string(data: mmap.mmap, start: int) -> str:
    end = data.find(b"\0", start)
    if end < 0:
        raise ValueError("a string does not end")
    return data[start:end].decode(errors="replace")


def _architectures(data: mmap.mmap, start: int, size: int) -> Iterator[str]:
    """Walk the fat binaries of a section; alignment leaves zero bytes between them."""
    position, end = start, start + size
    while position + 16 <= end:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, position)
        if magic != MAGIC:
            position += 8
            continue
        entry, last = position + header, position + header + length
        if last > end:
            raise ValueError("a fat binary is longer than its section")
        while entry < last:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, entry)
            if entry_header < 48:
                raise ValueError("a fat binary's entry has no readable header")
            (number,) = struct.unpack_from("<I", data, entry + 28)
            (flags,) = struct.unpack_from("<Q", data, entry + 40)
            letter = "a" if flags & FLAG_SPECIFIC else "f" if flags & FLAG_FAMILY else ""
            if kind in (PTX, MACHINE_CODE):
                yield f"{'sm' if kind == MACHINE_CODE else 'compute'}_{number}{letter}"
            entry += entry_header + payload
        position = last + (-last) % 8
