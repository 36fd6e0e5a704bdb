"""Merge `include:` files and `--set` into one tree; each value keeps its place.

Maps merge, lists replace, null deletes. A later include wins over an earlier one, the including
file over all of them, and `--set` over the file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bakehouse.errors import Fault
from bakehouse.recipe.faults import Origin, dotted, kind, printable, shown
from bakehouse.recipe.yaml import (
    MAX_DEPTH,
    Items,
    Leaf,
    Node,
    Table,
    Unreadable,
    compose,
)

MAX_BYTES = 2**20
MAX_FILES = 64
MAX_CHAIN = 16

KeyPath = tuple[str | int, ...]
"""Keys and list positions that lead to a value."""


@dataclass
class Gathered:
    """Files and faults so far."""

    faults: list[Fault] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    reads: int = 0
    """Number of files opened; one that is included twice counts twice."""
    broken: bool = False
    """Whether a file could not be read, so that keys may only seem to be missing."""


def gather(path: Path, overrides: Iterable[str], into: Gathered) -> Table:
    """Read `path` with its includes and apply the overrides; faults go to `into`."""
    tree = _file(path, Origin(shown(path), 1, 1), (), into)
    if tree is None:
        into.broken = True
        tree = Table(Origin(shown(path), 1, 1))
    for override in overrides:
        tree = _override(tree, override, into)
    return tree


def flatten(node: Node) -> tuple[Any, dict[KeyPath, Origin], dict[KeyPath, Origin]]:
    """Return plain data without nulls in maps, and the places of all values and of all keys."""
    places: dict[KeyPath, Origin] = {}
    keys: dict[KeyPath, Origin] = {}

    def walk(node: Node, path: KeyPath) -> Any:
        places[path] = node.origin
        if isinstance(node, Leaf):
            return node.value
        if isinstance(node, Items):
            return [walk(item, (*path, i)) for i, item in enumerate(node.items)]
        given = {name: value for name, value in node.entries.items() if not _is_null(value)}
        keys.update({(*path, name): node.keys[name] for name in given})
        return {name: walk(value, (*path, name)) for name, value in given.items()}

    return walk(node, ()), places, keys


def _is_null(node: Node | None) -> bool:
    return isinstance(node, Leaf) and node.value is None


def merge(base: Node | None, over: Node) -> Node:
    """Merge `over` into `base`. A null stays, so that it still deletes in a later merge."""
    if not isinstance(over, Table):
        return over
    under = base if isinstance(base, Table) else Table(over.origin)
    entries, keys = dict(under.entries), dict(under.keys)
    # Maps that a file wrote keep the file's place under an override.
    keep = isinstance(base, Table) and not over.origin.line
    for name, value in over.entries.items():
        entries[name] = merge(entries.get(name), value)
        into_map = keep and isinstance(value, Table) and name in keys
        keys[name] = keys[name] if into_map else over.keys[name]
    return Table(under.origin if keep else over.origin, entries, keys)


def _file(path: Path, asked: Origin, chain: tuple[Path, ...], into: Gathered) -> Table | None:
    """Read one file and its includes; None and a fault if that fails."""
    into.reads += 1
    if _real(path) in map(_real, chain):
        into.faults.append(asked.fault(f"include loop: {_chain((*chain, path))}"))
        return None
    if len(chain) >= MAX_CHAIN or into.reads > MAX_FILES:
        into.faults.append(
            asked.fault(f"too many includes: {_chain((*chain, path))}", f"at most {MAX_FILES}")
        )
        return None
    text = _read(path, asked, chain, into)
    root = None if text is None else _root(path, text, into)
    return _with_includes(path, root, (*chain, path), into) if root else None


def _root(path: Path, text: str, into: Gathered) -> Table | None:
    """Parse a file's text as a map; None and a fault if it is not one."""
    if path not in into.files:
        into.files.append(path)
    name = shown(path)
    try:
        root = compose(text, name, into.faults)
    except Unreadable as error:
        into.faults.append(error.fault)
        return None
    if isinstance(root, Table):
        return root
    if root is None or _is_null(root):
        into.faults.append(Origin(name, 1, 1).fault("the file is empty", "a recipe is a YAML map"))
        return None
    value = root.value if isinstance(root, Leaf) else []
    into.faults.append(
        root.origin.fault(f"a recipe is a map, this is {kind(value)}", "write 'key: value'")
    )
    return None


def _with_includes(path: Path, root: Table, chain: tuple[Path, ...], into: Gathered) -> Table:
    included = root.entries.get("include")
    own = Table(
        root.origin,
        {k: v for k, v in root.entries.items() if k != "include"},
        {k: v for k, v in root.keys.items() if k != "include"},
    )
    merged: Node = Table(root.origin)
    for leaf in _include_list(included, into):
        tree = _file(path.parent / leaf.value, leaf.origin, chain, into)
        if tree is None:
            into.broken = True
        else:
            merged = merge(merged, tree)
    merged = merge(merged, own)
    return merged if isinstance(merged, Table) else own


def _real(path: Path) -> str:
    try:
        return os.path.realpath(path)
    except ValueError:  # a NUL or half a surrogate pair; reading it says so
        return str(path)


def _is_path(text: str) -> bool:
    return bool(text.strip()) and "\0" not in text


def _include_list(node: Node | None, into: Gathered) -> list[Leaf]:
    if node is None or _is_null(node):
        return []
    paths = []
    for item in node.items if isinstance(node, Items) else (node,):
        if isinstance(item, Leaf) and isinstance(item.value, str) and _is_path(item.value):
            paths.append(item)
        else:
            value = item.value if isinstance(item, Leaf) else [] if isinstance(item, Items) else {}
            into.faults.append(
                item.origin.fault(f"include must be a path or a list of paths, got {kind(value)}")
            )
            into.broken = True
    return paths


def _read(path: Path, asked: Origin, chain: tuple[Path, ...], into: Gathered) -> str | None:
    """Return a file's text; None and a fault if it cannot be read."""
    by = f", included by {_chain(chain)}" if chain else ""
    try:
        # Checked before opening, since opening a pipe would block.
        mode = path.stat().st_mode
        if stat.S_ISREG(mode):
            with path.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
            return _decode(raw, asked if len(raw) > MAX_BYTES else Origin(shown(path), 1, 1), into)
        what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
        message = f"{shown(path)} is {what}, not a YAML file{by}"
    except FileNotFoundError:
        message = f"file '{shown(path)}' not found{by}"
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        message = f"{shown(path)} cannot be read: {why}{by}"
    into.faults.append(asked.fault(message))
    return None


def _decode(raw: bytes, place: Origin, into: Gathered) -> str | None:
    if len(raw) > MAX_BYTES:
        into.faults.append(place.fault("the file is larger than 1 MiB, the limit for recipes"))
        return None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8", "replace")
        line = before.count("\n") + 1
        column = len(before) - (before.rfind("\n") + 1) + 1
        into.faults.append(
            Origin(place.file, line, column).fault(
                f"the byte 0x{raw[error.start]:02x} is not UTF-8", "save the file as UTF-8"
            )
        )
        return None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _chain(paths: Iterable[Path]) -> str:
    return " -> ".join(shown(p) for p in paths)


def _override(tree: Table, override: str, into: Gathered) -> Table:
    """Apply one `KEY.KEY=VALUE`."""
    name, equals, text = override.partition("=")
    name = name.strip()
    origin = Origin(f"--set {printable(name, 100)}")
    path = name.split(".")
    if not equals or not all(path) or len(path) > MAX_DEPTH:
        shape = "write --set KEY.KEY=VALUE, as in --set serve.context=65536"
        whole = Origin(f"--set {printable(override, 100)}")
        into.faults.append(whole.fault("this is not KEY=VALUE", shape))
        return tree
    if path[0] == "include":
        into.faults.append(origin.fault("--set cannot change include", "set the values themselves"))
        return tree
    try:
        value = compose(text, origin.file, into.faults, origin) or Leaf(origin, None)
    except Unreadable as error:
        hint = "VALUE is YAML: quote text with special characters, as in --set 'key=\"*.gguf\"'"
        into.faults.append(origin.fault(error.fault.message, error.fault.hint or hint))
        return tree
    node: Node | None = tree
    for depth, part in enumerate(path):
        if node is None or _is_null(node):
            break
        if isinstance(node, Table):
            node = node.entries.get(part)
            continue
        above = dotted(path[:depth])
        if isinstance(node, Items):
            message = f"{above} is a list, and a list cannot be indexed"
            hint = f"set the whole list: --set {above}='[...]'"
        else:
            message, hint = f"{above} is {kind(node.value)}, not a map", f"--set {above}=VALUE"
        into.faults.append(origin.fault(message, hint))
        return tree
    layer: Node = value
    for part in reversed(path):
        layer = Table(origin, {part: layer}, {part: origin})
    merged = merge(tree, layer)
    return merged if isinstance(merged, Table) else tree
