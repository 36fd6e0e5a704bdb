"""What an ELF file says about the libraries that it loads. Source: the System V ABI, chapter 5."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

_DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 14, 15, 29
_PT_LOAD, _PT_DYNAMIC = 1, 2


@dataclass(frozen=True)
class Dynamic:
    """A dynamic section. `run_path` is DT_RUNPATH, or DT_RPATH where only that is there."""

    needed: tuple[str, ...] = ()
    soname: str | None = None
    run_path: str | None = None


def read_dynamic(path: Path) -> Dynamic | None:
    """Read the dynamic section; None for what is no ELF file, empty for a static one.

    Raises ValueError for an ELF file that is cut short or inconsistent.
    """
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            return None
        # A CUDA library has half a gigabyte, of which a few pages are read here.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _read(data)
            except (struct.error, IndexError) as error:
                raise ValueError(f"{path.name} is a damaged ELF file: {error}") from error


def _read(data: mmap.mmap) -> Dynamic:
    wide = data[4] == 2
    order = "<" if data[5] == 1 else ">"
    header = struct.unpack_from(order + ("HHIQQQIHHH" if wide else "HHIIIIIHHH"), data, 16)
    table, entry_size, count = header[4], header[8], header[9]
    loads: list[tuple[int, int, int]] = []
    dynamic: tuple[int, int] | None = None
    for index in range(count):
        at = table + index * entry_size
        if wide:
            kind, _, offset, address, _, size = struct.unpack_from(order + "IIQQQQ", data, at)
        else:
            kind, offset, address, _, size = struct.unpack_from(order + "IIIII", data, at)
        if kind == _PT_LOAD:
            loads.append((address, offset, size))
        elif kind == _PT_DYNAMIC:
            dynamic = (offset, size)
    if dynamic is None:
        return Dynamic()
    form = struct.Struct(order + ("qQ" if wide else "iI"))
    entries = []
    for at in range(dynamic[0], dynamic[0] + dynamic[1], form.size):
        tag, value = form.unpack_from(data, at)
        if tag == 0:
            break
        entries.append((tag, value))
    strings = next((value for tag, value in entries if tag == _DT_STRTAB), None)
    if strings is None:
        return Dynamic()
    base = next((o + strings - a for a, o, size in loads if a <= strings < a + size), strings)

    def text(offset: int) -> str:
        end = data.find(b"\0", base + offset)
        if end < 0:
            raise IndexError("a name does not end")
        return data[base + offset : end].decode(errors="replace")

    named = {tag: text(v) for tag, v in entries if tag in {_DT_SONAME, _DT_RPATH, _DT_RUNPATH}}
    return Dynamic(
        needed=tuple(text(value) for tag, value in entries if tag == _DT_NEEDED),
        soname=named.get(_DT_SONAME),
        run_path=named.get(_DT_RUNPATH, named.get(_DT_RPATH)),
    )
