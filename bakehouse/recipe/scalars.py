"""Scalar types of a recipe: text, versions, numbers, sizes, durations.

Text that YAML reads as a number, such as a commit of digits only, has to be quoted.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema


class Misplaced(ValueError):
    """A fault that a rule over several keys of one map found.

    `at` leads from that map to the key to blame.
    """

    def __init__(self, message: str, *at: str | int, about: tuple[str, ...] = ()) -> None:
        del about  # the keys that the rule reads, for readers of the code
        super().__init__(message)
        self.at = at


def _text(value: Any) -> Any:
    if isinstance(value, bool):
        word = str(value).lower()
        raise ValueError(f"{word} is a boolean; write '{word}' in quotes for text")
    if isinstance(value, int | float):
        raise ValueError(f"this is read as the number {value}; quote it to make it text")
    return value


def _text_or_integer(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return _text(value)


def _version(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(
            f"this version is read as the number {value}; quote it (13.10 and 13.1 are the same "
            "number, but different versions)"
        )
    return _text(value)


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"expected a number, got the boolean {str(value).lower()}")
    if isinstance(value, str):
        hint = "; remove the quotes" if value.strip().isdecimal() else ""
        raise ValueError(f"expected a number, got the text '{value}'{hint}")
    return value


def _flag(value: Any) -> Any:
    if isinstance(value, str) and value.lower() in {"on", "off", "yes", "no", "true", "false"}:
        raise ValueError(f"'{value}' is text in YAML 1.2; write true or false without quotes")
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _finite(value: Any) -> Any:
    """Refuse infinity and NaN at any depth: JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f".{value} is not a finite number")
    items = value.values() if isinstance(value, dict) else value
    for item in items if isinstance(value, dict | list) else ():
        _finite(item)
    return value


_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)[ ]*([KMGT]i?B|B)?", re.IGNORECASE)
_BYTES = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_size(value: Any) -> int:
    """Give bytes for `121GiB`, `4 GB` or a bare number of bytes; ValueError otherwise."""
    if isinstance(value, int) and not isinstance(value, bool):
        number, unit = str(value), "b"
    elif isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())) and found[2]:
        number, unit = found[1], found[2].lower()
    else:
        raise ValueError(f"'{value}' is not a size; write bytes or a unit, such as 4GiB or 98MB")
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
    raise ValueError(f"'{value}' is not a duration; write a unit, such as 90s, 15m or 1h30m")


def format_duration(seconds: float) -> str:
    """Write a duration so that a recipe can hold it: `900s`."""
    return f"{seconds:.6f}".rstrip("0").rstrip(".") + "s"


def _filled(value: str) -> str:
    if not value.strip():
        raise ValueError("the text is empty")
    return value


_TEXT = {"type": ["string", "number"]}
"""For editors, which may accept a number; the loader asks for quotes where that is ambiguous."""

Text = Annotated[str, BeforeValidator(_text), WithJsonSchema(_TEXT)]
TextOrInteger = Annotated[str, BeforeValidator(_text_or_integer), WithJsonSchema(_TEXT)]
"""Text in which an integer needs no quotes, such as the value of an environment variable."""
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
    BeforeValidator(parse_duration),
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
Anything = Annotated[Any, BeforeValidator(_finite)]
