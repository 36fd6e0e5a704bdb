"""What pydantic says about a recipe, in a recipe's words and at the recipe's places.

One mistake gives one message, and every mistake gives its own: rules over several keys run only
where the keys themselves are right, so each fault is mended in a copy (a misspelled key is taken
for the one that it is near to, anything else gets a stand-in) and the copy is judged again.
"""

from __future__ import annotations

import copy
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from bakehouse.errors import Fault
from bakehouse.recipe.faults import Origin, dotted, kind
from bakehouse.recipe.merge import KeyPath
from bakehouse.recipe.model import Recipe
from bakehouse.util.text import closest_match, did_you_mean

STAND_INS: dict[str, Any] = {
    "schema": 1,
    "name": "name",
    "engine": "llama.cpp",
    "weights": {"model": {"path": "model"}},
    "model": {"path": "model"},
    "serve": {"command": "server"},
    "command": "server",
    "file": "file",
    "folder": "folder",
    "sha256": "0" * 64,
    "version": "13.0",
    "ref": {"x86_64": "image"},
    "builder": {"x86_64": "image"},
    "runtime": {"x86_64": "image"},
    "ask": "question",
    "answers": ["answer"],
    "Measured.what": "weights",
    "Measured.size": 1,
    "Measured.source": "somebody",
}
"""A right value for each key that must be there, to judge the rest by."""


def stand_in(kind_: type[BaseModel] | None, key: str) -> Any:
    """Give a right value for a key that a map must have."""
    owner = kind_.__name__ if kind_ else ""
    return copy.deepcopy(STAND_INS.get(f"{owner}.{key}", STAND_INS.get(key)))


MAX_ROUNDS = 12


@dataclass
class Judged:
    """A recipe, or what is wrong with it. `mended` is the copy in which all faults are mended."""

    recipe: Recipe | None
    faults: list[Fault]
    mended: Recipe | None
    data: dict[str, Any]
    """What `mended` was made of."""
    touched: set[KeyPath]
    """Paths whose value in `mended` is not what the files say."""
    renamed: dict[KeyPath, KeyPath]
    """Paths in `mended`, and how the files write them, where a key was misspelled."""

    def written(self, path: KeyPath) -> KeyPath:
        """Give a path as the files write it."""
        return _written(path, self.renamed)


@dataclass(frozen=True)
class Places:
    """Where values and keys stand."""

    values: Mapping[KeyPath, Origin]
    keys: Mapping[KeyPath, Origin]

    def of(self, path: KeyPath) -> Origin:
        """Give the place of a value, or of the nearest map around it."""
        while path not in self.values and path:
            path = path[:-1]
        return self.values.get(path, Origin("recipe"))

    def of_key(self, path: KeyPath) -> Origin:
        """Give the place of a key, or of the nearest key around it."""
        while path and path not in self.keys:
            if path in self.values:  # an item of a list has no key
                return self.values[path]
            path = path[:-1]
        return self.keys[path] if path else self.of(())


def judge(data: dict[str, Any], places: Places, *, partial: bool = False) -> Judged:
    """Validate merged data; `partial` says that a file is missing, so that keys may be."""
    faults: list[Fault] = []
    touched: set[KeyPath] = set()
    renamed: dict[KeyPath, KeyPath] = {}
    current = data
    for number in range(MAX_ROUNDS):
        try:
            recipe = Recipe.model_validate(current)
            good = recipe if number == 0 else None
            return Judged(good, faults, recipe, current, touched, renamed)
        except ValidationError as error:
            current = copy.deepcopy(current)
            # Misspelled keys first: the key that each was meant to be is then no longer missing.
            for one in sorted(error.errors(include_url=False), key=_not_extra):
                path, is_key = _path_of(one)
                if (one["type"] == "missing" and path in renamed) or _only_seems_short(one):
                    continue
                blame = _written(path, renamed)
                if not _follows(one, path, touched) and not (partial and _may_be_absence(one)):
                    faults.append(_fault(one, path, blame, places, is_key=is_key))
                _mend(current, one, path, touched, renamed)
    return Judged(None, faults, None, current, touched, renamed)


def _not_extra(error: Any) -> bool:
    return bool(error["type"] != "extra_forbidden")


def _only_seems_short(error: Any) -> bool:
    """Whether a list counts as too short because what stands in it is wrong, which is said."""
    if error["type"] != "too_short":
        return False
    return bool(len(error["input"]) >= error["ctx"]["min_length"])


def _path_of(error: Any) -> tuple[KeyPath, bool]:
    """Give the path to blame, and whether its key rather than its value is wrong."""
    path: KeyPath = tuple(error["loc"])
    if path and path[-1] == "[key]":
        return path[:-1], True
    cause = error.get("ctx", {}).get("error")
    return (*path, *getattr(cause, "at", ())), error["type"] == "extra_forbidden"


def _written(path: KeyPath, renamed: Mapping[KeyPath, KeyPath]) -> KeyPath:
    """Give the path as the file writes it, where a key was taken for another one."""
    for length in range(len(path), 0, -1):
        if path[:length] in renamed:
            return (*renamed[path[:length]], *path[length:])
    return path


def _follows(error: Any, path: KeyPath, touched: set[KeyPath]) -> bool:
    """Whether this only says again what a mended fault has said."""
    if error["type"] == "value_error" and _is_rule(error):
        owner: KeyPath = tuple(error["loc"])
        about = getattr(error["ctx"]["error"], "about", None)
        return any(t[:-1] == owner and (about is None or t[-1] in about) for t in touched)
    emptied = error["type"] == "too_short" and any(t[:-1] == path for t in touched)
    return emptied or path in touched


def _is_rule(error: Any) -> bool:
    """Whether a rule over several keys of one map speaks."""
    return isinstance(error["input"], dict) and model_at(tuple(error["loc"])) is not None


def _may_be_absence(error: Any) -> bool:
    return error["type"] == "missing" or _is_rule(error)


def _mend(
    data: dict[str, Any],
    error: Any,
    path: KeyPath,
    touched: set[KeyPath],
    renamed: dict[KeyPath, KeyPath],
) -> None:
    """Change `data` so that this fault is gone from it."""
    holder = _holder(data, path)
    if holder is None:
        return
    last = path[-1]
    if error["type"] == "extra_forbidden":
        value = holder.pop(last, None)
        meant = closest_match(str(last), _names(model_at(path[:-1])))
        if meant and meant not in holder:
            holder[meant] = value
            renamed[(*path[:-1], meant)] = path
        return
    touched.add(path)
    if isinstance(last, int):
        touched.add(path[:-1])
        holder[last] = STAND_INS["ask"]
        above = _holder(data, path[:-1])
        if above is not None:
            above.pop(path[-2], None)
    elif _required(path) or error["type"] == "missing":
        holder[last] = stand_in(model_at(path[:-1]), str(last))
    else:
        holder.pop(last, None)


def _holder(data: Any, path: KeyPath) -> Any:
    """Give the map or list that holds the last part of `path`, None where there is none."""
    if not path:
        return None
    for part in path[:-1]:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    fits = isinstance(data, list) if isinstance(path[-1], int) else isinstance(data, dict)
    return data if fits else None


def model_at(path: KeyPath) -> type[BaseModel] | None:
    """Give the model that a path leads to, None where it leads to something else."""
    kind_: Any = Recipe
    for part in path:
        kind_ = _inner(kind_, part)
    found = _models(kind_)
    return found[0] if found else None


def _inner(kind_: Any, part: str | int) -> Any:
    """Give the type that stands under a key of a model, or inside a list or map."""
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
    """Give the keys that a map may have, in the order of the model."""
    return [f.alias or n for n, f in model.model_fields.items()] if model else []


def _required(path: KeyPath) -> bool:
    model = model_at(path[:-1])
    if model is None:
        return False
    return any(
        (f.alias or n) == path[-1] and f.is_required() for n, f in model.model_fields.items()
    )


def _fault(error: Any, path: KeyPath, blame: KeyPath, places: Places, *, is_key: bool) -> Fault:
    name = dotted(blame)
    if error["type"] == "missing":
        message = f"{name} is missing"
        return places.of_key(blame[:-1]).fault(message, _about_missing(path))
    if error["type"] == "extra_forbidden":
        known = _names(model_at(path[:-1]))
        hint = did_you_mean(str(path[-1]), known) or _known(path[:-1], known)
        return places.of_key(blame).fault(f"unknown key {name}", hint)
    is_key = is_key or (bool(blame) and _is_rule(error) and blame == tuple(error["loc"]))
    place = places.of_key(blame) if is_key else places.of(blame)
    message, hint = words(error)
    return place.fault(f"{name}: {message}" if name else message, hint)


def _known(path: KeyPath, known: list[str]) -> str | None:
    here = f"{dotted(path)} takes" if path else "a recipe takes"
    return f"{here} {', '.join(known)}" if known else None


def _about_missing(path: KeyPath) -> str | None:
    model = model_at(path)
    takes = _names(model)
    return f"it is a map with {', '.join(takes[:8])}" if takes else None


_WANTED = {
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
    "too_short": "{found} with nothing in it; at least {min_length} wanted",
    "finite_number": "{found} is not a finite number",
}


def words(error: Any) -> tuple[str, str | None]:
    """Give the message and the hint for one error of pydantic."""
    found = kind(error["input"])
    type_, context = error["type"], error.get("ctx", {})
    if type_ == "value_error":
        return str(context["error"]), getattr(context["error"], "hint", None)
    if type_ == "literal_error":
        return _literal(error, found)
    if type_ in _WANTED:
        wanted, hint = _WANTED[type_]
        return f"{found} stands where {wanted} is wanted", hint
    if type_ in _BEYOND:
        return _BEYOND[type_].format(found=found, **context), None
    text = str(error["msg"])
    return text[:1].lower() + text[1:], None


def _literal(error: Any, found: str) -> tuple[str, str | None]:
    wanted = str(error["ctx"]["expected"]).replace(" or ", ", ").replace("'", "")
    choices = wanted.split(", ")
    value = getattr(error["input"], "text", error["input"])
    hint = did_you_mean(value, choices) if isinstance(value, str) else None
    if not isinstance(error["input"], str) and str(value) in choices:
        hint = f'quote it: "{value}"'
    said = choices[0] if len(choices) == 1 else f"one of {wanted}"
    return f"{found} is not {said}", hint
