# ruff: noqa: E501 - tables of templates and what comes of them
"""Templates to arguments: byte for byte, no shell, no way out of the sandbox, no endless run."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bakehouse.errors import RecipeError
from bakehouse.recipe.argv import render
from bakehouse.recipe.faults import Origin
from bakehouse.recipe.load import load
from bakehouse.recipe.variables import StandIn, template_variables, trial_variables
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
    with pytest.raises(RecipeError) as caught:
        argv(template)
    assert caught.value.exit_code == 2
    assert caught.value.faults
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{{ server }} -c {{ serve.context }}\n-x\n", ["/x/llama-server", "-c", "2048", "-x"]),
        ("a \\\n  b\\\nc", ["a", "bc"]),
        ("'a \\\n b'", ["a  b"]),
        ("a\\\\\nb", ["a\\", "b"]),
        ("a # b", ["a", "#", "b"]),
        ("$HOME `ls` ~ *.x a;b | c > d && e", ["$HOME", "`ls`", "~", "*.x", "a;b", "|", "c", ">", "d", "&&", "e"]),
        ("--x={{ vars.quote }}", ["--x=it's"]),
        ("'{{ vars.quote }}' \"{{ vars.quote }}\" \\{{ vars.quote }}", ["it's", "it's", "it's"]),
        ("{{ vars.quote }}{{ vars.quote }}", ["it'sit's"]),
        ("{{ vars.empty }} x{{ vars.empty }}y '' \"\"", ["", "xy", "", ""]),
        ("{{ vars.list | args }}", ["a b", "c;d"]),
        ("x {{ vars.none | args }} y", ["x", "y"]),
        ("{{ vars.list | tojson }} '{{ vars.items | tojson }}'", ['["a b", "c;d"]', '{"keys": 1}']),
        ("{{ '<&>é' | tojson }}", ['"<&>é"']),
        ("{{ vars.items.keys }}", ["1"]),
        ("{{ vars.deep.keys() | join(',') }}", ["list"]),
        ("{% for i in vars.list %}-f {{ i }}{% if not loop.last %} , {% endif %}{% endfor %}", ["-f", "a b", ",", "-f", "c;d"]),
        ("{% for k, v in vars.items.items() %}--{{ k }} {{ v }}{% endfor %}", ["--keys", "1"]),
        ("{% if serve.kv_cache %}-ctk {{ serve.kv_cache }}{% else %}none{% endif %}", ["none"]),
        ("{% if weights.drafter %}-md {{ weights.drafter.first }}{% endif %} x", ["x"]),
        ("{% set n = serve.context // 2 %}-c {{ n }} {{ n ~ 'k' }}", ["-c", "1024", "1024k"]),
        ("{% with a = vars.list %}{{ a | join('+') }}{% endwith %}", ["a b+c;d"]),
        ("{{ 'on' if serve.flag else 'off' }} {{ serve.scale }}", ["on", "0.5"]),
        ("{{ vars.nothing | default('d') }} {{ nothing | default('e') }}", ["d", "e"]),
        ("{{ vars.list | map('upper') | args }}", ["A B", "C;D"]),
        ("{{ vars.list | map('upper') | list | tojson }}", ['["A B", "C;D"]']),
        ("{{ server.split('/') | last }} {{ weights.model.first | replace('.gguf', '') }}", ["llama-server", "m"]),
        ("{{ vars.list[0] }} {{ vars.list[::-1] | args }}", ["a b", "c;d", "a b"]),
        ("{{ range(3) | args }} {{ (vars.list + ['z']) | args }}", ["0", "1", "2", "a b", "c;d", "z"]),
        ("{% raw %}'{{ x }}'{% endraw %} {# comment #}y", ["{{ x }}", "y"]),
        ("'{\"a\": {\"b\": 1}}'", ['{"a": {"b": 1}}']),
        ("{{ {'a': vars.list} | tojson }}", ['{"a": ["a b", "c;d"]}']),
        ("{{ '{{ server }}' }} {{ \"'\" }} {{ '\\\\' }}", ["{{ server }}", "'", "\\"]),
        ("{{ ' \n\t ' }}", [" \n\t "]),
        ("{{ 'y' if serve.context is even else 'n' }}", ["y"]),
    ],
)  # fmt: skip
def test_renders(template: str, wanted: list[str]) -> None:
    assert list(argv(template)) == wanted


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("a\n{{ serve.kv_cache }}", "r.yaml:12:8: serve.kv_cache is null (not set)"),
        ("{{ serve.flag }}", "r.yaml:11:8: serve.flag is the boolean true, and an argument is text"),
        ("{{ true }}", "this expression is the boolean true"),
        ("{{ none }}", "this expression is null"),
        ("{{ vars.list }}", "r.yaml:11:8: vars.list is a bare list, and an argument is text or a number (write {{ vars.list | args }}"),
        ("{{ vars.list | map('upper') }}", "a bare list"),
        ("{{ vars.items }}", "r.yaml:11:8: vars.items is a bare map, and an argument is text or a number (write {{ vars.items | tojson }}"),
        ("{{ vars.mixed | args }}", "an item is null"),
        ("{{ [[1]] | args }}", "an item is a bare list"),
        ("{{ server | args }}", "args wants a list, this is the text '/x/llama-server'"),
        ("{{ vars.items | args }}", "args wants a list, this is a map"),
        ("x{{ vars.list | args }}", "what 'args' gives must stand alone"),
        ("{{ vars.list | args }}x", "what 'args' gives must stand alone"),
        ("'{{ vars.list | args }}'", "what 'args' gives must stand alone"),
        ("{{ vars.list | args }}{{ vars.list | args }}", "what 'args' gives must stand alone"),
        ("{{ vars.list | args | tojson }}", "cannot be computed"),
        ("{{ 'a' ~ vars.none }}", "a bare list"),
        ("{{ 'a' ~ none }}", "null"),
        ("{{ none | upper }} ", "null"),
        ("{{ true | string }}", "the boolean true"),
        ("{{ vars.mixed | join }}", "null"),
        ("{{ vars.nul }}", "r.yaml:11:8: vars.nul holds a NUL character"),
        ("{{ '\\x00' }}", "holds a NUL character"),
        ("{{ '\\ud800' }}", "half of a surrogate pair"),
        ("a\n  b 'c\n d", "r.yaml:12:9: the quote ' is never closed"),
        ('a "b\n', 'r.yaml:11:7: the quote " is never closed'),
        ("'{{ server }}", "the quote ' is never closed"),
        ("a \\", "r.yaml:11:7: a backslash ends the command"),
        ("", "the command is empty"),
        ("{% if false %}x{% endif %}\n", "the command is empty"),
        ("a\nb {{ servr }}", "r.yaml:12:10: 'servr' is not defined (did you mean server?)"),
        ("{{ zzz }}", "'zzz' is not defined (there are name, range, serve, server, vars, weights)"),
        ("{{ serve.contxt }}", "r.yaml:11:8: 'serve.contxt' is not defined (did you mean serve.context?)"),
        ("{{ vars.deep.lst }}", "'vars.deep.lst' is not defined (did you mean vars.deep.list?)"),
        ("{% if oops %}x{% endif %}", "'oops' is not defined"),
        ("a\n{% for x in oops %}x{% endfor %}", "r.yaml:12:5: 'oops' is not defined"),
        ("{{ weights.drafter.first }}", "what stands before it is not set"),
        ("{{ 'x' if false }}", "give it an 'else'"),
        ("a\nb\n  {% if %}", "r.yaml:13:7: template syntax: "),
        ("{{ a", "template syntax: "),
        ("{% for x in y %}", "template syntax: "),
        ("{% nonsense %}", "template syntax: Encountered unknown tag 'nonsense'"),
        ("{{ server | uper }}", "r.yaml:11:17: there is no filter 'uper' here (did you mean upper?)"),
        ("{{ 1 is odc }}", "there is no test 'odc' here (did you mean odd?)"),
        ("{% for x in 5 %}{% endfor %}", "a loop needs a list, this is the number 5"),
        ("{{ 1 / 0 }}", "a division by zero"),
        ("{{ 'x' | int }}", "the text 'x' is not a whole number"),
        ("{{ 'a' + 1 }}", "+ adds numbers or lists (use ~ to join text)"),
        ("{{ range }}", "call a method with ()"),
        ("{{ server.upper }}", "call a method with ()"),
        ("{{ 5() }}", "can be called"),
        ("{{ nothing() }}", "'nothing' is not defined"),
    ],
)  # fmt: skip
def test_refused_with_its_place(template: str, wanted: str) -> None:
    found = refused(template)
    assert any(wanted in line for line in found), found


def test_all_faults_of_a_template_at_once() -> None:
    found = refused("{{ a }} {{ serve.flag }}\n{{ b }} {{ vars.list }}")
    assert [line.split(": ")[0] for line in found] == [
        "r.yaml:11:8", "r.yaml:11:16", "r.yaml:12:8", "r.yaml:12:16",
    ]  # fmt: skip


ESCAPES = [
    "{{ server.__class__ }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ server['__class__'] }}",
    "{{ server | attr('__class__') }}", "{{ server['__cl' ~ 'ass__'] }}", "{{ self.__init__.__globals__ }}",
    "{{ '{0.__class__}'.format(server) }}", "{{ '{0.__class__}' | format(server) }}",
    "{{ 'x'.format_map(vars) }}", "{{ '%s' % server }}", "{{ '%s' | format(1) }}",
    "{{ vars.list | map(attribute='__class__') | list }}", "{{ vars.list | map('attr', '__class__') | list }}",
    "{{ [server] | map('_value', 0) | list }}", "{{ server | _value(0) }}", "{{ vars | _kept }}",
    "{{ vars.list | selectattr('__class__') | list }}", "{{ vars.list | sort(attribute='__class__') | list }}",
    "{{ range.__self__ }}", "{{ cycler.__init__ }}", "{{ joiner }}", "{{ namespace() }}", "{{ lipsum() }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}", "{{ config }}", "{{ request }}", "{{ self }}",
    "{{ caller() }}", "{{ loop }}", "{{ varargs }}", "{{ super() }}", "{{ server.upper.__func__ }}",
    "{{ server.upper.owner }}", "{{ server.upper['owner'] }}", "{{ (server.upper)['__self__'] }}",
    "{% for x in [1] %}{{ loop._iterator }}{% endfor %}", "{% for x in [1] %}{{ loop.__init__ }}{% endfor %}",
    "{% for x in [1] %}{{ loop.cycle }}{% endfor %}", "{% for x in [1] recursive %}{{ loop([2]) }}{% endfor %}",
    "{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% from 'os' import path %}", "{% extends 'x' %}",
    "{% macro a() %}{% endmacro %}", "{% call a() %}{% endcall %}", "{% filter upper %}x{% endfilter %}",
    "{% set x %}{{ server }}{% endset %}{{ x }}", "{% block a %}{% endblock %}", "{% set ns.x = 1 %}",
    "{% autoescape true %}{{ server }}{% endautoescape %}", "{{ vars.list.append(1) }}", "{{ vars.pop('list') }}",
    "{{ vars.update({}) }}", "{{ vars.clear() }}", "{{ server.encode() }}", "{{ server.translate({}) }}",
    "{{ (1).bit_length() }}", "{{ 1.0.hex() }}", "{{ vars.list | tojson(default=1) }}",
    "{{ vars.get.__self__ }}", "{{ [].extend }}", "{{ ({}).setdefault('a', 1) }}", "{{ server | pprint }}",
    "{{ vars | xmlattr }}", "{{ server | safe }}", "{{ server | e }}", "{{ server | random }}",
    "{{ dict(a=1) }}", "{{ debug }}", "{% debug %}", "{{ _ }}", "{% set _x = 1 %}", "{{ None.__class__ }}",
    "{{ undefined_name.__class__ }}", "{{ (undefined_name | default(self)).__class__ }}",
    "{{ server.join.__call__ }}", "{{ vars.list | map('default', self) | map('string') | list }}",
]  # fmt: skip


@pytest.mark.parametrize("template", ESCAPES)
def test_no_way_into_python(template: str) -> None:
    for line in refused(template):
        assert "object at 0x" not in line


ENDLESS = [
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "{% for i in range(9999) %}{% for j in range(9999) %}{{ 'x' * 9000 }}{% endfor %}{% endfor %}",
    "{{ 'a' * 10 ** 10 }}", "{{ ['a'] * 10 ** 10 }}", "{{ 10 ** 10 ** 10 }}", "{{ 2 ** 100000000 }}",
    "{{ 9 ** 9 ** 9 }}", "{{ -(2 ** 300) * 2 ** 300 }}", "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000}'.format(1) }}", "{{ 'a' | center(10 ** 9) }}", "{{ 'a'.ljust(10 ** 9) }}",
    "{{ 'a'.zfill(10 ** 9) }}", "{{ 'a' | indent(10 ** 9) }}", "{{ [1] | batch(10 ** 9, 1) | list }}",
    "{{ [1] | slice(10 ** 9) | list }}", "{{ 1 | round(10 ** 9, 'ceil') }}", "{{ range(10 ** 30) | list }}",
    "{% set a = 'x' * 9999 %}" + "{% set a = a ~ a %}" * 60 + "{{ a }}",
    "{% set a = [1] %}" + "{% set a = a + a %}" * 60 + "{{ a | tojson }}",
    "{% set a = [1] %}" + "{% set a = [a, a] %}" * 60 + "{{ a | tojson }}",
    "{% set a = [1] %}{% set b = [1] %}" + "{% set a = [a, a] %}{% set b = [b, b] %}" * 60 + "{{ a == b }}",
    "{% set a = {'a': 1} %}" + "{% set a = {'a': a, 'b': a} %}" * 60 + "{{ a | tojson }}",
    "{% set a = ('x' * 9999) %}{{ a.replace('', a) }}", "{% set a = ('x' * 9999) %}{{ a.replace('x', a) }}",
    "{% set a = ('x' * 9999) %}{{ ([a] * 9999) | join(a) }}", "{% set a = ('x' * 9999) %}{{ a.join([a] * 9999) }}",
    "{{ ([[['a'] * 9999] * 9999] * 9999) == ([[['a'] * 9999] * 9999] * 9999) }}",
    "{% with a = 'x' * 9999 %}{% with b = a ~ a ~ a ~ a %}{{ b * 9999 }}{% endwith %}{% endwith %}",
    "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}", "{{" + "-" * 9000 + "1}}", "{{ a" + ".a" * 9000 + "}}",
    "{% for a in [1] %}" * 25 + "x" + "{% endfor %}" * 25, "{% if 1 %}" * 3000 + "x" + "{% endif %}" * 3000,
    "{{" + " 1 +" * 9000 + " 1 }}", "{{" + "[" * 9000 + "]" * 9000 + "}}",
    "x" * 40_000, "{{ " + "9" * 5000 + " }}", "{{ 1e400 }}", "{{ serve.context.__class__ }}" * 500,
]  # fmt: skip


@pytest.mark.parametrize("template", ENDLESS, ids=range(len(ENDLESS)))
def test_nothing_runs_or_grows_without_end(template: str) -> None:
    started = time.process_time()
    refused(template)
    assert time.process_time() - started < 8


def test_an_argument_that_no_program_can_get_is_refused() -> None:
    assert "longer than 131071 bytes" in refused("{% set a = 'x' * 9999 %}" + "{{ a }}" * 14)[0]
    long = {"x": "y" * 131_071}
    assert render("{{ x }}", long, origin=AT) == (long["x"],)
    with pytest.raises(RecipeError):
        render("{{ x }}", {"x": "y" * 131_072}, origin=AT)


def test_deep_loops_and_small_repetition_work() -> None:
    assert (
        len(argv("{% for i in range(50) %}{% for j in range(50) %}x {% endfor %}{% endfor %}"))
        == 2500
    )


NO_NUL = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
HOLES = ["{{ v }}", "'{{ v }}'", '"{{ v }}"', "x{{ v }}y", "'a b'{{ v }}", '--o="{{ v }}"z', "\\{{ v }}",
         "{% if 1 %}{{ v }}{% endif %}", "{% for i in [v] %}{{ i }}{% endfor %}", "{% set w = v %}{{ w }}",
         "{{ v ~ '' }}", "{{ [v] | args }}", "{{ [v] | join }}", "{{ (v) }}", "'it'\\''s {{ v }}'"]  # fmt: skip
AROUND = {"{{ v }}": "{}", "x{{ v }}y": "x{}y", "'a b'{{ v }}": "a b{}", '--o="{{ v }}"z': "--o={}z",
          "'it'\\''s {{ v }}'": "it's {}"}  # fmt: skip


@given(NO_NUL, st.sampled_from(HOLES))
def test_any_value_arrives_whole_as_one_argument(value: str, hole: str) -> None:
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
def test_any_json_arrives_as_one_argument(value: Any) -> None:
    (got,) = render("{{ v | tojson }}", {"v": value}, origin=AT)
    assert json.loads(got) == value


SHELL = st.text(st.sampled_from("ab '\"\\\n\t#;$|&><*~é%"), max_size=30)


@settings(max_examples=400)
@given(SHELL)
def test_text_without_expressions_splits_as_shlex_does(text: str) -> None:
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


def test_a_real_shell_agrees(tmp_path: Path) -> None:
    text = """a 'b c' "d 'e' \\"f\\" \\\\g" h\\ i '' j'k'"l" \\
      m"""
    script = f"printf '%s\\0' {text}"
    out = subprocess.run(["sh", "-c", script], capture_output=True, check=True, cwd=tmp_path).stdout
    assert list(argv(text)) == out.decode().split("\0")[:-1]


@settings(max_examples=150)
@given(st.text(st.sampled_from("{}%#abcdefilnorst _.|()[]'\"~+*0123456789,=-\n"), max_size=60))
def test_any_template_gives_arguments_or_a_clear_error(text: str) -> None:
    with suppress(RecipeError):
        assert argv("{{ " + text)


# Where a template stands in its file


@pytest.mark.parametrize(
    ("style", "wanted"),
    [
        ("  command: |\n    a\n\n    b {{ oops }}\n", "r.yaml:14:10"),
        ("  command: |2\n      a\n    {{ oops }}\n", "r.yaml:13:8"),
        ("  command: | # why\n\n    {{ oops }}\n", "r.yaml:13:8"),
        ("  command: |-\n    {{ oops }}", "r.yaml:12:8"),
        ("  command: &x\n    |\n    a\n    {{ oops }}\n", "r.yaml:14:8"),
        ("  command: >\n    a\n    {{ oops }}\n", "r.yaml:11:12"),
        ('  command: "{{ oops }}"\n', "r.yaml:11:12"),
        ("  command: a {{ oops }}\n", "r.yaml:11:12"),
    ],
)
def test_the_line_is_right_in_every_style(tmp_path: Path, style: str, wanted: str) -> None:
    text = GOOD[: GOOD.index("  command")] + style
    with pytest.raises(RecipeError) as caught:
        load(write(tmp_path, text))
    assert f"{wanted}: 'oops' is not defined" in str(caught.value.where)


# The variables


def test_variables_have_one_shape_before_and_after(tmp_path: Path) -> None:
    recipe = loaded(tmp_path, GOOD + "  ready_timeout: 90s\n  vars: {a: yes}\n").recipe
    real = template_variables(
        recipe, server="/s", weights={"model": StandIn("/m/a", "/m", ("/m/a", "/m/b"))}
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


def test_data_that_no_template_may_see_is_our_own_fault() -> None:
    with pytest.raises(TypeError, match=r"x\.y is a object"):
        render("a", {"x": {"y": object()}}, origin=AT)
