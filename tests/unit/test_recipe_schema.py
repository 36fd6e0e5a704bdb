# ruff: noqa: E501 - tables
"""The schema for editors: fresh, and of one mind with the loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from ruamel.yaml import YAML

from bakehouse.models import to_json
from bakehouse.recipe.export import json_schema
from bakehouse.recipe.loader import names
from tests.support.recipe_text import GOOD

ROOT = Path(__file__).resolve().parents[2]


def faults(text: str) -> list[str]:
    data: Any = YAML(typ="safe", pure=True).load(text)
    return [error.message for error in Draft202012Validator(json_schema()).iter_errors(data)]


def test_schema_file_is_fresh() -> None:
    written = (ROOT / "recipes" / "recipe.schema.json").read_text()
    assert written == to_json(json_schema()), "run scripts/schema"


def test_schema_is_valid() -> None:
    Draft202012Validator.check_schema(json_schema())
    text = json.dumps(json_schema())
    for keyword in ('"ge"', '"le"', '"gt"', '"title": "Name"'):
        assert keyword not in text


def test_schema_accepts_shipped_recipes() -> None:
    texts = {
        name: (ROOT / "recipes" / f"{name}.yaml").read_text() for name in names(ROOT / "recipes")
    }
    assert {name: faults(text) for name, text in texts.items()} == {name: [] for name in texts}


def test_schema_accepts_what_the_loader_accepts() -> None:
    extras = [
        "  ready_timeout: 15m\n", "  ready_timeout: 1h30m\n", "  ready_timeout: 2.5s\n",
        "host: {memory_size: 4GiB}\n", "host: {memory_size: 4096}\n", "host: {memory_size: 98 MB}\n",
        "  flash_attn: on\n", "build: {cmake: {A: true, B: x, C: 1}}\n", "  kv_cache: null\n",
        'host: {compute_capability: "12.1"}\n', "  env: {A: 1, B: x}\n",
    ]  # fmt: skip
    assert not [extra for extra in extras if faults(GOOD + extra)]


def test_schema_refuses_what_the_loader_refuses() -> None:
    extras = [
        "  ready_timeout: 15\n", "  ready_timeout: 15 minutes\n", "  ready_timeout: ''\n",
        "host: {memory_size: lots}\n", "host: {memory_size: 4 GiBs}\n", "  flash_attn: true\n",
        "  port: 70000\n", "  slots: 0\n", "  contxt: 5\n", "zzz: 1\n", "build: {cuda: {}}\n",
        "host: {compute_capability: 12.1}\n", "build: {cmake: {A: []}}\n",
    ]  # fmt: skip
    assert not [extra for extra in extras if not faults(GOOD + extra)]


def test_schema_of_a_file_with_include_is_partial() -> None:
    assert not faults("include: base.yaml\nserve: {port: null, context: 4}\nhost: null\n")
    assert not faults("include: [a.yaml, b.yaml]\n")
    assert faults("include: base.yaml\nserve: {contxt: 4}\n")
    assert faults("include: 5\n")
    assert faults("include: base.yaml\nprobe: {facts: {questions: [{ask: x}]}}\n")
    assert faults("name: x\n")


def test_schema_describes_keys() -> None:
    definitions = json_schema()["$defs"]
    assert definitions["Serve"]["properties"]["port"]["description"]
    assert definitions["Archive"]["properties"]["folder"]["description"]
    assert definitions["Serve"]["properties"]["ready_timeout"]["default"] == "600s"
