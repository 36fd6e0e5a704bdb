"""Forcing one toolkit, and recipes that contradict themselves."""

from __future__ import annotations

from typing import Any

import pytest

from bakehouse.errors import HostError, RecipeError
from bakehouse.recipe.model import Build
from bakehouse.toolkit.force import (
    conflicts,
    expand_native,
    force,
    refuse_conflicts,
    toolkit_path,
    unverified_flags,
)
from bakehouse.toolkit.types import Toolkit

GOOD: dict[str, Any] = {"GGML_CUDA": True, "CMAKE_CUDA_ARCHITECTURES": "121a-real"}


def build(cuda: dict[str, str] | None, **cmake: Any) -> Build:
    return Build.model_validate({"cuda": cuda, "cmake": {**GOOD, **cmake}})


def same(path: str) -> str:
    return path.replace("/usr/local/cuda/", "/usr/local/cuda-13.0/")


def said(made: Build) -> list[str]:
    return [f"{'.'.join(c.keys)}: {c.message}" for c in conflicts(made, same)]


def test_naming_the_toolkit_is_enough() -> None:
    assert said(build({"version": "13.0"})) == []
    assert conflicts(None) == ()


@pytest.mark.parametrize("name", ["CUDAToolkit_ROOT", "CMAKE_CUDA_COMPILER"])
def test_one_of_the_pair_alone_is_refused(name: str) -> None:
    made = build({"version": "13.0"}, **{name: "/usr/local/cuda-13.0"})
    assert "is set without" in said(made)[0]
    with pytest.raises(RecipeError) as error:
        refuse_conflicts(made, "glm.yaml")
    assert error.value.exit_code == 2
    assert "glm.yaml" in (error.value.where or "")


def test_the_pair_to_two_places_is_refused() -> None:
    made = build(
        {"version": "13.0"},
        CUDAToolkit_ROOT="/usr/local/cuda-13.0",
        CMAKE_CUDA_COMPILER="/usr/local/cuda-13.2/bin/nvcc",
    )
    assert "two toolkits" in said(made)[0]


def test_the_pair_to_one_place_through_a_link_is_fine() -> None:
    made = build(
        {"version": "13.0"},
        CUDAToolkit_ROOT="/usr/local/cuda-13.0",
        CMAKE_CUDA_COMPILER="/usr/local/cuda/bin/nvcc",
    )
    assert said(made) == []
    assert toolkit_path(made) == "/usr/local/cuda-13.0"


@pytest.mark.parametrize(
    "cuda", [{"version": "13.0", "provide": "pypi"}, {"version": "13.0", "path": "/opt/other"}]
)
def test_a_pair_beside_another_toolkit_is_refused(cuda: dict[str, str]) -> None:
    made = build(
        cuda,
        CUDAToolkit_ROOT="/usr/local/cuda-13.0",
        CMAKE_CUDA_COMPILER="/usr/local/cuda-13.0/bin/nvcc",
    )
    assert "names another toolkit" in said(made)[0]


def test_cuda_without_a_toolkit_and_a_toolkit_without_cuda() -> None:
    assert "no toolkit is named" in said(build(None))[0]
    assert "not asked for" in said(build({"version": "13.0"}, GGML_CUDA=False))[0]
    assert "no longer used" in said(build({"version": "13.0"}, CUDA_TOOLKIT_ROOT_DIR="/x"))[0]


@pytest.mark.parametrize("text", ["all", "all-major", "90,121a", "native;90", "sm_90", ""])
def test_architectures_that_cannot_be_checked_are_refused(text: str) -> None:
    made = build({"version": "13.0"}, CMAKE_CUDA_ARCHITECTURES=text)
    assert "no list of architectures" in said(made)[0]


def test_architectures_have_to_be_named() -> None:
    made = Build.model_validate({"cuda": {"version": "13.0"}, "cmake": {"GGML_CUDA": True}})
    assert "depend on the machine" in said(made)[0]


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        (["9.0"], ("90-real",)),
        (["12.1"], ("121a-real",)),
        (["12.0", "8.6", "8.6"], ("86-real", "120a-real")),
        (["10.3"], ("103-real",)),
    ],
)
def test_native_becomes_this_hosts_gpus(capabilities: list[str], expected: tuple[str, ...]) -> None:
    assert expand_native("native", capabilities) == expected


def test_native_without_a_gpu_is_refused() -> None:
    with pytest.raises(HostError, match="there is none") as error:
        expand_native("native", [])
    assert error.value.exit_code == 9
    assert expand_native("90-real;121a-real", []) == ("90-real", "121a-real")


def test_the_host_compiler_is_the_environments() -> None:
    assert (
        "CXX=" in conflicts(build({"version": "13.0"}, CMAKE_CUDA_HOST_COMPILER="g++-13"))[0].hint
    )


def test_everything_points_at_one_toolkit_and_no_other_nvcc_comes_first() -> None:
    root = "/opt/cuda-13.0"
    toolkit = Toolkit(
        root=root, version="13.0.88", nvcc=f"{root}/bin/nvcc", include=f"{root}/include",
        library=f"{root}/lib",
    )  # fmt: skip
    made = force(
        toolkit,
        host_compiler="/usr/bin/g++",
        search_path="/opt/cuda-13.2/bin:/home/me/bin:/usr/bin::/opt/cuda-13.0/bin",
        hides_nvcc=lambda folder: folder != "/home/me/bin",
    )
    assert made.definitions == {
        "CUDAToolkit_ROOT": root,
        "CMAKE_CUDA_COMPILER": f"{root}/bin/nvcc",
        "CMAKE_CUDA_HOST_COMPILER": "/usr/bin/g++",
    }
    assert made.environment["PATH"] == "/opt/cuda-13.0/bin:/home/me/bin:/usr/bin"
    assert made.environment["CUDA_HOME"] == made.environment["CUDA_PATH"] == root
    assert made.environment["CUDACXX"] == f"{root}/bin/nvcc"


def test_flags_that_switch_the_compiler_check_off_are_seen() -> None:
    flags = {"CMAKE_CUDA_FLAGS": "-allow-unsupported-compiler", "CMAKE_CXX_FLAGS": "-O2"}
    assert unverified_flags(flags) == ("CMAKE_CUDA_FLAGS",)
