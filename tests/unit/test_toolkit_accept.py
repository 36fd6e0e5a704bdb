"""Acceptance of a configure: real CMake output, old and new, and every way to be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from bakehouse.checks import Check, Verdict
from bakehouse.errors import BuildFailed
from bakehouse.toolkit.accept import accept_configure, read_configure, refuse, refused
from bakehouse.toolkit.types import Requested, Toolkit

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
    return accept_configure(log, cache, chosen or toolkit(), requested, resolve)


def ids(checks: tuple[Check, ...], verdict: Verdict = Verdict.FAILED) -> set[str]:
    return {c.id for c in checks if c.verdict is verdict}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_real_pair_is_accepted(generation: str) -> None:
    checks = judge(*real(f"pair-{generation}"))
    assert ids(checks) == ids(checks, Verdict.UNKNOWN) == set()
    assert len(checks) == 11
    assert judge(*real(f"pair-{generation}"), version="13.0.88")[2].passed


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("root", ["13.0", "13.2"])
def test_compiler_of_one_and_toolkit_of_another_is_refused(generation: str, root: str) -> None:
    """CMake 3.25 shows two versions; from 3.31 on both lines agree, and only the place tells."""
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


def test_an_accepted_configure_is_not_refused() -> None:
    log, cache = real("pair-41")
    refuse(judge(log, cache), log, toolkit(), Requested(version="13.0", architectures=("90-real",)))


@pytest.mark.parametrize(
    ("line", "version", "host", "paths"),
    [
        ("NVIDIA 12.0.140", "12.0.140", None, 1),
        ("NVIDIA 13.0.88 with host compiler GNU 13.3.0", "13.0.88", "13.3.0", 1),
        ("NVIDIA 13.0.88 with host compiler Clang 18.1.3", "13.0.88", "18.1.3", 2),
    ],
)
def test_wordings(line: str, version: str, host: str | None, paths: int) -> None:
    include = ";".join(["/usr/local/cuda-13.0/targets/sbsa-linux/include", "/x/cccl"][:paths])
    said = read_configure(
        f"-- The CUDA compiler identification is {line}\n"
        f'-- Found CUDAToolkit: {include} (found suitable version "13.0.88", '
        'minimum required is "11.7")\n'
    )
    assert said["compilers"][0].values["version"] == version
    assert said["compilers"][0].values.get("host_version") == host
    assert said["toolkits"][0].values["version"] == "13.0.88"
    assert said["toolkits"][0].values["paths"] == include


@pytest.mark.parametrize("target", ["sbsa-linux", "x86_64-linux"])
def test_targets_folder_reached_through_the_system_link_is_inside(target: str) -> None:
    log, cache = real("pair-41")
    base = f"/usr/local/cuda/targets/{target}"
    log = log.replace("/opt/cuda-13.0/include", f"{base}/include")
    cache = cache.replace("/opt/cuda-13.0/lib", f"{base}/lib")
    cache = cache.replace("/opt/cuda-13.0", "/usr/local/cuda")
    chosen = toolkit("/usr/local/cuda-13.0", target=target)
    assert ids(judge(log, cache, chosen)) == set()


def edited(generation: str, old: str, new: str) -> tuple[str, str]:
    log, cache = real(f"pair-{generation}")
    assert old in log
    return log.replace(old, new), cache


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_missing_line_fails(generation: str) -> None:
    log, cache = real(f"pair-{generation}")
    for word, failed in (
        ("-- Including CUDA backend", "cuda.backend"),
        ("-- The CUDA compiler identification", "cuda.pair"),
        ("-- Found CUDAToolkit", "cuda.toolkit-place"),
    ):
        kept = "\n".join(line for line in log.splitlines() if not line.startswith(word))
        assert failed in ids(judge(kept, cache))
    assert len(ids(judge("", ""))) >= 7


@pytest.mark.parametrize(
    "warning",
    [
        "-- Could not find nvcc, please set CUDAToolkit_ROOT.",
        "  CUDA not found",
        "CMake Warning: CUDA Toolkit not found",
    ],
)
def test_missing_cuda_with_only_a_warning_fails(warning: str) -> None:
    log = f"{warning}\n-- Including CPU backend\n-- Configuring done (0.3s)\n"
    checks = judge(log, "")
    assert "cuda.backend" in ids(checks)
    with pytest.raises(BuildFailed, match=r"cuda\.backend") as error:
        refuse(checks, log, toolkit(), Requested(version="13.0", architectures=("90-real",)))
    assert "provide: pypi" in (error.value.hint or "")


def test_headers_of_a_newer_toolkit_than_nvcc() -> None:
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


@pytest.mark.parametrize(
    ("version", "fails"),
    [("13.0", False), ("13.0.88", False), ("13.0.8", True), ("13", False), ("13.1", True)],
)
def test_the_wanted_version(version: str, fails: bool) -> None:
    assert ("cuda.version" in ids(judge(*real("pair-331"), version=version))) == fails


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


@pytest.mark.parametrize(
    ("cmake", "fits"),
    [
        ("3.25.1", False), ("3.31.7", False), ("3.31.8", True), ("3.31.10", True),
        ("4.0.0", False), ("4.0.1", False), ("4.0.2", True), ("4.1.0", True),
    ],
)  # fmt: skip
def test_family_names_need_a_new_enough_cmake(cmake: str, fits: bool) -> None:
    log, cache = using("41", "120f-virtual")
    checks = judge(log, with_cmake(cache, cmake), architectures=("120f-virtual",))
    assert ("cuda.compilable" in ids(checks)) == (not fits)


@pytest.mark.parametrize(
    "architecture", ["90", "90-real", "90a-real", "121a-real", "100f-virtual", "120f-virtual"]
)
def test_architectures_that_this_nvcc_compiles(architecture: str) -> None:
    log, cache = using("41", architecture)
    assert ids(judge(log, cache, architectures=(architecture,))) == set()


@pytest.mark.parametrize("architecture", ["52-real", "70-virtual", "89a", "130-real", "sm_90", ""])
def test_architectures_that_it_does_not(architecture: str) -> None:
    log, cache = using("41", architecture)
    assert "cuda.compilable" in ids(judge(log, cache, architectures=(architecture,)))


def test_native_that_reached_configure_fails() -> None:
    log, cache = edited(
        "325", "Using CMAKE_CUDA_ARCHITECTURES=90-real", "Using CUDA architectures: native"
    )
    assert "cuda.architectures" in ids(judge(log, cache))


def test_other_architectures_than_asked_fail() -> None:
    log, cache = using("41", "75-virtual;80-virtual;86-real;90-real")
    assert "cuda.architectures" in ids(judge(log, cache))


def test_ggmls_own_change_to_the_a_form_is_what_was_asked() -> None:
    log, cache = using("41", "120a-real;90-real")
    assert ids(judge(log, cache, architectures=("90-real", "120-real"))) == set()


def test_silently_skipped_kernels_fail() -> None:
    log, cache = real("pair-41")
    log += "Not building NVFP4 as no compatible archs were found.\n"
    log += "Not building scaled_mm_c3x_120 as no compatible archs found\n"
    skipped = next(c for c in judge(log, cache) if c.id == "cuda.skipped")
    assert skipped.verdict is Verdict.FAILED
    assert skipped.observed == "NVFP4, scaled_mm_c3x_120"


@pytest.mark.parametrize(
    ("generation", "old", "host", "verdict"),
    [
        ("325", "is GNU 12.2.0", "is GNU 16.1.0", Verdict.FAILED),
        ("331", "compiler GNU 12.2.0", "compiler GNU 16.1.0", Verdict.FAILED),
        ("41", "compiler GNU 12.2.0", "compiler Clang 21.1.0", Verdict.FAILED),
        ("41", "compiler GNU 12.2.0", "compiler Clang 20.1.0", Verdict.PASSED),
        ("41", "compiler GNU 12.2.0", "compiler GNU 15.2.0", Verdict.PASSED),
        ("41", "compiler GNU 12.2.0", "compiler IntelLLVM 2025.1", Verdict.UNKNOWN),
    ],
)
def test_host_compiler_bounds(generation: str, old: str, host: str, verdict: Verdict) -> None:
    checks = judge(*edited(generation, old, host))
    assert next(c for c in checks if c.id == "cuda.host-compiler").verdict is verdict


def test_switching_the_compiler_check_off_leaves_the_build_unverified() -> None:
    checks = judge(*real("pair-41"), CMAKE_CUDA_FLAGS="-O3 -allow-unsupported-compiler")
    assert ids(checks, Verdict.UNKNOWN) == {"cuda.host-compiler-checked"}
    assert refused(checks) == ()


def test_a_library_of_another_toolkit_fails() -> None:
    log, cache = real("pair-41")
    cache = cache.replace(
        "CUDA_cublas_LIBRARY:FILEPATH=/opt/cuda-13.0/lib", "CUDA_cublas_LIBRARY:FILEPATH=/usr/lib"
    )
    assert ids(judge(log, cache)) == {"cuda.libraries"}


def test_a_neighbour_with_the_same_prefix_is_not_inside() -> None:
    log, cache = real("pair-41")
    cache = cache.replace("/opt/cuda-13.0", "/opt/cuda-13.0.old")
    assert "cuda.libraries" in ids(judge(log, cache))


def test_headers_that_do_not_belong_to_this_nvcc_fail() -> None:
    for headers in ("12.8", None):
        assert ids(judge(*real("pair-41"), toolkit(headers=headers))) == (
            {"cuda.headers"} if headers else set()
        )
    unknown = judge(*real("pair-41"), toolkit(headers=None))
    assert ids(unknown, Verdict.UNKNOWN) == {"cuda.headers"}


def test_a_stale_compiler_in_the_cache_fails() -> None:
    log, cache = real("pair-41")
    cache = cache.replace(
        "CMAKE_CUDA_COMPILER:STRING=/opt/cuda-13.0", "CMAKE_CUDA_COMPILER:FILEPATH=/opt/cuda-12.0"
    )
    assert "cuda.compiler-place" in ids(judge(log, cache))
