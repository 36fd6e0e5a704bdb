"""The data files: strict, every template compiles, every row can be reached."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter

import pytest
from pydantic import ValidationError

from bakehouse.signatures import Scanner
from bakehouse.signatures.catalogue import build, catalogue, every_row, resolve, wanted
from bakehouse.signatures.judge import bound, filled
from bakehouse.signatures.model import ENGINES, Row
from bakehouse.signatures.pattern import parse, spellings

ROWS = every_row()
TEMPLATES = [(row, text) for row in ROWS for text in row.pattern]
NUMBERS = ("7", "0", "99", "0.001", "5000", "11.5", "1.5", "400")


def example(text: str, numbers: tuple[str, ...], option: int) -> str:
    """Make a line that a template matches: its own words, with numbers put in."""
    body = re.sub(r"\\(.)", lambda m: {"<": "\0", ">": "\1"}.get(m[1], m[1]), text)
    body = body.removeprefix("^").removesuffix("$")
    turn = itertools.cycle(numbers)

    def fill(found: re.Match[str]) -> str:
        kind, choice = found.groups()
        if choice is not None:
            options = choice.split("|")
            return str(options[min(option, len(options) - 1)])
        return (
            next(turn)
            if kind == "n"
            else {"w": "word", "*": "it", "again": "multimultimultimulti"}[kind]
        )

    filled = re.sub(r"<(?:([nw*]|again)(?::\w+)?|([^<>]*\|[^<>]*))>", fill, body)
    return filled.replace("\0", "<").replace("\1", ">")


PLAIN = {"role": "cause", "needs": (), "unless": (), "min_count": 1, "at_end": False}


def _shows(row: Row, line: str) -> bool:
    return row.id in {finding.id for finding in Scanner(known=build([row])).feed(line)}


@pytest.mark.parametrize("row", [row for row in ROWS if row.pattern], ids=lambda row: str(row.id))
def test_every_template_finds_a_line_of_its_own(row: Row) -> None:
    for text in row.pattern:
        alone = row.model_copy(update={"pattern": (text,), **PLAIN})
        tries = [
            example(text, numbers, option)
            for option in (0, 1)
            for numbers in itertools.product(NUMBERS, repeat=min(3, text.count("<n")))
        ]

        assert any(_shows(alone, line) for line in tries), tries[0]


def test_ids_are_unique_and_references_resolve() -> None:
    assert [id_ for id_, times in Counter(row.id for row in ROWS).items() if times > 1] == []
    assert len(catalogue().rows) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[row.id for row in ROWS])
def test_a_row_is_whole(row: Row) -> None:
    caught = set(re.findall(r"<(?:[nw*]|again):(\w+)>", " ".join(row.pattern)))
    used = set(re.findall(r"\w+", " ".join(re.findall(r"\{([\w/]+)\}", row.cause + row.mend))))

    assert all(row.source)
    assert set(row.where) <= caught
    for limit in row.where.values():
        bound(limit)
    assert used <= (caught or {"left", "right"})
    assert row.role == "fact" or (row.cause.endswith(".") and row.mend[-1] in ".}")
    for text in row.pattern:
        values = dict.fromkeys(re.findall(r"<(?:[nw*]|again):(\w+)>", text), "5")
        assert "?" not in filled(row.cause, values) + filled(row.mend, values).replace("'?'", "")
        assert text.count("<*") <= 4, "each open end costs time on hostile lines"


@pytest.mark.parametrize("row", [r for r in ROWS if r.compare], ids=lambda row: str(row.id))
def test_comparisons_name_facts_that_catch_something(row: Row) -> None:
    assert row.compare
    for side in (row.compare.left, row.compare.right):
        fact, _, name = side.rpartition(".")
        assert any(f":{name}>" in text for text in catalogue().rows[fact].pattern)


@pytest.mark.parametrize("engine", [*ENGINES, None])
def test_every_engine_has_a_catalogue_without_loose_ends(engine: str | None) -> None:
    assert len(catalogue(engine).rows) > 100


def test_only_the_other_servers_own_rows_are_left_out() -> None:
    by_id = {row.id: row for row in ROWS}

    assert not wanted(by_id["no-cache-blocks"], "llama.cpp")
    assert not wanted(by_id["model-architecture-unknown"], "vllm")
    assert wanted(by_id["oom-killer"], "vllm")
    assert wanted(by_id["toolkit-older-than-flag"], "vllm")
    assert wanted(by_id["model-architecture-unknown"], "docker")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"severty": "fatal"}, "severty"),
        ({"severity": "bad"}, "severity"),
        ({"stage": "lunch"}, "stage"),
        ({"engine": "lama"}, "lama"),
        ({"id": "Not An Id"}, "id"),
        ({"pattern": []}, "pattern"),
        ({"source": []}, "source"),
        ({"cause": ""}, "cause"),
    ],
)
def test_a_wrong_row_is_refused(change: dict[str, object], message: str) -> None:
    good = {
        "id": "x", "stage": "load", "severity": "fatal", "pattern": "some words",
        "cause": "Because of it.", "mend": "Mend it so.", "source": "here",
    }  # fmt: skip
    Row.model_validate(good)

    with pytest.raises(ValidationError, match=message):
        Row.model_validate({**good, **change})


def test_a_template_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match="no whole word"):
        spellings("<n>: <w>")
    with pytest.raises(ValueError, match="empty"):
        parse("")


def test_a_dangling_reference_and_a_double_id_are_refused() -> None:
    row = ROWS[0]
    with pytest.raises(ValueError, match="nowhere"):
        resolve([row.model_copy(update={"unless": ("nowhere",)})])
    with pytest.raises(ValueError, match="twice"):
        build([row, row])


def test_no_template_runs_away_on_hostile_lines() -> None:
    slowest = 0.0
    for row, text in TEMPLATES:
        template = spellings(text)[0]
        words = " ".join(sorted(word.decode() for word in template.words))
        hostile = (example(text, ("7",), 0)[:-1] + " ") * 60 + words * 40
        started = time.process_time()
        template.regex.search(hostile)
        slowest = max(slowest, time.process_time() - started)
        assert slowest < 0.5, row.id
