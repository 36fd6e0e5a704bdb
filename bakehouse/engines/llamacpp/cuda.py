"""What a CUDA toolkit brings to a llama.cpp build, and the rules by which it is accepted."""

from __future__ import annotations

import os
from collections.abc import Iterable

from bakehouse.checks import Check
from bakehouse.context import Context
from bakehouse.engines.configured import Configured, CudaExpected, Expected
from bakehouse.engines.llamacpp.cmake import NOTHING, Extra, asked
from bakehouse.lock import Lock
from bakehouse.recipe.model import Recipe
from bakehouse.toolchain import Tools
from bakehouse.toolkit.accept import UNVERIFIED, accept_configure, refuse
from bakehouse.toolkit.force import force
from bakehouse.toolkit.settle import Settled, settle, with_architectures
from bakehouse.toolkit.types import Requested


def cuda_extra(recipe: Recipe, settled: Settled, tools: Tools) -> Extra:
    """Give what forces one toolkit; `recipe` is what `settle.with_architectures` made."""
    forced = force(
        settled.toolkit,
        host_compiler=tools.cxx.path,
        search_path=tools.search_path,
        hides_nvcc=lambda folder: os.path.exists(os.path.join(folder, "nvcc")),
    )
    cmake = recipe.build.cmake if recipe.build else {}
    requested = Requested(
        version=settled.version, architectures=settled.architectures, definitions=asked(cmake)
    )
    return Extra(
        paths=forced.definitions,
        flags=forced.flags,
        tools={"cuda": settled.identity},
        # No `compilers`: CMake 3.25's file API gives no version for CUDA (seen); its log does, and
        # the rule below holds compiler and version against the toolkit.
        path_environment=forced.environment,
        cuda=CudaExpected(toolkit=settled.toolkit, requested=requested),
    )


def cuda(configured: Configured, expected: Expected) -> Iterable[Check]:
    """Rule: CMake's own words prove a right CUDA build."""
    if expected.cuda is None:
        return ()
    cache = "\n".join(f"{n}:{e.type}={e.value}" for n, e in configured.cache.items())
    return accept_configure(
        "\n".join(configured.log),
        cache,
        expected.cuda.toolkit,
        _requested(configured, expected.cuda),
    )


def _requested(configured: Configured, cuda: CudaExpected) -> Requested:
    return cuda.requested.model_copy(update={"log": configured.log_path})


def refuse_cuda(configured: Configured, expected: Expected, checks: tuple[Check, ...]) -> None:
    """Raise BuildFailed with CMake's two lines, both paths and the mend, if a CUDA check failed."""
    if expected.cuda is not None:
        of_cuda = tuple(c for c in checks if c.id.startswith("cuda."))
        requested = _requested(configured, expected.cuda)
        refuse(of_cuda, "\n".join(configured.log), expected.cuda.toolkit, requested)


def decisive(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Those that have to pass; a recipe that switched nvcc's own check off stays unverified."""
    return tuple(c for c in checks if c.id != UNVERIFIED)


def prepared(
    ctx: Context, recipe: Recipe, lock: Lock, tools: Tools, *, make: bool
) -> tuple[Recipe, Extra]:
    """Give what `plan_build` takes: the recipe as built here, and what the toolkit brings.

    `plan` only describes (`make=False`); `build` and `serve` have a toolkit that is to be provided
    laid out first. Both give the same digest. Raises what `toolkit.settle.settle` raises.
    """
    settled = settle(ctx, recipe, lock.toolkit, make=make)
    if settled is None:
        return recipe, NOTHING
    built = with_architectures(recipe, settled)
    return built, cuda_extra(built, settled, tools)
