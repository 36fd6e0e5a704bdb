"""The suite `vision`: generated pictures, and questions about them.

Pillow draws; its import waits until an image is wanted.
"""

from __future__ import annotations

import base64
import hashlib
import io
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bakehouse.models import Check, check
from bakehouse.probe.answers import THINK_LESS, Judgement, grade_answer, record_answer
from bakehouse.probe.client import Client, JsonResponse, find_in, larger_budget, split_thoughts
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
"""Characters of an answer that are graded: a transcription is no longer than its line."""
NAMES = frozenset({*COLOURS, "orange", "purple", "violet", "pink", "brown", "grey", "gray", "cyan",
                   "magenta", "turquoise"})  # fmt: skip
"""Words that name a colour; one that is not shown speaks against an answer."""


def levenshtein(wanted: str, text: str) -> int:
    """Give the least edits, in characters, between `wanted` and any piece of `text`."""
    above = [0] * (len(text) + 1)
    for row, char in enumerate(wanted, start=1):
        here = [row]
        for column, other in enumerate(text, start=1):
            here.append(min(above[column] + 1, here[-1] + 1, above[column - 1] + (char != other)))
        above = here
    return min(above)


def answer_of(reply: JsonResponse) -> str:
    """Give the answer without raw thinking, at most `LONGEST` characters."""
    return split_thoughts(reply.content)[0].strip()[:LONGEST]


def grade_colours(reply: JsonResponse, wanted: Sequence[str]) -> Judgement:
    """Grade an answer that should name these colours, in this order, and no other."""
    if no_answer := _without_answer(reply):
        return no_answer
    text = normal(answer_of(reply))
    named = [word for a, b in tokens(text) if (word := text[a:b]) in NAMES]
    once = [word for n, word in enumerate(named) if n == 0 or word != named[n - 1]]
    listed = ", ".join(once) or "no colour"
    if once == list(wanted):
        return Judgement("right", f"named {listed}")
    return Judgement("wrong", f"named {listed}, but {', '.join(wanted)} is shown")


def grade_reading(reply: JsonResponse, line: str, most: int) -> Judgement:
    """Grade a transcription by its Levenshtein distance; capitals and line breaks do not count.

    Text around it does not count either, as long as it is not much longer than the line.
    """
    if no_answer := _without_answer(reply):
        return no_answer
    text = normal(answer_of(reply))
    wanted = normal(line)
    if len(text) > 3 * len(wanted) + 200:
        return Judgement("wrong", f"{len(text)} characters for a line of {len(wanted)}")
    distance = levenshtein(wanted, text)
    why = f"Levenshtein distance {distance} to {line!r}"
    return Judgement("right" if distance <= most else "wrong", why)


def _without_answer(reply: JsonResponse) -> Judgement | None:
    """Grade a reply that holds no answer, or only thinking; None if there is one."""
    if reply.problem is not None:
        return Judgement("unanswered", reply.problem)
    if answer_of(reply):
        return None
    if reply.finish_reason == "length":
        return Judgement("never started", "the budget ended before any answer")
    return Judgement("wrong", "the answer is empty")


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
    """The pictures, and the replies about them."""

    pictures: Pictures
    replies: Mapping[str, JsonResponse]
    """By `colour`, `print`, `several`, `follow-up` and `text`."""
    capabilities: tuple[str, ...] | None = None
    """Of the model, where the server lists any."""
    speculates: bool | None = None


def ask(talk: Client, given: SuiteInput) -> Heard:
    """Show the pictures, one question each; then ask for text, behind an image and without."""
    seed = given.probe.vision.seed
    pictures = make(secrets.randbits(32) if seed is None else seed)
    listed = talk.get("/v1/models").find("models", 0, "capabilities")  # llama.cpp only
    capabilities = tuple(map(str, listed)) if isinstance(listed, list) else None
    first = [_user(COLOUR, pictures.colour)]
    replies: dict[str, JsonResponse] = {}
    with talk.progress.bar("vision", "questions") as bar:

        def send(name: str, messages: Sequence[Mapping[str, Any]]) -> None:
            replies[name] = _send(talk, given, messages)
            bar.update(len(replies), 5)

        send("colour", first)
        send("print", [_user(PRINTED, pictures.printed)])
        send("several", [_user(SEVERAL, *pictures.several)])
        answered = {"role": "assistant", "content": replies["colour"].content or "I see it."}
        send("follow-up", [*first, answered, _user(TEXT.ask)])
        send("text", [_user(TEXT.ask)])
    speculates = None
    rows = talk.get("/slots").data if any(r.problem for r in replies.values()) else None
    if isinstance(rows, list) and rows:
        speculates = any(find_in(row, "speculative") is True for row in rows)
    return Heard(pictures, replies, capabilities, speculates)


def _user(text: str, *pictures: Picture) -> dict[str, Any]:
    parts = [picture.part for picture in pictures]
    content: Any = [*parts, {"type": "text", "text": text}] if parts else text
    return {"role": "user", "content": content}


def _send(talk: Client, given: SuiteInput, messages: Sequence[Mapping[str, Any]]) -> JsonResponse:
    """Ask; a second time with more room if the budget ended before the answer."""
    request = given.probe.request
    reply = talk.chat(messages, request, request.max_tokens)
    unfinished = not reply.problem and reply.finish_reason == "length" and not answer_of(reply)
    larger = larger_budget(request.max_tokens, given.endpoint.context)
    return talk.chat(messages, request, larger) if unfinished and larger else reply


def conclude(heard: Heard, given: SuiteInput) -> SuiteProof:
    """Check the replies."""
    pictures, replies = heard.pictures, heard.replies
    colour, line = pictures.colour.truth, pictures.printed.truth
    several = [p.truth for p in pictures.several]
    most = given.probe.vision.distance
    grades = {
        "colour": grade_colours(replies["colour"], [colour]),
        "print": grade_reading(replies["print"], line, most),
        "several": grade_colours(replies["several"], several),
        "follow-up": grade_answer(TEXT, replies["follow-up"]),
        "text": grade_answer(TEXT, replies["text"]),
    }
    shown = {
        "colour": (COLOUR, (colour,)), "print": (PRINTED, (line,)),
        "several": (SEVERAL, (" ".join(several),)),
    }  # fmt: skip
    checks: list[Check] = []
    if heard.capabilities is not None:
        checks.append(check(
            "probe.vision.capability", "multimodal", ", ".join(heard.capabilities) or None,
            "GET /v1/models capabilities", ok="multimodal" in heard.capabilities,
        ))  # fmt: skip
    answers: list[Answer] = []
    for name, grade in grades.items():
        unknown = grade.verdict in ("unanswered", "never started")
        text = " ".join(replies[name].content.split())[:100]
        where = f"POST /v1/chat/completions: {text!r}" if text else "POST /v1/chat/completions"
        checks.append(check(
            f"probe.vision.{name}", _EXPECTED[name], grade.why, where,
            ok=None if unknown else grade.verdict == "right",
        ))  # fmt: skip
        question, wanted = shown.get(name, (TEXT.ask, TEXT.answers))
        plain = replace(grade, found_in=None)
        answers.append(record_answer(question, replies[name], plain, wanted))
    verdict, summary, hint = _verdict(heard, grades)
    return SuiteProof(
        suite="vision", verdict=verdict, summary=summary, checks=tuple(checks),
        answers=tuple(answers),
        figures={"seed": pictures.seed, "images": [p.facts() for p in pictures.all]},
        hint=hint, lost=all(r.lost for r in replies.values()),
    )  # fmt: skip


_EXPECTED = {
    "colour": "the colour of an image named",
    "print": "a printed line read back",
    "several": "the colours of three images named in their order",
    "follow-up": "text answered after an image",
    "text": "text answered without an image, afterwards",
}
_IMAGES = ("colour", "print", "several")


def _verdict(heard: Heard, seen: Mapping[str, Judgement]) -> tuple[SuiteVerdict, str, str | None]:
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
        return "never started", summary, THINK_LESS
    return _unanswered(heard, seen, summary)


def _unanswered(
    heard: Heard, seen: Mapping[str, Judgement], summary: str
) -> tuple[SuiteVerdict, str, str | None]:
    """Tell a server that is ill from one that cannot take images, and say why it cannot."""
    images = [heard.replies[name] for name in _IMAGES]
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
