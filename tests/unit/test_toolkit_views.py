"""A toolkit inside a container, as it was reported; `test_docker_cuda` has the real one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from bakehouse.context import Context
from bakehouse.cuda import configure
from bakehouse.cuda.configure import for_builder
from bakehouse.cuda.toolkit import ImageView, NotAToolkit, inspect
from bakehouse.errors import HostError
from bakehouse.host import Gpu
from bakehouse.recipe.models import Recipe
from tests.support.recipes import recipe_data

REAL = "/usr/local/cuda-13.0"
NVCC = Path("/usr/local/cuda/bin/nvcc")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What `docker/toolkit.sh` writes of a development image's toolkit: links, and `targets/`."""
    target = f"{REAL}/targets/x86_64-linux"
    lines = [
        (REAL, "/usr/local/cuda"), (f"{REAL}/bin/nvcc", str(NVCC)), (REAL, REAL),
        (f"{REAL}/bin/nvcc", f"{REAL}/bin/nvcc"),
        (f"{target}/include", f"{target}/include"),
        (f"{target}/include/cuda.h", f"{target}/include/cuda.h"),
        (f"{target}/include/crt/host_config.h", f"{target}/include/crt/host_config.h"),
        (f"{target}/lib", f"{target}/lib"),
        *((f"{target}/lib/lib{n}.so.13.0.9", f"{target}/lib/lib{n}.so")
          for n in ("cudart", "cublas", "cublasLt")),
        (f"{target}/lib/stubs/libcuda.so", f"{target}/lib/stubs/libcuda.so"),
    ]  # fmt: skip
    (tmp_path / "paths").write_text("".join(f"{real}\t7\t{path}\n" for real, path in lines))
    (tmp_path / "version").write_text(
        "Cuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0.r13.0/compiler.1_0\n"
    )
    (tmp_path / "help").write_text("Allowed values: 'sm_90','sm_90a','sm_121a'\n")
    (tmp_path / "dryrun").write_text(
        f"#$ TOP={NVCC.parent}/..\n#$ _TARGET_DIR_=targets/x86_64-linux\n"
    )
    for name, text in {
        "cuda.h": "#define CUDA_VERSION 13000\n",
        "crt/host_config.h": "#if __GNUC__ > 15\n",
    }.items():
        path = Path(f"{tmp_path}/files{target}/include/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "hashes").write_text(
        f"{hashlib.sha256(b'runtime').hexdigest()}  {target}/lib/libcudart.so.13.0.9\n"
    )
    return tmp_path


def test_container_toolkit_is_read_from_its_report(folder: Path) -> None:
    told = ImageView(folder)
    found = inspect(told, NVCC)
    assert (found.root, found.version, found.headers) == (REAL, "13.0.88", "13.0")
    assert found.nvcc == f"{REAL}/bin/nvcc"
    assert found.library == f"{REAL}/targets/x86_64-linux/lib"
    assert found.architectures == ("90", "90a", "121a")
    assert found.gcc_max == 15
    assert found.faults == ()
    assert told.stub is None


def test_container_toolkit_copy_is_recognised_by_its_bytes(folder: Path, tmp_path: Path) -> None:
    told = ImageView(folder)
    chosen = inspect(told, NVCC).libraries["cudart"]
    copy = tmp_path / "libcudart.so.13"
    copy.write_bytes(b"runtime")
    assert told.same(copy, chosen)
    copy.write_bytes(b"another")
    assert not told.same(copy, chosen)


def test_container_toolkit_whose_compiler_fails_is_refused(folder: Path) -> None:
    for lost in ("help", "version"):
        (folder / lost).rename(folder / f"{lost}.failed")
        with pytest.raises(NotAToolkit, match=f"nvcc --{lost} fails"):
            inspect(ImageView(folder), NVCC)


def test_container_toolkit_without_a_library_is_not_complete(folder: Path) -> None:
    lost = ("libcublas.so", "stubs/libcuda.so")
    kept = [ln for ln in (folder / "paths").read_text().splitlines() if not ln.endswith(lost)]
    (folder / "paths").write_text("\n".join(kept))
    faults = inspect(ImageView(folder), NVCC).faults
    assert [fault.split()[1] for fault in faults] == ["libcublas.so", "libcuda.so"]


def recipe(architectures: str) -> Recipe:
    bases = {role: {"x86_64": "base:1"} for role in ("builder", "runtime")}
    cmake = {"GGML_CUDA": True, "CMAKE_CUDA_ARCHITECTURES": architectures}
    return Recipe.model_validate(
        recipe_data(build={"where": "docker", "bases": bases, "cmake": cmake,
                           "cuda": {"version": "13.0"}})
    )  # fmt: skip


def test_container_build_takes_native_as_this_machines_gpu(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = [Gpu(index=0, name="NVIDIA GB10", compute_capability="12.1", driver="580.1")]
    monkeypatch.setattr(
        configure, "compute_capabilities", lambda _: tuple(one.compute_capability for one in seen)
    )
    native = for_builder(context, recipe("native"))
    assert native.build
    assert native.build.cmake["CMAKE_CUDA_ARCHITECTURES"] == "121a-real"
    seen.clear()
    named = for_builder(context, recipe("90-real;121a-real"))
    assert named.build
    assert named.build.cmake["CMAKE_CUDA_ARCHITECTURES"] == "90-real;121a-real"
    with pytest.raises(HostError, match="no GPU was found"):
        for_builder(context, recipe("native"))
