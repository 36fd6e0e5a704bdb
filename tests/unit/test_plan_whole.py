"""The whole plan: a golden file of its data, and one of its text."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bakehouse.commands.plan import build_lines, serve_lines, step_lines
from bakehouse.context import Context
from bakehouse.engines.llamacpp.cmake import NOTHING
from bakehouse.errors import RecipeError
from bakehouse.lock import FilePin, ImagePin, Lock, PatchPin, WeightPin
from bakehouse.models import to_json
from bakehouse.plan.image import plan_image, plan_image_build
from bakehouse.plan.planner import HostEnvironment, inspect_host, make_plan
from bakehouse.plan.types import Plan, Step
from bakehouse.recipe.loader import LoadedRecipe
from bakehouse.recipe.models import Recipe
from bakehouse.recipe.types import Origin
from tests.support.recipes import recipe_data
from tests.support.small_engine import (
    FAKE_HOST,
    FAKE_PLACES,
    FAKE_TOOLS,
    small_lock,
    small_recipe,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FILE = Path("/home/u/recipes/small.yaml")


def loaded(recipe: Recipe) -> LoadedRecipe:
    places: dict[tuple[str | int, ...], Origin] = {
        ("serve", "command"): Origin(str(FILE), 12, 12),
        ("build", "cmake", "GIT_EXE"): Origin(str(FILE), 8, 14),
    }
    return LoadedRecipe(recipe, FILE, (FILE,), places, ())


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
    here = HostEnvironment(FAKE_TOOLS, FAKE_HOST, recipe, NOTHING)
    return make_plan(loaded(recipe), lock(), here, FAKE_PLACES)[0]


def golden(name: str, made: str) -> str:
    """Read a golden file; with BAKEHOUSE_WRITE_GOLDEN=1 write it anew, then read the difference."""
    path = GOLDEN / name
    if os.environ.get("BAKEHOUSE_WRITE_GOLDEN"):
        path.write_text(made)
    return path.read_text()


def test_plan_data_is_golden() -> None:
    made = to_json(plan())
    assert json.loads(made) == json.loads(golden("whole-plan.json", made))


def test_plan_text_is_golden() -> None:
    made = plan()
    lines = [*step_lines(made.fetch), *build_lines(made.build), *serve_lines(made.serve)]
    text = "\n".join(lines) + "\n"
    assert text == golden("whole-plan.txt", text)


def test_plan_survives_json() -> None:
    made = plan()
    assert Plan.model_validate_json(to_json(made)) == made


def test_plan_text_has_no_control_characters() -> None:
    step = Step(id="x", title="a\x1b[2J", argv=("run", "a\nb\x07"), env={"A": "\x1b"})
    assert all(line.isprintable() for line in step_lines([step]))


def test_plan_names_the_line_of_a_refused_definition() -> None:
    recipe = small_recipe({"GIT_EXE": "git"})
    with pytest.raises(RecipeError) as caught:
        make_plan(
            loaded(recipe),
            lock(),
            HostEnvironment(FAKE_TOOLS, FAKE_HOST, recipe, NOTHING),
            FAKE_PLACES,
        )
    assert (caught.value.where or "").startswith(f"{FILE}:8:14: build.cmake.GIT_EXE: ")


def image_pin(number: str, role: str) -> ImagePin:
    return ImagePin(reference=f"base/{role}:1", name=f"docker.io/base/{role}",
                    digest=f"sha256:{number * 64}", id="sha256:0", size=1)  # fmt: skip


def test_image_plan_digests_do_not_change() -> None:
    """Built images are found by them. They may change only together with a number of RULES."""
    bases = {role: {"x86_64": f"base/{role}:1"} for role in ("builder", "runtime")}
    pins = {"builder": {"x86_64": image_pin("1", "builder")},
            "runtime": {"x86_64": image_pin("2", "runtime")}}  # fmt: skip
    built = small_lock().model_copy(update={"images": pins})
    cuda = {"cuda": {"version": "13.0"},
            "cmake": {"GGML_CUDA": True, "CMAKE_CUDA_ARCHITECTURES": "90-real"}}  # fmt: skip
    digests = []
    for more in ({}, cuda):
        data = recipe_data(build={"where": "docker", "bases": bases, **more})
        digests.append(plan_image_build(Recipe.model_validate(data), built, FAKE_HOST).digest)
    patch = PatchPin(id="fix", file=FilePin(path="fix.patch", size=99, sha256="c" * 64))
    for patches in ([], [{"file": "a.patch"}]):
        data = recipe_data(
            engine="vllm", source=None, image={"ref": {"x86_64": "a/b:1"}, "patches": patches},
            serve={"command": "vllm serve {{ weights.model.path }}"},
        )  # fmt: skip
        pulled = Lock(
            recipe="r", engine="vllm", wants="", weights={}, patches=(patch,) if patches else (),
            images={"image": {"x86_64": image_pin("3", "image")}},
        )  # fmt: skip
        command = ("vllm", "serve", "/weights/model", "--tool-call-parser", "hermes")
        plan = plan_image(Recipe.model_validate(data), pulled, "x86_64", command)
        assert plan.asks
        assert plan.asks.tool_parser == "hermes"
        digests.append(plan.digest)
    assert digests == [
        "4abc6501dbd3ab31b359e3d5af213f1b545d155cbeecd9425ec49352f0f75385",
        "0f8d4793516a63019ae2f438ddf3a30c8744955e794214c9152c71b71f23ed00",
        "df7b0706f12a4a488cad27f9ed8330f3f80da2d8fd88e3f0d4bca38d0d5927d4",
        "93a18ed00e0a65e22e43ee5ee126355ef33a76da59467a542f2720070704de4f",
    ]


def test_host_inspection_for_an_image_needs_no_tools(context: Context) -> None:
    data = {
        **small_recipe().to_data(), "engine": "vllm", "source": None, "build": None,
        "image": {"ref": {"x86_64": "vllm/vllm-openai:v1", "aarch64": "vllm/vllm-openai:v1"}},
    }  # fmt: skip
    assert inspect_host(context, Recipe.model_validate(data), lock()).tools is None
