"""Rules across keys, known-bad combinations, and the recipes that ship with Bakehouse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from bakehouse.errors import RecipeError
from bakehouse.models import Verdict
from bakehouse.preflight.known_bad import (
    Row,
    Situation,
    check_combinations,
    matches,
    meets,
    quantisations,
    rows,
    situation_of,
)
from bakehouse.preflight.rules import PROJECTOR_RULE, faults, require, rule_conflicts
from bakehouse.recipe.loader import load
from bakehouse.recipe.models import Recipe

RECIPES = Path(__file__).parents[2] / "recipes"
GLM = ("glm-text", "glm-text-32k", "glm-vision", "glm-vision-32k")


def recipe(**more: Any) -> Recipe:
    data: dict[str, Any] = {
        "schema": 1,
        "name": "r",
        "engine": "llama.cpp",
        "source": {"git": "https://example.org/r.git", "commit": "a" * 40},
        "weights": {"model": {"path": "model-IQ3_S.gguf"}},
        "serve": {"command": "{{ server }} -m x"},
    }
    return Recipe.model_validate({**data, **more})


def vllm(container: dict[str, str], files: str, **more: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "schema": 1,
            "name": "v",
            "engine": "vllm",
            "host": {"compute_capability": "12.1"},
            "image": {"ref": {"aarch64": "nvcr.io/nvidia/vllm@sha256:" + "a" * 64}},
            "container": {"env": container},
            "weights": {"model": {"hub": "org/model", "files": files}},
            "serve": {"command": "vllm serve"},
            **more,
        }
    )


def test_rules_accept_shipped_recipes() -> None:
    for name in (*GLM, "smollm2-cuda", "smollm2-cpu"):
        loaded = load(RECIPES / f"{name}.yaml")
        require(loaded)
        checks = check_combinations(
            loaded.recipe, situation_of(loaded.recipe, loaded.command), name
        )
        assert not [c for c in checks if c.verdict is Verdict.FAILED]


def test_glm_recipes_keep_their_pins_and_flags() -> None:
    text = load(RECIPES / "glm-text.yaml").recipe
    vision = load(RECIPES / "glm-vision.yaml").recipe
    assert text.source is not None
    assert vision.source is not None
    assert text.build is not None
    assert vision.build is not None
    assert text.source.commit == "8a8d0bcc4d5fdf024c457526245bec4bc3a12adc"
    assert (vision.source.ref, vision.source.commit) == ("glm5next/upstream", "d07e71ede7")
    assert vision.build.targets == ("llama-server", "llama-mtmd-cli")
    assert text.serve.speculation == "draft-mtp"
    assert vision.serve.speculation is None
    assert "--spec-type" not in vision.serve.command
    assert (text.serve.context, vision.serve.context) == (262144, 32768)
    for name in ("glm-text-32k", "glm-vision-32k"):
        assert load(RECIPES / f"{name}.yaml").recipe.serve.context == 32768
    for one in (text.build, vision.build):
        assert one.cuda is not None
        assert one.cuda.version == "13.0"
        assert one.cmake["CMAKE_CUDA_ARCHITECTURES"] == "121a-real"


def speculating(mode: str, *, written: bool = False, **more: Any) -> Recipe:
    serve = {"command": "{{ server }} -m x", "speculation": mode}
    if written:
        serve = {"command": f"{{{{ server }}}} --spec-type {mode}"}
    weights = {"model": {"path": "m.gguf"}, "projector": {"path": "p.gguf"}}
    return recipe(serve=serve, weights=weights, **more)


def test_projector_with_a_draft_cache_is_refused() -> None:
    modes = {
        "draft-mtp": True, "draft-eagle3": True, "draft-dflash": True, "draft-dspark": True,
        "ngram-mod,draft-mtp": True, "ngram-simple": False, "draft-simple": False,
    }  # fmt: skip
    for written in (False, True):
        found = {mode: rule_conflicts(speculating(mode, written=written)) for mode in modes}
        assert {mode: bool(conflicts) for mode, conflicts in found.items()} == modes
        assert all("HTTP 500" in c[0].message for c in found.values() if c)


def test_projector_rule_is_lifted_only_by_a_patch_in_an_experimental_recipe() -> None:
    source = {
        "git": "https://example.org/r.git",
        "commit": "a" * 40,
        "patches": [{"file": "25144.patch", "lifts": [f"{PROJECTOR_RULE}draft-mtp"]}],
    }
    assert rule_conflicts(speculating("draft-mtp", source=source))
    assert rule_conflicts(speculating("draft-mtp", experimental=True))
    assert not rule_conflicts(speculating("draft-mtp", source=source, experimental=True))
    for mode in ("draft-eagle3", "draft-mtp,draft-dflash"):
        (found,) = rule_conflicts(speculating(mode, source=source, experimental=True))
        assert found.hint is not None
        assert f"lifts: [{PROJECTOR_RULE}{mode.rpartition(',')[2]}]" in found.hint


def test_rules_name_the_place_of_a_contradiction(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        f"include: {RECIPES / 'glm-vision.yaml'}\nname: r\nserve: {{speculation: draft-mtp}}\n"
    )
    with pytest.raises(RecipeError, match="contradicts itself") as error:
        require(load(path))
    assert str(error.value.faults[0]).startswith(f"{path}:3:")
    assert error.value.exit_code == 2


def test_rules_refuse_an_open_address_without_key(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    rows: list[tuple[str, str | None]] = [
        ("host: 0.0.0.0", "serve.host: 0.0.0.0 can be reached from other machines"),
        ("host: '::'", "serve.host: :: can be reached from other machines"),
        ("host: example.org", "serve.host: 'example.org' is not an IP address"),
        ("host: 0.0.0.0, api_key: {env: KEY}", None),
        ("host: '::1'", None),
    ]
    for serve, said in rows:
        path.write_text(f"include: {RECIPES / 'smollm2-cpu.yaml'}\nname: r\nserve: {{{serve}}}\n")
        found = [str(fault).removeprefix(f"{path}:3:") for fault in faults(load(path))]
        assert len(found) == (said is not None), serve
        assert all(said and said in line and line[0].isdigit() for line in found), found


def test_rules_name_what_plan_and_build_refuse(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        f"include: {RECIPES / 'smollm2-cpu.yaml'}\nname: r\nbuild:\n  cmake:\n"
        "    CMAKE_C_COMPILER: /nope\nserve:\n  env: {LLAMA_ARG_PORT: 1}\n  command: |\n"
        "    {{ server }} --host 0.0.0.0 --port 1\n"
    )
    with pytest.raises(RecipeError) as error:
        require(load(path))
    said = [str(fault).removeprefix(f"{path}:") for fault in error.value.faults]
    assert [line.split(" (")[0] for line in said] == [
        "5:23: build.cmake.CMAKE_C_COMPILER: a recipe cannot set CMAKE_C_COMPILER",
        "8:12: serve.command must not hold --host",
        "8:12: serve.command must not hold --port",
        "8:12: serve.command names no model",
        "8:12: serve.env must not hold LLAMA_ARG_PORT",
    ]


def test_rules_name_the_place_of_toolkit_conflicts(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(
        f"include: {RECIPES / 'glm-text.yaml'}\nname: r\nbuild:\n  cmake:\n"
        "    CMAKE_CUDA_COMPILER: /usr/local/cuda-13.0/bin/nvcc\n"
    )
    with pytest.raises(RecipeError) as error:
        require(load(path))
    assert str(error.value.faults[0]).startswith(f"{path}:5:")
    assert "without CUDAToolkit_ROOT" in error.value.faults[0].message


def cuda(version: str, **more: Any) -> Recipe:
    cmake = {"GGML_CUDA": True, "CMAKE_CUDA_ARCHITECTURES": "121a-real"}
    return recipe(build={"cuda": {"version": version}, "cmake": cmake}, **more)


def ids(found: tuple[Any, ...]) -> dict[str, bool]:
    return {m.row.id: m.certain for m in found}


def test_known_bad_cuda_13_2_with_small_quants() -> None:
    files = {
        "m-IQ3_S.gguf": True, "m-IQ2_XXS.gguf": True, "GLM-UD-Q2_K_XL-00001-of-4.gguf": True,
        "m-Q4_K_M.gguf": False, "m-Q8_0.gguf": False,
    }  # fmt: skip
    for file, bad in files.items():
        for version in ("13.2", "13.2.86", "13.0"):
            made = cuda(version, weights={"model": {"path": file}})
            found = check_combinations(made, situation_of(made, capabilities=["9.0"]), "r.yaml")
            refused = bad and version != "13.0"
            assert [c.verdict for c in found] == [Verdict.FAILED] * refused, (file, version)


def test_known_bad_warns_until_tensor_types_are_known() -> None:
    made = cuda("13.2", weights={"model": {"path": "model.gguf"}})
    found = check_combinations(made, situation_of(made, capabilities=["9.0"]), "r.yaml")
    assert [c.verdict for c in found] == [Verdict.UNKNOWN]
    assert "not known: quantisation" in found[0].observed
    known = situation_of(made, capabilities=["9.0"], tensor_types=["iq3_s", "q8_0"])
    assert [c.verdict for c in check_combinations(made, known, "r.yaml")] == [Verdict.FAILED]
    fine = situation_of(made, capabilities=["9.0"], tensor_types=["q4_k", "f32"])
    assert check_combinations(made, fine, "r.yaml") == ()


def test_known_bad_cuda_12_on_gb10() -> None:
    made = cuda("12.8", weights={"model": {"path": "m-Q8_0.gguf"}})
    assert ids(matches(situation_of(made, capabilities=["12.1"]))) == {"cuda-12-gb10": True}
    assert ids(matches(situation_of(made, capabilities=["9.0"]))) == {}
    assert ids(matches(situation_of(made))) == {"cuda-12-gb10": False}


def test_known_bad_toolkit_does_not_apply_to_cpu() -> None:
    assert matches(situation_of(recipe(), capabilities=["12.1"])) == ()


def test_known_bad_vllm_on_gb10() -> None:
    rows: list[tuple[dict[str, str], str, set[str]]] = [
        ({"VLLM_USE_DEEP_GEMM": "0"}, "FP8.safetensors", {"vllm-no-deep-gemm-gb10"}),
        ({"VLLM_USE_DEEP_GEMM": "1"}, "m-Q8_0", set()),
        ({}, "model-MXFP4.safetensors", {"vllm-mxfp4-gb10"}),
        ({"VLLM_MXFP4_BACKEND": "marlin"}, "model-MXFP4.safetensors", set()),
        ({}, "model-NVFP4.safetensors", {"vllm-nvfp4-moe-gb10"}),
    ]
    for env, files, expected in rows:
        found = matches(situation_of(vllm(env, files)))
        assert {m.row.id for m in found if m.certain} == expected


def test_known_bad_acknowledged() -> None:
    made = cuda("13.2", acknowledge={"cuda-13.2-iq": "measuring how wrong it is"})
    found = check_combinations(made, situation_of(made, capabilities=["9.0"]), "r.yaml")
    assert found[0].passed
    assert "acknowledged: measuring how wrong it is" in found[0].observed
    wrong = rule_conflicts(cuda("13.0", acknowledge={"cuda-99": "why"}))
    assert [c.keys for c in wrong] == [("acknowledge", "cuda-99")]


def test_known_bad_version_conditions() -> None:
    rows = [
        ("13.2.86", "13.2", True), ("13.20.1", "13.2", False), ("12.8.93", "<13", True),
        ("13.0.88", "<13", False), ("13.0.88", "<=13.0", True), ("12.9.1", ">=12.9", True),
        ("12.8.93", ">=12.9", False), ("13.0.88", ">13.0", False),
    ]  # fmt: skip
    assert [meets(version, spec) for version, spec, _ in rows] == [holds for _, _, holds in rows]


def test_known_bad_rows_are_strict_and_all_reachable() -> None:
    every = Situation(
        engine_version="0.32", compute_capability=frozenset({"12.1"}),
        quantisation=frozenset({"IQ3_S", "MXFP4", "NVFP4", "FP8"}),
        flags=("-allow-unsupported-compiler", "--model-impl=transformers"),
    )  # fmt: skip
    reached = {
        m.row.id
        for engine in ("llama.cpp", "vllm")
        for toolkit in ("11.5.119", "12.8.93", "13.2.86")
        for gemm in ("0", "1")
        for m in matches(
            Situation(
                **{
                    **vars(every),
                    "engine": engine,
                    "toolkit": toolkit,
                    "environment": {"VLLM_USE_DEEP_GEMM": gemm},
                }
            )
        )
        if m.certain
    }
    assert reached == {row.id for row in rows()}
    with pytest.raises(ValidationError):
        Row.model_validate({**rows()[0].to_data(), "extra": 1})
    with pytest.raises(ValidationError, match="version condition"):
        Row.model_validate({**rows()[0].to_data(), "when": {"toolkit": ["newest"]}})


def test_known_bad_reads_quantisations_in_names() -> None:
    assert quantisations(["UD-Q2_K_XL/*.gguf"]) == frozenset({"UD-Q2_K_XL"})
    names = ["SmolLM2-135M-Instruct.Q4_1.gguf", "org/x-NVFP4"]
    assert quantisations(names) == frozenset({"Q4_1", "NVFP4"})
    assert quantisations(["model.gguf"]) is None
