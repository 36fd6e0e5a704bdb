# ruff: noqa: E501 - tables of templates and what comes of them
"""Command templates: values arrive byte for byte, no shell, no way out of the sandbox."""

from __future__ import annotations

import json
import shlex
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bakehouse.errors import RecipeError
from bakehouse.recipe.loader import load
from bakehouse.recipe.models import WeightPaths
from bakehouse.recipe.template import render, template_variables, trial_variables
from bakehouse.recipe.types import Origin
from tests.support.recipe_text import GOOD, loaded, write

AT = Origin("r.yaml", 10, 12, body=11, indent=4)
VARIABLES: dict[str, Any] = {
    "server": "/x/llama-server",
    "name": "small",
    "serve": {"context": 2048, "kv_cache": None, "flag": True, "scale": 0.5},
    "weights": {"model": {"first": "m.gguf", "files": ["a", "b"]}, "drafter": None},
    "vars": {"list": ["a b", "c;d"], "items": {"keys": 1}, "empty": "", "quote": "it's", "none": [],
             "deep": {"list": [1, "x"]}, "mixed": ["a", None], "nul": "a\0b"},
}  # fmt: skip


def argv(template: str) -> tuple[str, ...]:
    return render(template, VARIABLES, origin=AT)


def refused(template: str) -> list[str]:
    """Return the faults of a template; empty if it renders."""
    try:
        argv(template)
    except RecipeError as error:
        return [str(fault) for fault in error.faults]
    return []


RENDERED: dict[str, list[str]] = {
    '{{ server }} -c {{ serve.context }}\n-x\n': ['/x/llama-server', '-c', '2048', '-x'],
    'a \\\n  b\\\nc': ['a', 'bc'],
    "'a \\\n b'": ['a  b'],
    'a\\\\\nb': ['a\\', 'b'],
    'a # b': ['a', '#', 'b'],
    '$HOME `ls` ~ *.x a;b | c > d && e': ['$HOME', '`ls`', '~', '*.x', 'a;b', '|', 'c', '>', 'd', '&&', 'e'],
    '--x={{ vars.quote }}': ["--x=it's"],
    '\'{{ vars.quote }}\' "{{ vars.quote }}" \\{{ vars.quote }}': ["it's", "it's", "it's"],
    '{{ vars.quote }}{{ vars.quote }}': ["it'sit's"],
    '{{ vars.empty }} x{{ vars.empty }}y \'\' ""': ['', 'xy', '', ''],
    '{{ vars.list | args }}': ['a b', 'c;d'],
    'x {{ vars.none | args }} y': ['x', 'y'],
    "{{ vars.list | tojson }} '{{ vars.items | tojson }}'": ['["a b", "c;d"]', '{"keys": 1}'],
    "{{ '<&>é' | tojson }}": ['"<&>é"'],
    '{{ vars.items.keys }}': ['1'],
    "{{ vars.deep.keys() | join(',') }}": ['list'],
    '{% for i in vars.list %}-f {{ i }}{% if not loop.last %} , {% endif %}{% endfor %}': ['-f', 'a b', ',', '-f', 'c;d'],
    '{% for k, v in vars.items.items() %}--{{ k }} {{ v }}{% endfor %}': ['--keys', '1'],
    '{% if serve.kv_cache %}-ctk {{ serve.kv_cache }}{% else %}none{% endif %}': ['none'],
    '{% if weights.drafter %}-md {{ weights.drafter.first }}{% endif %} x': ['x'],
    "{% set n = serve.context // 2 %}-c {{ n }} {{ n ~ 'k' }}": ['-c', '1024', '1024k'],
    "{% with a = vars.list %}{{ a | join('+') }}{% endwith %}": ['a b+c;d'],
    "{{ 'on' if serve.flag else 'off' }} {{ serve.scale }}": ['on', '0.5'],
    "{{ vars.nothing | default('d') }} {{ nothing | default('e') }}": ['d', 'e'],
    "{{ vars.list | map('upper') | args }}": ['A B', 'C;D'],
    "{{ vars.list | map('upper') | list | tojson }}": ['["A B", "C;D"]'],
    "{{ server.split('/') | last }} {{ weights.model.first | replace('.gguf', '') }}": ['llama-server', 'm'],
    '{{ vars.list[0] }} {{ vars.list[::-1] | args }}': ['a b', 'c;d', 'a b'],
    "{{ range(3) | args }} {{ (vars.list + ['z']) | args }}": ['0', '1', '2', 'a b', 'c;d', 'z'],
    "{% raw %}'{{ x }}'{% endraw %} {# comment #}y": ['{{ x }}', 'y'],
    '\'{"a": {"b": 1}}\'': ['{"a": {"b": 1}}'],
    "{{ {'a': vars.list} | tojson }}": ['{"a": ["a b", "c;d"]}'],
    '{{ \'{{ server }}\' }} {{ "\'" }} {{ \'\\\\\' }}': ['{{ server }}', "'", '\\'],
    "{{ ' \n\t ' }}": [' \n\t '],
    "{{ 'y' if serve.context is even else 'n' }}": ['y'],
}  # fmt: skip


def test_template_renders() -> None:
    assert {template: list(argv(template)) for template in RENDERED} == RENDERED


REFUSED = {
    'a\n{{ serve.kv_cache }}': 'r.yaml:12:8: serve.kv_cache is null',
    '{{ serve.flag }}': 'r.yaml:11:8: serve.flag is the boolean true, but an argument is text',
    '{{ true }}': 'this expression is the boolean true',
    '{{ none }}': 'this expression is null',
    '{{ vars.list }}': 'r.yaml:11:8: vars.list is a list, but an argument is text or a number (write {{ vars.list | args }}',
    "{{ vars.list | map('upper') }}": 'a list',
    '{{ vars.items }}': 'r.yaml:11:8: vars.items is a map, but an argument is text or a number (write {{ vars.items | tojson }}',
    '{{ vars.mixed | args }}': 'an item is null',
    '{{ [[1]] | args }}': 'an item is a list',
    '{{ server | args }}': "'args' expects a list, got the text '/x/llama-server'",
    '{{ vars.items | args }}': "'args' expects a list, got a map",
    'x{{ vars.list | args }}': "the result of 'args' must be a word of its own",
    '{{ vars.list | args }}x': "the result of 'args' must be a word of its own",
    "'{{ vars.list | args }}'": "the result of 'args' must be a word of its own",
    '{{ vars.list | args }}{{ vars.list | args }}': "the result of 'args' must be a word of its own",
    '{{ vars.list | args | tojson }}': "'tojson' expects a list",
    "{{ 'a' ~ vars.none }}": 'a list',
    "{{ 'a' ~ none }}": 'null',
    '{{ none | upper }} ': 'null',
    '{{ true | string }}': 'the boolean true',
    '{{ vars.mixed | join }}': 'null',
    '{{ vars.nul }}': 'r.yaml:11:8: vars.nul contains a NUL character',
    "{{ '\\x00' }}": 'contains a NUL character',
    "{{ '\\ud800' }}": 'half of a surrogate pair',
    "a\n  b 'c\n d": "r.yaml:12:9: the quote ' is never closed",
    'a "b\n': 'r.yaml:11:7: the quote " is never closed',
    "'{{ server }}": "the quote ' is never closed",
    'a \\': 'a backslash ends the command',
    '': 'the command is empty',
    '{% if false %}x{% endif %}\n': 'the command is empty',
    'a\nb {{ servr }}': "r.yaml:12:10: 'servr' is not defined (did you mean server?)",
    '{{ zzz }}': "'zzz' is not defined (available: name, range, serve, server, vars, weights)",
    '{{ serve.contxt }}': "r.yaml:11:8: 'contxt' is not defined (did you mean context?)",
    '{{ vars.deep.lst }}': "r.yaml:11:8: 'lst' is not defined (did you mean list?)",
    '{% if oops %}x{% endif %}': "'oops' is not defined",
    'a\n{% for x in oops %}x{% endfor %}': "r.yaml:12:17: 'oops' is not defined",
    '{{ weights.drafter.first }}': "'first' of null: the value before it is not set",
    "{{ 'x' if false }}": 'add an else',
    'a\nb\n  {% if %}': 'r.yaml:13:7: template syntax: ',
    '{{ a': 'template syntax: ',
    '{% for x in y %}': 'template syntax: ',
    '{% nonsense %}': "template syntax: Encountered unknown tag 'nonsense'",
    '{{ server | uper }}': "r.yaml:11:17: unknown filter 'uper' (did you mean upper?)",
    '{{ 1 is odc }}': "unknown test 'odc' (did you mean odd?)",
    '{% for x in 5 %}{% endfor %}': "the template failed: 'int' object is not iterable",
    '{{ 1 / 0 }}': 'the template failed: division by zero',
    "{{ 'x' | int }}": "the text 'x' is not a number",
    '{{ range }}': 'not text or a number',
    '{{ server.upper }}': 'call methods with ()',
    '{{ nothing() }}': "'nothing' is not defined",
    'a\x00b': 'the template contains a NUL character',
}  # fmt: skip


def test_template_faults_name_their_place() -> None:
    found = {template: refused(template) for template in REFUSED}
    wrong = {t: found[t] for t, w in REFUSED.items() if not any(w in line for line in found[t])}
    assert not wrong


def test_template_reports_all_faults_at_once() -> None:
    found = refused("{{ a }} {{ serve.flag }}\n{{ b }} {{ vars.list }}")
    assert [line.split(": ")[0] for line in found] == [
        "r.yaml:11:8", "r.yaml:11:16", "r.yaml:12:8", "r.yaml:12:16",
    ]  # fmt: skip


ESCAPES = [
    "{{ server.__class__ }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ server['__class__'] }}",
    "{{ server | attr('__class__') }}", "{{ server['__cl' ~ 'ass__'] }}", "{{ self.__init__.__globals__ }}",
    "{{ '{0.__class__}'.format(server) }}", "{{ 'x{a.__class__}'.format_map({'a': server}) }}",
    "{{ vars.list | map(attribute='__class__') | list }}", "{{ vars.list | map('attr', '__class__') | list }}",
    "{{ [server] | map('_value', 0, '') | list | args }}", "{{ server | _value(0, '') }}", "{{ 'a' | _text(1) }}",
    "{{ range.__self__ }}", "{{ cycler.__init__ }}", "{{ namespace() }}", "{{ lipsum() }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}", "{{ config }}", "{{ self }}", "{{ server.upper.__func__ }}",
    "{% for x in [1] %}{{ loop.__init__ }}{% endfor %}", "{% for x in [1] recursive %}{{ loop([2]) }}{% endfor %}",
    "{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% from 'os' import path %}", "{% extends 'x' %}",
    "{% macro a() %}{% endmacro %}", "{% call a() %}{% endcall %}", "{% filter upper %}x{% endfilter %}",
    "{% set x %}{{ server }}{% endset %}{{ x }}", "{% block a %}{% endblock %}", "{% set ns.x = 1 %}",
    "{% autoescape true %}{{ server }}{% endautoescape %}", "{{ vars.list.append(1) }}", "{{ vars.pop('list') }}",
    "{{ server | pprint }}", "{{ server | random }}", "{% debug %}", "{{ None.__class__ }}", "{{ '\\x000\\x00' }}",
]  # fmt: skip


def test_template_cannot_reach_python() -> None:
    found = {template: refused(template) for template in ESCAPES}
    assert not [t for t, lines in found.items() if not lines or "object at 0x" in str(lines)]


def test_template_argument_length_is_limited() -> None:
    assert "longer than 131071 bytes" in refused("{{ 'x' * 131072 }}")[0]
    assert argv("{{ 'x' * 131071 }}") == ("x" * 131_071,)


NO_NUL = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
HOLES = ["{{ v }}", "'{{ v }}'", '"{{ v }}"', "x{{ v }}y", "'a b'{{ v }}", '--o="{{ v }}"z', "\\{{ v }}",
         "{% if 1 %}{{ v }}{% endif %}", "{% for i in [v] %}{{ i }}{% endfor %}", "{% set w = v %}{{ w }}",
         "{{ v ~ '' }}", "{{ [v] | args }}", "{{ [v] | join }}", "{{ (v) }}", "'it'\\''s {{ v }}'"]  # fmt: skip
AROUND = {"{{ v }}": "{}", "x{{ v }}y": "x{}y", "'a b'{{ v }}": "a b{}", '--o="{{ v }}"z': "--o={}z",
          "'it'\\''s {{ v }}'": "it's {}"}  # fmt: skip


@given(NO_NUL, st.sampled_from(HOLES))
def test_template_value_arrives_whole_as_one_argument(value: str, hole: str) -> None:
    got = render(f"before {hole} after", {"v": value}, origin=AT)
    wanted = AROUND.get(hole, "{}").replace("{}", value) if hole in AROUND else value
    assert got == ("before", wanted, "after")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-999, 999) | NO_NUL,
        lambda s: st.lists(s, max_size=3) | st.dictionaries(NO_NUL, s, max_size=3),
        max_leaves=8,
    )
)
def test_template_json_arrives_as_one_argument(value: Any) -> None:
    (got,) = render("{{ v | tojson }}", {"v": value}, origin=AT)
    assert json.loads(got) == value


SHELL = st.text(st.sampled_from("ab '\"\\\n\t#;$|&><*~é%"), max_size=30)


@settings(max_examples=400)
@given(SHELL)
def test_template_text_splits_like_shlex(text: str) -> None:
    unfolded: list[str] = []
    slashes = 0
    for char in text:
        if char == "\n" and slashes % 2:
            unfolded.pop()
            slashes = 0
            continue
        slashes = slashes + 1 if char == "\\" else 0
        unfolded.append(char)
    try:
        wanted = shlex.split("".join(unfolded), comments=False, posix=True)
    except ValueError:
        wanted = []
    try:
        got = list(argv("{# #}" + text))
    except RecipeError:
        got = []
    assert got == wanted


def test_template_text_splits_like_a_shell(tmp_path: Path) -> None:
    text = """a 'b c' "d 'e' \\"f\\" \\\\g" h\\ i '' j'k'"l" \\
      m"""
    script = f"printf '%s\\0' {text}"
    out = subprocess.run(["sh", "-c", script], capture_output=True, check=True, cwd=tmp_path).stdout
    assert list(argv(text)) == out.decode().split("\0")[:-1]


@settings(max_examples=150)
@given(st.text(st.sampled_from("{}%#abcdefilnorst _.|()[]'\"~+0123456789,=-\n"), max_size=60))
def test_template_gives_arguments_or_a_clear_error(text: str) -> None:
    with suppress(RecipeError):
        assert argv("{{ " + text)


def test_template_fault_has_the_right_line_in_every_yaml_style(tmp_path: Path) -> None:
    styles = {
        "  command: |\n    a\n\n    b {{ oops }}\n": "r.yaml:14:10",
        "  command: |2\n      a\n    {{ oops }}\n": "r.yaml:13:8",
        "  command: | # why\n\n    {{ oops }}\n": "r.yaml:13:8",
        "  command: |-\n    {{ oops }}": "r.yaml:12:8",
        "  command: &x\n    |\n    a\n    {{ oops }}\n": "r.yaml:14:8",
        "  command: >\n    a\n    {{ oops }}\n": "r.yaml:11:12",
        '  command: "{{ oops }}"\n': "r.yaml:11:12",
        "  command: a {{ oops }}\n": "r.yaml:11:12",
    }
    found = {}
    for style in styles:
        with pytest.raises(RecipeError) as caught:
            load(write(tmp_path, GOOD[: GOOD.index("  command")] + style))
        found[style] = str(caught.value.where).rpartition("/")[2].partition(": ")[0]
        assert "'oops' is not defined" in str(caught.value.where)
    assert found == styles


def test_template_variables_have_one_shape(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, GOOD + "  ready_timeout: 90s\n  vars: {a: yes}\n").recipe
    real = template_variables(
        recipe, server="/s", weights={"model": WeightPaths("/m/a", "/m", ("/m/a", "/m/b"))}
    )
    trial = trial_variables(recipe)
    assert trial.keys() == real.keys() == {"server", "name", "serve", "weights", "vars", "host"}
    assert trial["serve"] == real["serve"]
    assert real["serve"]["ready_timeout"] == 90
    assert isinstance(real["serve"]["ready_timeout"], int)
    assert "command" not in real["serve"]
    assert real["weights"] == {
        "model": {"first": "/m/a", "path": "/m", "files": ["/m/a", "/m/b"]},
        "drafter": None,
        "projector": None,
    }
    assert real["vars"] == {"a": "yes"}
