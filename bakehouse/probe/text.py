"""Whole words in any script: how a reply is brought into one form, and an answer found in it."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from operator import eq

_SUPERSCRIPTS = {ord(c): f"^{i}" for i, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
"""Kept apart before NFKC would turn 4² into 42."""

_ALIKE = str.maketrans({
    **dict.fromkeys("‐‑‒–—−", "-"),
    **dict.fromkeys("‘’ʼ", "'"),
    **dict.fromkeys("*_`$~{}\ufe0f", ""),
})  # fmt: skip
"""Dashes and apostrophes as one; the marks of Markdown and LaTeX left out."""

_INLINE = re.compile(r"</?(?:sub|sup|b|i|em|strong|u|code|span|mark|small|font)(?: [^<>]{0,40})?>")
"""Tags that may stand within a word; any other one parts two words."""
_TAG = re.compile(r"</?[a-z|][^<>]{0,40}>")
_LATEX = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it|sf)|boxed|ce|rm)(?![a-z])")
_SPACE = re.compile(r"\s+")

_SPACELESS = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007"
    r"\u3040-\u30ff\u3130-\u318f\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f"
    r"\uac00-\ud7ff\uf900-\ufaff\U0001b000-\U0001b16f\U00020000-\U0003ffff]"
)
"""Scripts that put no space between words, or join particles to them: Thai, Lao, Burmese, Khmer,
Chinese, Japanese, Korean."""

_CHINESE_DIGITS = set("零〇一二三四五六七八九十百千万萬亿億两兩")
_TENS = re.compile(r"(?:twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety)[ -]$")
_NUMBER_BEFORE = re.compile(r"\d[.,]$|(?:^|[^\w)\]])-$")
_NUMBER_AFTER = re.compile(r"[.,]\d")
_TOKEN = re.compile(rf"{_SPACELESS.pattern}|[^\W_]+")


def normal(text: str) -> str:
    r"""Bring text into one form: NFKC, case folded, digits as ASCII, no markup, single spaces.

    H₂O, H2O, `H<sub>2</sub>O`, `$\mathrm{H}_2\mathrm{O}$` and **H2O** all become h2o.
    """
    text = _few_marks(text.translate(_SUPERSCRIPTS))
    text = unicodedata.normalize("NFKC", text).casefold()
    text = unicodedata.normalize("NFKC", text)
    text = _TAG.sub(" ", _INLINE.sub("", text))
    text = _LATEX.sub("", text).translate(_ALIKE)
    if not text.isascii():
        text = "".join(map(_plain_char, text))
    return _SPACE.sub(" ", text).strip()


MARKS = 30
"""Combining marks on one letter that are looked at: no writing has more (the Unicode Standard's
Stream-Safe Text Format, UAX 15), and to order a longer run takes the square of its length."""


def _few_marks(text: str) -> str:
    """Cut runs of combining marks."""
    if text.isascii():
        return text
    kept: list[str] = []
    run = 0
    for char in text:
        run = run + 1 if unicodedata.combining(char) else 0
        if run <= MARKS:
            kept.append(char)
    return "".join(kept)


def _plain_char(char: str) -> str:
    category = unicodedata.category(char)
    if category == "Nd":
        return str(unicodedata.decimal(char))
    return "" if category == "Cf" else char


def tokens(text: str) -> list[tuple[int, int]]:
    """Spans of the words of a normal text; in scripts without spaces, of each character."""
    return [found.span() for found in _TOKEN.finditer(text)]


def holds(text: str, answer: str) -> bool:
    """Whether a normal text holds a normal answer as whole words.

    `4` is in `2+2=4.` and in `答案是4个`, not in `14`, `4.5`, `4,000`, `-4` or `twenty-four`.
    """
    at = text.find(answer) if answer else -1
    while at >= 0:
        if _stands_alone(text, at, at + len(answer)):
            return True
        at = text.find(answer, at + 1)
    return False


def _stands_alone(text: str, start: int, end: int) -> bool:
    before, after = text[max(0, start - 12) : start], text[end : end + 2]
    first, last = text[start], text[end - 1]
    in_word = (before and _joined(before[-1], first)) or (after and _joined(last, after[0]))
    in_number = (first.isdigit() and _NUMBER_BEFORE.search(before)) or (
        last.isdigit() and _NUMBER_AFTER.match(after)
    )
    return not (in_word or in_number or _TENS.search(before))


def _joined(left: str, right: str) -> bool:
    """Whether two neighbours belong to one word, or to one Chinese number."""
    if left in _CHINESE_DIGITS and right in _CHINESE_DIGITS:
        return True
    return _in_word(left) and _in_word(right)


def _in_word(char: str) -> bool:
    if _SPACELESS.match(char):
        return False
    return char.isalnum() or unicodedata.category(char).startswith("M")


_DENIED = re.compile(
    r"\b(?:is|are|was|were|'s|it|certainly|definitely|ist|sind|war|est|es|era) ?"
    r"(?:not|n't|nicht|kein|keine|pas|no) (?:(?:the|a|an|der|die|das|el|la|le) )?(?!only\b|just\b)"
    r"[\w^]+|\b(?:isn't|aren't|wasn't|weren't) (?:the |a )?[\w^]+"
    r"|\bwhether (?:or not )?(?:it|this|that) is (?:the |a )?[\w^]+"
)


def asserted(text: str) -> str:
    """Give a normal text without the words that it denies, or only wonders about."""
    return _DENIED.sub(" . ", text)


ECHO = 4
"""So many of the question's words in a row are its echo."""


def without_echo(text: str, question: str) -> str:
    """Give a normal text without what it repeats of the (normal) question.

    Runs of four or more of the question's words go, or the whole question where it is shorter; a
    full stop takes their place, so that what stood around them does not become one word.
    """
    asked = [question[a:b] for a, b in tokens(question)]
    length = min(ECHO, len(asked))
    if not length:
        return text
    runs = {tuple(asked[i : i + length]) for i in range(len(asked) - length + 1)}
    spans = tokens(text)
    said = [text[a:b] for a, b in spans]
    pieces: list[str] = []
    kept_from = 0
    covered = -1
    for i in range(len(said) - length + 1):
        if tuple(said[i : i + length]) not in runs:
            continue
        if i > covered:
            pieces.append(text[kept_from : spans[i][0]])
        covered = i + length - 1
        kept_from = spans[covered][1]
    pieces.append(text[kept_from:])
    return " . ".join(pieces)


@lru_cache(maxsize=32)
def loops(text: str) -> bool:
    """Whether a normal text is little more than one piece of it, over and over.

    True where its beginning (1200 characters), shifted by some period, agrees with itself in at
    least 85% of the characters, over four periods or more; and where few different words make up a
    long text. Ordinary text shifted against itself agrees in 6 to 8%.
    """
    part = text[:1200]
    length = len(part)
    if length < 20:
        return False
    for period in range(1, length // 4 + 1):
        if sum(map(eq, part, part[period:])) >= 0.85 * (length - period):
            return True
    words = [text[a:b] for a, b in tokens(text[:20_000])]
    few = 0.15 if len(words) <= 300 else 0.04
    return len(words) >= 40 and len(set(words)) < few * len(words)


def lists(text: str) -> bool:
    """Whether a text (line breaks kept) is a list of a dozen or more short items."""
    items = [item for piece in re.split(r"[\n,;|/、，；]", text) if (item := piece.strip())]
    if len(items) < 12:
        return False
    short = sum(len(tokens(normal(item))) <= 3 for item in items)
    return short >= 0.75 * len(items)


SAME = 8
"""So many words in a row that stand before or behind every answer are worth a remark."""


def same_words(texts: Sequence[str]) -> list[str]:
    """Give the words that all of four or more texts end with, else begin with; none if few.

    A stuck engine does that, and a polite model as well: it is for a person to judge.
    """
    if len(texts) < 4:
        return []
    words = [text[:4000].split() for text in texts]
    ends = _common([one[::-1] for one in words])[::-1]
    return next((same for same in (ends, _common(words)) if len(same) >= SAME), [])


def _common(lists: Sequence[Sequence[str]]) -> list[str]:
    """Give what all lists begin with."""
    alike = itertools.takewhile(lambda row: len(set(row)) == 1, zip(*lists, strict=False))
    return [row[0] for row in alike]
