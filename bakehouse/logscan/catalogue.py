"""Signatures of log lines: templates, the data files, and their index.

A template is a line as the log has it, with placeholders, such as:

    offloaded <n:layers>/<n> layers to GPU

`<n>` is a number, `<w>` a run without spaces, `<*>` anything within the line, `<a|b>` one of
several spellings, `<again>` one syllable or sign over and over; a name after a colon keeps what was
caught. Case and the kind of quote do not matter, a space stands for any run of spaces, `^` and `$`
are the ends of the message (what a logger put before it does not count), and a backslash makes the
next character literal. A template is a regular expression with bounded repeats only, so that no log
can make it run away.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

from bakehouse.logscan.findings import Row

_DIGITS = b"0123456789"
_TABLE = bytes(
    (code | 0x20) if 65 <= code <= 90 else code if 97 <= code <= 122 or code == 10 else 32
    for code in range(256)
)

_PART = re.compile(
    r"\\(.)|<([nw*]|again)(?::(\w+))?>|<([^<>]*\|[^<>]*)>|(\s+)|([\"'`])|(.)", re.DOTALL
)
_AGAIN = r"(?:(?P<syllable>[^\W\d_]{3,12}?)(?P=syllable){3,}|(?P<sign>[?!@G])(?P=sign){15,})"
_REPEAT = {"n": r"[-+]?\d[\d.,]*", "w": r"\S{1,300}?", "*": r".{0,240}?", "again": _AGAIN}
_OPEN = {rf"(?:{_REPEAT['w']})": r"(?<=\S)", rf"(?:{_REPEAT['*']})": ""}
_CLOSE = {rf"(?:{_REPEAT['w']})": r"(?=\S)", rf"(?:{_REPEAT['*']})": ""}
"""An open end costs nothing where only its presence matters."""
_QUOTE = r"\\?[\"'`\u2018\u2019\u201c\u201d]"


def shape(text: bytes) -> bytes:
    """Reduce text to lower-case words between spaces, digits left out; newlines stay."""
    return text.translate(_TABLE, _DIGITS)


def words_of(literal: str) -> list[bytes]:
    """Give the words of a literal as `shape` leaves them in a line that holds it."""
    return shape(literal.encode()).split()


@dataclass(frozen=True)
class Template:
    """A parsed template."""

    text: str
    expression: str
    words: frozenset[bytes]
    """Words that any line it matches must hold."""
    anchored: bool
    """Whether it begins at the start of a message, so that prefixes have to come off first."""
    alike: bool
    """Whether lines of one shape all match if one does: no digit is named."""
    strict: bool
    """Whether a line of the same shape may match where this one did not: numbers or ends count."""

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """Compiled at first use: most signatures never come near a line."""
        return re.compile(self.expression, re.IGNORECASE)


def parse(text: str) -> Template:
    """Read a template; ValueError names what is wrong with it."""
    start, end = text.startswith("^"), text.endswith("$") and not text.endswith("\\$")
    body = text[1 if start else 0 : -1 if end else None]
    parts = [_part(found) for found in _PART.finditer(body)]
    if not parts:
        raise ValueError(f"the template '{text}' is empty")
    pieces = [piece for piece, _ in parts]
    literal = "".join(plain for _, plain in parts)
    if not start:
        pieces[0] = _OPEN.get(pieces[0], pieces[0])
        if literal[0].isalnum():
            pieces.insert(0, r"(?<![A-Za-z0-9])")
    if not end:
        pieces[-1] = _CLOSE.get(pieces[-1], pieces[-1])
        if literal[-1].isalnum():
            pieces.append(r"(?![A-Za-z0-9])")
    digits = any(c.isdigit() for c in text)
    return Template(
        text,
        (r"\A" if start else "") + "".join(pieces) + (r"\s*\Z" if end else ""),
        words=_required(literal),
        anchored=start,
        alike=not digits,
        strict=start or end or digits or "<n" in text,
    )


def _part(found: re.Match[str]) -> tuple[str, str]:
    """Give a part's regular expression, and its literal text (NUL for a placeholder)."""
    escaped, kind, name, choice, space, quote, plain = found.groups()
    if kind:
        inner = _REPEAT[kind]
        return (f"(?P<{name}>{inner})" if name else f"(?:{inner})"), "\0"
    if choice is not None:
        return f"(?:{'|'.join(_literal(option) for option in choice.split('|'))})", "\0"
    if space or quote:
        return (r"\s+" if space else _QUOTE), " "
    return re.escape(escaped or plain), escaped or plain


def spellings(text: str) -> tuple[Template, ...]:
    """Read a template; one that holds no whole word becomes several, one for each choice.

    ValueError where it holds no word even then: there would be nothing to look it up by.
    """
    template = parse(text)
    if template.words:
        return (template,)
    choice = next((found for found in _PART.finditer(text) if found[4] is not None), None)
    if choice is None:
        raise ValueError(f"'{text}' holds no whole word to look it up by")
    head, tail = text[: choice.start()], text[choice.end() :]
    return tuple(
        template for option in choice[4].split("|") for template in spellings(head + option + tail)
    )


def _literal(text: str) -> str:
    return r"\s+".join(re.escape(part) for part in text.split(" "))


def _required(text: str) -> frozenset[bytes]:
    """Whole words only: one that touches a placeholder may be part of a longer word."""
    separated = re.sub(r"[A-Za-z0-9]*\0[A-Za-z0-9\0]*", " ", text)
    return frozenset(words_of(separated))


FOLDER = Path(__file__).parent

_COMMON = frozenset(
    b"""a all an and any are array as at available backend be being bool build by cache cannot
    capability class cmake code compatible completed config context could count cpu create cuda
    data default device devices did directory do does done engine error errors exception exit
    exited fail failed failure false fatal file files find for found from get ggml gguf given
    gpu has have if in index info init initialize initialized int into invalid is it its key
    kernel kv layers length line list llama load loaded loader loading log main max memory message
    missing mode model models module more must n name need no none not null num number of on one
    only open option or out process python query read ready request requests response run s
    server service set shape size slot slots so source space srv start started state str such
    supported system t tensor that the there this time to token tokens true try type unable
    unknown unsupported update use used using value version vllm vocab w warn warning was with
    worker you d e i m r""".split()
)
"""Words of every log: a poor choice to look a signature up by."""


@dataclass(frozen=True, eq=False)
class Signature:
    """One template of one row."""

    row: Row
    template: Template


@dataclass(frozen=True)
class Catalogue:
    """Rows, and their templates by the rarest word each of them must find in a line."""

    rows: dict[str, Row]
    by_word: dict[bytes, tuple[Signature, ...]]
    words: frozenset[bytes] = field(repr=False)
    every_word: frozenset[bytes] = field(repr=False)
    """Of all templates, the others of each as well."""

    def worth(self, words: Iterable[bytes]) -> frozenset[bytes]:
        """Give the rarest words of signatures whose words are all among those of some lines."""
        held = self.every_word.intersection(words)
        return frozenset(
            word
            for word in held & self.words
            if any(signature.template.words <= held for signature in self.by_word[word])
        )

    def candidates(self, words: Iterable[bytes]) -> tuple[Signature, ...]:
        """Give the signatures that a line of these words may show, in the files' order."""
        held = frozenset(words)
        return tuple(
            signature
            for word in held & self.words
            for signature in self.by_word[word]
            if signature.template.words <= held
        )


def build(rows: Iterable[Row]) -> Catalogue:
    """Index rows; ValueError for a double id or a template without words."""
    known: dict[str, Row] = {}
    index: dict[bytes, list[Signature]] = {}
    for row in rows:
        if row.id in known:
            raise ValueError(f"the id '{row.id}' is used twice")
        known[row.id] = row
        for template in (template for text in row.pattern for template in spellings(text)):
            anchor = max(template.words, key=lambda word: (word not in _COMMON, len(word), word))
            index.setdefault(anchor, []).append(Signature(row, template))
    frozen = {word: tuple(found) for word, found in index.items()}
    every = (s.template.words for found in frozen.values() for s in found)
    return Catalogue(known, frozen, frozenset(frozen), frozenset().union(*every))


def resolve(rows: Collection[Row]) -> None:
    """ValueError where a row refers to one that there is not."""
    ids = {row.id for row in rows}
    for row in rows:
        for name in (*row.needs, *row.unless):
            if name not in ids:
                raise ValueError(f"{row.id} refers to '{name}', which does not exist")


def read(path: Path) -> list[Row]:
    """Read one data file; strict, so that a misspelt key is an error."""
    from ruamel.yaml import YAML  # only who scans a log pays for it

    return [Row.model_validate(entry) for entry in YAML(typ="safe").load(path)]


def wanted(row: Row, engine: str | None) -> bool:
    """Whether a row can show in this engine's log: only rows of the other engine cannot.

    A server's log holds what Docker, CMake (kernels compiled at run time) and git say as well, so
    only rows that belong to nobody but the other server are left out.
    """
    servers = {"llama.cpp", "vllm"}
    return not (engine in servers and row.engine and set(row.engine) <= servers - {engine})


@lru_cache(maxsize=1)
def every_row() -> tuple[Row, ...]:
    """Give the rows of all data files, read from disk once a process."""
    rows = tuple(row for path in sorted(FOLDER.glob("*.yaml")) for row in read(path))
    resolve(rows)
    return rows


@lru_cache(maxsize=8)
def catalogue(engine: str | None = None) -> Catalogue:
    """Give all rows that can show in this engine's log."""
    return build(row for row in every_row() if wanted(row, engine))
