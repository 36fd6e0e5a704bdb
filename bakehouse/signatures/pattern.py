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
_QUOTE = r"\\?[\"'`\u2018\u2019\u201c\u201d]"


def shape(text: bytes) -> bytes:
    """Reduce text to lower-case words between spaces, digits left out; newlines stay."""
    return text.translate(_TABLE, _DIGITS)


def words_of(literal: str) -> list[bytes]:
    """Give the words of a literal as `shape` leaves them in a line that holds it."""
    return shape(literal.encode()).split()


@dataclass(frozen=True)
class Template:
    """A parsed template; `words` are those that any line it matches must hold."""

    text: str
    expression: str
    words: frozenset[bytes]

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """Compiled at first use: most signatures never come near a line."""
        return re.compile(self.expression, re.IGNORECASE)


def parse(text: str) -> Template:
    """Read a template; ValueError names what is wrong with it."""
    body = text
    start, end = body.startswith("^"), body.endswith("$") and not body.endswith("\\$")
    body = body[1:] if start else body
    body = body[:-1] if end else body
    pieces: list[str] = []
    literals: list[str] = []
    """Runs of literal text; NUL stands where a placeholder touches them."""
    for match in _PART.finditer(body):
        escaped, kind, name, choice, space, quote, plain = match.groups()
        if kind:
            inner = _REPEAT[kind]
            pieces.append(f"(?P<{name}>{inner})" if name else f"(?:{inner})")
            literals.append("\0")
        elif choice is not None:
            pieces.append(f"(?:{'|'.join(_literal(option) for option in choice.split('|'))})")
            literals.append("\0")
        elif space:
            pieces.append(r"\s+")
            literals.append(" ")
        elif quote:
            pieces.append(_QUOTE)
            literals.append(" ")
        else:
            pieces.append(re.escape(escaped or plain))
            literals.append(escaped or plain)
    if not pieces:
        raise ValueError(f"the template '{text}' is empty")
    expression = "".join(pieces)
    if start:
        expression = r"\A" + expression
    elif literals[0].isalnum():
        expression = r"(?<![A-Za-z0-9])" + expression
    if end:
        expression += r"\s*\Z"
    elif literals[-1].isalnum():
        expression += r"(?![A-Za-z0-9])"
    return Template(text, expression, _required("".join(literals)))


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
