"""Render a command's Jinja template to an argument list, without a shell.

The template's own text is split like a POSIX shell splits words (quotes and backslashes; no
comments, no expansion). The value of an expression becomes part of exactly one argument, byte for
byte: in the rendered text a placeholder stands for it, which is replaced after splitting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from bakehouse.errors import Fault, RecipeError
from bakehouse.recipe.models import Recipe, WeightPaths
from bakehouse.recipe.types import Origin, kind, printable
from bakehouse.util.text import did_you_mean

if TYPE_CHECKING:  # Jinja is slow to import
    from jinja2 import Environment, nodes

MAX_ARGUMENT = 128 * 1024 - 1
"""Bytes; Linux starts no program with a longer argument (MAX_ARG_STRLEN, its NUL counted)."""
NOT_IN_COMMANDS = frozenset({"command", "env", "api_key", "vars"})
"""Keys of `serve` that a template cannot use."""


def template_variables(
    recipe: Recipe, *, server: str, weights: Mapping[str, WeightPaths]
) -> dict[str, Any]:
    """Return the variables of a template: server, name, serve, weights, vars and host.

    Missing keys and roles are None, so that a template can test them with `{% if … %}`. Durations
    are in seconds, sizes in bytes; whole numbers are integers.
    """
    serve = {k: v for k, v in recipe.serve.model_dump().items() if k not in NOT_IN_COMMANDS}
    roles: dict[str, Any] = dict.fromkeys(("model", "drafter", "projector"))
    for role, paths in weights.items():
        roles[role] = {"first": paths.first, "path": paths.path, "files": list(paths.files)}
    return {
        "server": server,
        "name": recipe.name,
        "serve": {k: int(v) if _is_whole(v) else v for k, v in serve.items()},
        "weights": roles,
        "vars": dict(recipe.serve.vars),
        "host": recipe.host.model_dump(),
    }


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()


def trial_variables(recipe: Recipe) -> dict[str, Any]:
    """Return variables with example paths, before anything is built or fetched."""
    server = "vllm" if recipe.engine == "vllm" else "/build/bin/llama-server"
    weights = {}
    for role, _ in recipe.weights.items():
        first = f"/weights/{role}/{role}.gguf"
        weights[role] = WeightPaths(first, f"/weights/{role}", (first,))
    return template_variables(recipe, server=server, weights=weights)


def render(template: str, variables: Mapping[str, Any], *, origin: Origin) -> tuple[str, ...]:
    """Return the arguments that a template gives. Raises RecipeError with every fault."""
    rendering = _Rendering(template, variables, origin)
    rendering.run()
    if rendering.faults:
        raise RecipeError("the command template cannot be rendered", rendering.faults)
    return tuple(rendering.words)


def faults_of(template: str, *, origin: Origin) -> list[Fault]:
    """Return the faults of a template that do not depend on its variables."""
    rendering = _Rendering(template, {}, origin)
    rendering.parse()
    return rendering.faults


class TemplateValueError(Exception):
    """A value that cannot be used in a command; `hint` says what to write instead."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class ArgumentList:
    """Several whole arguments, made by the filter `args`."""

    values: tuple[str, ...]


def argument_text(value: Any, name: str = "") -> str:
    """Return a value as text for an argument. Raises TemplateValueError, UndefinedError."""
    from jinja2 import Undefined

    if isinstance(value, Undefined):
        str(value)  # raises UndefinedError
        raise TemplateValueError("an inline 'if' without 'else' gives nothing here", "add an else")
    what, short = name or "this expression", "x" if " " in name else name or "x"
    if isinstance(value, bool):
        hint = f"write {{{{ 'on' if {short} else 'off' }}}} or {{% if {short} %}}…{{% endif %}}"
    elif value is None:
        hint = f"{{% if {short} %}}…{{% endif %}} leaves it out if it is not set"
    elif isinstance(value, dict):
        hint = f"write {{{{ {short} | tojson }}}} for JSON"
    elif isinstance(value, list | tuple | range | Iterator):
        hint = f"write {{{{ {short} | args }}}} for one argument each, or use tojson or join(',')"
        value = list(value)
    elif isinstance(value, str | int | float):
        return _checked(str(value), what)
    else:
        hint, value = "call methods with ()", None
        raise TemplateValueError(f"{what} is not text or a number", hint)
    raise TemplateValueError(f"{what} is {kind(value)}, but an argument is text or a number", hint)


def _checked(text: str, what: str) -> str:
    if "\0" in text:
        raise TemplateValueError(f"{what} contains a NUL character, which no argument can")
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise TemplateValueError(f"{what} contains half of a surrogate pair") from None
    return text


def _items(value: Any, filter_name: str) -> list[Any]:
    from jinja2 import Undefined

    if not isinstance(value, Undefined) and (
        isinstance(value, str | dict) or not isinstance(value, Iterable)
    ):
        raise TemplateValueError(f"'{filter_name}' expects a list, got {kind(value)}")
    return list(value)


def _args(value: Any) -> ArgumentList:
    return ArgumentList(tuple(argument_text(item, "an item") for item in _items(value, "args")))


def _tojson(value: Any) -> str:
    if not isinstance(value, str | int | float | dict | list | None):
        value = _items(value, "tojson")
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _join(value: Any, separator: Any = "") -> str:
    return argument_text(separator).join(argument_text(v) for v in _items(value, "join"))


def _replace(value: Any, old: Any, new: Any) -> str:
    return argument_text(value).replace(argument_text(old), argument_text(new))


def _number(convert: Callable[[Any], Any], value: Any) -> Any:
    try:
        return convert(value if isinstance(value, int | float) else argument_text(value))
    except (ValueError, OverflowError):
        raise TemplateValueError(f"{kind(value)} is not a number") from None


FILTERS: dict[str, Callable[..., Any]] = {
    "args": _args,
    "tojson": _tojson,
    "join": _join,
    "replace": _replace,
    "string": argument_text,
    "lower": lambda value: argument_text(value).lower(),
    "upper": lambda value: argument_text(value).upper(),
    "trim": lambda value: argument_text(value).strip(),
    "int": partial(_number, int),
    "float": partial(_number, float),
}
JINJA_FILTERS = (
    "abs", "count", "d", "default", "dictsort", "first", "items", "last", "length", "list", "map",
    "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "sum",
    "unique",
)  # fmt: skip
REFUSED = {
    "AssignBlock": "a {% set %} block; write {% set name = value %}",
    "FilterBlock": "{% filter %}; write {{ value | filter }}",
    "Macro": "{% macro %}", "CallBlock": "{% call %}", "Include": "{% include %}",
    "Import": "{% import %}", "FromImport": "{% from %}", "Extends": "{% extends %}",
    "Block": "{% block %}", "NSRef": "namespace()",
    "ScopedEvalContextModifier": "{% autoescape %}",
}  # fmt: skip
"""Jinja nodes that would turn values into text, or load other templates."""

_SPACE = re.compile(r"(?:[ \t\r\n]|\\\n)+")
_WORD = re.compile(r"""(?:[^ \t\r\n'"\\]+|\\.|'[^']*'|"(?:[^"\\]|\\.)*")+""", re.DOTALL)
_PART = re.compile(r"""\\\n|\\(.)|'([^']*)'|"((?:[^"\\]|\\.)*)"|([^'"\\]+)""", re.DOTALL)
_PLACEHOLDER = re.compile("\0([0-9]+)\0")


def _unquoted(part: re.Match[str]) -> str:
    escaped, single, double, plain = part.groups()
    if double is not None:
        return re.sub(r'\\(?:\n|(["\\]))', r"\1", double)
    if single is not None:
        return re.sub(r"(?<!\\)((?:\\\\)*)\\\n", r"\1", single)
    return escaped or plain or ""


class _Rendering:
    """One run of a template: its words, and everything that is wrong with it."""

    def __init__(self, template: str, variables: Mapping[str, Any], origin: Origin) -> None:
        self.template = template
        self.variables = variables
        self.origin = origin
        self.faults: list[Fault] = []
        self.words: list[str] = []
        self.values: list[str | ArgumentList] = []
        self.pieces: list[tuple[int, str]] = []
        """Line of the template, and text with placeholders."""
        self.jinja = _environment([*variables, "range"])
        self.jinja.filters |= {"_value": self._value, "_text": self._text}

    def fault(self, line: int, word: str, message: str, hint: str | None = None) -> None:
        """Add a fault at a word of a line of the template, or at the line's first character."""
        lines = self.template.split("\n")
        text = lines[line - 1] if 0 < line <= len(lines) else ""
        column = text.find(word) if word and word in text else len(text) - len(text.lstrip())
        self.faults.append(self.origin.at(line, column + 1).fault(message, hint))

    def parse(self) -> nodes.Template | None:
        """Parse the template and refuse what it must not use; None for a syntax error."""
        from jinja2 import TemplateSyntaxError, nodes

        if "\0" in self.template:
            self.fault(1, "", "the template contains a NUL character")
            return None
        try:
            tree = self.jinja.parse(self.template)
        except TemplateSyntaxError as error:
            self.fault(error.lineno, "", f"template syntax: {error.message}")
            return None
        except (RecursionError, ValueError) as error:
            self.fault(1, "", f"template syntax: {error}")
            return None
        for node in tree.find_all(nodes.Node):
            name = type(node).__name__
            if name in REFUSED or (isinstance(node, nodes.For) and node.recursive):
                what = REFUSED.get(name, "a recursive loop")
                self.fault(node.lineno, "", f"a command template cannot use {what}")
            elif isinstance(node, nodes.Filter | nodes.Test):
                known = self.jinja.filters if isinstance(node, nodes.Filter) else self.jinja.tests
                if node.name not in known or node.name.startswith("_"):
                    hint = did_you_mean(node.name, [k for k in known if k[0] != "_"])
                    message = f"unknown {name.lower()} '{node.name}'"
                    self.fault(node.lineno, node.name, message, hint)
        return tree

    def run(self) -> None:
        """Render, then split into words."""
        tree = self.parse()
        if tree is None or self.faults:
            return
        self._instrument(tree)
        try:
            template = self.jinja.from_string(tree)
            template.render(self.variables)
        except Exception as error:  # whatever a template runs into is the template's fault
            message, hint = _explained(error)
            name = re.search("'([^']*)'", message)
            self.fault(_line_of(error), name[1] if name else "", message, hint)
        if not self.faults:
            self._split("".join(text for _, text in self.pieces))
            if not self.words and not self.faults:
                self.fault(1, "", "the command is empty")

    def _instrument(self, tree: nodes.Template) -> None:
        """Send all output, text and values, to `pieces`; check what `~` joins."""
        from jinja2 import nodes

        def call(node: nodes.Expr, name: str, *arguments: Any) -> nodes.Filter:
            consts: list[nodes.Expr] = [nodes.Const(a, lineno=node.lineno) for a in arguments]
            return nodes.Filter(node, name, consts, [], None, None, lineno=node.lineno)

        for concat in list(tree.find_all(nodes.Concat)):
            concat.nodes = [call(node, "string") for node in concat.nodes]
        for output in list(tree.find_all(nodes.Output)):
            output.nodes = [
                call(nodes.Const(node.data, lineno=node.lineno), "_text", node.lineno)
                if isinstance(node, nodes.TemplateData)
                else call(node, "_value", node.lineno, _label(node))
                for node in output.nodes
            ]

    @property
    def _text(self) -> Callable[..., str]:
        from jinja2 import pass_context

        def add(_: Any, text: str, line: int) -> str:
            self.pieces.append((line, text))
            return ""

        return pass_context(add)  # which also keeps Jinja from calling it while compiling

    @property
    def _value(self) -> Callable[..., str]:
        from jinja2 import UndefinedError, pass_context

        def add(_: Any, value: Any, line: int, name: str) -> str:
            try:
                done = value if isinstance(value, ArgumentList) else argument_text(value, name)
            except (UndefinedError, TemplateValueError) as error:
                self.fault(line, name, *_explained(error))
                done = ""
            self.values.append(done)
            self.pieces.append((line, f"\0{len(self.values) - 1}\0"))
            return ""

        return pass_context(add)

    def _split(self, text: str) -> None:
        """Split into words like `shlex.split`, but join lines that end with a backslash."""
        at = 0
        while at < len(text):
            if space := _SPACE.match(text, at):
                at = space.end()
                continue
            word = _WORD.match(text, at)
            end = word.end() if word else at
            if end < len(text) and text[end] in "'\"\\":
                quote = text[end]
                message = "a backslash ends the command" if quote == "\\" else (
                    f"the quote {quote} is never closed"
                )  # fmt: skip
                self.fault(self._line(end), quote, message)
                return
            self._add(text[at:end], self._line(at))
            at = end

    def _add(self, raw: str, line: int) -> None:
        """Add a word: quotes removed, placeholders replaced by their values."""
        whole = _PLACEHOLDER.fullmatch(raw)
        if whole and isinstance(many := self.values[int(whole[1])], ArgumentList):
            words = list(many.values)
        else:
            unquoted = "".join(map(_unquoted, _PART.finditer(raw)))
            found = [self.values[int(number)] for number in _PLACEHOLDER.findall(unquoted)]
            if any(isinstance(value, ArgumentList) for value in found):
                message = "the result of 'args' must be a word of its own"
                self.fault(line, "args", message, "put spaces around it, and no quotes")
                return
            words = [_PLACEHOLDER.sub(lambda m: str(self.values[int(m[1])]), unquoted)]
        for word in words:
            if len(word.encode("utf-8", "surrogateescape")) > MAX_ARGUMENT:
                message = f"an argument is longer than {MAX_ARGUMENT} bytes, the limit of Linux"
                self.fault(line, "", message)
        self.words += words

    def _line(self, offset: int) -> int:
        """Return the template's line of an offset in the rendered text."""
        for line, text in self.pieces:
            if offset < len(text):
                return line + text.count("\n", 0, offset)
            offset -= len(text)
        return 1


def _environment(names: Iterable[str]) -> Environment:
    """Return Jinja's sandbox; `names` are the variables, for hints."""
    from jinja2 import StrictUndefined
    from jinja2.filters import FILTERS as JINJA
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import missing

    known = sorted(names)

    class Missing(StrictUndefined):
        """Names what is missing, and the closest match."""

        @property
        def _undefined_message(self) -> str:
            name, owner = self._undefined_name, self._undefined_obj
            if self._undefined_hint:
                return self._undefined_hint
            if owner is None:
                return f"'{name}' of null: the value before it is not set"
            choices = known if owner is missing else owner if isinstance(owner, dict) else ()
            listed = ", ".join(map(str, list(choices)[:20]))
            hint = did_you_mean(str(name), map(str, choices)) or f"available: {listed or 'nothing'}"
            return f"'{name}' is not defined ({hint})"

    class Sandbox(ImmutableSandboxedEnvironment):
        """Prefers the keys of a map to the methods of dict."""

        def getattr(self, obj: Any, attribute: str) -> Any:
            if isinstance(obj, dict) and attribute in obj:
                return obj[attribute]
            return super().getattr(obj, attribute)

    made = Sandbox(undefined=Missing, keep_trailing_newline=True, cache_size=0)
    made.filters = {**{name: JINJA[name] for name in JINJA_FILTERS}, **FILTERS}
    made.globals = {"range": made.globals["range"]}
    return made


def _explained(error: Exception) -> tuple[str, str | None]:
    from jinja2 import UndefinedError

    if isinstance(error, TemplateValueError):
        return str(error), error.hint
    if isinstance(error, UndefinedError):
        message, _, hint = printable(str(error)).partition(" (")
        return message, hint.removesuffix(")") or None
    return f"the template failed: {printable(str(error))}", None


def _label(node: nodes.Node) -> str:
    """Return a plain chain of names as the template writes it, such as `serve.context`; else ''."""
    from jinja2 import nodes

    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Getattr) and (before := _label(node.node)):
        return f"{before}.{node.attr}"
    return ""


def _line_of(error: BaseException) -> int:
    """Return the template's line in which an error arose (Jinja puts it into the traceback)."""
    line, frame = 1, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>":
            line = frame.tb_lineno
        frame = frame.tb_next
    return line
