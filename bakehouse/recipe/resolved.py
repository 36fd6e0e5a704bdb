"""Export a loaded recipe with all defaults and the origin of each value."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

from bakehouse.recipe.faults import Origin, dotted, shown
from bakehouse.recipe.load import Loaded
from bakehouse.recipe.merge import KeyPath
from bakehouse.recipe.yaml import is_word

DEFAULT = "default"


def resolved(loaded: Loaded) -> dict[str, Any]:
    """Return the recipe as data with all defaults, without keys that are not set.

    Sizes are in bytes, durations have a unit, so that the data is a valid recipe again.
    """
    data: dict[str, Any] = _without_none(loaded.recipe.to_data())
    return data


def sources(loaded: Loaded, data: Mapping[str, Any]) -> dict[str, str]:
    """Return the origin of each value in `data` that is not a map: a place, or `default`."""
    return {dotted(path): _source(loaded, path) for path in _leaves(data, ())}


def to_yaml(loaded: Loaded, data: Mapping[str, Any]) -> str:
    """Return YAML that loads again; comments name the origins outside the file itself."""
    yaml = YAML()
    yaml.width = 2**16
    yaml.indent(mapping=2, sequence=4, offset=2)
    out = io.StringIO()
    for line in (f"# {shown(path)}" for path in loaded.files):
        out.write(line + "\n")
    yaml.dump(_commented(loaded, data, ()), out)
    return out.getvalue()


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list) else value


def _leaves(value: Any, path: KeyPath) -> list[KeyPath]:
    if not isinstance(value, dict) or not value:
        return [path]
    return [leaf for key, below in value.items() for leaf in _leaves(below, (*path, key))]


def _source(loaded: Loaded, path: KeyPath) -> str:
    place = loaded.places.get(path)
    return _origin_text(place) if place else DEFAULT


def _origin_text(place: Origin) -> str:
    return f"{place.file}:{place.line}:{place.column}" if place.line else place.file


def _commented(loaded: Loaded, value: Any, path: KeyPath) -> Any:
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
        note = _origin_text(place) if place else DEFAULT
        if isinstance(table[key], LiteralScalarString) or _is_block(table[key]):
            indent = 2 * len(path)
            table.yaml_set_comment_before_after_key(key, before=note, indent=indent)
        else:
            table.yaml_add_eol_comment(note, key)
    return table


def _is_block(value: Any) -> bool:
    return isinstance(value, CommentedSeq) and not value.fa.flow_style()


def _text(text: str) -> Any:
    """Choose a style that every YAML 1.2 reader reads as exactly this text."""
    lines = text.split("\n")
    if len(lines) > 1 and all(line.isprintable() for line in lines):
        tidy = lines[0].strip() and not any(line != line.rstrip() for line in lines)
        if tidy and not lines[0].startswith(" ") and not text.endswith("\n\n"):
            return LiteralScalarString(text)
    fits = text.isprintable() and text == text.strip() and is_word(text)
    return text if fits else DoubleQuotedScalarString(text)
