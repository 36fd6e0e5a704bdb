"""Scan a finished log, or follow a growing one.

Most lines of a log are others of the same kind with other numbers. So a block of lines is reduced
to shapes (lower-case words, digits gone) in one pass of the interpreter's own C code, shapes that
are known to hold no signature's rarest word are dropped by set arithmetic, and only what is left
meets a regular expression. Memory is bounded whatever the log holds.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from bakehouse.logscan.catalogue import Catalogue, Signature, catalogue, shape
from bakehouse.logscan.findings import Finding, Hit, Severity, judge, within
from bakehouse.redact import clean

_ANSI = re.compile(
    rb"(?:\x1b|\\u001b|\\x1b|\\033)"
    rb"(?:\[[0-9;:?<=>]*[ -/]*[@-~]|\][^\x07\x1b\n]{0,200}(?:\x07|\x1b\\)|[()][A-Z0-9])",
    re.IGNORECASE,
)

_ESCAPES = (b"u001b", b"U001B", b"\\x1b")
_QUOTES = re.compile(rb"\\u20(?:18|19|1c|1d)", re.IGNORECASE)

_PREFIX = re.compile(
    r"""\s*(?:
      \d{1,4}\.\d\d\.\d{3}\.\d{3}\s+[DIWEFT](?=\s)                          # llama.cpp
    | (?:INFO|WARNING|ERROR|DEBUG|CRITICAL)\s+\d\d-\d\d\s[\d:.]+\s\[[^\]\s]{1,80}\]  # vLLM
    | \((?:EngineCore|APIServer|Worker|VllmWorker|Engine|pid)[^()]{0,60}\)  # vLLM's processes
    | (?:ERROR|WARNING|INFO|CRITICAL)(?=\s+\[[\w.]+\.py:\d+\])
    | \[[\w.]+\.py:\d+\]
    | \[?\d{4}[-/]\d\d[-/]\d\d[T\ ]\d\d:\d\d:\d\d(?:[.,]\d+)?\s?(?:Z|[+-]\d\d:?\d\d|UTC)?\]?:?
    | (?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)?\s?[A-Z][a-z]{2}\s{1,2}\d{1,2}\s\d\d:\d\d:\d\d
      (?:\.\d+)?\s[\w.:-]{1,64}\s[\w./@-]{1,64}(?:\[\d+\])?:                # syslog, journald
    | \[\s{0,8}\d+\.\d{6}\]                                                 # the kernel's ring
    | \[[A-Z][a-z]{2}\s[A-Z][a-z]{2}\s{1,2}\d{1,2}\s[\d:]{8}\s\d{4}\]
    | \#\d+\s\d+\.\d+                                                       # BuildKit
    | [\w.-]{1,64}\s{1,20}\|(?=\s)                                          # Compose
    | <\d{1,2}>                                                             # syslog priority
    | [\w.:-]{1,64}\s[\w./@-]{1,64}\[\d{1,9}\]:                             # journald, short-iso
    | \[rank\d{1,5}\]:                                                     # torchrun
    | std(?:out|err)\s[FP](?=\s)                                           # Kubernetes' CRI
    | \[pod/[\w./-]{1,160}\]                                               # kubectl --prefix
    | \#\#\[\w{1,20}\]                                                     # GitHub Actions
    | time="[^"]{1,40}"\slevel=\w{1,20}\smsg="                             # logfmt
    )(?:\s|(?=<)|(?<=[\]"]))\s{0,200}""",
    re.VERBOSE | re.IGNORECASE,
)
_SHOWN = 500


def without_colours(data: bytes) -> bytes:
    """Take terminal escapes out, also those that a JSON logger wrote as backslash, u001b.

    Typographic quotes that such a logger wrote as numbers become plain ones.
    """
    written = b"\\" in data
    if b"\x1b" in data or (written and any(word in data for word in _ESCAPES)):
        data = _ANSI.sub(b"", data)
    if written and b"\\u20" in data:
        data = _QUOTES.sub(b"'", data)
    return data


def message(line: str) -> str:
    """Take off what loggers, Docker, journald and the kernel put before a message."""
    position = 0
    for _ in range(6):
        found = _PREFIX.match(line, position)
        if not found:
            break
        position = found.end()
    return line[position:].lstrip()


def decoded(data: bytes) -> str:
    """Give a line's text, also where a logger wrapped it into a JSON object."""
    line = data.decode(errors="replace")
    if not line.startswith('{"'):
        return line
    try:
        wrapped = json.loads(line)
    except (ValueError, RecursionError):
        return line
    if isinstance(wrapped, dict):
        for name in ("log", "msg", "message", "MESSAGE"):
            if isinstance(wrapped.get(name), str):
                return str(wrapped[name]).rstrip("\n")
    return line


_SPOKEN = re.compile(
    r"""["'](?:content|prompt|reasoning(?:_content)?)\\?["']\s?:\s?\\?["'\[]
      | \bReceived\srequest\s[\w-]{1,80}:\s{1,3}prompt:\s
      | \bGenerated\sresponse\s[\w-]{1,80}(?:\s\([^()]{1,40}\))?:\s{1,3}output:\s
      | \bPars(?:ing|ed)\s(?:chat\s|input\s)?message:\s
      | \bnext\stoken:\s{1,9}\d{1,9}\s""",
    re.VERBOSE | re.IGNORECASE,
)
"""What a server logs before the words of its users and its model, who may talk of anything."""
_SPEECH = (b"content", b"prompt", b"reasoning", b"Generated response", b"message:", b"next token:")
"""One of these is in every such line."""
_SPEECH_SHAPES = tuple(shape(word).strip() for word in _SPEECH)


def may_speak(seen: bytes) -> bool:
    """Whether a line of this shape may hold somebody's words; most lines of most logs do not."""
    return any(word in seen for word in _SPEECH_SHAPES)


def spoken_from(data: bytes) -> int | None:
    """Give where the words of users or of the model begin in a line; None where nowhere.

    The place is one in the line's decoded text.
    """
    if not any(word in data for word in _SPEECH):
        return None
    found = _SPOKEN.search(decoded(data))
    return found.end() if found else None


def printable(line: str) -> str:
    """Make one line safe to print: controls escaped, at most 500 characters."""
    cut = line if len(line) <= _SHOWN else line[: _SHOWN - 1] + "…"
    return clean(cut.replace("\t", " ").strip(), one_line=True)


_BLOCK = 1 << 18
"""Bytes of whole lines that are looked at in one go."""
_LINE = 1 << 16
"""Bytes of one line that are looked at in one go; a longer line is taken in pieces."""
_OVERLAP = 1 << 10
_FEW = 24
"""So many words are looked for one by one; with more of them every shape is taken apart."""
_REMEMBERED = 1 << 23
"""Bytes of shapes to remember, of each kind."""


Caught = Mapping[Signature, dict[str, str]]
"""What matched in a line, with what its template caught."""


class Known(NamedTuple):
    """What is known of the lines of one shape."""

    sure: tuple[str, ...]
    """Rows that every such line shows."""
    open: tuple[Signature, ...]
    """Signatures that each such line may show or not."""
    settled: bool
    """Whether a line of the shape has been seen."""
    speaks: bool
    """Whether such a line may hold words of users or of the model."""

    @property
    def plain(self) -> bool:
        """Whether there is nothing to be learned from another such line."""
        return self.settled and not self.open and not self.speaks


class Scanner:
    """Reads a log as it comes and says at any time what it shows.

    `feed` takes one line, `feed_bytes` data cut anywhere; both give the findings that are new, also
    those that an earlier line shows and only this one corroborates.
    """

    def __init__(
        self,
        *,
        engine: str | None = None,
        stage: str | None = None,
        known: Catalogue | None = None,
    ) -> None:
        self._catalogue = known or catalogue(engine)
        self._stage = stage
        self._hits: dict[str, Hit] = {}
        self._changed = False
        self._told: set[tuple[str, Severity]] = set()
        self._clean: set[bytes] = set()
        self._clean_size = 0
        self._hot: dict[bytes, Known] = {}
        self._hot_size = 0
        self._rest = b""
        self._spoken = False
        """Whether the rest of the line that is read is somebody's words."""
        self.lines = 0
        """Whole lines read so far."""

    def feed(self, line: str | bytes) -> tuple[Finding, ...]:
        """Read one line, with or without its newline."""
        data = line.encode(errors="replace") if isinstance(line, str) else line
        return self.feed_bytes(data.rstrip(b"\r\n") + b"\n")

    def feed_bytes(self, data: bytes) -> tuple[Finding, ...]:
        """Read data as it comes from a file or pipe; an unfinished last line waits for its end."""
        for start in range(0, len(data), _BLOCK):
            self._take(data[start : start + _BLOCK])
        if not self._changed:
            return ()
        self._changed = False
        new = [f for f in self.findings() if (f.id, f.severity) not in self._told]
        self._told.update((f.id, f.severity) for f in new)
        return tuple(new)

    def findings(self) -> tuple[Finding, ...]:
        """Give what the log shows so far, first cause first."""
        return judge(self._catalogue.rows, self._hits, self._stage, complete=False)

    def finish(self) -> tuple[Finding, ...]:
        """Take the log as complete and give what it shows, first cause first."""
        if self._rest:
            self._block(self._rest, whole=True)
            self._rest = b""
        return judge(self._catalogue.rows, self._hits, self._stage, complete=True)

    def _take(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        if self._spoken:
            end = data.find(b"\n")
            self._rest = b""
            if end < 0:
                return
            self._spoken, data = False, data[end:]
        end = data.rfind(b"\n") + 1
        if end:
            self._block(data[: end - 1], whole=True)
        rest = data[end:]
        while len(rest) > _LINE:
            self._block(rest[:_LINE], whole=False)
            self._spoken = spoken_from(rest[:_LINE]) is not None
            rest = b"" if self._spoken else rest[_LINE - _OVERLAP :]
        self._rest = rest

    def _block(self, data: bytes, *, whole: bool) -> None:
        """Look at lines, or (not `whole`) at a piece of a line that goes on."""
        text = without_colours(data)
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n").rstrip(b"\r")
        if b"\r" in text:
            self._overwritten(text, whole=whole)
            return
        count = self._look(text, self.lines + 1, step=1)
        self.lines += count if whole else 0

    def _overwritten(self, text: bytes, *, whole: bool) -> None:
        """Progress bars draw one line over and over: each drawing counts as text of that line."""
        lines = text.split(b"\n")
        for offset, line in enumerate(lines):
            self._look(line.replace(b"\r", b"\n"), self.lines + offset + 1, step=0)
        self.lines += len(lines) if whole else 0

    def _look(self, text: bytes, first: int, *, step: int) -> int:
        """Match what has to be matched in lines numbered from `first`; give how many they are."""
        shapes = shape(text).split(b"\n")
        hot = self._hot_among(set(shapes))
        if hot:
            # Lines that can only be counted are counted all at once, where each has its own number.
            plain = {seen: known for seen, known in hot.items() if known.plain and step}
            # The first line may go on from a piece that was counted before.
            begun = plain[shapes[0]].sure if shapes[0] in plain else ()
            counted = [id_ for id_ in begun if self._hits[id_].last == first]
            if len(plain) < len(hot):
                lines = text.split(b"\n")
                for offset, seen in enumerate(shapes):
                    if seen in hot and seen not in plain:
                        number = first + step * offset
                        hot[seen] = self._match(number, lines[offset], hot[seen])
            if plain:
                self._count_all(plain, shapes, first)
            for id_ in counted:
                self._hits[id_].count -= 1
            self._keep(hot)
        return len(shapes)

    def _count_all(self, plain: Mapping[bytes, Known], shapes: list[bytes], first: int) -> None:
        """Count the lines of shapes that show what is known already, and nothing else."""
        often = Counter(shapes)
        ends = dict(zip(shapes, range(len(shapes)), strict=True))
        for seen, known in plain.items():
            last = first + ends[seen]
            for id_ in known.sure:
                hit = self._hits[id_]
                hit.count += often[seen]
                if hit.last < last:
                    hit.last, hit.latest = last, {}

    def _keep(self, hot: dict[bytes, Known]) -> None:
        self._hot_size += sum(len(seen) + 200 for seen in hot if seen not in self._hot)
        if self._hot_size > _REMEMBERED:
            self._hot, self._hot_size = {}, 0
        self._hot.update(hot)

    def _hot_among(self, shapes: set[bytes]) -> dict[bytes, Known]:
        """Give the shapes that may show a signature, and which."""
        left = shapes - self._clean
        if not left:
            return {}
        hot = {seen: self._hot[seen] for seen in left if seen in self._hot} if self._hot else {}
        fresh = left - hot.keys() if hot else left
        if fresh:
            self._sort(fresh, hot)
        return hot

    def _sort(self, fresh: set[bytes], hot: dict[bytes, Known]) -> None:
        known = self._catalogue
        joined = b" " + b" \n ".join(fresh) + b" "
        there = known.worth(joined.split())
        for seen in _holding(there, joined) if len(there) <= _FEW else fresh:
            words = seen.split()
            if not there.isdisjoint(words) and (found := known.candidates(words)):
                hot[seen] = Known((), found, settled=False, speaks=may_speak(seen))
        self._remember(fresh - hot.keys(), len(joined))

    def _remember(self, clean: set[bytes], size: int) -> None:
        self._clean_size += size + 100 * len(clean)
        if self._clean_size > _REMEMBERED:
            self._clean, self._clean_size = set(), 0
        self._clean |= clean

    def _match(self, line_number: int, data: bytes, known: Known) -> Known:
        """Count what a line shows; give what is known of its shape after that."""
        if known.speaks and (spoken := spoken_from(data)) is not None:
            self._beside_speech(line_number, data, spoken)
            return known
        for id_ in known.sure:
            self._hit(id_, line_number, data, {})
        if not known.open:
            return known
        line = decoded(data)
        body = message(line) if any(s.template.anchored for s in known.open) else line
        caught = {s: found for s in known.open if (found := _caught(s, line, body)) is not None}
        telling = self._count(line_number, data, caught, explained=bool(known.sure))
        if known.settled:
            return known
        return _settled(known, caught.keys(), telling)

    def _count(
        self, line_number: int, data: bytes, caught: Caught, *, explained: bool
    ) -> list[Signature]:
        """Count what a line shows; give what of it explains something."""
        telling = [s for s in caught if s.row.role not in {"unknown", "fact"}]
        for signature, values in caught.items():
            if signature.row.role != "unknown" or not (explained or telling):
                self._hit(signature.row.id, line_number, data, values)
        return telling

    def _beside_speech(self, line_number: int, data: bytes, spoken: int) -> None:
        """Count what a line shows before somebody's words; nothing is learnt of its shape."""
        line = decoded(data)
        body = message(line)
        caught = {
            signature: found
            for signature in self._catalogue.candidates(shape(data).split())
            if (found := _caught(signature, line, body, spoken)) is not None
        }
        self._count(line_number, data, caught, explained=False)

    def _hit(self, id_: str, line_number: int, data: bytes, caught: dict[str, str]) -> None:
        hit = self._hits.get(id_)
        if hit is None:
            line = printable(message(decoded(data)))
            self._hits[id_] = Hit(line_number, line, caught, last=line_number, latest=caught)
            self._changed = True
        elif hit.last != line_number:
            hit.count += 1
            hit.last = line_number
            hit.latest = caught
        else:  # another spelling of the same row in the same line may have caught more
            hit.latest = {**caught, **hit.latest}
            hit.caught = {**caught, **hit.caught} if line_number == hit.line_number else hit.caught


def _holding(words: Iterable[bytes], joined: bytes) -> set[bytes]:
    """Give the shapes that hold any of the words: each a line, with a space before and behind."""
    found = set()
    for word in words:
        whole = b" %b " % word
        at = joined.find(whole)
        while at >= 0:
            end = joined.find(b"\n", at)
            end = len(joined) if end < 0 else end
            found.add(joined[joined.rfind(b"\n", 0, at) + 2 : end - 1])
            at = joined.find(whole, end)
    return found


def _settled(known: Known, shown: Collection[Signature], telling: list[Signature]) -> Known:
    """Learn from one line what holds for all of its shape, so that they need no expression."""
    alike = [s for s in telling if s.template.alike and not s.row.where]
    sure = tuple(dict.fromkeys(s.row.id for s in alike))
    left = tuple(
        s
        for s in known.open
        if s.row.id not in sure and not (sure and s.row.role == "unknown")
        if s in shown or s.template.strict or s.row.where
    )
    return Known(sure, left, settled=True, speaks=known.speaks)


def _caught(
    signature: Signature, line: str, body: str, before: int | None = None
) -> dict[str, str] | None:
    """Give what the template caught, None where it does not match or a bound does not hold.

    What begins at the place `before` or behind it does not count.
    """
    template = signature.template
    found = template.regex.search(body if template.anchored else line)
    if found is None or (before is not None and found.start() >= before):
        return None
    caught = {name: value for name, value in found.groupdict().items() if value is not None}
    return caught if within(signature.row.where, caught) else None


def scan(
    lines: Iterable[str | bytes], *, engine: str | None = None, stage: str | None = None
) -> tuple[Finding, ...]:
    """Judge a finished log, given as lines: the findings, first cause first."""
    scanner = Scanner(engine=engine, stage=stage)
    for line in lines:
        scanner.feed(line)
    return scanner.finish()
