"""Compare two logs by kind of line: what a line says without its numbers.

Times, ids, addresses, process ids and sizes become `<n>`, `<addr>`, `<id>`, `<size>`; numbers in
brackets and after `head=` stay, because they name a part of an engine: `llama_decode[1]` that fails
thousands of times while `head=0` never does is a finding.

Most lines of a log repeat a kind with other numbers. Lines are therefore reduced to outlines in the
interpreter's C code, a block at a time, and only the first line of each outline is matched with a
regular expression. Memory is bounded for any log.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bakehouse.logscan.scanner import decoded, message, printable, without_colours
from bakehouse.models import Frozen

Level = Literal["error", "warning", "other"]
LEVELS: tuple[Level, ...] = ("error", "warning", "other")
"""Most severe first."""

MOST_KINDS = 5_000
"""Most kinds of one log; lines of further kinds are only counted."""
_BLOCK = 1 << 18
_LINE = 1 << 12
"""Bytes of a line that are looked at."""
_REMEMBERED = 1 << 23
"""Bytes of outlines that are cached."""

_KEPT_BRACKET = re.compile(rb"\[\d{1,3}\]")
_KEPT_HEAD = re.compile(rb"(?i)\bhead[=:#]\d{1,3}\b")
_HIDE = bytes.maketrans(b"0123456789", bytes(range(0x0E, 0x18)))
_SHOW = bytes.maketrans(bytes(range(0x0E, 0x18)), b"0123456789")
_FLAT = bytes.maketrans(b"123456789", b"000000000")
_FOREIGN = bytes(range(0x0E, 0x18))
"""Control characters that stand for kept digits while the others become 0."""

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
"""Prefixes of llama.cpp (optional time, level letter) and glog (in PyTorch): W1130 01:02:03."""
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
    """One kind of line; `line_number` and `line` are of the first one."""

    level: Level
    text: str
    count: int
    line_number: int
    line: str


@dataclass
class Kinds:
    """Counts the kinds of a log that is fed in pieces of any size, then finished.

    `own` are names that differ between two runs anyway, such as a build's folder.
    """

    own: Sequence[str] = ()
    lines: int = 0
    """Whole lines read so far."""
    beyond: int = 0
    """Lines of kinds after the first MOST_KINDS."""
    _first: dict[tuple[Level, str], tuple[int, str]] = field(default_factory=dict)
    """Line number and text of the first line of each kind."""
    _counts: Counter[tuple[Level, str]] = field(default_factory=Counter)
    _outlines: dict[bytes, tuple[Level, str] | None] = field(default_factory=dict)
    _size: int = 0
    _rest: bytes = b""

    def feed(self, data: bytes) -> None:
        """Read a piece; an incomplete last line waits for its end."""
        for start in range(0, len(data), _BLOCK):
            self._take(data[start : start + _BLOCK])

    def finish(self) -> tuple[Kind, ...]:
        """Take the log as complete; return its kinds, errors first, then by count."""
        if self._rest:
            self._block(self._rest)
            self._rest = b""
        kinds = (
            Kind(level=key[0], text=key[1], count=self._counts[key], line_number=number, line=line)
            for key, (number, line) in self._first.items()
        )
        return tuple(sorted(kinds, key=lambda k: (LEVELS.index(k.level), -k.count, k.line_number)))

    def _take(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        end = data.rfind(b"\n") + 1
        if end:
            self._block(data[: end - 1])
        self._rest = data[end:]
        if len(self._rest) > 4 * _LINE:
            # A long line that goes on: keep what is looked at.
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
                self._counts[kind] += count
            elif seen.strip():
                self.beyond += count
        self.lines += len(outlines)
        if self._size > _REMEMBERED:
            self._outlines, self._size = {}, 0

    def _learn(self, fresh: set[bytes], outlines: list[bytes], lines: list[bytes]) -> None:
        """Determine the kind of each new outline from its first line."""
        left = set(fresh)
        for offset, seen in enumerate(outlines):
            if seen in left:
                left.discard(seen)
                self._outlines[seen] = self._kind(seen, lines[offset], self.lines + offset + 1)
                self._size += len(seen) + 200
                if not left:
                    return

    def _kind(self, seen: bytes, line: bytes, number: int) -> tuple[Level, str] | None:
        if not seen.strip():
            return None
        key = kind_of(line, self.own)
        if key not in self._first:
            if len(self._first) >= MOST_KINDS:
                return None
            self._first[key] = (number, printable(message(decoded(line))))
        return key


def outline(text: bytes) -> bytes:
    """Replace numbers by 0, except in brackets and after `head=`; newlines stay."""
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
    """Return the level of one line, and its text without what varies."""
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
    """Return a line's level: by its logger's prefix, else by its words."""
    if found := _LETTER.match(line):
        return _OF_LETTER.get(found[1] or found[2] or found[3], "other")
    before = line[: len(line) - len(body)] if line.endswith(body) else line
    if found := _WORD.search(before) or _WORD.match(body):
        return _OF_WORD.get(found[1], "other")
    return "error" if _SPEAKS.search(body) else "other"


def read_kinds(path: Path, own: Sequence[str] = ()) -> tuple[tuple[Kind, ...], Kinds]:
    """Count the kinds of a log file; also return the counter."""
    kinds = Kinds(own)
    with path.open("rb") as log:
        while data := log.read(_BLOCK):
            kinds.feed(data)
    return kinds.finish(), kinds


def kinds_of(lines: Iterable[str], own: Sequence[str] = ()) -> tuple[Kind, ...]:
    """Count the kinds of some lines."""
    kinds = Kinds(own)
    for line in lines:
        kinds.feed(line.encode(errors="replace") + b"\n")
    return kinds.finish()


How = Literal["new", "raised", "gone", "lowered"]
HOWS: tuple[How, ...] = ("new", "raised", "gone", "lowered")
CHANCE = 1e-4
"""Largest probability of a count by chance at which it counts as changed."""
FACTOR = 1.5
"""Smallest factor of a change: logs of thousands of lines are never quite alike."""
_EXACT = 4000
"""Most events for which the probability is summed exactly."""


class Change(Frozen):
    """A kind whose count differs between two logs; `line` is its first line."""

    how: How
    level: Level
    text: str
    without: int
    patched: int
    line_number: int
    line: str

    @property
    def worse(self) -> bool:
        """Whether the patched log has more of it."""
        return self.how in ("new", "raised")

    def __str__(self) -> str:
        """One line for a report."""
        before = "never without" if self.how == "new" else f"{self.without:,} without"
        return f"{self.patched:,} times, {before}: {self.text}"


def contrast(
    without: Sequence[Kind], patched: Sequence[Kind], *, share: float = 0.5
) -> tuple[Change, ...]:
    """Compare the logs of two runs, without a patch and with it.

    `share` is the patched run's share of the requests of both. Errors come first, then new kinds,
    then the most frequent ones.
    """
    before = {(k.level, k.text): k for k in without}
    after = {(k.level, k.text): k for k in patched}
    changes = []
    for key in dict.fromkeys((*after, *before)):
        old, new = before.get(key), after.get(key)
        counts = (old.count if old else 0, new.count if new else 0)
        how = _change_of(*counts, share)
        kind = new or old
        if how and kind:
            changes.append(
                Change(how=how, level=kind.level, text=kind.text, without=counts[0],
                       patched=counts[1], line_number=kind.line_number, line=kind.line)
            )  # fmt: skip
    changes.sort(
        key=lambda c: (LEVELS.index(c.level), HOWS.index(c.how), -max(c.patched, c.without), c.text)
    )
    return tuple(changes)


def _change_of(without: int, patched: int, share: float) -> How | None:
    if not without:
        return "new"
    if not patched:
        return "gone"
    odds = share / (1 - share)
    if patched >= FACTOR * without * odds and tail(patched, without, share) < CHANCE:
        return "raised"
    if without * odds >= FACTOR * patched and tail(without, patched, 1 - share) < CHANCE:
        return "lowered"
    return None


def tail(more: int, less: int, share: float) -> float:
    """Return the probability that of `more + less` events at least `more` fall on one side.

    Each does so with probability `share`: two Poisson counts, given their sum.
    """
    total = more + less
    if total > _EXACT:
        deviation = math.sqrt(total * share * (1 - share))
        return 0.5 * math.erfc((more - 0.5 - total * share) / deviation / math.sqrt(2))
    logs = (
        math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
        + k * math.log(share) + (total - k) * math.log1p(-share)
        for k in range(more, total + 1)
    )  # fmt: skip
    return min(1.0, math.fsum(map(math.exp, logs)))
