r"""Templates: the log line as it stands, with placeholders where it varies.

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
from dataclasses import dataclass
from functools import cached_property

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
