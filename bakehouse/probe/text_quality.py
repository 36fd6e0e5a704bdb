"""Find degenerate text.

Fluent nonsense has a good form; that is what `likelihood` and `facts` are for. What is found here:
loops, collapsed variety, leaked control tokens, broken characters, mixed scripts, no words at all.
Good answers in any script, code, lists, tables and poems with a refrain stay unflagged.
"""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


MOST = 4000
"""Characters that are looked at: the beginning and the end of a longer text."""


@dataclass(frozen=True)
class Flaw:
    """One thing that no good answer shows; `what` is for people."""

    id: str
    what: str


def find_defects(text: str) -> tuple[Flaw, ...]:
    """Give everything about the form of an answer that no good answer shows."""
    text = text.strip()
    if len(text) > MOST:
        text = f"{text[: MOST // 2]}\n{text[-MOST // 2 :]}"
    if not text:
        return (Flaw("empty", "nothing was written"),)
    found = ((name, rule(text)) for name, rule in _RULES.items())
    return tuple(Flaw(name, what) for name, what in found if what)


_FENCED = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
_ROLE = re.compile(
    r"<[|｜]/?[\w▁ ]{1,40}[|｜]>"
    r"|</?(?:start|end)_of_turn>|</s>|\[/?INST\]|<</?SYS>>|<0x[0-9A-F]{2}>|<extra_id_\d+>"
    r"|<(?:unk|pad|bos|eos)>|\[(?:UNK|PAD|MASK|CLS|SEP)\]|<(?:reserved|unused)_?\w*\d+>"
    r"|_c?(?:assistant|user|system)_|^(?:assistant|im_start|im_end)$",
    re.MULTILINE,
)


def _role(text: str) -> str | None:
    """Find control and role tokens that belong to the template, not to the answer."""
    found = _ROLE.search(_FENCED.sub(" ", text))
    return f"the control token {found[0]!r} leaked into the text" if found else None


def _broken(text: str) -> str | None:
    """Find replacement and other characters that no text holds; one may be a cut-off at the end."""
    odd = [
        c
        for c in text
        if c == "\ufffd"
        or (unicodedata.category(c) in ("Cc", "Co", "Cn", "Cs") and c not in _BLANK)
    ]
    if len(odd) < 2 and not (odd and len(text) < 20):
        return None
    return f"{len(odd)} characters that belong to no text, such as U+{ord(odd[0]):04X}"


_BLANK = "\n\r\t\f\v"
_RUN = re.compile(r"([^\W\d_])\1{9,}|([!?？！,;:'\"@$%^&+\\/])\2{7,}")
_RULER = re.compile(r"[-=_*#.~|:+─━═—·•\s]{3,}")
"""Lines of Markdown and of tables."""


def _run(text: str) -> str | None:
    """Find one character over and over."""
    bare = "".join(text.split())
    if len(bare) >= 4 and len(set(bare)) == 1:
        return f"nothing but {len(bare)} times {bare[0]!r}"
    found = _RUN.search(text)
    return f"the character {found[0][0]!r} {len(found[0])} times in a row" if found else None


def _wordless(text: str) -> str | None:
    """Find text that is hardly letters or digits."""
    bare = _RULER.sub("", text)
    meant = sum(c.isalnum() or unicodedata.category(c)[0] == "M" for c in bare)
    if meant == 0 or (len(bare) >= 20 and meant < 0.3 * len(bare)):
        return f"{meant} letters and digits among {len(text)} characters"
    return None


_GLUED = re.compile(r"([^\W\d_]{3,12}?)\1{2,}", re.IGNORECASE)
LONG_WORD = 70
"""Letters: the longest words of real languages that put spaces between them."""


def _glued(text: str) -> str | None:
    """Find words that are pieces stuck together."""
    plain = _FENCED.sub(" ", text)
    found = _GLUED.search(plain)
    if found and found[1].isascii():
        return f"the piece {found[1]!r} stuck together {len(found[0]) // len(found[1])} times"
    for word in re.findall(rf"[A-Za-z\u00c0-\u024f]{{{LONG_WORD},}}", plain):
        return f"a word of {len(word)} letters"
    return None


def _whole_twice(text: str) -> str | None:
    """Find text that is one piece of it twice or more often, from end to end."""
    part = f"{' '.join(text.split())} "[:1200]
    length = len(part)
    if length < 24 or not any(c.isalpha() for c in part):
        return None
    for period in range(8, length // 2 + 1):
        if all(map(eq, part, part[period:])):
            return f"a piece of {period} characters repeated from end to end"
    return None


def _tail(text: str) -> str | None:
    """Find a loop that the text ends in: one piece five times or more, 60 characters or more."""
    flat = " ".join(text.split())[-1500:]
    for period in range(1, len(flat) // 5 + 1):
        piece = flat[-period:]
        times = 1
        while flat.endswith(piece * (times + 1)):
            times += 1
        if times >= 5 and times * period >= 60 and _RULER.sub("", piece):
            return f"it ends in {times} times {piece.strip()[:40]!r}"
    return None


def _words(text: str) -> list[str]:
    folded = text.casefold()
    return [folded[a:b] for a, b in tokens(folded)]


def _few_words(text: str) -> str | None:
    """Find long text of few different words, or of few different sequences of four."""
    words = _words(text)
    if len(words) < 40:
        return None
    fours = list(zip(words, words[1:], words[2:], words[3:], strict=False))
    share, of_words = len(set(fours)) / len(fours), len(set(words)) / min(len(words), 300)
    if share < 0.3 or of_words < 0.12:
        return f"{len(set(words))} different words among {len(words)}"
    return None


def _pieces(text: str) -> str | None:
    """Find text of few different sequences of four letters, which needs no word borders."""
    letters = "".join(c for c in _without_rows(text).casefold() if c.isalpha())[:600]
    if len(letters) < 32:
        return None
    fours = [letters[i : i + 4] for i in range(len(letters) - 3)]
    share = len(set(fours)) / len(fours)
    return f"{share:.0%} of its letter sequences are different" if share < 0.4 else None


def _without_rows(text: str) -> str:
    """Leave out lines of code and of tables that differ from an earlier one in numbers alone."""
    seen: set[str] = set()
    kept: list[str] = []
    for line in text.splitlines():
        marks = sum(not (c.isalnum() or c.isspace()) for c in line)
        form = re.sub(r"\d+", "0", line)
        if marks < 0.2 * len(line) or form not in seen:
            kept.append(line)
        seen.add(form)
    return "\n".join(kept)


def _flat(text: str) -> str | None:
    """Find text that packs too well, or whose characters are too few different ones."""
    data = text.encode()
    if len(data) >= 300 and (ratio := len(data) / len(zlib.compress(data, 9))) > 5:
        return f"it packs {ratio:.1f} times"
    bare = [c for c in _RULER.sub("", text) if not c.isspace()]
    if len(bare) >= 40 and (bits := entropy(bare)) < 2.2:
        return f"{bits:.1f} bits of entropy a character"
    return None


def entropy(symbols: list[str]) -> float:
    """Give the Shannon entropy of single symbols, in bits."""
    total = len(symbols)
    return -sum(n / total * math.log2(n / total) for n in Counter(symbols).values())


_EAST = {"CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO", "IDEOGRAPHIC", "FULLWIDTH"}
_SHARED = {"MODIFIER", "MICRO", "FEMININE", "MASCULINE", "DOUBLE-STRUCK", "MATHEMATICAL", "SCRIPT"}


def _script(char: str) -> str | None:
    """Name a letter's script; the East Asian ones, which are written together, count as one."""
    if char.isascii():
        return "LATIN" if char.isalpha() else None
    if not char.isalpha():
        return None
    name = unicodedata.name(char, "UNKNOWN").split()[0]
    if name in _SHARED:
        return None
    return "CJK" if name in _EAST else name


def _scripts(text: str) -> str | None:
    """Find words of several scripts, and texts of four or more."""
    letters = Counter(filter(None, map(_script, text)))
    total = letters.total()
    if total < 12:
        return None
    common = [name for name, n in letters.items() if n >= max(2, 0.02 * total)]
    if len(common) >= 4:
        return f"letters of {len(common)} scripts: {', '.join(sorted(common)).lower()}"
    words = re.findall(r"[^\W\d_]{2,}", text)
    mixed = [w for w in words if _mixed(w)]
    if len(mixed) >= 2 and len(mixed) >= 0.05 * len(words):
        return f"{len(mixed)} words of several scripts, such as {mixed[0][:30]!r}"
    return None


def _mixed(word: str) -> bool:
    """Whether a word mixes alphabets; a Greek letter beside Latin ones is a unit or a formula."""
    scripts = Counter(filter(None, map(_script, word)))
    if scripts.get("GREEK", 0) == 1:
        del scripts["GREEK"]
    scripts.pop("CJK", None)
    return len(scripts) >= 2


_RULES: dict[str, Callable[[str], str | None]] = {
    "control-token": _role,
    "broken-characters": _broken,
    "one-character": _run,
    "no-words": _wordless,
    "stuck-together": _glued,
    "repeated-whole": _whole_twice,
    "ends-in-a-loop": _tail,
    "few-words": _few_words,
    "few-pieces": _pieces,
    "collapsed": _flat,
    "mixed-scripts": _scripts,
}
RULES = ("empty", *_RULES)
LOOPS = frozenset({"repeated-whole", "ends-in-a-loop", "few-words", "few-pieces", "collapsed"})
"""Flaws of text that repeats itself, and may consist of good words all the same."""
