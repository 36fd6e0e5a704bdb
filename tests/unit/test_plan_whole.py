"""The whole plan: a golden file of the data, one of what is printed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bakehouse.base import to_json
from bakehouse.commands.planned import build_lines, serve_lines, step_lines
from bakehouse.context import Context
from bakehouse.engines.llamacpp.cmake import NOTHING
from bakehouse.errors import RecipeError
from bakehouse.lock import FilePin, Lock, PatchPin, WeightPin
from bakehouse.plan.types import Plan, Step
from bakehouse.plan.whole import Here, make_plan, survey
from bakehouse.recipe.faults import Origin
from bakehouse.recipe.load import Loaded
from bakehouse.recipe.model import Recipe
from tests.support.small_engine import (
    FAKE_HOST,
    FAKE_PLACES,
    FAKE_TOOLS,
    small_lock,
    small_recipe,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FILE = Path("/home/u/recipes/small.yaml")


def loaded(recipe: Recipe) -> Loaded:
    places: dict[tuple[str | int, ...], Origin] = {
        ("serve", "command"): Origin(str(FILE), 12, 12),
        ("build", "cmake", "GIT_EXE"): Origin(str(FILE), 8, 14),
    }
    return Loaded(recipe, FILE, (FILE,), places, ())


def lock() -> Lock:
    model = FilePin(path="model.gguf", size=98_362_432, sha256="b" * 64)
    patch = PatchPin(id="fix", file=FilePin(path="fix.patch", size=99, sha256="c" * 64))
    weights = {"model": WeightPin(origin="model.gguf", files=(model,))}
    return small_lock().model_copy(update={"weights": weights, "patches": (patch,)})


def plan() -> Plan:
    recipe = small_recipe({"SMALL_GREETING": "good morning; $HOME"})
    serve = recipe.serve.model_copy(
        update={"command": "{{ server }} -m {{ weights.model.first }} --note 'two words'"}
    )
    recipe = recipe.model_copy(update={"serve": serve})
    here = Here(FAKE_TOOLS, FAKE_HOST, recipe, NOTHING)
    return make_plan(loaded(recipe), lock(), here, FAKE_PLACES)[0]


def golden(name: str, made: str) -> str:
    """Read a golden file; with BAKEHOUSE_WRITE_GOLDEN=1 write it anew, then read the difference."""
    path = GOLDEN / name
    if os.environ.get("BAKEHOUSE_WRITE_GOLDEN"):
        path.write_text(made)
    return path.read_text()


def test_golden_data() -> None:
    made = to_json(plan())
    assert json.loads(made) == json.loads(golden("whole-plan.json", made))


def test_golden_text() -> None:
    made = plan()
    lines = [*step_lines(made.fetch), *build_lines(made.build), *serve_lines(made.serve)]
    text = "\n".join(lines) + "\n"
    assert text == golden("whole-plan.txt", text)


def test_a_plan_is_plain_data_and_comes_back_the_same() -> None:
    made = plan()
    assert Plan.model_validate_json(to_json(made)) == made


def test_steps_print_without_control_characters() -> None:
    step = Step(id="x", title="a\x1b[2J", argv=("run", "a\nb\x07"), env={"A": "\x1b"})
    assert all(line.isprintable() for line in step_lines([step]))


def test_the_place_of_a_forced_definition_is_named() -> None:
    recipe = small_recipe({"GIT_EXE": "git"})
    with pytest.raises(RecipeError) as caught:
        make_plan(loaded(recipe), lock(), Here(FAKE_TOOLS, FAKE_HOST, recipe, NOTHING), FAKE_PLACES)
    assert (caught.value.where or "").startswith(f"{FILE}:8:14: build.cmake.GIT_EXE: ")


def test_an_image_needs_no_tools(context: Context) -> None:
    data = {
        **small_recipe().to_data(), "engine": "vllm", "source": None, "build": None,
        "image": {"ref": {"x86_64": "vllm/vllm-openai:v1", "aarch64": "vllm/vllm-openai:v1"}},
    }  # fmt: skip
    assert survey(context, Recipe.model_validate(data), lock()).tools is None
