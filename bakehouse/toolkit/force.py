"""Force one toolkit: CMake definitions and environment in which nothing else can win.

CMake looks the toolkit and the compiler up apart from each other, and which of the two settles the
other differs: with CMake 3.25 the toolkit's root alone decides headers and libraries, with 3.31 and
later the compiler does. So both are always given, both from the same toolkit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bakehouse.base import Frozen
from bakehouse.errors import Fault, HostError, RecipeError
from bakehouse.recipe.model import Build
from bakehouse.toolkit.types import Toolkit, parse_architecture, split_list

ROOT, COMPILER = "CUDAToolkit_ROOT", "CMAKE_CUDA_COMPILER"
HOST_COMPILER = "CMAKE_CUDA_HOST_COMPILER"
ARCHITECTURES = "CMAKE_CUDA_ARCHITECTURES"
SYSTEM_FOLDERS = frozenset({"/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"})
"""They hold the host compiler and shell as well, so they stay on PATH behind the toolkit."""
WITHOUT_DRIVER = {"CMAKE_EXE_LINKER_FLAGS": ("-Wl,--allow-shlib-undefined",)}
"""Where no driver is installed, ld finds no libcuda.so.1 for the programs it links."""
OVERRIDE = "-allow-unsupported-compiler"


@dataclass(frozen=True)
class Conflict:
    """One thing wrong with a recipe's CUDA settings; `keys` leads to it."""

    keys: tuple[str, ...]
    message: str
    hint: str


class Forced(Frozen):
    """What configure and compile are given for one toolkit."""

    definitions: dict[str, str]
    flags: dict[str, tuple[str, ...]]
    """Added to a definition; `{work}` stands for the build's work folder."""
    environment: dict[str, str]


def wants_cuda(build: Build | None) -> bool:
    """Whether the CUDA backend is asked for, by CMake's rules for true."""
    return build is not None and _true(build.cmake.get("GGML_CUDA"))


def _true(value: object) -> bool:
    return value is True or str(value).upper() in {"1", "ON", "YES", "TRUE", "Y"}


def conflicts(
    build: Build | None, resolve: Callable[[str], str] = os.path.realpath
) -> tuple[Conflict, ...]:
    """Everything in a recipe's `build` that contradicts itself about CUDA; no other reading."""
    if build is None:
        return ()
    found = [Conflict(("build", "cmake", n), *_NOT_SO[n]) for n in _NOT_SO if n in build.cmake]
    found += _of_the_builder(build) if build.where == "docker" else _pair(build, resolve)
    if wants_cuda(build) and build.cuda is None:
        found.append(
            Conflict(
                ("build", "cmake", "GGML_CUDA"),
                "CUDA is asked for, but no toolkit is named",
                'add build.cuda, such as cuda: {version: "13.0"}',
            )
        )
    if build.cuda is not None and not wants_cuda(build):
        found.append(
            Conflict(
                ("build", "cuda"),
                "a CUDA toolkit is named, but the CUDA backend is not asked for",
                "set build.cmake.GGML_CUDA: true, or leave build.cuda out",
            )
        )
    if wants_cuda(build):
        found += _architectures(build)
    return tuple(found)


_NOT_SO = {
    "CUDA_TOOLKIT_ROOT_DIR": (
        "CUDA_TOOLKIT_ROOT_DIR belongs to a CMake module that is no longer used",
        "name the toolkit in build.cuda.path",
    ),
    HOST_COMPILER: (
        "the host compiler is the one that compiles all other C++ as well",
        "set CC and CXX in the environment, such as CC=gcc-13 CXX=g++-13",
    ),
}


def _of_the_builder(build: Build) -> list[Conflict]:
    """A container builds with the toolkit of its builder image; nothing else can be wished for."""
    cuda = build.cuda
    wishes = {
        ("build", "cuda", "provide"): cuda is not None and cuda.provide != "host",
        ("build", "cuda", "path"): cuda is not None and cuda.path is not None,
        **{("build", "cmake", name): name in build.cmake for name in (ROOT, COMPILER)},
    }
    return [
        Conflict(
            keys,
            f"{keys[-1]} says where a toolkit comes from, but this build's is in its builder image",
            "leave it out, and name a builder image with that toolkit in build.bases",
        )
        for keys, wished in wishes.items()
        if wished
    ]


def _pair(build: Build, resolve: Callable[[str], str]) -> list[Conflict]:
    cmake = build.cmake
    given = [name for name in (ROOT, COMPILER) if name in cmake]
    if not given:
        return []
    if len(given) == 1:
        other = COMPILER if given[0] == ROOT else ROOT
        return [
            Conflict(
                ("build", "cmake", given[0]),
                f"{given[0]} is set without {other}: CMake would look the other one up by itself",
                "leave both out and name the toolkit in build.cuda, or set both to one toolkit",
            )
        ]
    root, compiler = str(cmake[ROOT]), str(cmake[COMPILER])
    inside = resolve(os.path.join(root, "bin", os.path.basename(compiler)))
    if inside != resolve(compiler):
        return [
            Conflict(
                ("build", "cmake", COMPILER),
                f"{COMPILER} is {compiler}, but {ROOT} is {root}: two toolkits",
                "leave both out and name the toolkit in build.cuda.path",
            )
        ]
    cuda = build.cuda
    if cuda and (cuda.provide != "host" or (cuda.path and resolve(cuda.path) != resolve(root))):
        return [
            Conflict(
                ("build", "cmake", ROOT),
                f"{ROOT} is {root}, but build.cuda names another toolkit",
                "leave the two CMake definitions out; build.cuda is enough",
            )
        ]
    return []


def _architectures(build: Build) -> list[Conflict]:
    keys = ("build", "cmake", ARCHITECTURES)
    text = build.cmake.get(ARCHITECTURES)
    if text is None:
        return [
            Conflict(
                keys[:2],
                f"{ARCHITECTURES} is missing: what is compiled would depend on the machine",
                "write native for this machine's GPU, or name them, such as 90-real or 121a-real",
            )
        ]
    items = split_list(str(text))
    bad = [i for i in items if i != "native" and parse_architecture(i) is None]
    if not items or bad or ("native" in items and len(items) > 1):
        shown = ", ".join(bad) or str(text)
        return [
            Conflict(
                keys,
                f"'{shown}' is no list of architectures that can be checked",
                "write native alone, or names such as 90-real;121a-real (';' between them)",
            )
        ]
    return []


def refuse_conflicts(build: Build | None, file: str) -> None:
    """Raise RecipeError (exit 2) for what `conflicts` finds; positions are the loader's matter."""
    found = conflicts(build)
    if found:
        raise RecipeError(
            "the recipe's CUDA settings contradict each other",
            [Fault(file, 0, 0, f"{'.'.join(c.keys)}: {c.message}", c.hint) for c in found],
        )


def toolkit_path(build: Build) -> str | None:
    """The folder that a recipe names, in `build.cuda.path` or by the agreeing pair."""
    if build.cuda and build.cuda.path:
        return build.cuda.path
    return str(build.cmake[ROOT]) if ROOT in build.cmake and COMPILER in build.cmake else None


def expand_native(text: str, capabilities: Sequence[str]) -> tuple[str, ...]:
    """Replace `native` by the compute capabilities of this host's GPUs; HostError without one.

    Configure never sees `native`: CMake settles it late, after a mismatch could be caught, and
    without a GPU it becomes something else in silence. GPUs from 12.0 on get the `a` form, which
    ggml's fast kernels for them need.
    """
    items = split_list(text)
    if items != ("native",):
        return items
    if not capabilities:
        raise HostError(
            "architecture 'native' means this machine's GPU, and there is none to be seen",
            where="nvidia-smi",
            hint="build for a named one: --set build.cmake.CMAKE_CUDA_ARCHITECTURES=90-real "
            "(121a-real for a DGX Spark)",
            id="no-gpu",
        )
    expanded = []
    for capability in sorted(set(capabilities), key=lambda c: [int(p) for p in c.split(".")]):
        number = int(capability.replace(".", ""))
        expanded.append(f"{number}{'a' if number >= 120 else ''}-real")
    return tuple(expanded)


def unverified_flags(definitions: Mapping[str, object]) -> tuple[str, ...]:
    """Definitions that switch nvcc's check of the host compiler off."""
    return tuple(name for name, value in definitions.items() if OVERRIDE in str(value))


def force(
    toolkit: Toolkit, *, host_compiler: str, search_path: str, hides_nvcc: Callable[[str], bool]
) -> Forced:
    """Give definitions, flags and environment for one toolkit.

    `host_compiler` is the C++ compiler that nvcc calls. `search_path` is the PATH to clean;
    `hides_nvcc(folder)` says whether a folder holds an nvcc. The toolkit's `bin` comes first, so
    that even in a system folder, which has to stay, no other nvcc can win.
    """
    binaries = os.path.dirname(toolkit.nvcc)
    kept = [
        folder
        for folder in search_path.split(os.pathsep)
        if folder and folder != binaries and (folder in SYSTEM_FOLDERS or not hides_nvcc(folder))
    ]
    return Forced(
        definitions={
            ROOT: toolkit.root,
            COMPILER: toolkit.nvcc,
            HOST_COMPILER: host_compiler,
        },
        flags={
            **WITHOUT_DRIVER,
            "CMAKE_CUDA_FLAGS": (
                "-Xcompiler=-ffile-prefix-map={work}=/build",
                f"-Xcompiler=-ffile-prefix-map={toolkit.root}=/cuda",
            ),
        },
        environment={
            "CUDACXX": toolkit.nvcc,
            "CUDAHOSTCXX": host_compiler,
            "CUDA_HOME": toolkit.root,
            "CUDA_PATH": toolkit.root,
            "PATH": os.pathsep.join([binaries, *kept]),
        },
    )
