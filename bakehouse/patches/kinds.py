"""Kinds of log lines, counted: what a line says once its numbers are taken out of it.

Times, ids, addresses, pids and sizes become `<n>`, `<addr>`, `<id>`, `<size>`; numbers in brackets
and after `head=` stay, since they tell which part of an engine speaks: `llama_decode[1]` that fails
thousands of times while `head=0` never does is a finding.

Most lines of a log are others of the same kind with other numbers. So lines are reduced to outlines
in the interpreter's own C code, a block at a time, and only the first line of each outline meets a
regular expression. Memory is bounded whatever the log holds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bakehouse.base import Frozen
from bakehouse.signatures.text import decoded, message, printable, without_colours

Level = Literal["error", "warning", "other"]
LEVELS: tuple[Level, ...] = ("error", "warning", "other")
"""The gravest first."""

MOST_KINDS = 5_000
"""Kinds that are kept apart in one log; lines of further ones are only counted."""
_BLOCK = 1 << 18
_LINE = 1 << 12
"""Bytes of a line that count; what comes after them is passed over."""
_REMEMBERED = 1 << 23
"""Bytes of outlines to remember."""

_KEPT_BRACKET = re.compile(rb"\[\d{1,3}\]")
_KEPT_HEAD = re.compile(rb"(?i)\bhead[=:#]\d{1,3}\b")
_HIDE = bytes.maketrans(b"0123456789", bytes(range(0x0E, 0x18)))
_SHOW = bytes.maketrans(bytes(range(0x0E, 0x18)), b"0123456789")
_FLAT = bytes.maketrans(b"123456789", b"000000000")
_FOREIGN = bytes(range(0x0E, 0x18))
"""Control characters that stand for digits which are kept, while the others are flattened."""

_ZEROS = (b"0000", b"000", b"00", b"00", b"00")
_VARIES = re.compile(
    r"(?P<addr>\b0x[0-9a-f]+\b)"
    r"|(?P<id>\b(?:chat)?cmpl-[0-9a-z-]+"
    r"|(?<![a-z0-9])(?=[0-9a-f-]*0)(?=[0-9a-f-]*[a-f])[0-9a-f]{7,}(?:-[0-9a-f]+)*(?![a-z0-9]))"
    r"|(?P<size>[-+]?\b0(?:\.0)?\s?(?:[KMGT]i?B|bytes|B)\b)"
    r"|(?P<n>(?<![\w.])[-+]?0(?:[.,:/-]0)*(?:e[-+]?0)?|0(?:[.,:]0)*)",
    re.IGNORECASE,
)
_LETTER = re.compile(r"\s*(?:[\d.]+ ([DIWEFT]) |([EW]) |\[?([IWEF])\d{4} \d\d:)")
"""What llama.cpp puts before a line (the time, which can be switched off, and a letter), and what
glog does, as PyTorch has it: W1130 01:02:03."""
_WORD = re.compile(r"\b(ERROR|CRITICAL|FATAL|WARNING|WARN|INFO|DEBUG)\b")
_SPEAKS = re.compile(
    r"\berrors?\b(?!\s*[:=]\s*(?:0|none|null)\b)|\bfailed\b|\bfailure\b|\bfatal\b|\bcannot\b"
    r"|\bassert|\babort|\bexception\b|terminate called|traceback",
    re.IGNORECASE,
)
_OF_LETTER: dict[str, Level] = {"E": "error", "F": "error", "W": "warning"}
_OF_WORD: dict[str, Level] = {
    "ERROR": "error", "CRITICAL": "error", "FATAL": "error", "WARNING": "warning",
    "WARN": "warning",
}  # fmt: skip


class Kind(Frozen):
    """One kind of line. `line_number` and `line` are of the first that was seen."""

    level: Level
    text: str
    count: int
    line_number: int
    line: str


@dataclass
class _Seen:
    level: Level
    text: str
    line_number: int
    line: str
    count: int = 0


@dataclass
class Kinds:
    """Counts the kinds of a log as it comes. `own` are names that differ between two runs anyway.

    Feed bytes cut anywhere, then `finish`; the same lines give the same kinds however they are cut.
    """

    own: Sequence[str] = ()
    lines: int = 0
    """Whole lines read so far."""
    beyond: int = 0
    """Lines of kinds that came after the most that are kept: of these nothing more is known."""
    _kinds: dict[tuple[Level, str], _Seen] = field(default_factory=dict)
    _outlines: dict[bytes, _Seen | None] = field(default_factory=dict)
    _size: int = 0
    _rest: bytes = b""

    def feed(self, data: bytes) -> None:
        """Read data as it comes; an unfinished last line waits for its end."""
        for start in range(0, len(data), _BLOCK):
            self._take(data[start : start + _BLOCK])

    def finish(self) -> tuple[Kind, ...]:
        """Take the log as complete; give its kinds, errors first, then by count."""
        if self._rest:
            self._block(self._rest)
            self._rest = b""
        seen = sorted(
            self._kinds.values(), key=lambda k: (LEVELS.index(k.level), -k.count, k.line_number)
        )
        return tuple(
            Kind(level=k.level, text=k.text, count=k.count, line_number=k.line_number, line=k.line)
            for k in seen
        )

    def _take(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        end = data.rfind(b"\n") + 1
        if end:
            self._block(data[: end - 1])
        self._rest = data[end:]
        if len(self._rest) > 4 * _LINE:
            # The line goes on; so much of it as counts is kept, and no more.
            self._rest = self._rest[: 2 * _LINE]

    def _block(self, data: bytes) -> None:
        text = without_colours(data)
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n").rstrip(b"\r").replace(b"\r", b" ")
        lines = text.split(b"\n")
        if len(text) > _LINE and max(map(len, lines)) > _LINE:
            lines = [line[:_LINE] for line in lines]
            text = b"\n".join(lines)
        outlines = outline(text).split(b"\n")
        counted = Counter(outlines)
        fresh = counted.keys() - self._outlines.keys()
        if fresh:
            self._learn(fresh, outlines, lines)
        for seen, count in counted.items():
            kind = self._outlines[seen]
            if kind:
                kind.count += count
            elif seen.strip():
                self.beyond += count
        self.lines += len(outlines)
        if self._size > _REMEMBERED:
            self._outlines, self._size = {}, 0

    def _learn(self, fresh: set[bytes], outlines: list[bytes], lines: list[bytes]) -> None:
        """Find out the kind of each new outline from its first line."""
        left = set(fresh)
        for offset, seen in enumerate(outlines):
            if seen in left:
                left.discard(seen)
                self._outlines[seen] = self._kind(seen, lines[offset], self.lines + offset + 1)
                self._size += len(seen) + 200
                if not left:
                    return

    def _kind(self, seen: bytes, line: bytes, number: int) -> _Seen | None:
        if not seen.strip():
            return None
        key = kind_of(line, self.own)
        known = self._kinds.get(key)
        if known is None and len(self._kinds) < MOST_KINDS:
            shown = printable(message(decoded(line)))
            known = self._kinds[key] = _Seen(*key, number, shown)
        return known


def outline(text: bytes) -> bytes:
    """Flatten numbers, but for those in brackets and after `head=`; newlines stay."""
    text = text.translate(None, _FOREIGN)
    if b"[" in text:
        text = _KEPT_BRACKET.sub(_hide, text)
    if b"head" in text or b"HEAD" in text or b"Head" in text:
        text = _KEPT_HEAD.sub(_hide, text)
    text = text.translate(_FLAT)
    for zeros in _ZEROS:
        text = text.replace(zeros, b"0")
    return text


def _hide(found: re.Match[bytes]) -> bytes:
    return found[0].translate(_HIDE)


def kind_of(line: bytes, own: Sequence[str] = ()) -> tuple[Level, str]:
    """Give the level of one line, and its text with what varies taken out."""
    whole = decoded(without_colours(line))
    body = message(whole)
    for name in own:
        if name and name in body:
            body = body.replace(name, "<own>")
    flat = outline(body.encode(errors="replace")).decode(errors="replace")
    text = _VARIES.sub(lambda found: f"<{found.lastgroup}>", flat)
    shown = text.encode(errors="replace").translate(_SHOW).decode(errors="replace")
    return level_of(whole, body), printable(" ".join(shown.split()))


def level_of(line: str, body: str) -> Level:
    """Give a line's level: what its logger wrote before it, else what its words say."""
    if found := _LETTER.match(line):
        return _OF_LETTER.get(found[1] or found[2] or found[3], "other")
    before = line[: len(line) - len(body)] if line.endswith(body) else line
    if found := _WORD.search(before) or _WORD.match(body):
        return _OF_WORD.get(found[1], "other")
    return "error" if _SPEAKS.search(body) else "other"


def read_kinds(path: Path, own: Sequence[str] = ()) -> tuple[tuple[Kind, ...], Kinds]:
    """Count the kinds of a log file."""
    kinds = Kinds(own)
    with path.open("rb") as log:
        while data := log.read(_BLOCK):
            kinds.feed(data)
    return kinds.finish(), kinds


def kinds_of(lines: Iterable[str], own: Sequence[str] = ()) -> tuple[Kind, ...]:
    """Count the kinds of a log that is at hand as lines."""
    kinds = Kinds(own)
    for line in lines:
        kinds.feed(line.encode(errors="replace") + b"\n")
    return kinds.finish()
