"""Read what CMake said about CUDA while configuring: its lines and its cache. Pure.

Wordings of old and new CMake, seen with 3.25, 3.31 and 4.1: newer ones append `with host compiler
GNU 13.3.0` to the compiler's line and may list several include paths, with `;` between them, on the
toolkit's line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_COMPILER = re.compile(
    r"^-- The CUDA compiler identification is (?P<id>\S+)(?: (?P<version>[\d.]+))?"
    r"(?: with host compiler (?P<host>\S+) (?P<host_version>[\d.]+))?"
)
_TOOLKIT = re.compile(
    r"^-- Found CUDAToolkit: (?P<paths>.+?) \(found (?:suitable )?version \"(?P<version>[\d.]+)\""
)
_HOST = re.compile(r"^-- CUDA host compiler is (?P<host>\S+) (?P<host_version>[\d.]+)")
_USING = re.compile(r"^-- Using (?:CMAKE_CUDA_ARCHITECTURES=|CUDA architectures: )(?P<list>\S*)")
_INCLUDED = re.compile(r"^-- Including CUDA backend")
_SKIPPED = re.compile(r"Not building (?P<what>.+?) as no compatible archs")
_ABSENT = re.compile(
    r"CUDA Toolkit not found|\bCUDA not found|Could not find nvcc|Could NOT find CUDAToolkit"
)
_CACHE = re.compile(r"^(?P<name>[^#/\s][^:=]*):(?P<type>[A-Z]+)=(?P<value>.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Line:
    """One line of a log; `number` counts from 1."""

    number: int
    text: str
    values: dict[str, str]

    def at(self, log: str) -> str:
        """Give file, line number and the line itself."""
        return f"{log}:{self.number}: {self.text.strip()}"


@dataclass(frozen=True)
class Configured:
    """All lines that speak of CUDA, in order, by what they say."""

    compilers: tuple[Line, ...]
    toolkits: tuple[Line, ...]
    hosts: tuple[Line, ...]
    using: tuple[Line, ...]
    included: tuple[Line, ...]
    skipped: tuple[Line, ...]
    absent: tuple[Line, ...]


def read_configure(log: str) -> Configured:
    """Sort the lines of a configure log."""

    def all_of(pattern: re.Pattern[str]) -> tuple[Line, ...]:
        return tuple(
            Line(number, text, {k: v for k, v in found.groupdict().items() if v})
            for number, text in enumerate(lines, start=1)
            if (found := pattern.search(text))
        )

    lines = log.splitlines()
    return Configured(
        compilers=all_of(_COMPILER),
        toolkits=all_of(_TOOLKIT),
        hosts=all_of(_HOST),
        using=all_of(_USING),
        included=all_of(_INCLUDED),
        skipped=all_of(_SKIPPED),
        absent=all_of(_ABSENT),
    )


def read_cache(text: str) -> dict[str, str]:
    """Read a CMakeCache.txt: variable to value."""
    return {found["name"]: found["value"] for found in _CACHE.finditer(text)}


def cmake_version(cache: dict[str, str]) -> tuple[int, int, int] | None:
    """The version of the CMake that wrote the cache."""
    parts = [cache.get(f"CMAKE_CACHE_{n}_VERSION", "") for n in ("MAJOR", "MINOR", "PATCH")]
    if not all(part.isdigit() for part in parts):
        return None
    return int(parts[0]), int(parts[1]), int(parts[2])
