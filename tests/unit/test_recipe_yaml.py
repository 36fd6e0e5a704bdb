"""YAML 1.2, as a recipe may use it: what it means, and where it is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bakehouse.errors import NotFound, RecipeError
from bakehouse.recipe.document import compose, flatten
from bakehouse.recipe.loader import find, load
from tests.support.recipe_text import GOOD, faults, lines, loaded


def read(text: str) -> Any:
    found: list[Any] = []
    node = compose(text, "f", found)
    assert not found
    assert node is not None
    return flatten(node)[0]


def test_yaml_words_stay_words() -> None:
    words = (
        "on", "off", "yes", "no", "On", "y", "0b11", "1_000", "1:30", "2001-01-01", "<", "=",
        "nUll", "tRue", "+.inf.", "0x", "0o8", "1e", ".", "12e03x", "tru",
    )  # fmt: skip
    assert {word: read(f"a: {word}") for word in words} == {word: {"a": word} for word in words}


def test_yaml_core_schema_scalars() -> None:
    wanted = {
        "true": True, "False": False, "TRUE": True, "-7": -7, "+7": 7, "0o17": 15, "0xFf": 255,
        "13.0": 13.0, "1e3": 1000.0, ".5": 0.5, "5.": 5.0, "-.inf": float("-inf"),
    }  # fmt: skip
    found = {text: read(f"a: {text}")["a"] for text in wanted}
    assert found == wanted
    assert [type(v) for v in found.values()] == [type(v) for v in wanted.values()]
    for text in ("null", "Null", "NULL", "~", ""):
        assert read(f"a: {text}\nb: [{text or '~'}]\n") == {"b": [None]}
    for text in ("true", "13.0", "null", "~", "0123"):
        assert read(f"a: '{text}'\nb: \"{text}\"") == {"a": text, "b": text}


INVALID: list[tuple[str | bytes, str]] = [
    ('a:\n\tb: 1\n', 'r.yaml:2:1: found a tab where YAML requires spaces (indent with spaces)'),
    ('a: 1\nb: 2\na: 3\n', "r.yaml:3:1: duplicate key 'a' (first on line 1)"),
    ('a: {x: 1, x: 2}\n', "r.yaml:1:11: duplicate key 'x' (first on line 1)"),
    ('1: x\n', 'r.yaml:1:1: a key must be text, not the number 1 (put it in quotes)'),
    ('true: x\n', 'r.yaml:1:1: a key must be text, not the boolean true'),
    ('~: x\n', 'r.yaml:1:1: a key must be text, not null'),
    ('? [a, b]\n: x\n', 'r.yaml:1:3: a key must be text, not a list'),
    ('? {a: b}\n: x\n', 'r.yaml:1:3: a key must be text, not a map'),
    ('<<: {a: 1}\n', "r.yaml:1:1: '<<' does not merge in YAML 1.2 (use include:)"),
    ('a: !!str 1\n', 'r.yaml:1:4: tags such as !!str are not supported'),
    ('a: !python/object:os.system x\n', 'r.yaml:1:4: tags such as !python/object:os.system'),
    ('a: 1\n---\nb: 2\n', 'r.yaml:2:1: a second YAML document starts here'),
    ('%YAML 1.1\n---\na: on\n', 'recipes are YAML 1.2'),
    ('a: *b\n', "r.yaml:1:4: found undefined alias 'b' (quote text"),
    ('a: &b [*b]\n', 'r.yaml:1:4: an anchor contains itself'),
    ('a: @b\n', "r.yaml:1:4: found character '@' that cannot start any token (quote text"),
    ("a: 'b\nc: d\n", 'r.yaml:1:4: a quoted scalar is never closed'),
    ('a: b: c\n', 'r.yaml:1:5: a colon and a space make a key, which is not allowed here'),
    ('a: [1\nb: 2\n', "r.yaml:2:2: expected ',' or ']'"),
    ('a: b\x00c\n', 'r.yaml:1:5: YAML does not allow the character U+0000'),
    ('a: 1\nb: \x1b[31m\n', 'r.yaml:2:4: YAML does not allow the character U+001B'),
    ('a: "\\0"\n', 'r.yaml:1:4: text must not contain a NUL character'),
    ('a: "\\ud800"\n', 'r.yaml:1:4: text must not contain half of a surrogate pair'),
    ('a: "\\U00110000"\n', 'invalid YAML'),
    ('', 'r.yaml:1:1: the file is empty (a recipe is a YAML map)'),
    ('# only a comment\n', 'r.yaml:1:1: the file is empty'),
    ('---\n...\n', 'the file is empty'),
    ('- a\n- b\n', 'r.yaml:1:1: a recipe is a map, this is a list'),
    ('text\n', "r.yaml:1:1: a recipe is a map, this is the text 'text'"),
    ('42', 'r.yaml:1:1: a recipe is a map, this is the number 42'),
    ('a: ' + '[' * 5000, 'more than 40 levels deep'),
    ('a: ' + '{a: ' * 5000, 'more than 40 levels deep'),
    ('a: ' + '9' * 5000, 'r.yaml:1:4: a number of 5000 digits'),
    ('a: [' + 'x, ' * 30000 + ']', 'more than 20000 values'),
    ('x' * (2 ** 20 + 1), 'r.yaml:1:1: the file is larger than 1 MiB'),
    (b'a: 1\nb: \xff\n', 'r.yaml:2:4: the byte 0xff is not UTF-8 (save the file as UTF-8)'),
    ('a: 1\n'.encode('utf-16'), 'the byte 0xff is not UTF-8'),
]  # fmt: skip


def test_yaml_faults_name_their_place(tmp_path: Path) -> None:
    wrong = []
    for text, wanted in INVALID:
        found = lines(faults(tmp_path, text), tmp_path)
        if not any(wanted in line for line in found):
            wrong.append((text[:40], wanted, found))
        assert all(line.startswith("r.yaml:") for line in found), found
    assert not wrong


def test_yaml_anchors_that_explode_are_stopped(tmp_path: Path) -> None:
    rows = ["l0: &l0 [" + "x, " * 9 + "x]"]
    rows += [f"l{i}: &l{i} [" + f"*l{i - 1}, " * 9 + f"*l{i - 1}]" for i in range(1, 30)]
    found = lines(faults(tmp_path, "\n".join(rows)), tmp_path)
    assert "more than 20000 values" in found[0]


def test_yaml_long_text_repeated_by_anchors_is_stopped(tmp_path: Path) -> None:
    text = f"a: &a {'x' * 900_000}\nb: [" + "*a, " * 10 + "]\n"
    assert "4194304 characters" in str(faults(tmp_path, text)[0])


def test_yaml_anchors(tmp_path: Path) -> None:
    text = GOOD + "  vars: {a: &a [x, y], b: *a}\n"
    assert loaded(tmp_path, text).recipe.serve.vars == {"a": ["x", "y"], "b": ["x", "y"]}


def test_yaml_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    text = "\ufeff" + GOOD.replace("\n", "\r\n")
    made = loaded(tmp_path, text)
    assert made.recipe.name == "small"
    assert made.origin("name").column == 7


def test_yaml_faults_are_reported_together(tmp_path: Path) -> None:
    text = "schema: 1\nschema: 1\n2: x\nname: !x small\nnonsense: 3\n"
    found = lines(faults(tmp_path, text), tmp_path)
    starts = [line.split(": ")[0] for line in found]
    for place in ("r.yaml:2:1", "r.yaml:3:1", "r.yaml:4:7", "r.yaml:5:1"):
        assert place in starts


@pytest.mark.parametrize("make", ["folder", "pipe", "absent", "loop"])
def test_recipe_must_be_a_file(tmp_path: Path, make: str) -> None:
    path = tmp_path / "r.yaml"
    wanted = {"folder": "is a folder", "pipe": "is not a regular file",
              "absent": "not found", "loop": "cannot be read"}[make]  # fmt: skip
    if make == "folder":
        path.mkdir()
    elif make == "pipe":
        os.mkfifo(path)
    elif make == "loop":
        path.symlink_to(path)
    with pytest.raises(RecipeError) as caught:
        load(path)
    assert wanted in str(caught.value.where)
    assert ":1:1: " in str(caught.value.where)


def test_recipe_path_that_no_system_takes(tmp_path: Path) -> None:
    for name in ("a\0b", "x" * 5000, "\udcff\ud800"):
        with pytest.raises(RecipeError):
            load(tmp_path / name)
        with pytest.raises(NotFound):
            find(name, tmp_path)
