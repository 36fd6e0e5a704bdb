"""Select a CUDA toolkit, and force it: `cmake_overrides` gives the definitions of the pair.

CMake searches for the toolkit and for the compiler separately, and which of them decides differs:
with CMake 3.25 the toolkit's root alone decides headers and libraries, with 3.31 and later the
compiler does. So both are always given, both from the same toolkit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bakehouse.context import Context
from bakehouse.cuda.install import provide, toolkit_folder
from bakehouse.cuda.toolkit import (
    Toolkit,
    choose,
    find_toolkits,
    parse_architecture,
    satisfies,
    split_list,
)
from bakehouse.errors import HostError, LockError
from bakehouse.host import compute_capabilities
from bakehouse.lock import ToolkitPin
from bakehouse.models import Frozen
from bakehouse.paths import Places
from bakehouse.recipe.models import Build, Recipe

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
    """What configure and compile get for one toolkit."""

    definitions: dict[str, str]
    flags: dict[str, tuple[str, ...]]
    """Added to a definition; `{work}` stands for the build's work folder."""
    environment: dict[str, str]


def wants_cuda(build: Build | None) -> bool:
    """Whether the recipe asks for the CUDA backend, by CMake's rules for true."""
    value = str(build.cmake.get("GGML_CUDA")) if build else ""
    return value.upper() in {"1", "ON", "YES", "TRUE", "Y"}


_REFUSED = {
    "CUDA_TOOLKIT_ROOT_DIR": (
        "CUDA_TOOLKIT_ROOT_DIR belongs to a CMake module that is no longer used",
        "name the toolkit in build.cuda.path",
    ),
    HOST_COMPILER: (
        "the host compiler is the one that compiles all other C++ as well",
        "set CC and CXX in the environment, such as CC=gcc-13 CXX=g++-13",
    ),
}


def conflicts(
    build: Build | None, resolve: Callable[[str], str] = os.path.realpath
) -> Iterator[Conflict]:
    """Find every contradiction about CUDA in a recipe's `build`; `resolve` follows links."""
    if build is None:
        return
    for name, (message, hint) in _REFUSED.items():
        if name in build.cmake:
            yield Conflict(("build", "cmake", name), message, hint)
    yield from _builder_conflicts(build) if build.where == "docker" else _pair(build, resolve)
    if not wants_cuda(build):
        if build.cuda is not None:
            message = "a CUDA toolkit is named, but the CUDA backend is not enabled"
            hint = "set build.cmake.GGML_CUDA: true, or leave build.cuda out"
            yield Conflict(("build", "cuda"), message, hint)
        return
    if build.cuda is None:
        message = "the CUDA backend is enabled, but no toolkit is named"
        hint = 'add build.cuda, such as cuda: {version: "13.0"}'
        yield Conflict(("build", "cmake", "GGML_CUDA"), message, hint)
    text = build.cmake.get(ARCHITECTURES)
    if text is None:
        message = f"{ARCHITECTURES} is missing: the build would depend on the machine"
        hint = "write native for this machine's GPU, or names such as 90-real or 121a-real"
        yield Conflict(("build", "cmake"), message, hint)
        return
    items = split_list(str(text))
    bad = [i for i in items if i != "native" and parse_architecture(i) is None]
    if not items or bad or ("native" in items and len(items) > 1):
        message = f"'{', '.join(bad) or text}' is not a list of architectures that can be checked"
        hint = "write native alone, or names such as 90-real;121a-real (';' between them)"
        yield Conflict(("build", "cmake", ARCHITECTURES), message, hint)


def _builder_conflicts(build: Build) -> Iterator[Conflict]:
    """A container builds with the toolkit of its builder image; a recipe cannot name another."""
    cuda = build.cuda
    named = {
        ("build", "cuda", "provide"): cuda is not None and cuda.provide != "host",
        ("build", "cuda", "path"): cuda is not None and cuda.path is not None,
        **{("build", "cmake", name): name in build.cmake for name in (ROOT, COMPILER)},
    }
    hint = "leave it out, and name a builder image with that toolkit in build.bases"
    for keys in (keys for keys, is_set in named.items() if is_set):
        message = f"{keys[-1]} names a toolkit, but this build uses the one in its builder image"
        yield Conflict(keys, message, hint)


def _pair(build: Build, resolve: Callable[[str], str]) -> Iterator[Conflict]:
    """Root and compiler, if the recipe names them: both, inside one toolkit, and no other."""
    named = [name for name in (ROOT, COMPILER) if name in build.cmake]
    if not named:
        return
    cuda = build.cuda
    root, compiler = str(build.cmake.get(ROOT)), str(build.cmake.get(COMPILER))
    inside = os.path.join(root, "bin", os.path.basename(compiler))
    if len(named) == 1:
        name = named[0]
        other = COMPILER if name == ROOT else ROOT
        message = f"{name} is set without {other}: CMake would search for the other one by itself"
        hint = "leave both out and name the toolkit in build.cuda, or set both to one toolkit"
    elif resolve(inside) != resolve(compiler):
        name, message = COMPILER, f"{COMPILER} is {compiler}, but {ROOT} is {root}: two toolkits"
        hint = "leave both out and name the toolkit in build.cuda.path"
    elif cuda and (cuda.provide != "host" or (cuda.path and resolve(cuda.path) != resolve(root))):
        name, message = ROOT, f"{ROOT} is {root}, but build.cuda names another toolkit"
        hint = "leave the two CMake definitions out; build.cuda is enough"
    else:
        return
    yield Conflict(("build", "cmake", name), message, hint)


def toolkit_path(build: Build) -> str | None:
    """Give the folder that a recipe names, in `build.cuda.path` or by the pair of definitions."""
    if build.cuda and build.cuda.path:
        return build.cuda.path
    return str(build.cmake[ROOT]) if ROOT in build.cmake and COMPILER in build.cmake else None


def expand_native(text: str, capabilities: Sequence[str]) -> tuple[str, ...]:
    """Replace `native` by the compute capabilities of this host's GPUs.

    Configure never sees `native`: CMake resolves it late, after a mismatch could be caught, and
    silently takes something else without a GPU. GPUs from 12.0 on get the `a` form, which ggml's
    fast kernels for them need. Raises HostError for `native` without a GPU.
    """
    items = split_list(text)
    if items != ("native",):
        return items
    if not capabilities:
        raise HostError(
            "architecture 'native' means this machine's GPU, but no GPU was found",
            where="nvidia-smi",
            hint="name an architecture: --set build.cmake.CMAKE_CUDA_ARCHITECTURES=90-real "
            "(121a-real for a DGX Spark)",
            id="no-gpu",
        )
    found = sorted({int(capability.replace(".", "")) for capability in capabilities})
    return tuple(f"{number}{'a' if number >= 120 else ''}-real" for number in found)


def unverified_flags(definitions: Mapping[str, object]) -> tuple[str, ...]:
    """Name the definitions that switch off nvcc's check of the host compiler."""
    return tuple(name for name, value in definitions.items() if OVERRIDE in str(value))


def cmake_overrides(
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


@dataclass(frozen=True)
class SelectedToolkit:
    """One toolkit for one build."""

    toolkit: Toolkit
    identity: str
    """Goes into the build digest."""
    version: str
    """The version in the recipe."""
    architectures: tuple[str, ...]


def select_toolkit(
    ctx: Context, recipe: Recipe, pin: ToolkitPin | None, *, make: bool
) -> SelectedToolkit | None:
    """Select the toolkit; None for a build without CUDA.

    With `make`, a toolkit from PyPI is installed; without it, it is only described, and the digest
    is the same. Raises HostError if this machine has no such toolkit, or no GPU for `native`;
    LockError if the pin is missing or of another version.
    """
    build = recipe.build
    if build is None or build.cuda is None or not wants_cuda(build):
        return None
    wanted = build.cuda.version
    architectures = _requested_architectures(ctx, build)
    if build.cuda.provide == "pypi":
        if pin is None or not satisfies(pin.version, wanted):
            raise LockError(
                f"recipe {recipe.name} needs CUDA {wanted} from PyPI, but its lock pins "
                f"{pin.version if pin else 'no toolkit'}",
                hint=f"run: invoke lock --update --recipe {recipe.name}",
            )
        toolkit = provide(ctx, pin) if make else described(ctx.places, pin)
        identity = f"provided {toolkit_folder(ctx.places, pin).name}"
        return SelectedToolkit(toolkit, identity, wanted, architectures)
    path = toolkit_path(build)
    path = os.path.expanduser(path) if path else None
    toolkit = choose(find_toolkits(ctx, (path,) if path else ()), wanted, path)
    return SelectedToolkit(toolkit, toolkit.identity, wanted, architectures)


def _requested_architectures(ctx: Context, build: Build) -> tuple[str, ...]:
    text = str(build.cmake.get(ARCHITECTURES, "native"))
    if text.strip() != "native":
        return expand_native(text, ())
    return expand_native(text, compute_capabilities(ctx.processes))


def described(places: Places, pin: ToolkitPin) -> Toolkit:
    """Describe a toolkit from PyPI before it is installed: its paths and its version."""
    root = toolkit_folder(places, pin)
    library = root / "lib"
    major = pin.version.split(".", 1)[0]
    return Toolkit(
        root=str(root),
        origins=(f"to be provided: PyPI, release {pin.release}",),
        version=pin.version,
        nvcc=str(root / "bin" / "nvcc"),
        include=str(root / "include"),
        headers=pin.version.rsplit(".", 1)[0],
        library=str(library),
        libraries={n: f"{library}/lib{n}.so.{major}" for n in ("cudart", "cublas", "cublasLt")},
    )


def with_architectures(recipe: Recipe, selected: SelectedToolkit) -> Recipe:
    """Give the recipe as it is built here: `native` expanded, without the forced pair."""
    cmake = dict(recipe.build.cmake) if recipe.build else {}
    for name in (ROOT, COMPILER):
        cmake.pop(name, None)
    return _with_cmake(recipe, {**cmake, ARCHITECTURES: ";".join(selected.architectures)})


def for_builder(ctx: Context, recipe: Recipe) -> Recipe:
    """Give the recipe as a container builds it, with its own toolkit: `native` expanded.

    No build sees a GPU there, so CMake could not. Raises HostError for `native` without a GPU.
    """
    if recipe.build is None or not wants_cuda(recipe.build):
        return recipe
    architectures = ";".join(_requested_architectures(ctx, recipe.build))
    return _with_cmake(recipe, {**recipe.build.cmake, ARCHITECTURES: architectures})


def _with_cmake(recipe: Recipe, cmake: dict[str, Any]) -> Recipe:
    build = recipe.build and recipe.build.model_copy(update={"cmake": cmake})
    return recipe.model_copy(update={"build": build})
