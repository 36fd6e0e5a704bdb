"""Read YAML 1.2 text as nodes that know their place.

ruamel.yaml composes the nodes; plain scalars then follow the core schema of YAML 1.2: `on`, `yes`
and `off` are words, `~` and nothing are null.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml import nodes as ruamel
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from bakehouse.errors import Fault
from bakehouse.recipe.faults import Origin, kind

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
