"""A resolved recipe with the origin of each value, and the JSON schema.

A file with `include:` may leave out keys, and delete them with null, so the schema has each type
twice: whole and partial.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

from bakehouse.recipe import models
from bakehouse.recipe.document import KeyPath, is_word
from bakehouse.recipe.loader import LoadedRecipe
from bakehouse.recipe.models import Recipe
from bakehouse.recipe.types import dotted, format_duration, shown

DEFAULT = "default"


def resolved(loaded: LoadedRecipe) -> dict[str, Any]:
    """Return the recipe as data with all defaults, without keys that are not set.

    Sizes are in bytes, durations have a unit, so that the data is a valid recipe again.
    """
    return loaded.recipe.model_dump(mode="json", by_alias=True, exclude_none=True)


def sources(loaded: LoadedRecipe, data: Mapping[str, Any]) -> dict[str, str]:
    """Return the origin of each value in `data` that is not a map: a place, or `default`."""
    return {dotted(path): _source(loaded, path) for path in _leaves(data, ())}


def to_yaml(loaded: LoadedRecipe, data: Mapping[str, Any]) -> str:
    """Return YAML that loads again; comments name the origins outside the file itself."""
    yaml = YAML()
    yaml.width = 2**16
    yaml.indent(mapping=2, sequence=4, offset=2)
    out = io.StringIO()
    out.writelines(f"# {shown(path)}\n" for path in loaded.files)
    yaml.dump(_commented(loaded, data, ()), out)
    return out.getvalue()


def _leaves(value: Any, path: KeyPath) -> list[KeyPath]:
    if not isinstance(value, dict) or not value:
        return [path]
    return [leaf for key, below in value.items() for leaf in _leaves(below, (*path, key))]


def _source(loaded: LoadedRecipe, path: KeyPath) -> str:
    place = loaded.places.get(path)
    if not place:
        return DEFAULT
    return f"{place.file}:{place.line}:{place.column}" if place.line else place.file


def _commented(loaded: LoadedRecipe, value: Any, path: KeyPath) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        items = CommentedSeq([_commented(loaded, v, (*path, i)) for i, v in enumerate(value)])
        if not any(isinstance(item, dict | list) for item in value):
            items.fa.set_flow_style()
        return items
    if not isinstance(value, dict):
        return value
    table = CommentedMap()
    own = shown(loaded.path)
    for key, below in value.items():
        here = (*path, key)
        table[key] = _commented(loaded, below, here)
        place = loaded.places.get(here)
        if (isinstance(below, dict) and below) or (place and place.file == own):
            continue
        note, made = _source(loaded, here), table[key]
        is_block_list = isinstance(made, CommentedSeq) and not made.fa.flow_style()
        if isinstance(made, LiteralScalarString) or is_block_list:
            table.yaml_set_comment_before_after_key(key, before=note, indent=2 * len(path))
        else:
            table.yaml_add_eol_comment(note, key)
    return table


def _text(text: str) -> Any:
    """Choose a style that every YAML 1.2 reader reads as exactly this text."""
    lines = text.split("\n")
    if len(lines) > 1 and all(line.isprintable() for line in lines):
        tidy = lines[0].strip() and not any(line != line.rstrip() for line in lines)
        if tidy and not lines[0].startswith(" ") and not text.endswith("\n\n"):
            return LiteralScalarString(text)
    fits = text.isprintable() and text == text.strip() and is_word(text)
    return text if fits else DoubleQuotedScalarString(text)


INCLUDE = {
    "description": "One path or a list, relative to this file: maps merge, lists replace, null "
    "deletes; a later file wins, and this file wins over all.",
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}},
    ],
}
PART = "Part"
"""Suffix of the name of a partial type."""


def json_schema() -> dict[str, Any]:
    """Return the schema as data."""
    whole = Recipe.model_json_schema(by_alias=True)
    definitions = whole.pop("$defs")
    definitions["Recipe"] = whole
    for (kind, key), text in _field_docstrings().items():
        if kind in definitions and key in definitions[kind]["properties"]:
            definitions[kind]["properties"][key]["description"] = text
    definitions = {name: _tidy(schema) for name, schema in definitions.items()}
    parts = {f"{name}{PART}": _part(schema) for name, schema in definitions.items()}
    parts[f"Recipe{PART}"]["properties"]["include"] = INCLUDE
    every = {**definitions, **parts}
    reached: set[str] = set()
    waiting = ["Recipe", f"Recipe{PART}"]
    while waiting:
        if (name := waiting.pop()) not in reached:
            reached.add(name)
            waiting += re.findall(r'"#/\$defs/(\w+)"', json.dumps(every[name]))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Bakehouse recipe",
        "type": "object",
        "if": {"required": ["include"]},
        "then": {"$ref": f"#/$defs/Recipe{PART}"},
        "else": {"$ref": "#/$defs/Recipe"},
        "$defs": {name: every[name] for name in sorted(reached)},
    }


_KEYWORDS = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}


def _tidy(schema: Any) -> Any:
    """Use the standard keywords for bounds; leave out titles that only repeat the key."""
    if isinstance(schema, list):
        return [_tidy(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    named = {"properties", "$defs"} & schema.keys()
    kept: dict[str, Any] = {
        _KEYWORDS.get(str(key), str(key)): {k: _tidy(v) for k, v in value.items()}
        if key in named
        else _tidy(value)
        for key, value in schema.items()
        if key != "title" and (key, value) != ("default", None)
    }
    default: Any = kept.get("default")
    if kept.get("type") == "string" and isinstance(default, float):
        kept["default"] = format_duration(default)
    return kept


def _part(schema: Any) -> Any:
    """Copy a schema so that nothing is required, and every key may be null."""
    if isinstance(schema, list):
        return [_part(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # A list is replaced as a whole, so its items have to be whole.
    copy = {
        k: v if k == "items" else _part(v)
        for k, v in schema.items()
        if k not in {"required", "default"}
    }
    if isinstance(ref := schema.get("$ref"), str):
        copy["$ref"] = f"{ref}{PART}"
    if isinstance(properties := copy.get("properties"), dict):
        copy["properties"] = {name: _or_null(value) for name, value in properties.items()}
    return copy


def _or_null(schema: Any) -> Any:
    if {"type": "null"} in schema.get("anyOf", ()):
        return schema
    described = {k: v for k, v in schema.items() if k in {"description", "title"}}
    rest = {k: v for k, v in schema.items() if k not in described}
    return {**described, "anyOf": [rest, {"type": "null"}]}


def _field_docstrings() -> dict[tuple[str, str], str]:
    """Return the docstring below each field of a model, by class and key.

    Read from the source only here, since pydantic would read it at every start.
    """
    found = {}
    for node in ast.parse(inspect.getsource(models)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, after in zip(node.body, node.body[1:], strict=False):
            match field, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=key)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    key = "schema" if key == "schema_version" else key
                    found[node.name, key] = " ".join(text.split())
    return found
