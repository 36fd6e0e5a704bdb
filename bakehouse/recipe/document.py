"""YAML documents with positions: reading and merging them.

ruamel.yaml composes the nodes; plain scalars then follow the core schema of YAML 1.2: `on`, `yes`
and `off` are words, `~` and nothing are null.

Maps merge, lists replace, null deletes. A later include wins over an earlier one, the including
file over all of them, and `--set` over the file.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml import nodes as ruamel
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from bakehouse.errors import Fault
from bakehouse.recipe.types import Origin, dotted, kind, printable, shown

MAX_NODES = 20_000
"""Values in one document, each use of an anchor counted."""
MAX_CHARACTERS = 4 * 2**20
"""Characters of text in one document, each use of an anchor counted."""
MAX_DEPTH = 40
MAX_DIGITS = 1000

NULL = re.compile(r"null|Null|NULL|~|")
BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
INT = re.compile(r"[-+]?[0-9]+")
OCTAL = re.compile(r"0o[0-7]+")
HEX = re.compile(r"0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_TAG = re.compile(r"(?:&\S+\s+)?(!\S*)")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A scalar: text, a number, a boolean or None."""

    origin: Origin
    value: Any


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    origin: Origin
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A map."""

    origin: Origin
    entries: dict[str, Node] = field(default_factory=dict)
    keys: dict[str, Origin] = field(default_factory=dict)
    """Where each key itself is."""


Node = Leaf | Items | Table


def is_word(text: str) -> bool:
    """Whether an unquoted scalar of this text is text: no number, boolean or null."""
    forms = (NULL, BOOL, INT, OCTAL, HEX, FLOAT, NOT_FINITE)
    return not any(form.fullmatch(text) for form in forms)


class Unreadable(Exception):
    """The text is not YAML that a recipe may contain."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


def compose(text: str, file: str, faults: list[Fault], origin: Origin | None = None) -> Node | None:
    """Read one document; None for an empty one. Adds to `faults`; raises Unreadable.

    With `origin`, every place in it is that one.
    """
    reader = _Reader(text, file, faults, origin)
    root = reader.read()
    return None if root is None else reader.convert(root, 0)


class _Reader:
    """Composes a text, and converts ruamel's nodes to ours."""

    def __init__(self, text: str, file: str, faults: list[Fault], fixed: Origin | None) -> None:
        self.text = text
        self.file = file
        self.faults = faults
        self.fixed = fixed
        self.open: set[int] = set()
        """Ids of the ruamel nodes that are being converted: an alias to one is a loop."""
        self.nodes = 0
        self.characters = 0

    def read(self) -> Any:
        """Let ruamel compose the document. Raises Unreadable."""
        if version := re.search(r"^%YAML\s+(?!1\.2\s)", self.text, re.MULTILINE):
            place = self._at_index(version.start())
            self.faults.append(place.fault("recipes are YAML 1.2", "remove the %YAML directive"))
        start = self.fixed or Origin(self.file, 1, 1)
        try:
            return YAML(typ="safe", pure=True).compose(self.text)
        except ReaderError as error:
            code = error.character if isinstance(error.character, int) else 0
            place = self._at_index(error.position)
            raise Unreadable(
                place.fault(f"YAML does not allow the character U+{code:04X}")
            ) from error
        except MarkedYAMLError as error:
            raise Unreadable(self._syntax(error)) from error
        except RecursionError as error:
            raise Unreadable(start.fault(f"more than {MAX_DEPTH} levels deep")) from error
        except (YAMLError, ValueError, OverflowError, LookupError) as error:
            raise Unreadable(start.fault("invalid YAML", str(error) or None)) from error

    def _syntax(self, error: Any) -> Fault:
        mark = error.problem_mark or error.context_mark
        problem = str(error.problem or error.context or "invalid YAML")
        hint = None
        if "'\\t'" in problem or "tab" in problem:
            problem, hint = "found a tab where YAML requires spaces", "indent with spaces"
        elif "unexpected end of stream" in problem and error.context_mark:
            mark = error.context_mark
            problem = f"{str(error.context).removeprefix('while scanning ')} is never closed"
        elif "cannot start any token" in problem or "undefined alias" in problem:
            hint = "quote text that starts with such a character"
        elif "mapping values are not allowed" in problem:
            problem = "a colon and a space make a key, which is not allowed here"
            hint = "quote the text, or check the indentation"
        elif "found another document" in problem:
            problem, hint = "a second YAML document starts here", "remove the '---' line"
        elif error.context and error.context_mark and mark is not error.context_mark:
            context = str(error.context).removeprefix("while ")
            problem = f"{problem}, while {context} from line {error.context_mark.line + 1}"
        place = self._place(mark) if mark else self.fixed or Origin(self.file, 1, 1)
        return place.fault(problem, hint)

    def _place(self, mark: Any) -> Origin:
        return self.fixed or Origin(self.file, mark.line + 1, mark.column + 1)

    def _at_index(self, index: int) -> Origin:
        line = self.text.count("\n", 0, index)
        column = index - (self.text.rfind("\n", 0, index) + 1)
        return self.fixed or Origin(self.file, line + 1, column + 1)

    def _origin(self, node: Any) -> Origin:
        """Return a node's place; of a `|` block also where its text begins, and its indentation."""
        place = self._place(node.start_mark)
        if self.fixed or getattr(node, "style", None) != "|":
            return place
        start = node.start_mark.index
        header = self.text.find("|", start)
        line = node.start_mark.line + self.text.count("\n", start, header) + 2
        written = next((s for s in self.text[header:].split("\n")[1:] if s.strip()), "")
        value = next((s for s in node.value.split("\n") if s.strip()), "")
        indent = max(0, _margin(written) - _margin(value))
        return Origin(place.file, place.line, place.column, line, indent)

    def convert(self, node: Any, depth: int) -> Node:
        """Convert a node of ruamel's, aliases expanded. Raises Unreadable."""
        place = self._origin(node)
        if depth > MAX_DEPTH:
            raise Unreadable(place.fault(f"more than {MAX_DEPTH} levels deep"))
        if id(node) in self.open:
            raise Unreadable(place.fault("an anchor contains itself"))
        self.nodes += 1
        if isinstance(node, ruamel.ScalarNode):
            self.characters += len(node.value)
        if self.nodes > MAX_NODES or self.characters > MAX_CHARACTERS:
            message = f"more than {MAX_NODES} values or {MAX_CHARACTERS} characters, with anchors"
            raise Unreadable(place.fault(f"{message} expanded"))
        if tag := _TAG.match(self.text, node.start_mark.index):
            message = f"tags such as {tag[1]} are not supported"
            self.faults.append(place.fault(message, "put text in quotes"))
        if isinstance(node, ruamel.ScalarNode):
            return Leaf(place, self._scalar(node, place))
        self.open.add(id(node))
        made: Node
        if isinstance(node, ruamel.SequenceNode):
            made = Items(place, tuple(self.convert(item, depth + 1) for item in node.value))
        else:
            made = self._table(node, place, depth)
        self.open.remove(id(node))
        return made

    def _scalar(self, node: Any, place: Origin) -> Any:
        """Return a scalar's value as the core schema reads it."""
        text = node.value
        if "\0" in text:
            self.faults.append(place.fault("text must not contain a NUL character"))
        if any("\ud800" <= c <= "\udfff" for c in text):
            self.faults.append(place.fault("text must not contain half of a surrogate pair"))
        if node.style is not None:
            return text
        if NULL.fullmatch(text):
            return None
        if BOOL.fullmatch(text):
            return text.lower() == "true"
        return text if is_word(text) else self._number(text, place)

    def _number(self, text: str, place: Origin) -> Any:
        if NOT_FINITE.fullmatch(text):
            return float(text.replace(".", "", 1))
        if len(text) > MAX_DIGITS:
            self.faults.append(place.fault(f"a number of {len(text)} digits", "quote text"))
            return text
        if re.fullmatch(r"[-+]?0[0-9]+", text):
            hint = f'quote it: "{text}"; or remove the zeros'
            self.faults.append(place.fault(f"the number {text} has leading zeros", hint))
            return text
        if FLOAT.fullmatch(text) and not INT.fullmatch(text):
            return float(text)
        return int(text) if INT.fullmatch(text) else int(text, 0)

    def _table(self, node: Any, place: Origin, depth: int) -> Table:
        made = Table(place)
        for key_node, value_node in node.value:
            key = self.convert(key_node, depth + 1)
            value = self.convert(value_node, depth + 1)
            name = key.value if isinstance(key, Leaf) else [] if isinstance(key, Items) else {}
            at = self._place(key_node.start_mark)
            if not isinstance(name, str):
                message = f"a key must be text, not {kind(name)}"
                self.faults.append(at.fault(message, "put it in quotes"))
            elif name == "<<":
                self.faults.append(at.fault("'<<' does not merge in YAML 1.2", "use include:"))
            elif name in made.entries:
                first = made.keys[name]
                where = f"first on line {first.line}" if first.line else "given twice"
                self.faults.append(at.fault(f"duplicate key '{name}'", where))
            else:
                made.entries[name], made.keys[name] = value, at
        return made


def _margin(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


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
