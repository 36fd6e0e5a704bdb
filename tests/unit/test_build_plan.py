from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bakehouse.base import to_json
from bakehouse.engines.llamacpp.cmake import FORCED, OURS, Extra
from bakehouse.errors import HostError, RecipeError
from bakehouse.places import Places
from bakehouse.plan.build import plan_build
from bakehouse.plan.types import BuildPlan
from tests.support.small_engine import (
    FAKE_HOST,
    FAKE_PLACES,
    FAKE_TOOLS,
    small_lock,
    small_recipe,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def plan(cmake: Mapping[str, object] | None = None, **others: Any) -> BuildPlan:
    return plan_build(
        small_recipe(cmake), small_lock(), FAKE_TOOLS, FAKE_HOST, FAKE_PLACES, **others
    )


def definition(made: BuildPlan, name: str) -> str | None:
    start = f"-D{name}="
    found = [a.removeprefix(start) for a in made.step("configure").argv if a.startswith(start)]
    assert len(found) < 2
    return found[0] if found else None


def test_golden_plan() -> None:
    """Set BAKEHOUSE_WRITE_GOLDEN=1 to write the file anew, then read the difference."""
    made = to_json(plan({"CMAKE_CXX_FLAGS": "-O2 -g", "GGML_BLAS": False, "GGML_X": "a b;c"}))
    path = GOLDEN / "build-plan.json"
    if os.environ.get("BAKEHOUSE_WRITE_GOLDEN"):
        path.write_text(made)
    assert json.loads(made) == json.loads(path.read_text())


def test_what_is_not_in_the_digest() -> None:
    one = plan()
    elsewhere = Places(Path("/srv/x"), Path("/srv/y"))
    launcher = FAKE_TOOLS.model_copy(update={"launcher": "/usr/bin/ccache"})
    moved_tools = FAKE_TOOLS.model_copy(
        update={"cc": FAKE_TOOLS.cc.model_copy(update={"path": "/opt/gcc/bin/gcc"})}
    )
    small_host = FAKE_HOST.model_copy(update={"cpus": 1, "cpu_model": "Other"})
    recipe, lock = small_recipe(), small_lock()
    others = [
        plan(jobs=3),
        plan_build(recipe, lock, FAKE_TOOLS, FAKE_HOST, elsewhere),
        plan_build(recipe, lock, launcher, FAKE_HOST, FAKE_PLACES),
        plan_build(recipe, lock, moved_tools, FAKE_HOST, FAKE_PLACES),
        plan_build(recipe, lock, FAKE_TOOLS, small_host, FAKE_PLACES),
        plan(extra=Extra(paths={"CUDAToolkit_ROOT": "/x"}, path_environment={"PATH": "/x"})),
    ]
    assert {p.digest for p in others} == {one.digest}


def test_what_is_in_the_digest() -> None:
    recipe, lock = small_recipe(), small_lock()

    def tools(name: str) -> Any:
        old = getattr(FAKE_TOOLS, name)
        return FAKE_TOOLS.model_copy(
            update={name: old.model_copy(update={"identity": old.identity + " other"})}
        )

    others = [
        plan(),
        plan({"GGML_BLAS": True}),
        plan({"CMAKE_BUILD_TYPE": "Debug"}),
        plan({"GGML_NATIVE": True}),
        plan({"CMAKE_C_FLAGS": "-O1"}),
        *(
            plan_build(recipe, lock, tools(n), FAKE_HOST, FAKE_PLACES)
            for n in ("cmake", "cc", "cxx", "strip")
        ),
        plan_build(recipe, small_lock("6" * 40), FAKE_TOOLS, FAKE_HOST, FAKE_PLACES),
        plan_build(recipe, small_lock(number=78), FAKE_TOOLS, FAKE_HOST, FAKE_PLACES),
        plan_build(
            small_recipe(targets=("llama-server", "llama-bench")),
            lock, FAKE_TOOLS, FAKE_HOST, FAKE_PLACES,
        ),
        plan(extra=Extra(tools={"nvcc": "13.0.88"})),
        plan(extra=Extra(definitions={"GGML_CUDA": "ON"})),
    ]  # fmt: skip
    assert len({p.digest for p in others}) == len(others)


@pytest.mark.parametrize(
    "cmake", [{"GGML_NATIVE": True}, {"GGML_NATIVE": "1"}, {"CMAKE_CXX_FLAGS": "-march=native"}]
)
def test_a_build_for_this_cpu_names_it(cmake: dict[str, object]) -> None:
    made = plan(cmake)
    assert made.inputs.cpu == "Some CPU: avx avx2"
    other = FAKE_HOST.model_copy(update={"cpu_flags": "avx"})
    there = plan_build(small_recipe(cmake), small_lock(), FAKE_TOOLS, other, FAKE_PLACES)
    assert there.digest != made.digest


def test_instruction_sets_are_named() -> None:
    """SOURCE_DATE_EPOCH makes llama.cpp drop them, and the server several times slower."""
    assert definition(plan(), "GGML_AVX2") == "ON"
    assert plan().expected.forced["GGML_AVX2"] == "ON"
    assert definition(plan({"GGML_AVX2": False}), "GGML_AVX2") == "OFF"
    assert definition(plan({"GGML_NATIVE": True}), "GGML_AVX2") is None
    spark = FAKE_HOST.model_copy(update={"arch": "aarch64"})
    there = plan_build(small_recipe(), small_lock(), FAKE_TOOLS, spark, FAKE_PLACES)
    assert definition(there, "GGML_AVX2") is None


def test_a_portable_build_names_no_cpu() -> None:
    assert plan().inputs.cpu is None
    assert definition(plan(), "GGML_NATIVE") == "OFF"


@pytest.mark.parametrize("name", [*FORCED, *OURS])
def test_a_recipe_cannot_set_what_is_forced(name: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan({name: "something else", "GGML_CCACHE": True})
    assert name in (caught.value.where or "")
    assert "GGML_CCACHE must be OFF" in (caught.value.where or "")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("value", [False, "OFF", "off", 0, "NO"])
def test_a_recipe_may_say_the_same(value: object) -> None:
    assert definition(plan({"LLAMA_BUILD_UI": value}), "LLAMA_BUILD_UI") == "OFF"


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\0b", " a", "a ", "'a'"])
def test_values_that_cmake_cannot_keep(value: str) -> None:
    with pytest.raises(RecipeError):
        plan({"X": value})


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "ON"), (False, "OFF"), (121, "121"), ("a b;c", "a b;c"), ('"', '"'), ("", ""),
     ("$(reboot); `x`", "$(reboot); `x`"), ("ü", "ü")],
)  # fmt: skip
def test_values_arrive_as_one_argument(value: object, text: str) -> None:
    assert definition(plan({"X": value}), "X") == text


def test_places_are_named_in_errors() -> None:
    with pytest.raises(RecipeError) as caught:
        plan({"GIT_EXE": "x"}, where=lambda keys: ("r.yaml", 7, len(keys)))
    assert (caught.value.where or "").startswith("r.yaml:7:3: build.cmake.GIT_EXE: ")


@pytest.mark.parametrize("targets", [("llama-bench",), ("llama-server", "-j9"), ("a/b",)])
def test_targets_that_cannot_be(targets: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError):
        plan_build(small_recipe(targets=targets), small_lock(), FAKE_TOOLS, FAKE_HOST, FAKE_PLACES)


@pytest.mark.parametrize("name", ["a;b", 'a"b', "a$b", "a=b", "a:b", "a\nb"])
def test_a_home_that_flags_cannot_name(name: str) -> None:
    places = Places(Path("/tmp", name), Path("/tmp/state"))
    with pytest.raises(HostError) as caught:
        plan_build(small_recipe(), small_lock(), FAKE_TOOLS, FAKE_HOST, places)
    assert "BAKEHOUSE_HOME" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("cpus", "gib", "asked", "jobs"),
    [(16, 32, None, 16), (16, 6, None, 4), (4, 1, None, 1), (16, 32, 2, 2), (2, 1, 9, 9)],
)
def test_jobs(cpus: int, gib: int, asked: int | None, jobs: int) -> None:
    host = FAKE_HOST.model_copy(update={"cpus": cpus, "memory_available": gib * 2**30})
    made = plan_build(small_recipe(), small_lock(), FAKE_TOOLS, host, FAKE_PLACES, jobs=asked)
    argv = made.step("compile").argv
    assert argv[argv.index("-j") + 1] == str(jobs)


def test_what_a_toolkit_adds() -> None:
    extra = Extra(
        definitions={"GGML_CUDA": "ON"},
        paths={"CUDAToolkit_ROOT": "/t"},
        flags={"CMAKE_CUDA_FLAGS": ("-Xcompiler=-ffile-prefix-map={work}=/build",)},
        tools={"nvcc": "13.0.88"},
        compilers={"CUDA": ("/t/bin/nvcc", "13.0.88")},
        environment={"NVCC_APPEND_FLAGS": "-x"},
        path_environment={"PATH": "/t/bin:/usr/bin"},
    )
    made = plan({"GGML_CUDA": True}, extra=extra)
    assert made.inputs.environment["NVCC_APPEND_FLAGS"] == "-x"
    assert made.expected.compilers["CUDA"].version == "13.0.88"
    assert f"-Xcompiler=-ffile-prefix-map={made.work}=/build" == definition(
        made, "CMAKE_CUDA_FLAGS"
    )
    assert made.step("compile").env["PATH"] == "/t/bin:/usr/bin"
    assert "/t" not in to_json(made.inputs)
    with pytest.raises(RecipeError):
        plan({"CUDAToolkit_ROOT": "/other"}, extra=extra)


def test_a_fixed_place_for_what_writes_its_path_into_objects() -> None:
    flags = {"CMAKE_CUDA_FLAGS": ("-Xcompiler=-ffile-prefix-map={work}=/build",)}
    extra = Extra(flags=flags, place="/p", mount=("mount", "{work}", "/p", "--"))
    made = plan(extra=extra)
    assert made.step("compile").argv[:4] == ("mount", made.work, "/p", "--")
    assert definition(made, "CMAKE_CUDA_FLAGS") == "-Xcompiler=-ffile-prefix-map=/p=/build"
    assert definition(made, "GIT_EXE") == "/p/tools/git"
    assert definition(made, "CMAKE_C_FLAGS") == "-ffile-prefix-map=/p=/build"
    assert not made.not_reproducible
    assert plan(extra=Extra(not_reproducible="no mount")).not_reproducible == "no mount"


def test_what_nvcc_cannot_take_is_left_out_and_said() -> None:
    """It splits the value of -Xcompiler at commas, and hands a blank on as two arguments."""
    ours = ("-Xcompiler=-ffile-prefix-map={work}=/build", "-Xcompiler=-ffile-prefix-map=/a b=/cuda")
    made = plan(extra=Extra(flags={"CMAKE_CUDA_FLAGS": ours}, place="/p"))
    assert definition(made, "CMAKE_CUDA_FLAGS") == "-Xcompiler=-ffile-prefix-map=/p=/build"
    assert "not mapped" in made.not_reproducible
