"""Filters, methods and operators that a command's template may use, each with a bound."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from jinja2 import UndefinedError
from jinja2.filters import FILTERS as BUILT_IN
from jinja2.runtime import Undefined
from jinja2.utils import missing

from bakehouse.recipe.faults import kind, printable
from bakehouse.util.text import did_you_mean

MAX_TEXT = 2**20
MAX_ITEMS = 10_000
MAX_BITS = 256


class Unfit(Exception):
    """A value that cannot be used where it stands; `hint` says what to write instead."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True)
class Several:
    """Several whole arguments, made by the filter `args`."""

    values: tuple[str, ...]


class Table(dict[str, Any]):
    """A map that knows what a template calls it."""

    path: str = ""


@dataclass(frozen=True)
class Method:
    """A method of a value, looked up and not yet called."""

    owner: Any
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, within bounds."""
        if self.name == "replace":
            return replace(self.owner, *args, **kwargs)
        if self.name == "join":
            return join(*args, **{"d": self.owner, **kwargs})
        result = getattr(self.owner, self.name)(*args, **kwargs)
        return list(result) if self.name in {"keys", "values", "items", "partition"} else result


TEXT_METHODS = frozenset({
    "split", "rsplit", "splitlines", "strip", "lstrip", "rstrip", "startswith", "endswith",
    "lower", "upper", "replace", "join", "removeprefix", "removesuffix", "partition",
})  # fmt: skip
MAP_METHODS = frozenset({"get", "items", "keys", "values"})
LOOP = frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length"})


def is_method(owner: Any, name: str) -> bool:
    """Whether a template may use this method of this value."""
    if isinstance(owner, str):
        return name in TEXT_METHODS
    return isinstance(owner, dict) and name in MAP_METHODS


def bounded_range(*limits: int) -> range:
    """Give `range(…)`, at most 10,000 long."""
    made = range(*limits)
    if len(made) > MAX_ITEMS:
        raise Unfit(f"range() gives {len(made)} numbers; at most {MAX_ITEMS}")
    return made


def as_plain(value: Any, path: str) -> Any:
    """Copy data for a template: only maps, lists, text, numbers, booleans and None get in."""
    if isinstance(value, Mapping):
        table = Table({str(k): as_plain(v, f"{path}.{k}") for k, v in value.items()})
        table.path = path
        return table
    if isinstance(value, list | tuple):
        return [as_plain(v, path) for v in value]
    if isinstance(value, str | PurePath):
        return str(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{path} is a {type(value).__name__}, which no template may see")


def describe_missing(owner: Any, name: Any, known: Iterable[str]) -> str:
    """Say what is not there, and what is near."""
    if owner is missing:
        hint = did_you_mean(str(name), known) or f"there are {', '.join(sorted(known))}"
        return f"'{name}' is not defined ({hint})"
    if isinstance(owner, Table) and owner.path:
        near = did_you_mean(str(name), owner)
        hint = near.replace("mean ", f"mean {owner.path}.") if near else _has(owner)
        return f"'{owner.path}.{name}' is not defined ({hint})"
    if owner is None:
        return f"there is no '{name}' in null: what stands before it is not set"
    return f"there is no '{name}' in {kind(owner)}"


def _has(owner: Table) -> str:
    return (
        f"{owner.path} has {', '.join(sorted(owner)[:20])}" if owner else f"{owner.path} is empty"
    )


def defined(value: Any) -> None:
    """Refuse what is undefined. Raises UndefinedError, which says what it is."""
    if isinstance(value, Undefined):
        str(value)
        raise Unfit("an 'if' inside an expression gives nothing here", "give it an 'else'")


def argument_text(value: Any, name: str = "") -> str:
    """Give the text that a value is as (part of) an argument. Raises Unfit, UndefinedError."""
    defined(value)
    said = name or "this expression"
    short = name or "x"
    if isinstance(value, bool):
        raise Unfit(
            f"{said} is {kind(value)}, and an argument is text or a number",
            f"write {{{{ 'on' if {short} else 'off' }}}} or {{% if {short} %}}…{{% endif %}}",
        )
    if value is None:
        raise Unfit(
            f"{said} is null (not set), and an argument is text or a number",
            f"{{% if {short} %}}…{{% endif %}} leaves it out where it is not set",
        )
    if isinstance(value, list | tuple | range | Iterator):
        raise Unfit(
            f"{said} is a bare list, and an argument is text or a number",
            f"write {{{{ {short} | args }}}} for one argument each, or use tojson or join(',')",
        )
    if isinstance(value, dict):
        raise Unfit(
            f"{said} is a bare map, and an argument is text or a number",
            f"write {{{{ {short} | tojson }}}} for JSON",
        )
    if not isinstance(value, str | int | float):
        raise Unfit(f"{said} is not text or a number", "call a method with (), a filter with |")
    return _fit(str(value), said)


def _fit(text: str, said: str) -> str:
    if "\0" in text:
        raise Unfit(f"{said} holds a NUL character, which no argument can")
    if len(text) > MAX_TEXT:
        raise Unfit(f"{said} is longer than any argument can be")
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise Unfit(f"{said} holds half of a surrogate pair, which is no text") from None
    return text


def _items(value: Any, what: str) -> list[Any]:
    defined(value)
    if isinstance(value, str | dict) or not isinstance(value, Iterable):
        raise Unfit(f"{what} wants a list, this is {kind(value)}")
    return list(value)


def args(value: Any) -> Several:
    """Give each item of a list as an argument of its own."""
    return Several(tuple(argument_text(item, "an item") for item in _items(value, "args")))


def tojson(value: Any) -> str:
    """Give JSON, without the HTML escapes of Jinja's own filter."""
    defined(value)
    if not isinstance(value, str | int | float | dict | list | tuple | None):
        value = list(value) if isinstance(value, Iterable) else value
    parts, size = [], 0
    for part in json.JSONEncoder(ensure_ascii=False, allow_nan=False).iterencode(value):
        size += len(part)
        if size > MAX_TEXT:
            raise Unfit("the JSON is longer than any argument can be")
        parts.append(part)
    return "".join(parts)


def joined(values: Iterable[Any], separator: str = "") -> str:
    """Join text and numbers, bounded."""
    texts = [argument_text(value) for value in values]
    if sum(map(len, texts)) + len(separator) * len(texts) > MAX_TEXT:
        raise Unfit("the joined text is longer than any argument can be")
    return separator.join(texts)


def join(value: Any, d: Any = "") -> str:
    """Join the items of a list."""
    return joined(_items(value, "join"), argument_text(d))


def replace(value: Any, old: str, new: str) -> str:
    """Replace text, bounded."""
    text, old, new = argument_text(value), argument_text(old), argument_text(new)
    if len(text) + text.count(old) * len(new) > MAX_TEXT:
        raise Unfit("the text is longer than any argument can be")
    return text.replace(old, new)


def _on_text(change: Callable[[str], Any]) -> Callable[[Any], Any]:
    return lambda value: change(argument_text(value))


def _to_number(change: Callable[[Any], Any], what: str) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        text = argument_text(value)
        try:
            return change(value if isinstance(value, int | float) else text)
        except (ValueError, OverflowError):
            raise Unfit(f"{kind(text)} is not {what}") from None

    return convert


def kept(value: Any) -> Any:
    """Check what a template keeps in a variable: plain, and no larger than a recipe could be."""
    defined(value)
    if not isinstance(value, str | int | float | dict | list | tuple | range | None):
        if isinstance(value, Several | Method) or not isinstance(value, Iterable):
            raise Unfit("a variable holds text, a number, a list or a map")
        value = list(value)
    items, characters = MAX_ITEMS, MAX_TEXT
    stack = [value]
    while stack:
        item = stack.pop()
        items -= 1
        characters -= len(item) if isinstance(item, str) else 0
        below = [*item, *item.values()] if isinstance(item, dict) else item
        if isinstance(below, list | tuple):
            if len(below) > items:
                raise Unfit("a variable grows beyond what a command can hold")
            stack += below
        if items < 0 or characters < 0:
            raise Unfit("a variable grows beyond what a command can hold")
    return value


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse what would grow without bound, and `%` on text."""
    if any(isinstance(side, Undefined) for side in (left, right)):
        return
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    if operator == "%" and not numbers:
        raise Unfit("% computes with numbers only", "use ~ to join text")
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        if left.bit_length() * max(right, 0) > MAX_BITS:
            raise Unfit("the number is too large")
    elif operator == "*" and not numbers:
        count = left if isinstance(left, int) else right
        thing = right if isinstance(left, int) else left
        sized = isinstance(thing, str | list | tuple)
        if sized and isinstance(count, int) and len(thing) * max(count, 0) > MAX_ITEMS:
            raise Unfit("the repetition is too long")
    elif operator == "+" and not numbers:
        if not all(isinstance(s, list) for s in (left, right)):
            raise Unfit("+ adds numbers or lists", "use ~ to join text")
        if len(left) + len(right) > MAX_ITEMS:
            raise Unfit("the list is too long")
    elif operator in {"+", "*"} and max(_bits(left), _bits(right)) > MAX_BITS:
        raise Unfit("the number is too large")


def _bits(value: int | float) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def in_words(error: Exception) -> tuple[str, str | None]:
    """Give message and hint for whatever a template ran into."""
    if isinstance(error, Unfit):
        return error.message, error.hint
    text = printable(str(error))
    if isinstance(error, UndefinedError):
        message, _, hint = text.partition(" (")
        return message, hint.removesuffix(")") or None
    if isinstance(error, ZeroDivisionError):
        return "a division by zero", None
    return f"this cannot be computed: {text}", None


_TAKEN = (
    "abs", "count", "d", "default", "dictsort", "first", "items", "last", "length", "list", "map",
    "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "sum",
    "unique",
)  # fmt: skip

FILTERS: dict[str, Callable[..., Any]] = {
    **{name: BUILT_IN[name] for name in _TAKEN},
    "args": args,
    "tojson": tojson,
    "join": join,
    "replace": replace,
    "string": _on_text(str),
    "lower": _on_text(str.lower),
    "upper": _on_text(str.upper),
    "trim": _on_text(str.strip),
    "int": _to_number(int, "a whole number"),
    "float": _to_number(float, "a number"),
}
"""All that a template may use."""
