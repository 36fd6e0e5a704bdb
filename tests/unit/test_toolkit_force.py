"""Forcing one toolkit, and recipes whose CUDA settings contradict each other."""

from __future__ import annotations

from typing import Any

import pytest

from bakehouse.cuda.configure import (
    cmake_overrides,
    conflicts,
    expand_native,
    toolkit_path,
    unverified_flags,
)
from bakehouse.cuda.toolkit import Toolkit
from bakehouse.errors import HostError
from bakehouse.recipe.models import Build

GOOD: dict[str, Any] = {"GGML_CUDA": True, "CMAKE_CUDA_ARCHITECTURES": "121a-real"}
HOST = {"version": "13.0"}
ROOT, NVCC = "/usr/local/cuda-13.0", "/usr/local/cuda-13.0/bin/nvcc"


def build(cuda: dict[str, str] | None, **cmake: Any) -> Build:
    return Build.model_validate({"cuda": cuda, "cmake": {**GOOD, **cmake}})


def links(path: str) -> str:
    return path.replace("/usr/local/cuda/", "/usr/local/cuda-13.0/")


def said(made: Build) -> list[str]:
    return [f"{'.'.join(c.keys)}: {c.message}" for c in conflicts(made, links)]


def test_toolkit_named_once_is_accepted() -> None:
    assert said(build(HOST)) == []
    assert list(conflicts(None)) == []
    linked = build(HOST, CUDAToolkit_ROOT=ROOT, CMAKE_CUDA_COMPILER="/usr/local/cuda/bin/nvcc")
    assert said(linked) == []
    assert toolkit_path(linked) == ROOT


def test_toolkit_contradictions_are_refused() -> None:
    pair = {"CUDAToolkit_ROOT": ROOT, "CMAKE_CUDA_COMPILER": NVCC}
    other = "/usr/local/cuda-13.2/bin/nvcc"
    rows: list[tuple[dict[str, str] | None, dict[str, Any], str]] = [
        (HOST, {"CUDAToolkit_ROOT": ROOT}, "is set without CMAKE_CUDA_COMPILER"),
        (HOST, {"CMAKE_CUDA_COMPILER": NVCC}, "is set without CUDAToolkit_ROOT"),
        (HOST, {**pair, "CMAKE_CUDA_COMPILER": other}, "two toolkits"),
        ({**HOST, "provide": "pypi"}, pair, "names another toolkit"),
        ({**HOST, "path": "/opt/other"}, pair, "names another toolkit"),
        (None, {}, "no toolkit is named"),
        (HOST, {"GGML_CUDA": False}, "not enabled"),
        (HOST, {"CUDA_TOOLKIT_ROOT_DIR": "/x"}, "no longer used"),
        (HOST, {"CMAKE_CUDA_HOST_COMPILER": "g++-13"}, "compiles all other C++"),
    ]
    got = [(said(build(cuda, **cmake)), words) for cuda, cmake, words in rows]
    assert [
        (found, words) for found, words in got if len(found) != 1 or words not in found[0]
    ] == []
    (one,) = conflicts(build(HOST, CMAKE_CUDA_HOST_COMPILER="g++-13"))
    assert "CXX=" in one.hint


def test_toolkit_architectures_that_cannot_be_checked_are_refused() -> None:
    texts = ("all", "all-major", "90,121a", "native;90", "sm_90", "")
    found = [said(build(HOST, CMAKE_CUDA_ARCHITECTURES=text)) for text in texts]
    assert all("not a list of architectures" in lines[0] for lines in found), found
    made = Build.model_validate({"cuda": HOST, "cmake": {"GGML_CUDA": True}})
    assert "depend on the machine" in said(made)[0]


def test_toolkit_native_becomes_this_hosts_gpus() -> None:
    expected = {
        ("9.0",): ("90-real",),
        ("12.1",): ("121a-real",),
        ("12.0", "8.6", "8.6"): ("86-real", "120a-real"),
        ("10.3",): ("103-real",),
    }
    assert {gpus: expand_native("native", gpus) for gpus in expected} == expected
    assert expand_native("90-real;121a-real", []) == ("90-real", "121a-real")
    with pytest.raises(HostError, match="no GPU was found") as error:
        expand_native("native", [])
    assert error.value.exit_code == 9


def test_toolkit_is_forced_as_a_pair_and_no_other_nvcc_comes_first() -> None:
    root = "/opt/cuda-13.0"
    toolkit = Toolkit(
        root=root, version="13.0.88", nvcc=f"{root}/bin/nvcc", include=f"{root}/include",
        library=f"{root}/lib",
    )  # fmt: skip
    made = cmake_overrides(
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


def test_toolkit_flags_that_switch_off_the_compiler_check_are_found() -> None:
    flags = {"CMAKE_CUDA_FLAGS": "-allow-unsupported-compiler", "CMAKE_CXX_FLAGS": "-O2"}
    assert unverified_flags(flags) == ("CMAKE_CUDA_FLAGS",)
