"""Validate a recipe's data, and turn pydantic's errors into messages at `file:line:column`."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from bakehouse.errors import Fault
from bakehouse.recipe.document import KeyPath
from bakehouse.recipe.models import Recipe
from bakehouse.recipe.types import Origin, dotted, kind
from bakehouse.util.text import closest_match, did_you_mean


@dataclass(frozen=True)
class Places:
    """Where values and keys are."""

    values: Mapping[KeyPath, Origin]
    keys: Mapping[KeyPath, Origin]

    def of(self, path: KeyPath) -> Origin:
        """Return the place of a value, or of the nearest map around it."""
        while path not in self.values and path:
            path = path[:-1]
        return self.values.get(path, Origin("recipe"))

    def of_key(self, path: KeyPath) -> Origin:
        """Return the place of a key, or of the nearest key around it."""
        while path and path not in self.keys:
            if path in self.values:  # an item of a list has no key
                return self.values[path]
            path = path[:-1]
        return self.keys[path] if path else self.of(())


def validate(
    data: dict[str, Any], places: Places, *, partial: bool = False
) -> tuple[Recipe | None, list[Fault]]:
    """Return the recipe, or every fault of the merged data.

    Rules over several keys of a map run once the keys themselves are right. With `partial` a file
    is missing: missing keys, and rules that may fail because of them, are not reported.
    """
    try:
        return Recipe.model_validate(data), []
    except ValidationError as error:
        errors = [one for one in error.errors(include_url=False) if not _is_echo(one)]
    unknown = [tuple(one["loc"]) for one in errors if one["type"] == "extra_forbidden"]
    if partial:
        errors = [one for one in errors if one["type"] != "missing" and not _is_rule(one)]
    return None, [_fault(one, places) for one in errors if not _is_misspelled(one, unknown)]


def _is_echo(error: Any) -> bool:
    """Whether a list counts as too short only because of its invalid items."""
    short = error["type"] == "too_short"
    return short and bool(len(error["input"]) >= error["ctx"]["min_length"])


def _is_misspelled(error: Any, unknown: Sequence[KeyPath]) -> bool:
    """Whether a key is missing because it is misspelled, which is reported already."""
    path = tuple(error["loc"])
    return error["type"] == "missing" and any(
        other[:-1] == path[:-1]
        and closest_match(str(other[-1]), _names(model_at(path[:-1]))) == path[-1]
        for other in unknown
    )


def _is_rule(error: Any) -> bool:
    """Whether a rule over several keys of one map failed."""
    is_rule = error["type"] == "value_error" and isinstance(error["input"], dict)
    return is_rule and model_at(tuple(error["loc"])) is not None


def model_at(path: KeyPath) -> type[BaseModel] | None:
    """Return the model that a path leads to; None if it leads to something else."""
    kind_: Any = Recipe
    for part in path:
        kind_ = _inner(kind_, part)
    found = _models(kind_)
    return found[0] if found else None


def _inner(kind_: Any, part: str | int) -> Any:
    """Return the type under a key of a model, or inside a list or map."""
    for model in _models(kind_):
        for name, field in model.model_fields.items():
            if part in (field.alias, name):
                return field.annotation
        return None
    for option in _options(kind_):
        arguments = [a for a in typing.get_args(option) if a is not Ellipsis]
        if typing.get_origin(option) in (tuple, list, dict) and arguments:
            return arguments[-1]
    return None


def _options(kind_: Any) -> list[Any]:
    """Take Annotated and optional types apart."""
    origin = typing.get_origin(kind_)
    if origin is typing.Annotated:
        return _options(typing.get_args(kind_)[0])
    if origin in (typing.Union, types.UnionType):
        return [o for a in typing.get_args(kind_) for o in _options(a)]
    return [kind_]


def _models(kind_: Any) -> list[type[BaseModel]]:
    return [o for o in _options(kind_) if isinstance(o, type) and issubclass(o, BaseModel)]


def _names(model: type[BaseModel] | None) -> list[str]:
    """Return the keys of a map, in the order of the model."""
    return [f.alias or n for n, f in model.model_fields.items()] if model else []


def _fault(error: Any, places: Places) -> Fault:
    path: KeyPath = tuple(error["loc"])
    is_key = bool(path) and path[-1] == "[key]"
    path = path[:-1] if is_key else path
    blamed = (*path, *getattr(error.get("ctx", {}).get("error"), "at", ()))
    name = dotted(blamed)
    if error["type"] == "missing":
        takes = ", ".join(_names(model_at(path))[:8])
        hint = f"it is a map with {takes}" if takes else None
        return places.of_key(path[:-1]).fault(f"{name} is missing", hint)
    if error["type"] == "extra_forbidden":
        known = _names(model_at(path[:-1]))
        here = dotted(path[:-1]) or "a recipe"
        hint = did_you_mean(str(path[-1]), known)
        return places.of_key(path).fault(
            f"unknown key {name}", hint or (f"{here} takes {', '.join(known)}" if known else None)
        )
    is_key = is_key or (bool(path) and blamed == path and _is_rule(error))
    place = places.of_key(blamed) if is_key else places.of(blamed)
    message, hint = words(error)
    return place.fault(f"{name}: {message}" if name else message, hint)


_EXPECTED = {
    "string_type": ("text", None),
    "model_type": ("a map", "write its keys below, indented"),
    "dict_type": ("a map", "write its keys below, indented"),
    "tuple_type": ("a list", "write [a, b], or lines with '- '"),
    "int_type": ("a whole number", None),
    "int_from_float": ("a whole number", None),
    "float_type": ("a number", None),
}

_BEYOND = {
    "greater_than_equal": "{found} is too small; at least {ge}",
    "greater_than": "{found} is too small; more than {gt}",
    "less_than_equal": "{found} is too large; at most {le}",
    "less_than": "{found} is too large; less than {lt}",
    "too_short": "{found} with too few items; at least {min_length} required",
    "finite_number": "{found} is not a finite number",
}


def words(error: Any) -> tuple[str, str | None]:
    """Return the message and the hint for one of pydantic's errors."""
    found = kind(error["input"])
    type_, context = error["type"], error.get("ctx", {})
    if type_ == "value_error":
        return str(context["error"]), getattr(context["error"], "hint", None)
    if type_ == "literal_error":
        return _literal(error, found)
    if type_ in _EXPECTED:
        expected, hint = _EXPECTED[type_]
        return f"expected {expected}, got {found}", hint
    if type_ in _BEYOND:
        return _BEYOND[type_].format(found=found, **context), None
    text = str(error["msg"])
    return text[:1].lower() + text[1:], None


def _literal(error: Any, found: str) -> tuple[str, str | None]:
    choices = str(error["ctx"]["expected"]).replace(" or ", ", ").replace("'", "").split(", ")
    value = error["input"]
    hint = did_you_mean(value, choices) if isinstance(value, str) else None
    if not isinstance(value, str) and str(value) in choices:
        hint = f'quote it: "{value}"'
    one_of = "one of " if len(choices) > 1 else ""
    return f"{found} is not {one_of}{', '.join(choices)}", hint
