"""The Jinja side of a command: what a template may do, and what it leaves behind.

A template is compiled in Jinja's immutable sandbox and, on top of that, may use only the listed
constructs, filters, tests and methods: enough to choose and repeat arguments, and nothing that
reaches Python or runs without end. Expressions never become text here. Each leaves a `Value` in
the list of pieces, between the `Words` of the template, and no template can make either of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, UndefinedError, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing

from bakehouse.recipe import filters
from bakehouse.recipe.faults import kind
from bakehouse.recipe.filters import Several
from bakehouse.util.text import did_you_mean

MAX_TEMPLATE = 32 * 1024
MAX_DEPTH = 60
MAX_ROUNDS = 10_000
"""Rounds of all loops together."""
MAX_SECONDS = 5.0
MAX_PIECES = 100_000


@dataclass(frozen=True, slots=True)
class Words:
    """Text of the template itself; `line` is the template's line on which it begins."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Value:
    """What an expression gave: part of one argument, or several whole arguments."""

    value: str | Several
    line: int
    label: str


Piece = Words | Value


@dataclass(frozen=True, slots=True)
class Complaint:
    """A fault in a template: its line there (from 1), the word to point at, what and hint."""

    line: int
    word: str
    message: str
    hint: str | None = None


ALLOWED: tuple[type[nodes.Node], ...] = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Name, nodes.Const, nodes.Getattr,
    nodes.Getitem, nodes.Slice, nodes.Filter, nodes.Test, nodes.Call, nodes.Keyword,
    nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Pos,
    nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow,
    nodes.Concat, nodes.CondExpr, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair, nodes.If,
    nodes.For, nodes.Assign, nodes.With,
)  # fmt: skip

REFUSED = {
    nodes.AssignBlock: "a {% set %} block; write {% set name = value %}",
    nodes.FilterBlock: "{% filter %}; write {{ value | filter }}",
    nodes.Macro: "{% macro %}",
    nodes.CallBlock: "{% call %}",
    nodes.Include: "{% include %}",
    nodes.Import: "{% import %}",
    nodes.FromImport: "{% from %}",
    nodes.Extends: "{% extends %}",
    nodes.Block: "{% block %}",
    nodes.NSRef: "namespace()",
    nodes.Scope: "{% autoescape %}",
}


def evaluate(template: str, variables: Mapping[str, Any]) -> tuple[list[Piece], list[Complaint]]:
    """Run a template over plain data; give its pieces and everything that is wrong with it."""
    run = _Run({name: filters.as_plain(value, name) for name, value in variables.items()})
    tree, complaints = _parse(template, run.sandbox)
    if complaints:
        return [], complaints
    run.go(tree)
    return run.pieces, run.complaints


def unfit(template: str) -> list[Complaint]:
    """Give what is wrong with a template whatever its variables are."""
    return _parse(template, _Run({}).sandbox)[1]


def _parse(template: str, sandbox: Sandbox) -> tuple[nodes.Template, list[Complaint]]:
    """Parse, and find what a template may not use."""
    line, message = 1, f"the template is longer than {MAX_TEMPLATE} characters"
    if len(template) <= MAX_TEMPLATE:
        try:
            tree = sandbox.parse(template)
            return tree, list(_unfit(tree, sandbox))
        except TemplateSyntaxError as error:
            line, message = error.lineno, f"template syntax: {error.message}"
        except (RecursionError, MemoryError):
            message = "the template is nested too deeply"
        except ValueError as error:  # such as a number of 5000 digits
            message = f"template syntax: {error}"
    return nodes.Template([], lineno=1), [Complaint(line, "", message)]


def _unfit(tree: nodes.Template, sandbox: Sandbox) -> Iterator[Complaint]:
    """Find what a template may not use."""
    stack: list[tuple[nodes.Node, int, int]] = [(tree, 0, 1)]
    while stack:
        node, depth, line = stack.pop()
        line = node.lineno or line  # some nodes that Jinja makes itself have none
        if depth > MAX_DEPTH:
            yield Complaint(line, "", "the template is nested too deeply")
            return
        if not isinstance(node, ALLOWED) or (isinstance(node, nodes.For) and node.recursive):
            what = REFUSED.get(type(node), "a recursive loop")
            yield Complaint(line, "", f"a command's template has no use for {what}")
            continue
        yield from _unfit_node(node, line, sandbox)
        stack += [(child, depth + 1, line) for child in node.iter_child_nodes()]


def _unfit_node(node: nodes.Node, line: int, sandbox: Sandbox) -> Iterator[Complaint]:
    if isinstance(node, nodes.Filter | nodes.Test):
        what = type(node).__name__.lower()
        known = filters.FILTERS if isinstance(node, nodes.Filter) else sandbox.tests
        if node.name not in known:
            hint = did_you_mean(node.name, known) or (
                f"there are {', '.join(sorted(known))}" if known is filters.FILTERS else None
            )
            yield Complaint(line, node.name, f"there is no {what} '{node.name}' here", hint)
    elif (name := _name_in(node)).startswith("_"):
        yield Complaint(line, name, f"'{name}' would reach into Python, which a template may not")


def _name_in(node: nodes.Node) -> str:
    """Give the name that a node reads, '' where there is none."""
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return str(node.arg.value)
    return ""


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, narrowed: keys of maps before methods, listed methods, bounded sizes."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Give a map's key or a listed method; anything else is undefined."""
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        if filters.is_method(obj, attribute):
            # A method travels as a pair: nothing that Python could call is ever in reach.
            return filters.Method(obj, attribute)
        if isinstance(obj, LoopContext) and attribute in filters.LOOP:
            return getattr(obj, attribute)
        return self._absent(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Give an item of a map, a list or a text; never an attribute."""
        try:
            if isinstance(obj, dict | list | tuple | str | range):
                return obj[argument]
        except (LookupError, TypeError, ValueError):
            pass
        return self._absent(obj, argument)

    def _absent(self, obj: Any, key: Any) -> Undefined:
        if isinstance(obj, Undefined):
            return obj
        return self.undefined(obj=obj, name=key)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """Call `range` or a listed method."""
        for name in ("_loop_vars", "_block_vars"):  # how Jinja hands scopes to macros
            kwargs.pop(name, None)
        if isinstance(obj, filters.Method):
            return obj(*args, **kwargs)
        if obj is filters.bounded_range:
            return filters.bounded_range(*args, **kwargs)
        filters.defined(obj)
        raise SecurityError("only range() and a few methods of text and maps can be called")

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Let `map` and `select` use the listed filters only."""
        if name not in filters.FILTERS:
            raise SecurityError(f"there is no filter '{name}' here")
        return super().call_filter(name, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute with bounds."""
        filters.check_operands(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        return filters.kept(result) if isinstance(result, list | tuple) else result


def _undefined_class(known: Iterable[str]) -> type[StrictUndefined]:
    """Make the undefined value of one run, which knows what there is."""
    names = tuple(known)

    class Missing(StrictUndefined):
        """Says what is missing and what is near."""

        def __init__(
            self,
            hint: str | None = None,
            obj: Any = missing,
            name: Any = None,
            exc: type[TemplateRuntimeError] = UndefinedError,
        ) -> None:
            super().__init__(hint or filters.describe_missing(obj, name, names), obj, name, exc)

    return Missing


class _Run:
    """One evaluation: its sandbox, what came out, what was wrong."""

    def __init__(self, variables: dict[str, Any]) -> None:
        self.variables = variables
        self.pieces: list[Piece] = []
        self.complaints: list[Complaint] = []
        self.rounds = 0
        self.deadline = time.monotonic() + MAX_SECONDS
        self.outputs: list[tuple[int, str]] = []
        self.texts: list[tuple[int, str]] = []
        self.sandbox = Sandbox(
            undefined=_undefined_class([*variables, "range"]),
            optimized=False,
            keep_trailing_newline=True,
            cache_size=0,
        )
        own: dict[str, Callable[..., Any]] = {
            "_words": pass_context(lambda _, index: self._words(index)),
            "_value": pass_context(lambda _, value, index: self._value(value, index)),
            "_rounds": pass_context(lambda _, items: self._rounds(items)),
            "_kept": pass_context(lambda _, value: filters.kept(value)),
            "_joined": pass_context(lambda _, values: filters.joined(values)),
        }
        self.sandbox.filters = {**filters.FILTERS, **own}
        self.sandbox.globals = {"range": filters.bounded_range}

    def go(self, tree: nodes.Template) -> None:
        """Compile and run."""
        self._rewrite(tree)
        template = None
        try:
            template = self.sandbox.from_string(tree)
            for _ in template.root_render_func(template.new_context(self.variables)):
                pass
        except (SyntaxError, RecursionError, MemoryError):
            self.complaints.append(Complaint(1, "", "the template is nested too deeply"))
        except Exception as error:  # whatever a template can cause is the template's fault
            line = _line_of(error, template.get_corresponding_lineno if template else None)
            message, hint = filters.in_words(error)
            self.complaints.append(Complaint(line, "", message, hint))

    def _rewrite(self, tree: nodes.Template) -> None:
        """Lead text and expressions into `pieces`, and every loop and assignment past a bound."""
        for output in tree.find_all(nodes.Output):
            output.nodes = [self._led(child) for child in output.nodes]
        for loop in tree.find_all(nodes.For):
            loop.iter = _filter(loop.iter, "_rounds")
        for assign in tree.find_all(nodes.Assign):
            assign.node = _filter(assign.node, "_kept")
        for with_ in tree.find_all(nodes.With):
            with_.values = [_filter(value, "_kept") for value in with_.values]
        _join_concatenations(tree)

    def _led(self, child: nodes.Expr) -> nodes.Expr:
        if isinstance(child, nodes.TemplateData):
            self.texts.append((child.lineno, child.data))
            index = nodes.Const(len(self.texts) - 1, lineno=child.lineno)
            return _filter(index, "_words")
        self.outputs.append((child.lineno, label(child)))
        return _filter(child, "_value", nodes.Const(len(self.outputs) - 1, lineno=child.lineno))

    def _add(self, piece: Piece) -> str:
        if len(self.pieces) >= MAX_PIECES:
            raise filters.Unfit("the template gives more than a command can hold")
        self.pieces.append(piece)
        return ""

    def _words(self, index: int) -> str:
        line, text = self.texts[index]
        return self._add(Words(text, line))

    def _value(self, value: Any, index: int) -> str:
        line, name = self.outputs[index]
        try:
            done = value if isinstance(value, Several) else filters.argument_text(value, name)
        except (UndefinedError, filters.Unfit) as error:
            message, hint = filters.in_words(error)
            self.complaints.append(Complaint(line, name, message, hint))
            done = ""
        return self._add(Value(done, line, name))

    def _rounds(self, items: Any) -> Iterator[Any]:
        filters.defined(items)
        if not isinstance(items, Iterable):
            raise filters.Unfit(f"a loop needs a list, this is {kind(items)}")
        return self._counted(items)

    def _counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.rounds += 1
            if self.rounds > MAX_ROUNDS:
                raise filters.Unfit(f"the loops take more than {MAX_ROUNDS} rounds")
            if time.monotonic() > self.deadline:
                raise filters.Unfit(f"the loops take more than {MAX_SECONDS:g} s")
            yield item


def _filter(node: nodes.Node, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=node.lineno)


def _join_concatenations(tree: nodes.Node) -> None:
    """Replace each `a ~ b` by a filter, so that what it joins is judged and bounded."""
    for parent in reversed([tree, *tree.find_all(nodes.Node)]):  # inner ones first
        for name, value in list(parent.iter_fields()):
            if isinstance(value, nodes.Concat):
                setattr(parent, name, _joined(value))
            elif isinstance(value, list):
                swapped = [_joined(v) if isinstance(v, nodes.Concat) else v for v in value]
                setattr(parent, name, swapped)


def _joined(node: nodes.Concat) -> nodes.Filter:
    return _filter(nodes.List(list(node.nodes), lineno=node.lineno), "_joined")


def label(node: nodes.Node) -> str:
    """Write a plain chain of names as the template does, such as `serve.context`; else ''."""
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Getattr) and (before := label(node.node)):
        return f"{before}.{node.attr}"
    return ""


def _line_of(error: BaseException, to_line: Callable[[int], int] | None) -> int:
    """Give the template's line in which an error arose."""
    line, frame = 1, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "<template>" and to_line:
            line = to_line(frame.tb_lineno)
        frame = frame.tb_next
    return line
