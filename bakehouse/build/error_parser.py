"""The first error in a build log, and Ninja's progress.

Wordings of GCC, Clang, GNU as and ld, lld, nvcc, ptxas, Ninja and CMake.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from bakehouse.progress import Bar
from bakehouse.redact import clean

_STATUS = re.compile(r"\[(\d+)/(\d+) [\d.]+\] ")
"""As in `plan.build.NINJA_STATUS`: finished, total, seconds so far."""


class NinjaWatch:
    """Moves a progress bar by the lines of a build."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar

    def line(self, text: str) -> None:
        """Take one line of Ninja's output."""
        if found := _STATUS.match(text):
            self._bar.update(int(found[1]), int(found[2]))


_FILE = r"(?P<file>[^\s:()][^:()]*?)"
_PATTERNS = (
    # GCC, Clang, GNU as: file:line:column: error: …
    re.compile(
        _FILE + r":(?P<line>\d+):(?:(?P<column>\d+):)?\s+"
        r"(?:(?:fatal |internal compiler )?error:|Error:) (?P<message>.+)"
    ),
    # nvcc: file(line): error: …, and error #20012-D:
    re.compile(
        _FILE + r"\((?P<line>\d+)\)\s*: (?:catastrophic |internal )?error(?: #[\w-]+)?: "
        r"(?P<message>.+)"
    ),
    # A linker's missing symbol, with line information or only a section.
    re.compile(
        r"(?:\S*ld(?:\.\w+)?: )?" + _FILE + r":(?:(?P<line>\d+)|\(\.[^)]+\)): "
        r"(?P<message>(?:undefined reference|multiple definition|relocation) .+)"
    ),
    re.compile(r"(?P<message>(?:ptxas|nvlink|fatbinary|cicc|nvcc)\s*(?:fatal|error)\s*:.+)"),
    re.compile(r"(?P<message>\S*\bld(?:\.\w+)?: (?!.*(?:warning:|: in function )).+)"),
    # A driver reports a program that died: cc: fatal error: Killed signal terminated …
    re.compile(r"(?P<message>[\w.+/-]+: (?:fatal |internal compiler )?error: .+)"),
    re.compile(r"(?P<message>ninja: (?:error|fatal): .+)"),
    re.compile(r"(?P<message>(?:Error|ERROR): .+)"),
)
_CMAKE_AT = re.compile(r"CMake Error at (?P<file>.+?):(?P<line>\d+)(?: \([^)]*\))?:")
_CMAKE = re.compile(r"CMake Error(?: in (?P<file>[^:]+))?:\s*(?P<message>.*)")
_QUOTES = ("The output was:", "fails with the following output:")
_PROGRESS = re.compile(r"\[\d+/\d+")


@dataclass(frozen=True)
class FirstError:
    """An error as printed. Lines and columns count from 1."""

    message: str
    log_line: int
    file: str | None = None
    line: int | None = None
    column: int | None = None

    def place(self, log: str) -> str:
        """Name file and line, then the line of the log."""
        spot = ""
        if self.file:
            spot = ":".join(str(p) for p in (self.file, self.line, self.column) if p is not None)
            spot = f"{clean(spot)}, "
        return f"{spot}{log}:{self.log_line}"


def first_cmake_error(lines: Sequence[str], roots: Sequence[str] = ()) -> FirstError | None:
    """Find the first error that CMake prints; `roots` are cut from the front of file names."""
    for index, line in enumerate(lines):
        if found := _CMAKE_AT.match(line.strip()):
            message = _indented(lines, index + 1) or "CMake gave no reason"
            # A compiler that CMake tried: the error is in the output that CMake quotes.
            quoted = [*takewhile(lambda ln: not ln.strip() or ln[:2] == "  ", lines[index + 1 :])]
            at = next((n for n, ln in enumerate(quoted) if ln.strip().endswith(_QUOTES)), None)
            end = index + 1 + len(quoted)
            if at is not None and (inner := _first_in(lines, index + at + 2, end, ())):
                summary = re.split(r"\.\s", message, maxsplit=1)[0]
                return replace(inner, message=f"{clean(summary)}: {inner.message}")
            line_number, file = int(found["line"]), _short(found["file"], roots)
            return FirstError(clean(message), index + 1, file, line_number)
        if found := _CMAKE.match(line.strip()):
            message = found["message"] or _indented(lines, index + 1) or "CMake gave no reason"
            named = _short(found["file"], roots) if found["file"] else None
            return FirstError(clean(message), index + 1, named)
    return None


def _indented(lines: Sequence[str], start: int) -> str:
    """Join the indented text that follows a CMake error's heading; two blank lines end it."""
    words: list[str] = []
    blank = 0
    for line in lines[start : start + 40]:
        if line.strip() and not line.startswith("  "):
            break
        blank = 0 if line.strip() else blank + 1
        if blank == 2 and words:
            break
        words += line.split()
    return " ".join(words)


def first_build_error(lines: Sequence[str], roots: Sequence[str] = ()) -> FirstError | None:
    """Find the first error of a build: the first one of the first command that failed."""
    start = next((n for n, line in enumerate(lines) if line.startswith("FAILED: ")), None)
    if start is None:
        return _first_in(lines, 0, len(lines), roots)
    end = next(
        (n for n in range(start + 1, len(lines)) if _PROGRESS.match(lines[n])
         or lines[n].startswith(("FAILED: ", "ninja: "))),
        len(lines),
    )  # fmt: skip
    if found := _first_in(lines, start + 1, end, roots):
        return found
    # The command itself is on the line after FAILED; its output follows.
    for index in range(start + 2, end):
        if lines[index].strip():
            return FirstError(clean(lines[index].strip()), index + 1)
    what = lines[start].removeprefix("FAILED: ").strip()
    return FirstError(clean(f"{what} failed without a message"), start + 1)


def _first_in(
    lines: Sequence[str], start: int, end: int, roots: Sequence[str]
) -> FirstError | None:
    for index in range(start, end):
        line = lines[index].strip()
        if line.startswith("CMake Error") and (found := first_cmake_error(lines[index:end], roots)):
            return replace(found, log_line=found.log_line + index)
        for pattern in _PATTERNS:
            if match := pattern.match(line):
                parts = match.groupdict()
                at = {n: int(parts[n]) if parts.get(n) else None for n in ("line", "column")}
                file = _short(parts["file"], roots) if parts.get("file") else None
                return FirstError(clean(parts["message"]), index + 1, file, **at)
    return None


def _short(file: str, roots: Sequence[str]) -> str:
    """Cut the work folder from a file's name."""
    root = next((root for root in roots if file.startswith(f"{root}/")), None)
    return file.removeprefix(f"{root}/") if root else file
