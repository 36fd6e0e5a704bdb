"""YAML 1.2 text to nodes that know their place.

The reader is ruamel.yaml's; it is asked for its events rather than for finished nodes, because
only an event says whether a tag was written or guessed. Scalars follow the YAML 1.2 core schema:
`on`, `yes` and `off` are words, `~` and nothing are null.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)
from ruamel.yaml.reader import ReaderError

from bakehouse.errors import Fault
from bakehouse.recipe.faults import Origin, kind
from bakehouse.recipe.scalars import PlainBool, PlainFloat, PlainInt

MAX_NODES = 20_000
"""Values in one document, each use of an anchor counted."""
MAX_CHARACTERS = 4 * 2**20
"""Text in one document, each use of an anchor counted."""
MAX_DEPTH = 40

NULL = re.compile(r"null|Null|NULL|~|")
BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
INT = re.compile(r"[-+]?[0-9]+")
OCTAL = re.compile(r"0o[0-7]+")
HEX = re.compile(r"0x[0-9a-fA-F]+")
FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
MAX_DIGITS = 1000


@dataclass(frozen=True, slots=True)
class Leaf:
    """A scalar: str, PlainInt, PlainFloat, PlainBool or None."""

    origin: Origin
    value: Any
    weight: int = 1
    length: int = 0


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    origin: Origin
    items: tuple[Node, ...]
    weight: int = 1
    length: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """A map. `weight` and `length` count all nodes and characters below, aliases expanded."""

    origin: Origin
    entries: dict[str, Node] = field(default_factory=dict)
    keys: dict[str, Origin] = field(default_factory=dict)
    """Where each key itself stands."""
    weight: int = 1
    length: int = 0


Node = Leaf | Items | Table


def is_word(text: str) -> bool:
    """Whether an unquoted scalar of this text is text: no number, boolean or null."""
    forms = (NULL, BOOL, INT, OCTAL, HEX, FLOAT, NOT_FINITE)
    return not any(form.fullmatch(text) for form in forms)


class Unreadable(Exception):
    """The text is not YAML that a recipe may hold, and nothing after this place can be read."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


def compose(text: str, file: str, faults: list[Fault]) -> Node | None:
    """Read one document; None where there is none. Adds to `faults`, may raise Unreadable."""
    return _Composer(text, file, faults).document()


def compose_value(text: str, origin: Origin, faults: list[Fault]) -> Node | None:
    """Read the VALUE of an override: every place in it is `origin`."""
    return _Composer(text, origin.file, faults, origin).document()


class _Composer:
    def __init__(
        self, text: str, file: str, faults: list[Fault], fixed: Origin | None = None
    ) -> None:
        self.text = text
        self.file = file
        self.faults = faults
        self.fixed = fixed
        self.anchors: dict[str, Node | None] = {}
        self.nodes = 0
        self.characters = 0
        self.last: Any = None
        self.events = self._events()

    def document(self) -> Node | None:
        next(self.events)
        event = next(self.events)
        if isinstance(event, StreamEndEvent):
            return None
        self._directives(event)
        root = self._node(next(self.events), 0)
        next(self.events)
        after = next(self.events)
        if not isinstance(after, StreamEndEvent):
            self._fault(
                self._origin(after),
                "a second YAML document starts here",
                "a recipe is one document; take the '---' line away",
            )
        return root

    def _directives(self, event: Any) -> None:
        if isinstance(event, DocumentStartEvent) and event.version not in (None, (1, 2)):
            self._fault(
                self._origin(event), "recipes are YAML 1.2", "take the %YAML directive away"
            )

    def _events(self) -> Iterator[Any]:
        yaml = YAML(typ="safe", pure=True)
        try:
            for event in yaml.parse(self.text):
                self.last = event.end_mark
                yield event
        except ReaderError as error:
            place = self._at_index(error.position)
            code = error.character if isinstance(error.character, int) else 0
            raise Unreadable(
                place.fault(f"the character U+{code:04X} may not stand in YAML")
            ) from error
        except MarkedYAMLError as error:
            raise Unreadable(self._syntax(error)) from error
        except (YAMLError, ValueError, OverflowError, RecursionError, LookupError) as error:
            place = self._place(self.last) if self.last else self._start()
            raise Unreadable(
                place.fault("what follows cannot be read as YAML", str(error) or None)
            ) from error

    def _syntax(self, error: Any) -> Fault:
        mark = error.problem_mark or error.context_mark
        problem = str(error.problem or error.context or "this cannot be read as YAML")
        hint = None
        if "'\\t'" in problem or "tab" in problem:
            problem, hint = "a tab stands where YAML wants spaces", "indent with spaces"
        elif "unexpected end of stream" in problem and error.context_mark:
            mark = error.context_mark
            problem = f"{str(error.context).removeprefix('while scanning ')} is never closed"
        elif "cannot start any token" in problem or "undefined alias" in problem:
            hint = "put text that starts with such a character in quotes"
        elif "mapping values are not allowed" in problem:
            problem = "a colon and a space make a key, and no key may stand here"
            hint = "put the text in quotes, or check the indentation"
        elif error.context and error.context_mark and mark is not error.context_mark:
            context = str(error.context).removeprefix("while ")
            problem = f"{problem}, while {context} from line {error.context_mark.line + 1}"
        place = self._start() if mark is None else self._place(mark)
        return place.fault(problem, hint)

    def _start(self) -> Origin:
        return self.fixed or Origin(self.file, 1, 1)

    def _place(self, mark: Any) -> Origin:
        return self.fixed or Origin(self.file, mark.line + 1, mark.column + 1)

    def _at_index(self, index: int) -> Origin:
        before = self.text[:index]
        column = index - (before.rfind("\n") + 1) + 1
        return self.fixed or Origin(self.file, before.count("\n") + 1, column)

    def _origin(self, event: Any) -> Origin:
        place = self._place(event.start_mark)
        if self.fixed or getattr(event, "style", None) != "|":
            return place
        start = event.start_mark.index
        header = self.text.find("|", start)
        line = event.start_mark.line + self.text.count("\n", start, header) + 2
        return Origin(place.file, place.line, place.column, line, self._indent(header, event.value))

    def _indent(self, header: int, value: str) -> int:
        """Columns by which a block is indented: the file's first line of text less the value's."""
        written = next((s for s in self.text[header:].split("\n")[1:] if s.strip()), "")
        kept = next((s for s in value.split("\n") if s.strip()), "")
        return max(0, _margin(written) - _margin(kept))

    def _fault(self, place: Origin, message: str, hint: str | None = None) -> None:
        self.faults.append(place.fault(message, hint))

    def _node(self, event: Any, depth: int) -> Node:
        place = self._origin(event)
        if depth > MAX_DEPTH:
            raise Unreadable(place.fault(f"more than {MAX_DEPTH} levels deep"))
        if isinstance(event, AliasEvent):
            return self._alias(event, place)
        if event.tag is not None:
            self._fault(
                place,
                f"tags such as {event.tag.replace('tag:yaml.org,2002:', '!!')} are not used here",
                "put text in quotes",
            )
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        self._count(place, 1, 0)
        node: Node
        if isinstance(event, ScalarEvent):
            node = self._scalar(event, place)
        elif isinstance(event, SequenceStartEvent):
            node = self._sequence(place, depth)
        else:
            node = self._mapping(place, depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def _alias(self, event: Any, place: Origin) -> Node:
        if event.anchor not in self.anchors:
            raise Unreadable(
                place.fault(
                    f"*{event.anchor} names no anchor",
                    "put text that starts with * in quotes",
                )
            )
        node = self.anchors[event.anchor]
        if node is None:
            raise Unreadable(place.fault(f"*{event.anchor} stands inside itself"))
        self._count(place, node.weight, node.length)
        return node

    def _count(self, place: Origin, nodes: int, characters: int) -> None:
        self.nodes += nodes
        self.characters += characters
        if self.nodes > MAX_NODES or self.characters > MAX_CHARACTERS:
            raise Unreadable(
                place.fault(
                    f"more than {MAX_NODES} values or {MAX_CHARACTERS} characters, "
                    "counting what anchors repeat"
                )
            )

    def _scalar(self, event: Any, place: Origin) -> Leaf:
        text = event.value
        self._count(place, 0, len(text))
        if "\0" in text:
            self._fault(place, "text may not hold a NUL character")
        if any("\ud800" <= c <= "\udfff" for c in text):
            self._fault(place, "text may not hold half of a surrogate pair")
        value = self._resolve(text, place) if event.style is None else text
        return Leaf(place, value, 1, len(text))

    def _resolve(self, text: str, place: Origin) -> Any:
        """Give a plain scalar the meaning that the core schema gives it."""
        if NULL.fullmatch(text):
            return None
        if BOOL.fullmatch(text):
            return PlainBool(text.lower() == "true", text)
        base = 10 if INT.fullmatch(text) else 8 if OCTAL.fullmatch(text) else 0
        base = 16 if HEX.fullmatch(text) else base
        if base or FLOAT.fullmatch(text):
            if len(text) > MAX_DIGITS:
                self._fault(place, f"a number of {len(text)} digits", "put text in quotes")
                return text
            return PlainInt(int(text, base), text) if base else PlainFloat(float(text), text)
        if NOT_FINITE.fullmatch(text):
            return PlainFloat(float(text.replace(".", "", 1)), text)
        return text

    def _sequence(self, place: Origin, depth: int) -> Items:
        items = []
        while not isinstance(event := next(self.events), SequenceEndEvent):
            items.append(self._node(event, depth + 1))
        weight, length = _sums(items)
        return Items(place, tuple(items), weight, length)

    def _mapping(self, place: Origin, depth: int) -> Table:
        entries: dict[str, Node] = {}
        keys: dict[str, Origin] = {}
        while not isinstance(event := next(self.events), MappingEndEvent):
            key = self._node(event, depth + 1)
            key_place = self._place(event.start_mark)
            value = self._node(next(self.events), depth + 1)
            name = self._key(key, key_place, keys)
            if name is not None:
                entries[name], keys[name] = value, key_place
        weight, length = _sums(entries.values())
        return Table(place, entries, keys, weight + len(keys), length + sum(map(len, keys)))

    def _key(self, key: Node, place: Origin, keys: dict[str, Origin]) -> str | None:
        """Give a key's text, or None and a fault."""
        if not isinstance(key, Leaf) or not isinstance(key.value, str):
            value = key.value if isinstance(key, Leaf) else [] if isinstance(key, Items) else {}
            self._fault(place, f"a key must be text, this one is {kind(value)}", "put it in quotes")
            return None
        if key.value == "<<":
            self._fault(place, "'<<' does not merge in YAML 1.2", "use include:")
            return None
        if key.value in keys:
            first = keys[key.value]
            where = f"first on line {first.line}" if first.line else "given twice"
            self._fault(place, f"the key '{key.value}' stands here again", where)
            return None
        return key.value


def _margin(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _sums(nodes: Any) -> tuple[int, int]:
    weight, length = 1, 0
    for node in nodes:
        weight += node.weight
        length += node.length
    return weight, length
