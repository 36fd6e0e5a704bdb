"""Scalar types of a recipe: text that keeps its source form, versions, sizes, durations.

A YAML reader turns `0123456` into a number; a commit of digits alone must stay text. The loader
therefore hands over plain scalars as `PlainInt`, `PlainFloat` and `PlainBool`, which remember how
they were written, and each field's type decides what to make of them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema


class Misplaced(ValueError):
    """A fault that a rule over several keys of one map found.

    `at` leads from that map to the key to blame; `about` names the keys that the rule looked at.
    """

    def __init__(self, message: str, *at: str | int, about: tuple[str, ...]) -> None:
        super().__init__(message)
        self.at = at
        self.about = about


class PlainInt(int):
    """An unquoted integer that remembers how it was written."""

    text: str

    def __new__(cls, value: int, text: str) -> PlainInt:
        """Keep `text` beside the value."""
        made = super().__new__(cls, value)
        made.text = text
        return made

    def __getnewargs__(self) -> tuple[int, str]:  # type: ignore[override]
        """Let copies be made."""
        return int(self), self.text


class PlainFloat(float):
    """An unquoted floating-point number that remembers how it was written."""

    text: str

    def __new__(cls, value: float, text: str) -> PlainFloat:
        """Keep `text` beside the value."""
        made = super().__new__(cls, value)
        made.text = text
        return made

    def __getnewargs__(self) -> tuple[float, str]:  # type: ignore[override]
        """Let copies be made."""
        return float(self), self.text


@dataclass(frozen=True)
class PlainBool:
    """An unquoted `true` or `false` that remembers how it was written."""

    value: bool
    text: str

    def __bool__(self) -> bool:
        """Give the value itself."""
        return self.value


def _text(value: Any) -> Any:
    if isinstance(value, PlainInt | PlainFloat):
        return value.text
    if isinstance(value, PlainBool):
        raise ValueError(f"{value.text} is a boolean here; write '{value.text}' in quotes for text")
    return value


def _version(value: Any) -> Any:
    if isinstance(value, PlainInt | PlainFloat):
        raise ValueError(
            f'the version {value.text} is read as a number; quote it: "{value.text}" '
            "(13.10 and 13.1 are the same number and different versions)"
        )
    return _text(value)


def _number(value: Any) -> Any:
    if isinstance(value, PlainBool):
        raise ValueError(f"{value.text} is a boolean, a number is wanted")
    if isinstance(value, PlainInt):
        return int(value)
    if isinstance(value, PlainFloat):
        return float(value)
    if isinstance(value, str):
        mend = "; take the quotes away" if value.strip().isdecimal() else ""
        raise ValueError(f"'{value}' is text, a number is wanted{mend}")
    return value


def _flag(value: Any) -> Any:
    if isinstance(value, PlainBool):
        return value.value
    if isinstance(value, str) and value.lower() in {"on", "off", "yes", "no", "true", "false"}:
        raise ValueError(f"'{value}' is text in YAML 1.2; write true or false without quotes")
    if not isinstance(value, bool):
        raise ValueError("true or false is wanted")
    return value


def plain(value: Any) -> Any:
    """Turn remembered scalars, at any depth, into ordinary Python values."""
    if isinstance(value, PlainBool):
        return value.value
    if isinstance(value, PlainInt):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{getattr(value, 'text', value)} is not a finite number")
        return float(value)
    if isinstance(value, dict):
        return {str(getattr(k, "text", k)): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)[ ]*([KMGT]i?B|B)?", re.IGNORECASE)
_BYTES = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_size(value: Any) -> int:
    """Give bytes for `121GiB`, `4 GB` or a bare number of bytes; ValueError otherwise."""
    if isinstance(value, int) and not isinstance(value, bool):
        number, unit = str(int(value)), "b"
    elif isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())) and found[2]:
        number, unit = found[1], found[2].lower()
    else:
        written = getattr(value, "text", value)
        raise ValueError(f"'{written}' is not a size; write bytes or a unit, such as 4GiB or 98MB")
    size = float(number) * _BYTES[unit] if "." in number else int(number) * _BYTES[unit]
    if not 0 <= size < 2**63:
        raise ValueError("a size lies between 0 and 8 EiB")
    return int(size)


_DURATION = re.compile(r"(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9}(?:\.[0-9]{1,6})?)s)?")
LONGEST = 366 * 86400.0
"""Seconds; the clocks below us cannot wait for ever."""


def parse_duration(value: Any) -> float:
    """Give seconds for `15m`, `1h30m`, `2.5s`; ValueError otherwise, also for a bare number."""
    if isinstance(value, str) and value.strip() and (found := _DURATION.fullmatch(value.strip())):
        hours, minutes, seconds = (float(part or 0) for part in found.groups())
        total = hours * 3600 + minutes * 60 + seconds
        if 0 < total <= LONGEST:
            return total
        raise ValueError(f"'{value.strip()}' is not above 0 and at most a year")
    written = getattr(value, "text", value)
    raise ValueError(f"'{written}' is not a duration; write a unit, such as 90s, 15m or 1h30m")


def _from_json_duration(value: Any) -> Any:
    if isinstance(value, float) and not isinstance(value, PlainFloat):
        return value
    return parse_duration(value)


def format_duration(seconds: float) -> str:
    """Write a duration so that a recipe can hold it: `900s`."""
    return f"{seconds:.6f}".rstrip("0").rstrip(".") + "s"


def _filled(value: str) -> str:
    if not value.strip():
        raise ValueError("the text is empty")
    return value


_TEXT = {"type": ["string", "number"]}
"""What an editor may accept: a number in place of text keeps the form in which it is written."""

Text = Annotated[str, BeforeValidator(_text), WithJsonSchema(_TEXT)]
Filled = Annotated[Text, AfterValidator(_filled)]
"""Text with something in it."""
Version = Annotated[str, BeforeValidator(_version), WithJsonSchema({"type": "string"})]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_number), Field(le=2**31 - 1)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Size = Annotated[
    int,
    BeforeValidator(parse_size),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KMGTkmgt][Ii]?)?[Bb]\s*$"},
            ],
            "examples": ["4GiB", "98MB"],
        }
    ),
]
"""Bytes."""
Duration = Annotated[
    float,
    BeforeValidator(_from_json_duration),
    PlainSerializer(format_duration, return_type=str, when_used="json"),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": r"^\s*(?=.*\d)(\d+h)?(\d+m)?(\d+(\.\d+)?s)?\s*$",
            "examples": ["90s", "15m", "1h30m"],
        }
    ),
]
"""Seconds; written with its unit."""
Anything = Annotated[Any, BeforeValidator(plain)]
