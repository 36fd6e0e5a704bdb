"""Select the toolkit and the architectures of a build."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from bakehouse.context import Context
from bakehouse.errors import LockError
from bakehouse.host import compute_capabilities
from bakehouse.lock import ToolkitPin
from bakehouse.places import Places
from bakehouse.recipe.model import Build, Recipe
from bakehouse.toolkit.find import choose, find_toolkits
from bakehouse.toolkit.force import (
    ARCHITECTURES,
    COMPILER,
    ROOT,
    expand_native,
    toolkit_path,
    wants_cuda,
)
from bakehouse.toolkit.provide import provide, toolkit_folder
from bakehouse.toolkit.types import Toolkit, satisfies


@dataclass(frozen=True)
class Settled:
    """One toolkit for one build."""

    toolkit: Toolkit
    identity: str
    """Goes into the build digest."""
    version: str
    """The version in the recipe."""
    architectures: tuple[str, ...]


def settle(ctx: Context, recipe: Recipe, pin: ToolkitPin | None, *, make: bool) -> Settled | None:
    """Select the toolkit; None for a build without CUDA.

    With `make`, a toolkit from PyPI is installed; without it, it is only described, and the digest
    is the same. Raises HostError if this machine has no such toolkit, or no GPU for `native`;
    LockError if the pin is missing or of another version.
    """
    build = recipe.build
    if build is None or build.cuda is None or not wants_cuda(build):
        return None
    wanted = build.cuda.version
    architectures = _architectures(ctx, build)
    if build.cuda.provide == "pypi":
        checked = _pinned(recipe.name, pin, wanted)
        toolkit = provide(ctx, checked) if make else described(ctx.places, checked)
        identity = f"provided {toolkit_folder(ctx.places, checked).name}"
        return Settled(toolkit, identity, wanted, architectures)
    path = toolkit_path(build)
    path = os.path.expanduser(path) if path else None
    toolkit = choose(find_toolkits(ctx, (path,) if path else ()), wanted, path)
    return Settled(toolkit, toolkit.identity, wanted, architectures)


def _architectures(ctx: Context, build: Build) -> tuple[str, ...]:
    text = str(build.cmake.get(ARCHITECTURES, "native"))
    if text.strip() != "native":
        return expand_native(text, ())
    return expand_native(text, compute_capabilities(ctx.processes))


def _pinned(recipe: str, pin: ToolkitPin | None, wanted: str) -> ToolkitPin:
    if pin is None or not satisfies(pin.version, wanted):
        raise LockError(
            f"recipe {recipe} needs CUDA {wanted} from PyPI, but its lock pins "
            f"{pin.version if pin else 'no toolkit'}",
            hint=f"run: invoke lock --update --recipe {recipe}",
        )
    return pin


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


def with_architectures(recipe: Recipe, settled: Settled) -> Recipe:
    """Give the recipe as it is built here: `native` expanded, the pair left to `force`."""
    cmake = dict(recipe.build.cmake) if recipe.build else {}
    for name in (ROOT, COMPILER):
        cmake.pop(name, None)
    return _with_cmake(recipe, {**cmake, ARCHITECTURES: ";".join(settled.architectures)})


def for_builder(ctx: Context, recipe: Recipe) -> Recipe:
    """Give the recipe as a container builds it, with its own toolkit: `native` expanded.

    No build sees a GPU there, so CMake could not. Raises HostError for `native` without a GPU.
    """
    if recipe.build is None or not wants_cuda(recipe.build):
        return recipe
    architectures = ";".join(_architectures(ctx, recipe.build))
    return _with_cmake(recipe, {**recipe.build.cmake, ARCHITECTURES: architectures})


def _with_cmake(recipe: Recipe, cmake: dict[str, Any]) -> Recipe:
    build = recipe.build and recipe.build.model_copy(update={"cmake": cmake})
    return recipe.model_copy(update={"build": build})
