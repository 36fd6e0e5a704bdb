"""The suite `vision`: generated pictures, and questions about them.

Pillow draws; its import waits until an image is wanted.
"""

from __future__ import annotations

import base64
import hashlib
import io
import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bakehouse.models import Check, check
from bakehouse.probe.answers import judge
from bakehouse.probe.client import Client, Completion, larger_budget, said_of, split_thoughts
from bakehouse.probe.models import SuiteInput, SuiteProof
from bakehouse.probe.suites.base import Suite
from bakehouse.probe.text_quality import normal, tokens
from bakehouse.recipe.models import Question
from bakehouse.runs.store import Answer, SuiteVerdict

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (255, 0, 0),
    "green": (0, 160, 0),
    "blue": (0, 0, 255),
    "yellow": (255, 255, 0),
    "black": (0, 0, 0),
    "white": (255, 255, 255),
}
"""Colours that every language names, far from each other; RGB, 8 bits each."""

SIDE = 64
"""Pixels of a colour's square."""
PRINT = (1200, 400)
"""Width and height of a printed line, in pixels."""
FONT = 60
"""Height of the print, in pixels."""

_WORDS = (
    ("SILVER", "GOLDEN", "WOODEN", "LITTLE", "CLEVER", "QUIET"),
    ("ROBOT", "SAILOR", "FARMER", "DOCTOR", "PAINTER", "TEACHER"),
    ("READS", "FOLDS", "CARRIES", "PAINTS", "COUNTS", "BURIES"),
    ("THREE", "FOUR", "SEVEN", "EIGHT", "NINE", "TWELVE"),
    ("BLUE", "GREEN", "YELLOW", "PURPLE", "WHITE", "ORANGE"),
    ("MAPS", "BOATS", "LAMPS", "BOOKS", "STONES", "KITES"),
)


@dataclass(frozen=True)
class Picture:
    """A PNG file, and what is on it."""

    what: str
    """`colour` or `print`."""
    truth: str
    png: bytes
    size: tuple[int, int]
    """Width and height in pixels."""

    @property
    def part(self) -> dict[str, Any]:
        """The part of a chat message that holds it."""
        data = base64.b64encode(self.png).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    def facts(self) -> dict[str, Any]:
        """What is kept of it: enough to know that an answer is about this very image."""
        return {
            "what": self.what, "size": list(self.size), "truth": self.truth,
            "sha256": hashlib.sha256(self.png).hexdigest(),
            "truth_sha256": hashlib.sha256(self.truth.encode()).hexdigest(),
        }  # fmt: skip


@dataclass(frozen=True)
class Pictures:
    """What one run of the suite shows."""

    seed: int
    colour: Picture
    printed: Picture
    several: tuple[Picture, ...]
    """Three colours, none twice."""

    @property
    def all(self) -> tuple[Picture, ...]:
        """Every picture, in the order in which it is shown."""
        return (self.colour, self.printed, *self.several)


def make(seed: int) -> Pictures:
    """Make the pictures of a seed; the same seed and the same Pillow give the same bytes."""
    dice = random.Random(seed)  # noqa: S311 - nothing here is secret
    first = dice.choice(tuple(COLOURS))
    several = tuple(map(colour, dice.sample(tuple(COLOURS), 3)))
    line = " ".join(dice.choice(words) for words in _WORDS)
    return Pictures(seed, colour(first), printed(f"THE {line}."), several)


def colour(name: str) -> Picture:
    """Give a square of one colour."""
    from PIL import Image  # 0.1 s that only this suite needs

    image = Image.new("RGB", (SIDE, SIDE), COLOURS[name])
    return Picture("colour", name, _png(image), image.size)


def printed(line: str) -> Picture:
    """Print a line black on white, in as many rows as it takes."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", PRINT, "white")
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(FONT)
    rows = [""]
    for word in line.split():
        longer = f"{rows[-1]} {word}".strip()
        if pen.textlength(longer, font=font) > PRINT[0] - 2 * FONT:
            rows.append(word)
        else:
            rows[-1] = longer
    pen.multiline_text((FONT, FONT), "\n".join(rows), fill="black", font=font, spacing=FONT // 2)
    return Picture("print", line, _png(image), image.size)


def _png(image: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


LONGEST = 2000
"""Characters of an answer that are looked at: a transcription is no longer than what it copies."""
NAMES = frozenset({*COLOURS, "orange", "purple", "violet", "pink", "brown", "grey", "gray", "cyan",
                   "magenta", "turquoise"})  # fmt: skip
"""Words that name a colour; one that is not shown speaks against an answer."""


@dataclass(frozen=True)
class Seen:
    """What came of one question about images."""

    verdict: Literal["right", "wrong", "never started", "unanswered"]
    why: str


def levenshtein(wanted: str, text: str) -> int:
    """Give the least edits, in characters, between `wanted` and any piece of `text`."""
    above = [0] * (len(text) + 1)
    for row, char in enumerate(wanted, start=1):
        here = [row]
        for column, other in enumerate(text, start=1):
            here.append(min(above[column] + 1, here[-1] + 1, above[column - 1] + (char != other)))
        above = here
    return min(above)


def answer_of(said: Completion) -> str:
    """Give what was answered, without raw thinking; not longer than is looked at."""
    return split_thoughts(said.content)[0].strip()[:LONGEST]


def colours(said: Completion, wanted: Sequence[str]) -> Seen:
    """Judge an answer that should name these colours, in this order, and no other."""
    if early := _early(said):
        return early
    text = normal(answer_of(said))
    named = [word for a, b in tokens(text) if (word := text[a:b]) in NAMES]
    once = [word for n, word in enumerate(named) if n == 0 or word != named[n - 1]]
    heard = ", ".join(once) or "no colour"
    if once == list(wanted):
        return Seen("right", f"named {heard}")
    return Seen("wrong", f"named {heard} where {', '.join(wanted)} is shown")


def reading(said: Completion, line: str, most: int) -> Seen:
    """Judge a transcription by its Levenshtein distance; capitals and line breaks do not count.

    What stands around it does not count either, as long as it is not much longer than the line.
    """
    if early := _early(said):
        return early
    text = normal(answer_of(said))
    wanted = normal(line)
    if len(text) > 3 * len(wanted) + 200:
        return Seen("wrong", f"an answer of {len(text)} characters to a line of {len(wanted)}")
    distance = levenshtein(wanted, text)
    why = f"Levenshtein distance {distance} to {line!r}"
    return Seen("right" if distance <= most else "wrong", why)


def _early(said: Completion) -> Seen | None:
    """What can be said before the content counts: nothing came, or only thinking."""
    if said.problem is not None:
        return Seen("unanswered", said.problem)
    if answer_of(said):
        return None
    if said.finish_reason == "length":
        return Seen("never started", "the budget ended before any answer")
    return Seen("wrong", "the answer is empty")


TEXT = Question(ask="What is 2+2? Answer with a number.", answers=("4", "four"))
"""Asked behind an image, and once more without any."""
COLOUR = "What colour fills this image? Answer with one word."
PRINTED = "Copy the line that is printed in this image, exactly and without anything else."
SEVERAL = "Name the colour of each of these images, in their order, one word for each."
SPECULATES = (
    "a draft context of its own never learns that an image passed: serve images without "
    "--spec-type, or with an n-gram mode"
)


@dataclass(frozen=True)
class Heard:
    """What was shown, and what was said of it."""

    pictures: Pictures
    said: Mapping[str, Completion]
    """By `colour`, `print`, `several`, `follow-up` and `text`."""
    capabilities: tuple[str, ...] | None = None
    """Of the model, where the server lists any."""
    speculates: bool | None = None


def ask(talk: Client, given: SuiteInput) -> Heard:
    """Show the pictures, one question each; then ask for text, behind an image and without."""
    seed = given.probe.vision.seed
    pictures = make(secrets.randbits(32) if seed is None else seed)
    capabilities = _capabilities(talk.get("/v1/models").data)
    first = [_user(COLOUR, pictures.colour)]
    said: dict[str, Completion] = {}
    with talk.progress.bar("vision", "questions") as bar:
        said["colour"] = _say(talk, given, first)
        bar.update(1, 5)
        said["print"] = _say(talk, given, [_user(PRINTED, pictures.printed)])
        bar.update(2, 5)
        said["several"] = _say(talk, given, [_user(SEVERAL, *pictures.several)])
        bar.update(3, 5)
        answered = {"role": "assistant", "content": said["colour"].content or "I see it."}
        said["follow-up"] = _say(talk, given, [*first, answered, _user(TEXT.ask)])
        bar.update(4, 5)
        said["text"] = _say(talk, given, [_user(TEXT.ask)])
        bar.update(5, 5)
    broken = any(s.problem for s in said.values())
    return Heard(pictures, said, capabilities, _speculates(talk) if broken else None)


def _user(text: str, *pictures: Picture) -> dict[str, Any]:
    parts = [picture.part for picture in pictures]
    content: Any = [*parts, {"type": "text", "text": text}] if parts else text
    return {"role": "user", "content": content}


def _say(talk: Client, given: SuiteInput, messages: Sequence[Mapping[str, Any]]) -> Completion:
    """Ask; a second time with more room if the budget ended before the answer."""
    request = given.probe.request
    said = _once(talk, given, messages, request.max_tokens)
    unfinished = not said.problem and said.finish_reason == "length" and not answer_of(said)
    larger = larger_budget(request.max_tokens, given.endpoint.context)
    return _once(talk, given, messages, larger) if unfinished and larger else said


def _once(
    talk: Client, given: SuiteInput, messages: Sequence[Mapping[str, Any]], budget: int
) -> Completion:
    request = given.probe.request
    body: dict[str, Any] = {
        "model": talk.endpoint.model or "default", "messages": list(messages),
        "max_tokens": budget, "temperature": request.temperature, "stream": False,
    }  # fmt: skip
    if request.reasoning_effort:
        body["reasoning_effort"] = request.reasoning_effort
    told = talk.post("/v1/chat/completions", body, tokens=budget)
    return said_of(told, "chat")


def _capabilities(data: Any) -> tuple[str, ...] | None:
    """What llama.cpp lists for its model; None where a server lists nothing of the kind."""
    models = data.get("models") if isinstance(data, dict) else None
    first = models[0] if isinstance(models, list) and models else None
    listed = first.get("capabilities") if isinstance(first, dict) else None
    return tuple(map(str, listed)) if isinstance(listed, list) else None


def _speculates(talk: Client) -> bool | None:
    """Whether a slot speculates; None where the server does not tell."""
    rows = talk.get("/slots").data
    if not isinstance(rows, list) or not rows:
        return None
    return any(isinstance(row, dict) and row.get("speculative") is True for row in rows)


def conclude(heard: Heard, given: SuiteInput) -> SuiteProof:
    """Judge what was said."""
    seen = _judged(heard, given)
    checks = [_check(name, heard, one) for name, one in seen.items()]
    if heard.capabilities is not None:
        listed = ", ".join(heard.capabilities) or None
        checks.insert(0, check(
            "probe.vision.capability", "multimodal", listed, "GET /v1/models capabilities",
            ok="multimodal" in heard.capabilities,
        ))  # fmt: skip
    verdict, summary, hint = _verdict(heard, seen)
    return SuiteProof(
        suite="vision", verdict=verdict, summary=summary, checks=tuple(checks),
        answers=tuple(_answer(name, heard, one) for name, one in seen.items()),
        figures={
            "seed": heard.pictures.seed, "images": [p.facts() for p in heard.pictures.all]
        },
        hint=hint, lost=all(s.lost for s in heard.said.values()),
    )  # fmt: skip


def _judged(heard: Heard, given: SuiteInput) -> dict[str, Seen]:
    pictures, said = heard.pictures, heard.said
    wanted = [p.truth for p in pictures.several]
    judges: dict[str, Callable[[Completion], Seen]] = {
        "colour": lambda s: colours(s, [pictures.colour.truth]),
        "print": lambda s: reading(s, pictures.printed.truth, given.probe.vision.distance),
        "several": lambda s: colours(s, wanted),
        "follow-up": _text,
        "text": _text,
    }
    return {name: judges[name](said[name]) for name in judges}


def _text(said: Completion) -> Seen:
    judged = judge(TEXT, said)
    return Seen(judged.verdict, judged.why)


_EXPECTED = {
    "colour": "the colour of an image named",
    "print": "a printed line read back",
    "several": "the colours of three images named in their order",
    "follow-up": "text answered behind an image",
    "text": "text answered without an image, afterwards",
}


def _check(name: str, heard: Heard, seen: Seen) -> Check:
    unknown = seen.verdict in ("unanswered", "never started")
    answer = " ".join(heard.said[name].content.split())[:100]
    where = f"POST /v1/chat/completions: {answer!r}" if answer else "POST /v1/chat/completions"
    return check(
        f"probe.vision.{name}", _EXPECTED[name], seen.why, where,
        ok=None if unknown else seen.verdict == "right",
    )  # fmt: skip


def _answer(name: str, heard: Heard, seen: Seen) -> Answer:
    said, pictures = heard.said[name], heard.pictures
    shown = {
        "colour": (COLOUR, (pictures.colour.truth,)),
        "print": (PRINTED, (pictures.printed.truth,)),
        "several": (SEVERAL, (" ".join(p.truth for p in pictures.several),)),
    }
    question, wanted = shown.get(name, (TEXT.ask, TEXT.answers))
    return Answer(
        question=question, mode="chat", wanted=wanted, content=said.content,
        reasoning=said.reasoning, finish_reason=said.finish_reason, verdict=seen.verdict,
        why=seen.why, tokens=said.tokens, seconds=round(said.seconds, 3),
        http_status=said.http_status,
    )  # fmt: skip


_IMAGES = ("colour", "print", "several")


def _verdict(heard: Heard, seen: Mapping[str, Seen]) -> tuple[SuiteVerdict, str, str | None]:
    """Give the verdict, the one sentence, and what to do."""
    count = sum(one.verdict == "right" for one in seen.values())
    summary = f"{count} of {len(seen)} as shown"
    if heard.capabilities is not None and "multimodal" not in heard.capabilities:
        return "unable", "/v1/models does not say multimodal", (
            "serve with the projector: --mmproj {{ weights.projector.first }}"
        )  # fmt: skip
    bad = next(((n, s) for n, s in seen.items() if s.verdict != "right"), None)
    if bad is None:
        return "true", summary, None
    summary = f"{summary}; {bad[0]}: {bad[1].why}"
    verdicts = {one.verdict for one in seen.values()}
    if "wrong" in verdicts:
        return "wrong", summary, None
    if "unanswered" not in verdicts:
        return "never started", summary, (
            "set probe.request.reasoning_effort: low, or raise probe.request.max_tokens"
        )  # fmt: skip
    return _unanswered(heard, seen, summary)


def _unanswered(
    heard: Heard, seen: Mapping[str, Seen], summary: str
) -> tuple[SuiteVerdict, str, str | None]:
    """Tell a server that is ill from one that cannot take images, and say why it cannot."""
    images = [heard.said[name] for name in _IMAGES]
    errors = [s for s in images if s.problem and (s.http_status or 0) >= 400]
    if len(errors) < len(images):
        return "unstable", summary, "look at the server's log for what it made of the request"
    status = errors[0].http_status
    text = "text is answered" if seen["text"].verdict == "right" else "text is not answered either"
    says = f"every image request ends with HTTP {status}, {text}: {errors[0].problem}"
    drafts = any("specul" in (s.problem or "") or "draft" in (s.problem or "") for s in errors)
    if heard.speculates or drafts:
        says = (
            f"every image request ends with HTTP {status} with speculation on, {text}: the draft "
            "context is suspect, not the image"
        )
        return "unable", says, SPECULATES
    return "unable", says, "check the projector: that it belongs to this model, and its own file"


SUITE = Suite("vision", ask, conclude)
