"""Images made when they are needed, from a seed, with what is on them: nobody can have seen them.

Pillow draws; its import waits until an image is wanted.
"""

from __future__ import annotations

import base64
import hashlib
import io
import random
from dataclasses import dataclass
from typing import Any

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
