"""The JSON schema of a recipe file, for completion and checks in editors.

A file with `include:` may leave out keys, and delete them with null, so the schema has each type
twice: whole and partial.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from types import ModuleType
from typing import Any

from bakehouse.recipe import gate, guard, model, patches
from bakehouse.recipe.model import Recipe
from bakehouse.recipe.scalars import format_duration

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
    texts = {
        k: v
        for module in (gate, guard, model, patches)
        for k, v in _field_docstrings(module).items()
    }
    for name, text in texts.items():
        kind, _, key = name.partition(".")
        if kind in definitions and key in definitions[kind]["properties"]:
            definitions[kind]["properties"][key]["description"] = text
    definitions = {name: _tidy(schema) for name, schema in definitions.items()}
    parts = {f"{name}{PART}": _part(schema) for name, schema in definitions.items()}
    parts[f"Recipe{PART}"]["properties"]["include"] = INCLUDE
    every = {**definitions, **parts}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Bakehouse recipe",
        "type": "object",
        "if": {"required": ["include"]},
        "then": {"$ref": f"#/$defs/Recipe{PART}"},
        "else": {"$ref": "#/$defs/Recipe"},
        "$defs": {name: every[name] for name in sorted(_reached(every))},
    }


def _reached(definitions: dict[str, Any]) -> set[str]:
    """Return the names of all types that a recipe can contain."""
    reached: set[str] = set()
    waiting = ["Recipe", f"Recipe{PART}"]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += re.findall(r'"#/\$defs/(\w+)"', json.dumps(definitions[name]))
    return reached


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


def _field_docstrings(module: ModuleType) -> dict[str, str]:
    """Return the docstring below each field by `Class.key`.

    Read from the source only here, since pydantic would read it at every start.
    """
    found: dict[str, str] = {}
    aliases = {"schema_version": "schema"}
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, after in zip(node.body, node.body[1:], strict=False):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                key = aliases.get(field.target.id, field.target.id)
                found[f"{node.name}.{key}"] = " ".join(str(after.value.value).split())
    return found
