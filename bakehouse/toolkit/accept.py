"""Accept a CUDA build from CMake's own words, before a minute of compiling is spent. Pure.

What is asked for has to be shown to be there: a line that is missing fails, it does not pass. That
CMake ended with 0 proves nothing: it goes on with two toolkits, and without CUDA altogether.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from bakehouse.checks import Check, Verdict, check
from bakehouse.errors import BuildFailed
from bakehouse.toolkit.configured import Configured, Line, cmake_version, read_cache, read_configure
from bakehouse.toolkit.force import ARCHITECTURES, COMPILER, ROOT, unverified_flags
from bakehouse.toolkit.types import Requested, Toolkit, parse_architecture, satisfies, split_list

UNVERIFIED = "cuda.host-compiler-checked"
"""Its verdict is unknown where nvcc's own check is switched off: such a build is unverified."""
Resolve = Callable[[str], str]


def accept_configure(
    log: str,
    cache_text: str,
    toolkit: Toolkit,
    requested: Requested,
    resolve: Resolve = os.path.realpath,
) -> tuple[Check, ...]:
    """Judge a finished configure: `log` is all that CMake printed, `cache_text` its cache."""
    said, cache = read_configure(log), read_cache(cache_text)
    return (
        _backend(said, requested),
        _agreement(said, requested),
        _wanted_version(said, toolkit, requested),
        _compiler_place(cache, toolkit, resolve),
        _toolkit_place(said, cache, toolkit, requested, resolve),
        _libraries(cache, toolkit, resolve),
        _headers(toolkit),
        _architectures(said, cache, requested),
        _compilable(cache, toolkit, requested),
        _skipped(said, requested),
        _host_compiler(said, toolkit, requested),
        *_overridden(cache, requested),
    )


def refused(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Those that forbid compiling; unknown ones leave a build that is marked unverified."""
    return tuple(c for c in checks if c.verdict is Verdict.FAILED)


def refuse(checks: tuple[Check, ...], log: str, toolkit: Toolkit, requested: Requested) -> None:
    """Raise BuildFailed (exit 6) with CMake's two lines, both paths and the mend, if any failed."""
    failed = refused(checks)
    if not failed:
        return
    said = read_configure(log)
    lines = [*said.toolkits, *said.compilers, *said.skipped, *said.absent]
    where = [line.at(requested.log) for line in sorted(lines, key=lambda line: line.number)]
    where += [f"{c.id}: expected {c.expected}, observed {c.observed} ({c.where})" for c in failed]
    raise BuildFailed(
        f"configure does not prove a right CUDA build: {failed[0].id}: {failed[0].observed}",
        where="\n".join(where),
        hint=_MENDS.get(failed[0].id, _MEND).format(
            root=toolkit.root, version=requested.version, gcc=toolkit.gcc_max or "an older"
        ),
        id="cuda-refused",
        checks=checks,
    )


_MEND = (
    f"start from an empty build folder with {ROOT}={{root}} and {COMPILER}={{root}}/bin/nvcc; "
    "in a recipe, leave both out and name the toolkit in build.cuda"
)
_MENDS = {
    "cuda.backend": "see that a whole toolkit {version} is there (`invoke doctor` lists them), or "
    'let Bakehouse provide it: cuda: {{version: "{version}", provide: pypi}}',
    "cuda.architectures": f"name in {ARCHITECTURES} what this source and CMake can build",
    "cuda.compilable": "take a toolkit that knows these architectures, or other architectures; "
    "121 needs 12.9 or newer; names with 'f' need CMake 3.31.8 or 4.0.2",
    "cuda.skipped": "name an architecture that these kernels are written for",
    "cuda.host-compiler": "install gcc-{gcc} and g++-{gcc}, and set CC and CXX to them",
}


def _first(lines: tuple[Line, ...], log: str) -> str:
    return lines[0].at(log) if lines else f"{log}: no such line"


def _backend(said: Configured, requested: Requested) -> Check:
    proof = said.included and said.compilers and not said.absent
    return check(
        "cuda.backend",
        "a line 'Including CUDA backend', a CUDA compiler, and no word that CUDA is missing",
        (said.absent or said.included)[0].text.strip()
        if said.absent or said.included
        else "no such line: a build for the CPU alone",
        _first(said.absent or said.included, requested.log),
        ok=bool(proof),
    )


def _agreement(said: Configured, requested: Requested) -> Check:
    compilers = {line.values.get("version", "none") for line in said.compilers}
    toolkits = {line.values["version"] for line in said.toolkits}
    where = " | ".join(line.at(requested.log) for line in (*said.toolkits, *said.compilers))
    return check(
        "cuda.pair",
        "one full version, for the compiler and for the toolkit that was found",
        f"compiler {_words(compilers)}, toolkit {_words(toolkits)}",
        where or f"{requested.log}: neither line is there",
        ok=len(compilers) == 1 and compilers == toolkits,
    )


def _words(items: Iterable[str]) -> str:
    return ", ".join(sorted(items)) or "none"


def _wanted_version(said: Configured, toolkit: Toolkit, requested: Requested) -> Check:
    versions = {line.values.get("version", "none") for line in (*said.compilers, *said.toolkits)}
    return check(
        "cuda.version",
        f"{requested.version}, as the recipe says; the chosen toolkit is {toolkit.version}",
        _words(versions),
        _first(said.compilers, requested.log),
        ok=bool(versions)
        and all(satisfies(v, requested.version) and v == toolkit.version for v in versions),
    )


def _inside(path: str, toolkit: Toolkit, resolve: Resolve) -> bool:
    real = resolve(path)
    places = (toolkit.root, toolkit.include, toolkit.library)
    return any(real == place or real.startswith(place.rstrip("/") + "/") for place in places)


def _compiler_place(cache: dict[str, str], toolkit: Toolkit, resolve: Resolve) -> Check:
    compiler = cache.get(COMPILER, "")
    return check(
        "cuda.compiler-place",
        toolkit.nvcc,
        compiler or "not in the cache",
        f"CMakeCache.txt: {COMPILER}={compiler}",
        ok=bool(compiler) and resolve(compiler) == toolkit.nvcc,
    )


def _toolkit_place(
    said: Configured,
    cache: dict[str, str],
    toolkit: Toolkit,
    requested: Requested,
    resolve: Resolve,
) -> Check:
    found = [p for line in said.toolkits for p in split_list(line.values["paths"])]
    names = (ROOT, "CUDAToolkit_BIN_DIR", "CUDAToolkit_NVCC_EXECUTABLE")
    found += [cache[name] for name in names if cache.get(name)]
    outside = [path for path in found if not _inside(path, toolkit, resolve)]
    return check(
        "cuda.toolkit-place",
        f"everything inside {toolkit.root}",
        ", ".join(dict.fromkeys(outside or found)) or "no toolkit was found",
        _first(said.toolkits, requested.log),
        ok=bool(said.toolkits) and bool(cache.get(ROOT)) and not outside,
    )


def _libraries(cache: dict[str, str], toolkit: Toolkit, resolve: Resolve) -> Check:
    names = ("CUDA_CUDART", "CUDA_cublas_LIBRARY", "CUDA_cublasLt_LIBRARY")
    values = {name: cache.get(name, "") for name in names}
    wrong = {n: v for n, v in values.items() if not v or not _inside(v, toolkit, resolve)}
    driver = cache.get("CUDA_cuda_driver_LIBRARY", "")
    if driver.endswith("-NOTFOUND"):
        wrong["CUDA_cuda_driver_LIBRARY"] = driver
    shown = wrong or values
    return check(
        "cuda.libraries",
        f"cudart, cublas and cublasLt from {toolkit.library}, and a driver library to link with",
        ", ".join(f"{name}={value or 'missing'}" for name, value in shown.items()),
        "CMakeCache.txt",
        ok=not wrong,
    )


def _headers(toolkit: Toolkit) -> Check:
    return check(
        "cuda.headers",
        f"headers of {toolkit.version}",
        toolkit.headers,
        f"{toolkit.include}/cuda.h",
        ok=toolkit.headers is not None and satisfies(toolkit.version, toolkit.headers),
    )


def _effective(said: Configured, cache: dict[str, str]) -> tuple[tuple[str, ...], str]:
    if said.using:
        return split_list(said.using[-1].values.get("list", "")), said.using[-1].text.strip()
    value = cache.get(ARCHITECTURES, "")
    return split_list(value), f"CMakeCache.txt: {ARCHITECTURES}={value}"


def _architectures(said: Configured, cache: dict[str, str], requested: Requested) -> Check:
    """Hold what CMake will compile for against what was asked.

    ggml turns 12X into 12Xa by itself; that is a better form of what was asked, not another.
    """
    effective, where = _effective(said, cache)
    wanted = {specific(item) for item in requested.architectures}
    return check(
        "cuda.architectures",
        ";".join(requested.architectures),
        ";".join(effective) or "none",
        where,
        ok=bool(effective) and {specific(item) for item in effective} == wanted,
    )


def specific(item: str) -> str:
    """Give the form that ggml compiles: 12X becomes 12Xa, all else stays."""
    found = parse_architecture(item)
    if found is None or found.letter or not 120 <= found.number <= 129:
        return item
    return item.replace(str(found.number), f"{found.number}a", 1)


def _compilable(cache: dict[str, str], toolkit: Toolkit, requested: Requested) -> Check:
    version = cmake_version(cache)
    wrong = []
    for item in requested.architectures:
        found = parse_architecture(item)
        if found is None or found.name not in toolkit.architectures:
            wrong.append(f"{item}: this nvcc does not know it")
        elif found.letter == "f" and (version is None or not _takes_family_names(version)):
            shown = ".".join(map(str, version)) if version else "of unknown version"
            wrong.append(f"{item}: CMake {shown} does not take names with 'f'")
    return check(
        "cuda.compilable",
        "each of " + ";".join(requested.architectures) + " known to nvcc and CMake",
        "; ".join(wrong) or "all known",
        f"{toolkit.nvcc} --help: {' '.join(toolkit.architectures) or 'no list'}",
        ok=bool(requested.architectures) and not wrong,
    )


def _takes_family_names(version: tuple[int, int, int]) -> bool:
    return (3, 31, 8) <= version < (4, 0, 0) or version >= (4, 0, 2)


def _skipped(said: Configured, requested: Requested) -> Check:
    return check(
        "cuda.skipped",
        "no kernels left out for want of an architecture",
        ", ".join(line.values["what"] for line in said.skipped) or "none left out",
        _first(said.skipped, requested.log) if said.skipped else requested.log,
        ok=not said.skipped,
    )


def _host_compiler(said: Configured, toolkit: Toolkit, requested: Requested) -> Check:
    lines = [line for line in (*said.compilers, *said.hosts) if "host" in line.values]
    bounds = {"GNU": toolkit.gcc_max, "Clang": toolkit.clang_max}
    named = [(line.values["host"], line.values["host_version"]) for line in lines]
    known = [(name, v, bounds.get(name)) for name, v in named if bounds.get(name) is not None]
    ok: bool | None = None
    if known and len(known) == len(named):
        ok = all(int(v.split(".")[0]) <= (bound or 0) for _, v, bound in known)
    return check(
        "cuda.host-compiler",
        f"GCC up to {toolkit.gcc_max}, Clang up to {toolkit.clang_max}",
        _words({f"{name} {v}" for name, v in named}) if named else None,
        _first(tuple(lines), requested.log),
        ok=ok,
    )


def _overridden(cache: dict[str, str], requested: Requested) -> tuple[Check, ...]:
    flags = {n: v for n, v in cache.items() if n.startswith(("CMAKE_CUDA_FLAGS", "CUDA_"))}
    named = unverified_flags({**flags, **requested.definitions})
    if not named:
        return ()
    return (
        check(
            UNVERIFIED,
            "nvcc checks the host compiler itself",
            f"-allow-unsupported-compiler in {_words(named)}: this build is unverified",
            "the recipe's CMake definitions",
            ok=None,
        ),
    )
