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

INT = re.compile(r"[-+]?[0-9]+")
FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_NOT_TEXT = re.compile(
    r"null|Null|NULL|~||true|True|TRUE|false|False|FALSE|0o[0-7]+|0x[0-9a-fA-F]+|"
    rf"{INT.pattern}|{FLOAT.pattern}|{NOT_FINITE.pattern}"
)
_TAG = re.compile(r"(?:&\S+\s+)?(!\S*)")


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its place: a scalar, a tuple of nodes (list), or nodes by key (map)."""

    origin: Origin
    value: Any
    keys: dict[str, Origin] = field(default_factory=dict)
    """Where each key of a map itself is."""

    @property
    def is_null(self) -> bool:
        """Whether this is null, which deletes."""
        return self.value is None


def is_word(text: str) -> bool:
    """Whether an unquoted scalar of this text is text: no number, boolean or null."""
    return not _NOT_TEXT.fullmatch(text)


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
            return Node(place, self._scalar(node, place))
        self.open.add(id(node))
        if isinstance(node, ruamel.SequenceNode):
            made = Node(place, tuple(self.convert(item, depth + 1) for item in node.value))
        else:
            made = self._map(node, place, depth)
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
        if text in ("", "~", "null", "Null", "NULL"):
            return None
        if text.lower() in ("true", "false") and not is_word(text):
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
        if INT.fullmatch(text):
            return int(text)
        return float(text) if FLOAT.fullmatch(text) else int(text, 0)

    def _map(self, node: Any, place: Origin, depth: int) -> Node:
        entries: dict[str, Node] = {}
        keys: dict[str, Origin] = {}
        for key_node, value_node in node.value:
            name = self.convert(key_node, depth + 1).value
            value = self.convert(value_node, depth + 1)
            at = self._place(key_node.start_mark)
            if not isinstance(name, str):
                message = f"a key must be text, not {kind(name)}"
                self.faults.append(at.fault(message, "put it in quotes"))
            elif name == "<<":
                self.faults.append(at.fault("'<<' does not merge in YAML 1.2", "use include:"))
            elif name in entries:
                first = keys[name]
                where = f"first on line {first.line}" if first.line else "given twice"
                self.faults.append(at.fault(f"duplicate key '{name}'", where))
            else:
                entries[name], keys[name] = value, at
        return Node(place, entries, keys)


def _margin(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


MAX_BYTES = 2**20
MAX_FILES = 64
MAX_CHAIN = 16

KeyPath = tuple[str | int, ...]
"""Keys and list positions that lead to a value."""


def flatten(node: Node) -> tuple[Any, dict[KeyPath, Origin], dict[KeyPath, Origin]]:
    """Return plain data without nulls in maps, and the places of all values and of all keys."""
    places: dict[KeyPath, Origin] = {}
    keys: dict[KeyPath, Origin] = {}

    def walk(node: Node, path: KeyPath) -> Any:
        places[path] = node.origin
        if isinstance(node.value, tuple):
            return [walk(item, (*path, i)) for i, item in enumerate(node.value)]
        if not isinstance(node.value, dict):
            return node.value
        entries = {name: value for name, value in node.value.items() if not value.is_null}
        keys.update({(*path, name): node.keys[name] for name in entries})
        return {name: walk(value, (*path, name)) for name, value in entries.items()}

    return walk(node, ()), places, keys


def merge(base: Node | None, over: Node) -> Node:
    """Merge `over` into `base`. A null stays, so that it still deletes in a later merge."""
    if not isinstance(over.value, dict):
        return over
    is_map = base is not None and isinstance(base.value, dict)
    under = base if base and is_map else Node(over.origin, {})
    entries, keys = dict(under.value), dict(under.keys)
    # Maps that a file wrote keep the file's place under an override.
    keep = is_map and not over.origin.line
    for name, value in over.value.items():
        entries[name] = merge(entries.get(name), value)
        if not (keep and isinstance(value.value, dict) and name in keys):
            keys[name] = over.keys[name]
    return Node(under.origin if keep else over.origin, entries, keys)


class Gathering:
    """Reads a recipe with its includes and overrides; collects files and faults."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.files: list[Path] = []
        self.reads = 0
        """Number of files opened; one that is included twice counts twice."""
        self.broken = False
        """Whether a file could not be read, so that keys may only seem to be missing."""

    def gather(self, path: Path, overrides: Iterable[str]) -> Node:
        """Read `path` with its includes and apply the overrides."""
        start = Origin(shown(path), 1, 1)
        tree = self._try_file(path, start)
        for override in overrides:
            tree = self._override(tree or Node(start, {}), override)
        return tree or Node(start, {})

    def _try_file(self, path: Path, place: Origin, chain: tuple[Path, ...] = ()) -> Node | None:
        """Read a file that is named at `place`; None and a fault if that fails."""
        try:
            return self._file(path, place, chain)
        except Unreadable as error:
            self.faults.append(error.fault)
            self.broken = True
            return None

    def _file(self, path: Path, place: Origin, chain: tuple[Path, ...]) -> Node:
        """Read one file and its includes. Raises Unreadable."""
        self.reads += 1
        names = " -> ".join(shown(p) for p in (*chain, path))
        if _real(path) in map(_real, chain):
            raise Unreadable(place.fault(f"include loop: {names}"))
        if len(chain) >= MAX_CHAIN or self.reads > MAX_FILES:
            raise Unreadable(place.fault(f"too many includes: {names}", f"at most {MAX_FILES}"))
        text = _read(path, place, chain)
        if path not in self.files:
            self.files.append(path)
        root = compose(text, shown(path), self.faults)
        if root is None or root.is_null:
            start = Origin(shown(path), 1, 1)
            raise Unreadable(start.fault("the file is empty", "a recipe is a YAML map"))
        if not isinstance(root.value, dict):
            message = f"a recipe is a map, this is {kind(root.value)}"
            raise Unreadable(root.origin.fault(message, "write 'key: value'"))
        include = root.value.pop("include", None)
        merged = Node(root.origin, {})
        items = () if include is None or include.is_null else (include,)
        for item in include.value if include and isinstance(include.value, tuple) else items:
            name = item.value
            if not (isinstance(name, str) and name.strip() and "\0" not in name):
                message = f"include must be a path or a list of paths, got {kind(name)}"
                self.faults.append(item.origin.fault(message))
                self.broken = True
            elif tree := self._try_file(path.parent / name, item.origin, (*chain, path)):
                merged = merge(merged, tree)
        return merge(merged, root)

    def _override(self, tree: Node, override: str) -> Node:
        """Apply one `KEY.KEY=VALUE`."""
        name, equals, text = override.partition("=")
        name = name.strip()
        origin = Origin(f"--set {printable(name, 100)}")
        path = name.split(".")
        if not equals or not all(path) or len(path) > MAX_DEPTH:
            shape = "write --set KEY.KEY=VALUE, as in --set serve.context=65536"
            whole = Origin(f"--set {printable(override, 100)}")
            self.faults.append(whole.fault("this is not KEY=VALUE", shape))
            return tree
        if path[0] == "include":
            message, hint = "--set cannot change include", "set the values themselves"
            self.faults.append(origin.fault(message, hint))
            return tree
        try:
            layer = compose(text, origin.file, self.faults, origin) or Node(origin, None)
        except Unreadable as error:
            hint = "VALUE is YAML: quote text with special characters, as in --set 'key=\"*.gguf\"'"
            self.faults.append(origin.fault(error.fault.message, error.fault.hint or hint))
            return tree
        node: Node | None = tree
        for depth, part in enumerate(path):
            if node is None or node.is_null:
                break
            if isinstance(node.value, dict):
                node = node.value.get(part)
                continue
            above = dotted(path[:depth])
            if isinstance(node.value, tuple):
                message = f"{above} is a list, and a list cannot be indexed"
                hint = f"set the whole list: --set {above}='[...]'"
            else:
                message, hint = f"{above} is {kind(node.value)}, not a map", f"--set {above}=VALUE"
            self.faults.append(origin.fault(message, hint))
            return tree
        for part in reversed(path):
            layer = Node(origin, {part: layer}, {part: origin})
        return merge(tree, layer)


def _real(path: Path) -> str:
    try:
        return os.path.realpath(path)
    except ValueError:  # a NUL or half a surrogate pair; reading it says so
        return str(path)


def _read(path: Path, place: Origin, chain: tuple[Path, ...]) -> str:
    """Return the text of a file that is named at `place`. Raises Unreadable."""
    by = f", included by {' -> '.join(map(shown, chain))}" if chain else ""
    try:
        # Checked before opening, since opening a pipe would block.
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise Unreadable(place.fault(f"{shown(path)} is {what}, not a YAML file{by}"))
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise Unreadable(place.fault(f"file '{shown(path)}' not found{by}")) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Unreadable(place.fault(f"{shown(path)} cannot be read: {why}{by}")) from error
    if len(raw) > MAX_BYTES:
        raise Unreadable(place.fault("the file is larger than 1 MiB, the limit for recipes"))
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        lines = raw[: error.start].decode("utf-8", "replace").split("\n")
        at = Origin(shown(path), len(lines), len(lines[-1]) + 1)
        message = f"the byte 0x{raw[error.start]:02x} is not UTF-8"
        raise Unreadable(at.fault(message, "save the file as UTF-8")) from error
