"""CUDA builds in a container, with NVIDIA's real toolkits in the builder; no GPU is needed.

The toolkits are those of `test_toolkit`, from NVIDIA's wheels, laid over Debian as /usr/local/cuda.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bakehouse.build.image import image_files
from bakehouse.context import Context
from bakehouse.cuda.install import pin_toolkit, provide
from bakehouse.paths import Places
from tests.support.docker_engine import Engine, make_image
from tests.support.image_builds import BUILDER, ImageHome, write_small_recipe
from tests.support.small_cuda import CUDA_FILES
from tests.support.small_engine import FILES
from tests.support.vllm_image import debian, import_root

pytestmark = [pytest.mark.integration, pytest.mark.docker, pytest.mark.timeout(600)]

RUNTIME, BARE = "build-test/runtime:1", "build-test/bare:1"
SOURCE = {**FILES, **CUDA_FILES}
CUDA = {"GGML_CUDA": True, "CMAKE_CUDA_ARCHITECTURES": "90-real"}


@pytest.fixture
def home(tmp_path: Path, docker_engine: Engine) -> Iterator[ImageHome]:
    yield ImageHome(tmp_path, docker_engine)
    for one in set(docker_engine.cli("images", "--quiet", "bakehouse/test").split()):
        docker_engine.cli("rmi", "--force", one)


@pytest.fixture(scope="module")
def builders(
    docker_engine: Engine, test_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """Debian with a compiler, CMake, Ninja and one CUDA toolkit, and what they make runs on."""
    ctx = Context(Places(test_cache / "cache", test_cache / "state"), recipes=test_cache)
    root = debian(test_cache, "gcc,g++,cmake,ninja-build")
    made = {}
    for version in ("13.0", "13.2"):
        toolkit = provide(ctx, pin_toolkit(ctx, version))
        more = tmp_path_factory.mktemp("cuda")
        shutil.copytree(toolkit.root, more / "usr/local/cuda", symlinks=True, copy_function=_link)
        name = f"build-test/cuda:{version}"
        made[version] = import_root(docker_engine, root, name, "ENV PATH=/usr/bin:/bin", more=more)
        shutil.rmtree(more)
    made["none"] = import_root(docker_engine, root, BUILDER, "ENV PATH=/usr/bin:/bin")
    made["runtime"] = import_root(docker_engine, debian(test_cache), RUNTIME)
    yield made
    for version in ("13.0", "13.2"):
        docker_engine.cli("rmi", "--force", made[version])


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def recipe(home: ImageHome, builder: str, runtime: str = RUNTIME, **changes: Any) -> None:
    """The small engine with a kernel, from one builder image."""
    files = changes.pop("files", SOURCE)
    bases = {"builder": {"x86_64": builder}, "runtime": {"x86_64": runtime}}
    cuda = {"version": changes.pop("version", "13.0")}
    write_small_recipe(home, files, bases=bases, cuda=cuda, cmake={**CUDA, **changes})


def last_step(document: dict[str, Any]) -> str:
    record = json.loads(Path(document["result"]["record"], "record.json").read_text())
    return str(record["steps"][-1]["id"])


def test_cuda_image_build_of_a_server(home: ImageHome, builders: dict[str, str]) -> None:
    recipe(home, builders["13.0"])
    home.run("lock")
    built = home.run("build")
    verdicts = {c["id"]: c["verdict"] for c in built["checks"]}
    assert set(verdicts.values()) == {"passed"}, built["checks"]
    assert {
        "cuda.backend", "cuda.pair", "cuda.version", "cuda.compiler-place", "cuda.toolkit-place",
        "cuda.libraries", "cuda.headers", "cuda.architectures", "cuda.compilable", "cuda.skipped",
        "cuda.host-compiler", "cuda.library", "cuda.linked", "cuda.no-stub", "cuda.embedded",
        "image.libraries", "artifact.run_path", "artifact.runs", "artifact.stamp",
    } <= verdicts.keys()  # fmt: skip
    observed = {c["id"]: c["observed"] for c in built["checks"]}
    assert observed["cuda.version"] == "13.0.88"
    assert observed["cuda.embedded"] == "sm_90"
    assert observed["cuda.linked"] == "/opt/llama.cpp/bin/libcudart.so.13"
    of_files = [c for c in built["checks"] if c["id"].startswith(("cuda.l", "cuda.no", "cuda.em"))]
    assert not [c for c in of_files if "/.work/" in c["where"]], "copies are gone by then"
    port = home.engine.port()
    names = {Path(f.path).name for f in image_files(port, built["result"]["image"])}
    assert {"libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13"} <= names
    assert not {name for name in names if name.startswith(("libcuda.so", "nvcc"))}
    assert home.run("build")["result"]["reused"]


def test_cuda_image_build_refuses_another_release_before_compiling(
    home: ImageHome, builders: dict[str, str]
) -> None:
    recipe(home, builders["13.2"])
    failed = home.run("build", exits=6)
    assert failed["error"]["id"] == "cuda-refused"
    assert "13.2.86" in failed["error"]["what"]
    assert last_step(failed) == "accept"


def test_cuda_image_build_refuses_an_architecture_changed_by_the_source(
    home: ImageHome, builders: dict[str, str]
) -> None:
    lists = SOURCE["CMakeLists.txt"].replace(
        "enable_language(CUDA)", 'set(CMAKE_CUDA_ARCHITECTURES "75-real")\n  enable_language(CUDA)'
    )
    recipe(home, builders["13.0"], files={**SOURCE, "CMakeLists.txt": lists})
    failed = home.run("build", exits=6)
    assert failed["error"]["id"] == "cuda-refused"
    assert "75-real" in failed["error"]["what"]


def test_cuda_image_build_names_a_builder_without_a_toolkit(
    home: ImageHome, builders: dict[str, str]
) -> None:
    """The source only warns, as llama.cpp does, and would go on without CUDA."""
    lists = FILES["CMakeLists.txt"] + (
        'option(GGML_CUDA "CUDA" OFF)\nmessage(WARNING "CUDA not found")\n'
        "message(STATUS ${CUDAToolkit_ROOT} ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_ARCHITECTURES})\n"
    )
    recipe(home, builders["none"], files={**FILES, "CMakeLists.txt": lists})
    failed = home.run("build", exits=6)
    assert failed["error"]["id"] == "no-toolkit"
    assert "/usr/local/cuda" in failed["error"]["what"]
    assert "nvidia/cuda:" in failed["error"]["hint"]


def test_cuda_image_build_names_a_runtime_without_a_library(
    home: ImageHome, builders: dict[str, str]
) -> None:
    make_image(home.engine, BARE)
    recipe(home, builders["13.0"], runtime=BARE)
    failed = home.run("build", exits=6)
    assert failed["error"]["id"] == "not-accepted"
    assert "image.libraries" in failed["error"]["what"]
    assert "libstdc++.so.6" in failed["error"]["what"]


@pytest.mark.parametrize(
    ("build", "named"),
    [
        ({"cuda": {"version": "13.0", "provide": "pypi"}}, "provide"),
        ({"cuda": {"version": "13.0", "path": "/opt/cuda"}}, "path"),
    ],
)
def test_cuda_image_build_refuses_a_toolkit_of_this_machine(
    home: ImageHome, build: dict[str, Any], named: str
) -> None:
    write_small_recipe(home, SOURCE, cmake=CUDA, **build)
    said = json.dumps(home.run("check", exits=2))
    assert f"build.cuda.{named}" in said
    assert "in its builder image" in said
