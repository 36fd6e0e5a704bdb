"""The signature files: rows are complete, and each template matches a line made from it."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter

import pytest
from pydantic import ValidationError

from bakehouse.logscan.catalogue import (
    build,
    catalogue,
    every_row,
    parse,
    resolve,
    spellings,
    wanted,
)
from bakehouse.logscan.findings import ENGINES, Row, bound, filled
from bakehouse.logscan.scanner import Scanner

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


def _finds_its_own_line(row: Row, text: str) -> bool:
    alone = row.model_copy(update={"pattern": (text,), **PLAIN})
    tries = (
        example(text, numbers, option)
        for option in (0, 1)
        for numbers in itertools.product(NUMBERS, repeat=min(3, text.count("<n")))
    )
    return any(_shows(alone, line) for line in tries)


def test_signature_templates_match_a_line_made_from_them() -> None:
    assert [(row.id, t) for row, t in TEMPLATES if not _finds_its_own_line(row, t)] == []


def test_signature_ids_are_unique_and_references_resolve() -> None:
    assert [id_ for id_, times in Counter(row.id for row in ROWS).items() if times > 1] == []
    assert len(catalogue().rows) == len(ROWS)


def _faults_of(row: Row) -> list[str]:
    """What is incomplete in a row, or costs too much on hostile lines."""
    caught = set(re.findall(r"<(?:[nw*]|again):(\w+)>", " ".join(row.pattern)))
    used = set(re.findall(r"\w+", " ".join(re.findall(r"\{([\w/]+)\}", row.cause + row.mend))))
    for limit in row.where.values():
        bound(limit)  # raises ValueError
    faults = {
        "an empty source": not all(row.source),
        "a bound on something not caught": not set(row.where) <= caught,
        "a placeholder for something not caught": not used <= (caught or {"left", "right"}),
        "cause and mend end with a period": row.role != "fact"
        and not (row.cause.endswith(".") and row.mend[-1] in ".}"),
    }
    for text in row.pattern:
        values = dict.fromkeys(re.findall(r"<(?:[nw*]|again):(\w+)>", text), "5")
        shown = filled(row.cause, values) + filled(row.mend, values).replace("'?'", "")
        faults[f"a hole in the text for '{text}'"] = "?" in shown
        faults[f"more than 4 open ends in '{text}'"] = text.count("<*") > 4
    return [name for name, present in faults.items() if present]


def test_signature_rows_are_complete() -> None:
    assert {row.id: faults for row in ROWS if (faults := _faults_of(row))} == {}


def test_signature_comparisons_name_values_that_facts_catch() -> None:
    compared = [row.compare for row in ROWS if row.compare]
    assert compared
    for compare in compared:
        for side in (compare.left, compare.right):
            fact, _, name = side.rpartition(".")
            assert any(f":{name}>" in text for text in catalogue().rows[fact].pattern), side


def test_signature_catalogue_exists_for_every_engine() -> None:
    sizes = {engine: len(catalogue(engine).rows) for engine in (*ENGINES, None)}
    assert min(sizes.values()) > 100, sizes


def test_signature_catalogue_leaves_out_only_rows_of_the_other_server() -> None:
    by_id = {row.id: row for row in ROWS}

    assert not wanted(by_id["no-cache-blocks"], "llama.cpp")
    assert not wanted(by_id["model-architecture-unknown"], "vllm")
    assert wanted(by_id["oom-killer"], "vllm")
    assert wanted(by_id["toolkit-older-than-flag"], "vllm")
    assert wanted(by_id["model-architecture-unknown"], "docker")


def test_signature_row_that_is_wrong_is_refused_by_name() -> None:
    good = {
        "id": "x", "stage": "load", "severity": "fatal", "pattern": "some words",
        "cause": "Because of it.", "mend": "Fix it so.", "source": "here",
    }  # fmt: skip
    Row.model_validate(good)
    wrong: list[tuple[dict[str, object], str]] = [
        ({"severty": "fatal"}, "severty"),
        ({"severity": "bad"}, "severity"),
        ({"stage": "lunch"}, "stage"),
        ({"engine": "lama"}, "lama"),
        ({"id": "Not An Id"}, "id"),
        ({"pattern": []}, "pattern"),
        ({"source": []}, "source"),
        ({"cause": ""}, "cause"),
    ]
    for change, message in wrong:
        with pytest.raises(ValidationError, match=message):
            Row.model_validate({**good, **change})


def test_signature_template_without_a_word_is_refused() -> None:
    with pytest.raises(ValueError, match="no whole word"):
        spellings("<n>: <w>")
    with pytest.raises(ValueError, match="empty"):
        parse("")


def test_signature_reference_to_no_row_and_duplicate_id_are_refused() -> None:
    row = ROWS[0]
    with pytest.raises(ValueError, match="nowhere"):
        resolve([row.model_copy(update={"unless": ("nowhere",)})])
    with pytest.raises(ValueError, match="twice"):
        build([row, row])


def test_signature_templates_stay_fast_on_hostile_lines() -> None:
    slowest = 0.0
    for row, text in TEMPLATES:
        template = spellings(text)[0]
        words = " ".join(sorted(word.decode() for word in template.words))
        hostile = (example(text, ("7",), 0)[:-1] + " ") * 60 + words * 40
        started = time.process_time()
        template.regex.search(hostile)
        slowest = max(slowest, time.process_time() - started)
        assert slowest < 0.5, row.id
