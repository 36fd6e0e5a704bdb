"""Checks of a CUDA configure: real output of old and new CMake, and each way to be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from bakehouse.cuda.toolkit import Requested, Toolkit
from bakehouse.cuda.verify import accept_configure, read_configure, refuse
from bakehouse.errors import BuildFailed
from bakehouse.models import Check, Verdict
from tests.support.cmake_cache import cache_values

DATA = Path(__file__).parents[1] / "data" / "cmake"
KNOWN = ("75", "80", "86", "87", "88", "89", "90", "90a", "100", "100a", "100f",
         "120", "120a", "120f", "121", "121a", "121f")  # fmt: skip
GENERATIONS = ("325", "331", "41")
LINK = {"/usr/local/cuda": "/usr/local/cuda-13.0"}


def resolve(path: str) -> str:
    for link, target in LINK.items():
        if path == link or path.startswith(link + "/"):
            return target + path[len(link) :]
    return path


def toolkit(root: str = "/opt/cuda-13.0", version: str = "13.0.88", **more: object) -> Toolkit:
    library = str(more.pop("library", f"{root}/lib"))
    values: dict[str, object] = {
        "root": root,
        "version": version,
        "nvcc": f"{root}/bin/nvcc",
        "include": f"{root}/include",
        "headers": version.rsplit(".", 1)[0],
        "library": library,
        "architectures": KNOWN,
        "gcc_max": 15,
        "clang_max": 20,
        **more,
    }
    return Toolkit.model_validate(values)


def real(name: str) -> tuple[str, str]:
    return (DATA / f"{name}.log").read_text(), (DATA / f"{name}.cache").read_text()


def judge(
    log: str,
    cache: str,
    chosen: Toolkit | None = None,
    architectures: tuple[str, ...] = ("90-real",),
    version: str = "13.0",
    **definitions: str,
) -> tuple[Check, ...]:
    requested = Requested(version=version, architectures=architectures, definitions=definitions)
    return accept_configure(log, cache_values(cache), chosen or toolkit(), requested, resolve)


def ids(checks: tuple[Check, ...], verdict: Verdict = Verdict.FAILED) -> set[str]:
    return {c.id for c in checks if c.verdict is verdict}


def test_cuda_accept_takes_a_real_pair() -> None:
    for generation in GENERATIONS:
        checks = judge(*real(f"pair-{generation}"))
        assert ids(checks) == ids(checks, Verdict.UNKNOWN) == set(), generation
        assert len(checks) == 11
        log, _ = real(f"pair-{generation}")
        refuse(checks, log, toolkit(), Requested(version="13.0", architectures=("90-real",)))


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("root", ["13.0", "13.2"])
def test_cuda_accept_refuses_compiler_of_one_and_toolkit_of_another(
    generation: str, root: str
) -> None:
    """CMake 3.25 shows two versions; from 3.31 on both lines agree, and only the place differs."""
    log, cache = real(f"mixed-{generation}")
    version = {"13.0": "13.0.88", "13.2": "13.2.86"}[root]
    chosen = toolkit(f"/opt/cuda-{root}", version)
    checks = judge(log, cache, chosen, version=root)
    failed = ids(checks)
    assert {"cuda.toolkit-place"} <= failed or {"cuda.compiler-place"} <= failed
    assert ("cuda.pair" in failed) == (generation == "325")
    requested = Requested(version=root, architectures=("90-real",), log="logs/configure.log")
    with pytest.raises(BuildFailed) as error:
        refuse(checks, log, chosen, requested)
    where = error.value.where or ""
    assert "logs/configure.log:34: -- The CUDA compiler identification is NVIDIA 13.2.86" in where
    assert "logs/configure.log:32: -- Found CUDAToolkit: /opt/cuda-" in where
    assert "/opt/cuda-13.0" in where
    assert "/opt/cuda-13.2" in where
    assert error.value.exit_code == 6
    assert chosen.root in (error.value.hint or "")


def test_cuda_accept_reads_old_and_new_wordings() -> None:
    include = "/usr/local/cuda-13.0/targets/sbsa-linux/include"
    rows = [
        ("NVIDIA 12.0.140", "12.0.140", None, include),
        ("NVIDIA 13.0.88 with host compiler GNU 13.3.0", "13.0.88", "13.3.0", include),
        (
            "NVIDIA 13.0.88 with host compiler Clang 18.1.3", "13.0.88", "18.1.3",
            f"{include};/x/cccl",
        ),
    ]  # fmt: skip
    for line, version, host, paths in rows:
        said = read_configure(
            f"-- The CUDA compiler identification is {line}\n"
            f'-- Found CUDAToolkit: {paths} (found suitable version "13.0.88", '
            'minimum required is "11.7")\n'
        )
        assert said["compilers"][0].values["version"] == version
        assert said["compilers"][0].values.get("host_version") == host
        assert said["toolkits"][0].values["version"] == "13.0.88"
        assert said["toolkits"][0].values["paths"] == paths


def test_cuda_accept_follows_the_system_link_into_the_targets_folder() -> None:
    log, cache = real("pair-41")
    base = "/usr/local/cuda/targets/sbsa-linux"
    log = log.replace("/opt/cuda-13.0/include", f"{base}/include")
    cache = cache.replace("/opt/cuda-13.0/lib", f"{base}/lib")
    cache = cache.replace("/opt/cuda-13.0", "/usr/local/cuda")
    chosen = toolkit("/usr/local/cuda-13.0", target="sbsa-linux")
    assert ids(judge(log, cache, chosen)) == set()


def edited(generation: str, old: str, new: str) -> tuple[str, str]:
    log, cache = real(f"pair-{generation}")
    assert old in log
    return log.replace(old, new), cache


def test_cuda_accept_fails_for_every_missing_line() -> None:
    for generation in GENERATIONS:
        log, cache = real(f"pair-{generation}")
        for word, failed in (
            ("-- Including CUDA backend", "cuda.backend"),
            ("-- The CUDA compiler identification", "cuda.pair"),
            ("-- Found CUDAToolkit", "cuda.toolkit-place"),
        ):
            kept = "\n".join(line for line in log.splitlines() if not line.startswith(word))
            assert failed in ids(judge(kept, cache)), generation
    assert len(ids(judge("", ""))) >= 7


def test_cuda_accept_fails_if_cuda_is_missing_with_only_a_warning() -> None:
    for warning in (
        "-- Could not find nvcc, please set CUDAToolkit_ROOT.",
        "  CUDA not found",
        "CMake Warning: CUDA Toolkit not found",
    ):
        log = f"{warning}\n-- Including CPU backend\n-- Configuring done (0.3s)\n"
        checks = judge(log, "")
        assert "cuda.backend" in ids(checks), warning
        with pytest.raises(BuildFailed, match=r"cuda\.backend") as error:
            refuse(checks, log, toolkit(), Requested(version="13.0", architectures=("90-real",)))
        assert "provide: pypi" in (error.value.hint or "")


def test_cuda_accept_fails_for_headers_of_a_newer_toolkit_than_nvcc() -> None:
    log = (
        "-- Found CUDAToolkit: /usr/local/cuda-12.8/targets/x86_64-linux/include "
        '(found version "12.8.93")\n-- CUDA Toolkit found\n'
        "-- The CUDA compiler identification is NVIDIA 12.0.140\n"
    )
    checks = judge(log, "", toolkit("/usr/local/cuda-12.8", "12.8.93"), version="12.8")
    pair = next(c for c in checks if c.id == "cuda.pair")
    assert pair.verdict is Verdict.FAILED
    assert "12.0.140" in pair.observed
    assert "12.8.93" in pair.observed


def test_cuda_accept_compares_the_wanted_version() -> None:
    expected = {"13.0": False, "13.0.88": False, "13.0.8": True, "13": False, "13.1": True}
    pair = real("pair-331")
    assert {v: "cuda.version" in ids(judge(*pair, version=v)) for v in expected} == expected


def using(generation: str, architectures: str) -> tuple[str, str]:
    log, cache = real(f"pair-{generation}")
    log = log.replace(
        "CMAKE_CUDA_ARCHITECTURES=90-real", f"CMAKE_CUDA_ARCHITECTURES={architectures}"
    )
    return log, cache


def with_cmake(cache: str, version: str) -> str:
    parts = dict(zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True))
    kept = [line for line in cache.splitlines() if not line.startswith("CMAKE_CACHE_")]
    return "\n".join(kept + [f"CMAKE_CACHE_{n}_VERSION:INTERNAL={v}" for n, v in parts.items()])


def test_cuda_accept_takes_family_names_only_with_a_new_enough_cmake() -> None:
    expected = {
        "3.25.1": False, "3.31.7": False, "3.31.8": True, "3.31.10": True,
        "4.0.0": False, "4.0.1": False, "4.0.2": True, "4.1.0": True,
    }  # fmt: skip
    log, cache = using("41", "120f-virtual")
    got = {
        version: "cuda.compilable"
        not in ids(judge(log, with_cmake(cache, version), architectures=("120f-virtual",)))
        for version in expected
    }
    assert got == expected


def test_cuda_accept_knows_what_this_nvcc_compiles() -> None:
    for item in ("90", "90-real", "90a-real", "121a-real", "100f-virtual", "120f-virtual"):
        assert ids(judge(*using("41", item), architectures=(item,))) == set(), item
    for item in ("52-real", "70-virtual", "89a", "130-real", "sm_90", ""):
        assert "cuda.compilable" in ids(judge(*using("41", item), architectures=(item,))), item


def test_cuda_accept_fails_for_other_architectures_than_requested() -> None:
    native = edited(
        "325", "Using CMAKE_CUDA_ARCHITECTURES=90-real", "Using CUDA architectures: native"
    )
    assert "cuda.architectures" in ids(judge(*native))
    assert "cuda.architectures" in ids(judge(*using("41", "75-virtual;80-virtual;86-real;90-real")))
    a_form = judge(*using("41", "120a-real;90-real"), architectures=("90-real", "120-real"))
    assert ids(a_form) == set()


def test_cuda_accept_fails_for_silently_skipped_kernels() -> None:
    log, cache = real("pair-41")
    log += "Not building NVFP4 as no compatible archs were found.\n"
    log += "Not building scaled_mm_c3x_120 as no compatible archs found\n"
    skipped = next(c for c in judge(log, cache) if c.id == "cuda.skipped")
    assert skipped.verdict is Verdict.FAILED
    assert skipped.observed == "NVFP4, scaled_mm_c3x_120"


def test_cuda_accept_knows_the_host_compilers_that_headers_allow() -> None:
    for generation, old, host, verdict in (
        ("325", "is GNU 12.2.0", "is GNU 16.1.0", Verdict.FAILED),
        ("331", "compiler GNU 12.2.0", "compiler GNU 16.1.0", Verdict.FAILED),
        ("41", "compiler GNU 12.2.0", "compiler Clang 21.1.0", Verdict.FAILED),
        ("41", "compiler GNU 12.2.0", "compiler Clang 20.1.0", Verdict.PASSED),
        ("41", "compiler GNU 12.2.0", "compiler GNU 15.2.0", Verdict.PASSED),
        ("41", "compiler GNU 12.2.0", "compiler IntelLLVM 2025.1", Verdict.UNKNOWN),
    ):
        checks = judge(*edited(generation, old, host))
        assert next(c for c in checks if c.id == "cuda.host-compiler").verdict is verdict, host


def test_cuda_accept_leaves_a_build_without_compiler_check_unverified() -> None:
    checks = judge(*real("pair-41"), CMAKE_CUDA_FLAGS="-O3 -allow-unsupported-compiler")
    assert ids(checks, Verdict.UNKNOWN) == {"cuda.host-compiler-checked"}
    assert ids(checks) == set()


def test_cuda_accept_fails_for_paths_of_another_toolkit() -> None:
    log, cache = real("pair-41")
    cublas = "CUDA_cublas_LIBRARY:FILEPATH="
    library = cache.replace(f"{cublas}/opt/cuda-13.0/lib", f"{cublas}/usr/lib")
    assert ids(judge(log, library)) == {"cuda.libraries"}
    same_prefix = cache.replace("/opt/cuda-13.0", "/opt/cuda-13.0.old")
    assert "cuda.libraries" in ids(judge(log, same_prefix))
    stale = cache.replace(
        "CMAKE_CUDA_COMPILER:STRING=/opt/cuda-13.0", "CMAKE_CUDA_COMPILER:FILEPATH=/opt/cuda-12.0"
    )
    assert "cuda.compiler-place" in ids(judge(log, stale))


def test_cuda_accept_does_not_pass_headers_of_another_nvcc() -> None:
    assert ids(judge(*real("pair-41"), toolkit(headers="12.8"))) == {"cuda.headers"}
    unknown = judge(*real("pair-41"), toolkit(headers=None))
    assert ids(unknown) == set()
    assert ids(unknown, Verdict.UNKNOWN) == {"cuda.headers"}
