"""Load and validate a recipe, with every fault at `file:line:column`."""

from __future__ import annotations

import errno
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from bakehouse.errors import Fault, NotFound, RecipeError
from bakehouse.recipe.document import Gathering, KeyPath, flatten
from bakehouse.recipe.models import Recipe
from bakehouse.recipe.types import Origin, dotted, kind, printable, shown
from bakehouse.util.text import closest_match, did_you_mean

SUFFIX = ".yaml"


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


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe, its files and its command."""

    recipe: Recipe
    path: Path
    files: tuple[Path, ...]
    """All files read: the recipe's own first, then its includes."""
    places: Mapping[KeyPath, Origin] = field(repr=False)
    """Where each value of a file or an override is; defaults have no place."""
    command: tuple[str, ...]
    """The server's command, rendered with example paths of server and weights."""

    @property
    def folder(self) -> Path:
        """The folder that relative paths in the recipe start from."""
        return self.path.parent

    def origin(self, *path: str | int) -> Origin:
        """Return the place of a value, or of the nearest map around it."""
        return Places(self.places, {}).of(path)


def names(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of recipes in a folder, without files that begin with `_`."""
    try:
        found = [entry.name for entry in os.scandir(folder) if entry.name.endswith(SUFFIX)]
    except OSError:
        return ()
    return tuple(sorted(n.removesuffix(SUFFIX) for n in found if not n.startswith(("_", "."))))


def find(name: str, folder: Path) -> Path:
    """Return the file of `--recipe`: a name in `folder`, or a path. Raises NotFound."""
    is_path = "/" in name or name.endswith((SUFFIX, ".yml"))
    path = Path(name) if is_path else folder / f"{name}{SUFFIX}"
    if name and _is_there(path):
        return path
    there = names(folder)
    base = Path(name).name.removesuffix(".yml").removesuffix(SUFFIX)
    hint = did_you_mean(base, there) or (
        f"available: {', '.join(there)}" if there else f"no recipes in {shown(folder)}"
    )
    leads = f", a link to {printable(os.readlink(path), 200)}" if os.path.islink(path) else ""
    where = f"{shown(path)}{leads}"
    raise NotFound.named("recipe", printable(name, 100), where=where, hint=hint)


def _is_there(path: Path) -> bool:
    """Whether the path exists, readable or not; loading reports the rest."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL
        return False
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    return True


def load(path: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read, merge and validate a recipe, and render its command once with example paths.

    Raises RecipeError with every fault.
    """
    gathering = Gathering()
    data, values, keys = flatten(gathering.gather(path, overrides))
    faults = gathering.faults
    recipe: Recipe | None = None
    command: tuple[str, ...] = ()
    if data or not gathering.broken:
        recipe, found = _validate(data, Places(values, keys), partial=gathering.broken)
        faults += found
    if origin := values.get(("serve", "command")):
        from bakehouse.recipe import template

        text = data["serve"]["command"]
        if recipe:
            try:
                command = template.render(text, template.trial_variables(recipe), origin=origin)
            except RecipeError as error:
                faults += error.faults
        elif isinstance(text, str):
            faults += template.faults_of(text, origin=origin)
    if recipe is None or faults:
        count = "a fault" if len(set(faults)) == 1 else f"{len(set(faults))} faults"
        raise RecipeError(f"the recipe {shown(path)} has {count}", faults)
    return LoadedRecipe(recipe, path, tuple(gathering.files), values, command)


def _validate(
    data: dict[str, Any], places: Places, *, partial: bool
) -> tuple[Recipe | None, list[Fault]]:
    """Return the recipe, or every fault of the merged data.

    Rules over several keys of a map run once the keys themselves are right. With `partial` a file
    is missing: missing keys, and rules that may fail because of them, are not reported.
    """
    try:
        return Recipe.model_validate(data), []
    except ValidationError as error:
        errors: list[Any] = error.errors(include_url=False)
    unknown = [tuple(one["loc"]) for one in errors if one["type"] == "extra_forbidden"]

    def is_echo(error: Any) -> bool:
        """Whether another error causes this one, or a file that could not be read may."""
        path = tuple(error["loc"])
        if error["type"] == "too_short":  # by its invalid items only
            return bool(len(error["input"]) >= error["ctx"]["min_length"])
        if error["type"] != "missing":
            return partial and _is_rule(error)
        siblings = (other[-1] for other in unknown if other[:-1] == path[:-1])
        takes = _keys_at(path[:-1])
        return partial or any(closest_match(str(name), takes) == path[-1] for name in siblings)

    return None, [_fault(one, places) for one in errors if not is_echo(one)]


def _is_rule(error: Any) -> bool:
    """Whether a rule over several keys of one map failed."""
    is_rule = error["type"] == "value_error" and isinstance(error["input"], dict)
    return is_rule and bool(_keys_at(tuple(error["loc"])))


def _keys_at(path: KeyPath) -> list[str]:
    """Return the keys of the model that a path leads to, in order; empty for anything else."""
    options: list[Any] = [Recipe]
    for part in path:
        inner: list[Any] = []
        for option in options:
            if isinstance(option, type) and issubclass(option, BaseModel):
                fields = option.model_fields.items()
                inner += [f.annotation for name, f in fields if part in (f.alias, name)]
            elif typing.get_origin(option) in (tuple, list, dict):
                inner += [a for a in typing.get_args(option) if a is not Ellipsis][-1:]
        options = [one for kind_ in inner for one in _options(kind_)]
    models = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
    return [f.alias or n for n, f in models[0].model_fields.items()] if models else []


def _options(kind_: Any) -> list[Any]:
    """Take Annotated and optional types apart."""
    origin = typing.get_origin(kind_)
    if origin is typing.Annotated:
        return _options(typing.get_args(kind_)[0])
    if origin in (typing.Union, types.UnionType):
        return [o for a in typing.get_args(kind_) for o in _options(a)]
    return [kind_]


def _fault(error: Any, places: Places) -> Fault:
    path: KeyPath = tuple(error["loc"])
    is_key = bool(path) and path[-1] == "[key]"
    path = path[:-1] if is_key else path
    blamed = (*path, *getattr(error.get("ctx", {}).get("error"), "at", ()))
    name = dotted(blamed)
    if error["type"] == "missing":
        inner = ", ".join(_keys_at(path)[:8])
        hint = f"it is a map with {inner}" if inner else None
        return places.of_key(path[:-1]).fault(f"{name} is missing", hint)
    if error["type"] == "extra_forbidden":
        keys = _keys_at(path[:-1])
        takes = f"{dotted(path[:-1]) or 'a recipe'} takes {', '.join(keys)}" if keys else None
        hint = did_you_mean(str(path[-1]), keys) or takes
        return places.of_key(path).fault(f"unknown key {name}", hint)
    is_key = is_key or (bool(path) and blamed == path and _is_rule(error))
    place = places.of_key(blamed) if is_key else places.of(blamed)
    message, hint = message_of(error)
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


def message_of(error: Any) -> tuple[str, str | None]:
    """Return the message and the hint for one of pydantic's errors."""
    found = kind(error["input"])
    type_, context = error["type"], error.get("ctx", {})
    if type_ == "value_error":
        return str(context["error"]), getattr(context["error"], "hint", None)
    if type_ == "literal_error":
        choices = str(context["expected"]).replace(" or ", ", ").replace("'", "").split(", ")
        value = error["input"]
        hint = did_you_mean(value, choices) if isinstance(value, str) else None
        if not isinstance(value, str) and str(value) in choices:
            hint = f'quote it: "{value}"'
        one_of = "one of " if len(choices) > 1 else ""
        return f"{found} is not {one_of}{', '.join(choices)}", hint
    if type_ in _EXPECTED:
        expected, hint = _EXPECTED[type_]
        return f"expected {expected}, got {found}", hint
    if type_ in _BEYOND:
        return _BEYOND[type_].format(found=found, **context), None
    text = str(error["msg"])
    return text[:1].lower() + text[1:], None
