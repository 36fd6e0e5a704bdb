"""Read an ELF file: the libraries that it loads, its run path, and the GPU code inside.

Sources: the System V ABI, chapters 4 and 5, for ELF. The fat binaries of CUDA lie one after the
other in section `.nv_fatbin`, each with a 16-byte header (magic 0xBA55ED50, version, header size,
size), followed by entries: kind (1 PTX, 2 machine code), header size, payload size; at byte 28 the
architecture's number, and in the flags at byte 40 bit 20 for `a` and bit 21 for `f`. NVIDIA does
not document that layout: it was read off files that nvcc 13.0 made for known architectures
(compressed ones too) and agrees with what cuobjdump lists, which not every toolkit has.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MAGIC = 0xBA55ED50
FLAG_SPECIFIC, FLAG_FAMILY = 1 << 20, 1 << 21
KINDS = {1: "compute", 2: "sm"}
_DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 14, 15, 29
_PT_LOAD, _PT_DYNAMIC = 1, 2


class NotElf(ValueError):
    """The file is not a 64-bit little-endian ELF file, or it is damaged."""


@dataclass(frozen=True)
class ElfFile:
    """Dynamic links of an ELF file, empty for a static one, and its embedded GPU code."""

    needed: tuple[str, ...] = ()
    soname: str | None = None
    run_path: tuple[str, ...] = ()
    """Entries of DT_RUNPATH, or of DT_RPATH if only that exists."""
    embedded: frozenset[str] = frozenset()
    """`sm_90a` for machine code, `compute_90` for PTX; read by `read_cuda_file` only."""


def read_dynamic(path: Path) -> ElfFile | None:
    """Read the dynamic section; None for a file of another format. Raises NotElf if damaged."""
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            return None
    with _mapped(path) as data:
        return _dynamic(data)


def read_cuda_file(path: Path) -> ElfFile:
    """Read dynamic links and embedded GPU code. Raises NotElf."""
    with _mapped(path) as data:
        found = _dynamic(data)
        embedded = frozenset(n for at, size in _fat_sections(data) for n in _code(data, at, size))
        return ElfFile(found.needed, found.soname, found.run_path, embedded)


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    """Map an ELF file: a CUDA library has half a gigabyte, of which a few pages are read."""
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            raise NotElf(f"{path} is not an ELF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                if data[4:6] != b"\x02\x01":
                    raise ValueError("not 64-bit little-endian")
                yield data
            except (struct.error, IndexError, ValueError) as error:
                raise NotElf(f"{path.name} is a damaged ELF file: {error}") from error


def _header(data: mmap.mmap) -> tuple[int, ...]:
    """Give places, entry sizes and counts of the program and section headers, as in Elf64_Ehdr."""
    return struct.unpack_from("<QQIHHHHHH", data, 32)


def _text(data: mmap.mmap, start: int) -> str:
    end = data.find(b"\0", start)
    if end < 0:
        raise ValueError("a name does not end")
    return data[start:end].decode(errors="replace")


def _dynamic(data: mmap.mmap) -> ElfFile:
    table, _, _, _, entry_size, count, *_ = _header(data)
    loads: list[tuple[int, int, int]] = []
    entries: list[tuple[int, int]] = []
    for index in range(count):
        kind, _, offset, address, _, size = struct.unpack_from(
            "<IIQQQQ", data, table + index * entry_size
        )
        if kind == _PT_LOAD:
            loads.append((address, offset, size))
        elif kind == _PT_DYNAMIC:
            entries = [struct.unpack_from("<qQ", data, offset + n) for n in range(0, size, 16)]
    if (0, 0) in entries:
        entries = entries[: entries.index((0, 0))]
    strings = dict(entries).get(_DT_STRTAB)
    if strings is None:
        return ElfFile()
    base = next((o + strings - a for a, o, size in loads if a <= strings < a + size), strings)
    named = {
        tag: _text(data, base + value)
        for tag, value in entries
        if tag in {_DT_SONAME, _DT_RPATH, _DT_RUNPATH}
    }
    run_path = named.get(_DT_RUNPATH, named.get(_DT_RPATH, ""))
    return ElfFile(
        needed=tuple(_text(data, base + value) for tag, value in entries if tag == _DT_NEEDED),
        soname=named.get(_DT_SONAME),
        run_path=tuple(entry for entry in run_path.split(":") if entry),
    )


def _fat_sections(data: mmap.mmap) -> list[tuple[int, int]]:
    """Give offset and size, in bytes, of each section `.nv_fatbin`."""
    _, table, _, _, _, _, entry_size, count, names_at = _header(data)
    rows = [struct.unpack_from("<IIQQQQ", data, table + n * entry_size) for n in range(count)]
    return [(r[4], r[5]) for r in rows if _text(data, rows[names_at][4] + r[0]) == ".nv_fatbin"]


def _code(data: mmap.mmap, start: int, size: int) -> Iterator[str]:
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
                raise ValueError("the header of a fat binary's entry is too short")
            (number,) = struct.unpack_from("<I", data, entry + 28)
            (flags,) = struct.unpack_from("<Q", data, entry + 40)
            letter = "a" if flags & FLAG_SPECIFIC else "f" if flags & FLAG_FAMILY else ""
            if kind in KINDS:
                yield f"{KINDS[kind]}_{number}{letter}"
            entry += entry_header + payload
        position = last + (-last) % 8
