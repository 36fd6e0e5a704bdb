"""A command's template to arguments, without a shell.

The template's own text is split as a POSIX shell splits words (quotes, backslashes, no comments,
no expansion of any kind); what an expression gave is then part of exactly one argument, byte for
byte, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bakehouse.errors import Fault, RecipeError
from bakehouse.recipe.faults import Origin
from bakehouse.recipe.filters import Several
from bakehouse.recipe.template import Complaint, Piece, Value, evaluate, unfit

MAX_ARGUMENT = 128 * 1024 - 1
"""Bytes; Linux starts no program with a longer argument (MAX_ARG_STRLEN, its NUL counted)."""

SPACE = " \t\r\n"

__all__ = ["Origin", "faults_of", "render"]


def render(template: str, variables: Mapping[str, Any], *, origin: Origin) -> tuple[str, ...]:
    """Give the arguments that a template stands for. Raises RecipeError with every fault."""
    argv, complaints = _arguments(template, variables)
    if complaints:
        faults = [_place(complaint, template, origin) for complaint in complaints]
        raise RecipeError("the command cannot be made of its template", faults)
    return argv


def faults_of(template: str, variables: Mapping[str, Any] | None, *, origin: Origin) -> list[Fault]:
    """Give every fault of a template; without variables, those that show before it runs."""
    if variables is None:
        complaints = unfit(template)
    else:
        _, complaints = _arguments(template, variables)
    return [_place(complaint, template, origin) for complaint in complaints]


def _arguments(
    template: str, variables: Mapping[str, Any]
) -> tuple[tuple[str, ...], list[Complaint]]:
    pieces, complaints = evaluate(template, variables)
    if complaints:
        return (), complaints
    splitter = _Splitter(pieces)
    splitter.split()
    if not splitter.words and not splitter.complaints:
        splitter.complaints.append(Complaint(1, "", "the command is empty"))
    return tuple(splitter.words), splitter.complaints


def _place(complaint: Complaint, template: str, origin: Origin) -> Fault:
    """Find the column: that of the word in question, or of the line's first character."""
    lines = template.split("\n")
    text = lines[complaint.line - 1] if 0 < complaint.line <= len(lines) else ""
    found = text.find(complaint.word) if complaint.word else -1
    column = found if found >= 0 else len(text) - len(text.lstrip())
    return origin.at(complaint.line, column + 1).fault(complaint.message, complaint.hint)


Unit = tuple[str | Value, int]
"""A character of the template, or what an expression gave; and the line it stands on."""


def _units(pieces: list[Piece]) -> Iterator[Unit]:
    for piece in pieces:
        if isinstance(piece, Value):
            yield piece, piece.line
            continue
        line = piece.line
        for char in piece.text:
            yield char, line
            line += char == "\n"


def _continued(units: Iterator[Unit]) -> list[Unit]:
    """Drop each newline that a backslash stands before, unless that one is escaped itself."""
    kept: list[Unit] = []
    slashes = 0
    for unit in units:
        if unit[0] == "\n" and slashes % 2:
            kept.pop()
            slashes = 0
            continue
        slashes = slashes + 1 if unit[0] == "\\" else 0
        kept.append(unit)
    return kept


class _Splitter:
    """Splits units into words; the rules are those of `shlex.split`."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.units = _continued(_units(pieces))
        self.words: list[str] = []
        self.complaints: list[Complaint] = []
        self.word: list[str] | None = None
        self.at = 0

    def split(self) -> None:
        while self.at < len(self.units):
            unit, line = self._next()
            if isinstance(unit, Value):
                self._value(unit, whole=self.word is None and self._ends_here())
            elif unit in SPACE:
                self._end()
            elif unit == "'":
                self._single(line)
            elif unit == '"':
                self._double(line)
            elif unit == "\\":
                self._escaped(line)
            else:
                self._put(unit)
        self._end()

    def _next(self) -> Unit:
        self.at += 1
        return self.units[self.at - 1]

    def _ends_here(self) -> bool:
        if self.at >= len(self.units):
            return True
        unit = self.units[self.at][0]
        return isinstance(unit, str) and unit in SPACE

    def _put(self, text: str) -> None:
        if self.word is None:
            self.word = []
        self.word.append(text)

    def _end(self) -> None:
        if self.word is None:
            return
        text = "".join(self.word)
        if len(text.encode("utf-8", "surrogateescape")) > MAX_ARGUMENT:
            line = self.units[min(self.at, len(self.units)) - 1][1]
            message = f"an argument is longer than {MAX_ARGUMENT} bytes, which no program can get"
            self.complaints.append(Complaint(line, "", message))
        self.words.append(text)
        self.word = None

    def _value(self, value: Value, *, whole: bool) -> None:
        if not isinstance(value.value, Several):
            self._put(value.value)
        elif whole:
            self.words += value.value.values
        else:
            message = "what 'args' gives must stand alone, as a word of its own"
            self.complaints.append(
                Complaint(value.line, "args", message, "put spaces around it, and no quotes")
            )
            self._put("")

    def _single(self, line: int) -> None:
        self._put("")
        while self.at < len(self.units):
            unit, _ = self._next()
            if isinstance(unit, Value):
                self._value(unit, whole=False)
            elif unit == "'":
                return
            else:
                self._put(unit)
        self._unclosed("'", line)

    def _double(self, line: int) -> None:
        self._put("")
        while self.at < len(self.units):
            unit, _ = self._next()
            if isinstance(unit, Value):
                self._value(unit, whole=False)
            elif unit == '"':
                return
            elif unit == "\\" and self.at < len(self.units):
                after = self.units[self.at][0]
                if after in ('"', "\\"):
                    self.at += 1
                    self._put(str(after))
                else:
                    self._put(unit)
            else:
                self._put(unit)
        self._unclosed('"', line)

    def _unclosed(self, quote: str, line: int) -> None:
        self.complaints.append(Complaint(line, quote, f"the quote {quote} is never closed"))

    def _escaped(self, line: int) -> None:
        self._put("")
        if self.at >= len(self.units):
            self.complaints.append(Complaint(line, "\\", "a backslash ends the command"))
            return
        unit, _ = self._next()
        if isinstance(unit, Value):
            self._value(unit, whole=False)
        else:
            self._put(unit)
