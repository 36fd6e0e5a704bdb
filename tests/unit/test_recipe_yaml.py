"""YAML 1.2, as a recipe may use it: what it means, and where it is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bakehouse.errors import NotFound, RecipeError
from bakehouse.recipe.load import find, load
from bakehouse.recipe.merge import flatten
from bakehouse.recipe.scalars import PlainBool, PlainFloat, PlainInt
from bakehouse.recipe.yaml import compose
from tests.support.recipe_text import GOOD, faults, lines, loaded


def read(text: str) -> Any:
    found: list[Any] = []
    node = compose(text, "f", found)
    assert not found
    assert node is not None
    return flatten(node)[0]


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "On", "y", "0b11", "1_000", "1:30",
                                  "2001-01-01", "<", "=", "nUll", "tRue", "+.inf.", "0x", "0o8",
                                  "1e", ".", "12e03x", "tru"])  # fmt: skip
def test_words_stay_words(word: str) -> None:
    assert read(f"a: {word}") == {"a": word}


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("true", PlainBool, True), ("False", PlainBool, False), ("TRUE", PlainBool, True),
        ("0123", PlainInt, 123), ("-7", PlainInt, -7), ("+7", PlainInt, 7), ("0o17", PlainInt, 15),
        ("0xFf", PlainInt, 255), ("13.0", PlainFloat, 13.0), ("1e3", PlainFloat, 1000.0),
        (".5", PlainFloat, 0.5), ("5.", PlainFloat, 5.0), ("-.inf", PlainFloat, float("-inf")),
    ],
)  # fmt: skip
def test_core_schema_scalars_keep_how_they_were_written(text: str, kind: Any, value: Any) -> None:
    made = read(f"a: {text}")["a"]
    assert type(made) is kind
    assert made.text == text
    assert (made.value if kind is PlainBool else made) == value


@pytest.mark.parametrize("text", ["null", "Null", "NULL", "~", ""])
def test_nulls(text: str) -> None:
    assert read(f"a: {text}\nb: [{text or '~'}]\n") == {"b": [None]}


@pytest.mark.parametrize("quote", ["'", '"'])
@pytest.mark.parametrize("text", ["true", "13.0", "null", "~", "0123"])
def test_quoted_scalars_are_text(quote: str, text: str) -> None:
    assert read(f"a: {quote}{text}{quote}")["a"] == text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a:\n\tb: 1\n", "r.yaml:2:1: a tab stands where YAML wants spaces (indent with spaces)"),
        ("a: 1\nb: 2\na: 3\n", "r.yaml:3:1: the key 'a' stands here again (first on line 1)"),
        ("a: {x: 1, x: 2}\n", "r.yaml:1:11: the key 'x' stands here again (first on line 1)"),
        ("1: x\n", "r.yaml:1:1: a key must be text, this one is the number 1 (put it in quotes)"),
        ("true: x\n", "r.yaml:1:1: a key must be text, this one is the boolean true"),
        ("~: x\n", "r.yaml:1:1: a key must be text, this one is null"),
        ("? [a, b]\n: x\n", "r.yaml:1:3: a key must be text, this one is a list"),
        ("? {a: b}\n: x\n", "r.yaml:1:3: a key must be text, this one is a map"),
        ("<<: {a: 1}\n", "r.yaml:1:1: '<<' does not merge in YAML 1.2 (use include:)"),
        ("a: !!str 1\n", "r.yaml:1:4: tags such as !!str are not used here"),
        ("a: !python/object:os.system x\n", "r.yaml:1:4: tags such as !python/object:os.system"),
        ("a: 1\n---\nb: 2\n", "r.yaml:2:1: a second YAML document starts here"),
        ("%YAML 1.1\n---\na: on\n", "recipes are YAML 1.2"),
        ("a: *b\n", "r.yaml:1:4: *b names no anchor (put text that starts with * in quotes)"),
        ("a: &b [*b]\n", "r.yaml:1:8: *b stands inside itself"),
        ("a: @b\n", "r.yaml:1:4: found character '@' that cannot start any token (put text"),
        ("a: 'b\nc: d\n", "r.yaml:1:4: a quoted scalar is never closed"),
        ("a: b: c\n", "r.yaml:1:5: a colon and a space make a key, and no key may stand here"),
        ("a: [1\nb: 2\n", "r.yaml:2:2: expected ',' or ']'"),
        ("a: b\x00c\n", "r.yaml:1:5: the character U+0000 may not stand in YAML"),
        ("a: 1\nb: \x1b[31m\n", "r.yaml:2:4: the character U+001B may not stand in YAML"),
        ('a: "\\0"\n', "r.yaml:1:4: text may not hold a NUL character"),
        ('a: "\\ud800"\n', "r.yaml:1:4: text may not hold half of a surrogate pair"),
        ('a: "\\U00110000"\n', "what follows cannot be read as YAML"),
        ("", "r.yaml:1:1: the file is empty (a recipe is a YAML map)"),
        ("# only a comment\n", "r.yaml:1:1: the file is empty"),
        ("---\n...\n", "the file is empty"),
        ("- a\n- b\n", "r.yaml:1:1: this is a list, a recipe is a map"),
        ("text\n", "r.yaml:1:1: this is the text 'text', a recipe is a map"),
        ("42", "r.yaml:1:1: this is the number 42, a recipe is a map"),
        ("a: " + "[" * 5000, "more than 40 levels deep"),
        ("a: " + "{a: " * 5000, "more than 40 levels deep"),
        ("a: " + "9" * 5000, "r.yaml:1:4: a number of 5000 digits"),
        ("a: [" + "x, " * 30_000 + "]", "more than 20000 values"),
        ("x" * (2**20 + 1), "r.yaml:1:1: the file is larger than 1 MiB"),
        (b"a: 1\nb: \xff\n", "r.yaml:2:4: the byte 0xff is not UTF-8 (save the file as UTF-8)"),
        ("a: 1\n".encode("utf-16"), "the byte 0xff is not UTF-8"),
    ],
)  # fmt: skip
def test_refused_with_its_place(tmp_path: Path, text: str | bytes, wanted: str) -> None:
    found = lines(faults(tmp_path, text), tmp_path)
    assert any(wanted in line for line in found), found
    assert all(line.startswith("r.yaml:") for line in found), found


def test_anchors_that_explode_are_stopped_early(tmp_path: Path) -> None:
    rows = ["l0: &l0 [" + "x, " * 9 + "x]"]
    rows += [f"l{i}: &l{i} [" + f"*l{i - 1}, " * 9 + f"*l{i - 1}]" for i in range(1, 30)]
    found = lines(faults(tmp_path, "\n".join(rows)), tmp_path)
    assert "r.yaml:5:" in found[0]
    assert "more than 20000 values" in found[0]


def test_long_text_repeated_by_anchors_is_stopped(tmp_path: Path) -> None:
    text = f"a: &a {'x' * 900_000}\nb: [" + "*a, " * 10 + "]\n"
    assert "4194304 characters" in str(faults(tmp_path, text)[0])


def test_anchors_are_fine_otherwise(tmp_path: Path) -> None:
    text = GOOD + "  vars: {a: &a [x, y], b: *a}\n"
    assert loaded(tmp_path, text).recipe.serve.vars == {"a": ["x", "y"], "b": ["x", "y"]}


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    text = "\ufeff" + GOOD.replace("\n", "\r\n")
    made = loaded(tmp_path, text)
    assert made.recipe.name == "small"
    assert made.origin("name").column == 7


def test_a_fault_after_a_fault_is_found_as_well(tmp_path: Path) -> None:
    text = "schema: 1\nschema: 1\n2: x\nname: !x small\nnonsense: 3\n"
    found = lines(faults(tmp_path, text), tmp_path)
    starts = [line.split(": ")[0] for line in found]
    for place in ("r.yaml:2:1", "r.yaml:3:1", "r.yaml:4:7", "r.yaml:5:1"):
        assert place in starts


@pytest.mark.parametrize("make", ["folder", "pipe", "absent", "loop"])
def test_what_is_no_file_is_said(tmp_path: Path, make: str) -> None:
    path = tmp_path / "r.yaml"
    wanted = {"folder": "is a folder", "pipe": "is not a regular file",
              "absent": "there is no file", "loop": "cannot be read"}[make]  # fmt: skip
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


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "\udcff\ud800"])
def test_paths_that_no_system_takes(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecipeError):
        load(tmp_path / name)
    with pytest.raises(NotFound):
        find(name, tmp_path)
