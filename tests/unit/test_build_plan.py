from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bakehouse.engines.llamacpp.cmake import FORCED, OURS, Extra
from bakehouse.errors import HostError, RecipeError
from bakehouse.models import to_json
from bakehouse.paths import Places
from bakehouse.plan.build import plan_build
from bakehouse.plan.types import BuildPlan
from bakehouse.recipe.types import Origin
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


def test_build_plan_is_as_recorded() -> None:
    """Set BAKEHOUSE_WRITE_GOLDEN=1 to write the file anew, then read the difference."""
    made = to_json(plan({"CMAKE_CXX_FLAGS": "-O2 -g", "GGML_BLAS": False, "GGML_X": "a b;c"}))
    path = GOLDEN / "build-plan.json"
    if os.environ.get("BAKEHOUSE_WRITE_GOLDEN"):
        path.write_text(made)
    assert json.loads(made) == json.loads(path.read_text())


def test_build_digest_leaves_places_and_jobs_out() -> None:
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


def test_build_digest_covers_what_shapes_the_result() -> None:
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


def test_build_plan_for_this_cpu_names_it() -> None:
    other = FAKE_HOST.model_copy(update={"cpu_flags": "avx"})
    rows: list[dict[str, object]] = [
        {"GGML_NATIVE": True}, {"GGML_NATIVE": "1"}, {"CMAKE_CXX_FLAGS": "-march=native"},
    ]  # fmt: skip
    for cmake in rows:
        made = plan(cmake)
        assert made.inputs.cpu == "Some CPU: avx avx2"
        there = plan_build(small_recipe(cmake), small_lock(), FAKE_TOOLS, other, FAKE_PLACES)
        assert there.digest != made.digest


def test_build_plan_names_instruction_sets() -> None:
    """SOURCE_DATE_EPOCH makes llama.cpp drop them, and the server several times slower."""
    assert definition(plan(), "GGML_AVX2") == "ON"
    assert plan().expected.forced["GGML_AVX2"] == "ON"
    assert definition(plan({"GGML_AVX2": False}), "GGML_AVX2") == "OFF"
    assert definition(plan({"GGML_NATIVE": True}), "GGML_AVX2") is None
    spark = FAKE_HOST.model_copy(update={"arch": "aarch64"})
    there = plan_build(small_recipe(), small_lock(), FAKE_TOOLS, spark, FAKE_PLACES)
    assert definition(there, "GGML_AVX2") is None


def test_build_plan_of_a_portable_build_names_no_cpu() -> None:
    assert plan().inputs.cpu is None
    assert definition(plan(), "GGML_NATIVE") == "OFF"


def test_build_plan_refuses_definitions_that_are_forced() -> None:
    for name in (*FORCED, *OURS):
        with pytest.raises(RecipeError) as caught:
            plan({name: "something else", "GGML_CCACHE": True})
        assert name in (caught.value.where or "")
        assert "GGML_CCACHE must be OFF" in (caught.value.where or "")
        assert caught.value.exit_code == 2
    for same in (False, "OFF", "off", 0, "NO"):
        assert definition(plan({"LLAMA_BUILD_UI": same}), "LLAMA_BUILD_UI") == "OFF"


def test_build_plan_passes_each_value_as_one_argument() -> None:
    for value in ("a\nb", "a\rb", "a\0b", " a", "a ", "'a'"):
        with pytest.raises(RecipeError):
            plan({"X": value})
    texts: dict[object, str] = {
        True: "ON", False: "OFF", 121: "121", "a b;c": "a b;c", '"': '"', "": "",
        "$(reboot); `x`": "$(reboot); `x`", "ü": "ü",
    }  # fmt: skip
    assert {value: definition(plan({"X": value}), "X") for value in texts} == texts


def test_build_plan_errors_name_file_and_line() -> None:
    with pytest.raises(RecipeError) as caught:
        plan({"GIT_EXE": "x"}, where=lambda keys: Origin("r.yaml", 7, len(keys)))
    assert (caught.value.where or "").startswith("r.yaml:7:3: build.cmake.GIT_EXE: ")


def test_build_plan_refuses_impossible_targets_and_homes() -> None:
    lock = small_lock()
    for targets in (("llama-bench",), ("llama-server", "-j9"), ("a/b",)):
        with pytest.raises(RecipeError):
            plan_build(small_recipe(targets=targets), lock, FAKE_TOOLS, FAKE_HOST, FAKE_PLACES)
    for name in ("a;b", 'a"b', "a$b", "a=b", "a:b", "a\nb"):
        places = Places(Path("/tmp", name), Path("/tmp/state"))
        with pytest.raises(HostError) as caught:
            plan_build(small_recipe(), lock, FAKE_TOOLS, FAKE_HOST, places)
        assert "BAKEHOUSE_HOME" in (caught.value.hint or "")


def test_build_plan_limits_jobs_by_cores_and_memory() -> None:
    for cpus, gib, asked, jobs in (
        (16, 32, None, 16), (16, 6, None, 4), (4, 1, None, 1), (16, 32, 2, 2), (2, 1, 9, 9),
    ):  # fmt: skip
        host = FAKE_HOST.model_copy(update={"cpus": cpus, "memory_available": gib * 2**30})
        made = plan_build(small_recipe(), small_lock(), FAKE_TOOLS, host, FAKE_PLACES, jobs=asked)
        argv = made.step("compile").argv
        assert argv[argv.index("-j") + 1] == str(jobs)


def test_build_plan_with_a_toolkit() -> None:
    extra = Extra(
        definitions={"GGML_CUDA": "ON"},
        paths={"CUDAToolkit_ROOT": "/t"},
        flags={"CMAKE_CUDA_FLAGS": ("-Xcompiler=-ffile-prefix-map={work}=/build",)},
        tools={"nvcc": "13.0.88"},
        path_environment={"PATH": "/t/bin:/usr/bin"},
    )
    made = plan({"GGML_CUDA": True}, extra=extra)
    assert f"-Xcompiler=-ffile-prefix-map={made.work}=/build" == definition(
        made, "CMAKE_CUDA_FLAGS"
    )
    assert made.step("compile").env["PATH"] == "/t/bin:/usr/bin"
    assert "/t" not in to_json(made.inputs)
    with pytest.raises(RecipeError):
        plan({"CUDAToolkit_ROOT": "/other"}, extra=extra)


def test_build_plan_with_a_fixed_work_path() -> None:
    flags = {"CMAKE_CUDA_FLAGS": ("-Xcompiler=-ffile-prefix-map={work}=/build",)}
    extra = Extra(flags=flags, place="/p", mount=("mount", "{work}", "/p", "--"))
    made = plan(extra=extra)
    assert made.step("compile").argv[:4] == ("mount", made.work, "/p", "--")
    assert definition(made, "CMAKE_CUDA_FLAGS") == "-Xcompiler=-ffile-prefix-map=/p=/build"
    assert definition(made, "GIT_EXE") == "/p/tools/git"
    assert definition(made, "CMAKE_C_FLAGS") == "-ffile-prefix-map=/p=/build"
    assert not made.not_reproducible
    assert plan(extra=Extra(not_reproducible="no mount")).not_reproducible == "no mount"


def test_build_plan_leaves_out_flags_that_nvcc_splits() -> None:
    """It splits the value of -Xcompiler at commas, and hands a blank on as two arguments."""
    ours = ("-Xcompiler=-ffile-prefix-map={work}=/build", "-Xcompiler=-ffile-prefix-map=/a b=/cuda")
    made = plan(extra=Extra(flags={"CMAKE_CUDA_FLAGS": ours}, place="/p"))
    assert definition(made, "CMAKE_CUDA_FLAGS") == "-Xcompiler=-ffile-prefix-map=/p=/build"
    assert "not mapped" in made.not_reproducible
