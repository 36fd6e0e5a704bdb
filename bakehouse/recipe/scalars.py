"""Scalar types of a recipe: text that keeps its source form, versions, sizes, durations.

A YAML reader turns `0123456` into a number; a commit of digits alone must stay text. The loader
therefore hands over plain scalars as `PlainInt`, `PlainFloat` and `PlainBool`, which remember how
they were written, and each field's type decides what to make of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer


class PlainInt(int):
    """An unquoted integer that remembers how it was written."""

    text: str

    def __new__(cls, value: int, text: str) -> PlainInt:
        """Keep `text` beside the value."""
        made = super().__new__(cls, value)
        made.text = text
        return made


class PlainFloat(float):
    """An unquoted floating-point number that remembers how it was written."""

    text: str

    def __new__(cls, value: float, text: str) -> PlainFloat:
        """Keep `text` beside the value."""
        made = super().__new__(cls, value)
        made.text = text
        return made


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
        raise ValueError(f"'{value}' is text, a number is wanted; take the quotes away")
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
    if isinstance(value, PlainFloat):
        return float(value)
    if isinstance(value, dict):
        return {str(getattr(k, "text", k)): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
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
    if size < 0:
        raise ValueError("a size cannot be negative")
    return int(size)


_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?")


def parse_duration(value: Any) -> float:
    """Give seconds for `15m`, `1h30m`, `2.5s`; ValueError otherwise, also for a bare number."""
    if isinstance(value, str) and value and (found := _DURATION.fullmatch(value.strip())):
        hours, minutes, seconds = (float(part or 0) for part in found.groups())
        total = hours * 3600 + minutes * 60 + seconds
        if total > 0:
            return total
    written = getattr(value, "text", value)
    raise ValueError(f"'{written}' is not a duration; write a unit, such as 90s, 15m or 1h30m")


def _from_json_duration(value: Any) -> Any:
    if isinstance(value, float) and not isinstance(value, PlainFloat):
        return value
    return parse_duration(value)


Text = Annotated[str, BeforeValidator(_text)]
Version = Annotated[str, BeforeValidator(_version)]
Number = Annotated[float, BeforeValidator(_number)]
Whole = Annotated[int, BeforeValidator(_number)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Size = Annotated[int, BeforeValidator(parse_size)]
"""Bytes."""
Duration = Annotated[float, BeforeValidator(_from_json_duration), PlainSerializer(float)]
"""Seconds."""
Anything = Annotated[Any, BeforeValidator(plain)]
