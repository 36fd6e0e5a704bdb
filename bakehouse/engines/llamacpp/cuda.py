"""What a CUDA toolkit adds to a llama.cpp build, and the rule that accepts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from bakehouse.checks import Check
from bakehouse.context import Context
from bakehouse.engines.configured import Configured, CudaExpected, Expected
from bakehouse.engines.llamacpp.cmake import NOTHING, Extra, asked
from bakehouse.lock import Lock
from bakehouse.ports import fixed_path
from bakehouse.ports.process import environment
from bakehouse.recipe.model import Recipe
from bakehouse.toolchain import Tools
from bakehouse.toolkit.accept import UNVERIFIED, accept_configure, refuse
from bakehouse.toolkit.force import force
from bakehouse.toolkit.settle import settle, with_architectures
from bakehouse.toolkit.types import Requested

PLACE = "/tmp/bakehouse-build"  # noqa: S108 - only a mount point, in a namespace of our own
"""Where nvcc sees every build, so that the path that it hashes into symbols is always the same."""
PROBE_S = 10.0


def fixed_place(ctx: Context) -> str:
    """Why the work folder cannot be mounted at PLACE on this machine; empty if it can."""
    argv = (*mounting(PLACE), "true")
    said = ctx.processes.capture(argv, env=environment(), timeout=PROBE_S)
    return "" if said.ok else (said.err.strip().splitlines() or [f"exit code {said.code}"])[0]


def mounting(folder: str) -> tuple[str, ...]:
    """Give the arguments before a command that has to see a folder at PLACE."""
    return (sys.executable, "-I", "-S", str(Path(fixed_path.__file__)), folder, PLACE, "--")


def prepared(
    ctx: Context, recipe: Recipe, lock: Lock, tools: Tools, *, make: bool
) -> tuple[Recipe, Extra]:
    """Give what `plan_build` takes: the recipe as built here, and what the toolkit adds.

    `plan` only describes (`make=False`); `build` and `serve` install a toolkit from PyPI first.
    Both give the same digest. Raises what `toolkit.settle.settle` raises.
    """
    settled = settle(ctx, recipe, lock.toolkit, make=make)
    if settled is None:
        return recipe, NOTHING
    recipe = with_architectures(recipe, settled)
    # Without a fixed path, the objects carry the path of the builds folder.
    why_not = fixed_place(ctx)
    forced = force(
        settled.toolkit,
        host_compiler=tools.cxx.path,
        search_path=tools.search_path,
        hides_nvcc=lambda folder: os.path.exists(os.path.join(folder, "nvcc")),
    )
    requested = Requested(
        version=settled.version,
        architectures=settled.architectures,
        definitions=asked(recipe.build.cmake if recipe.build else {}),
    )
    reason = f"nvcc writes the folder's path into what it makes, and {why_not}" if why_not else ""
    return recipe, Extra(
        paths=forced.definitions,
        flags=forced.flags,
        tools={"cuda": settled.identity, "path": str(ctx.places.builds) if why_not else PLACE},
        # No `compilers`: CMake 3.25's file API gives no version for CUDA (seen); its log does, and
        # the rule below compares compiler and version with the toolkit.
        path_environment=forced.environment,
        cuda=CudaExpected(toolkit=settled.toolkit, requested=requested),
        place=None if why_not else PLACE,
        mount=() if why_not else mounting("{work}"),
        not_reproducible=reason,
    )


def cuda(configured: Configured, expected: Expected) -> Iterable[Check]:
    """Rule: CMake's log and cache prove a correct CUDA build."""
    if expected.cuda is None:
        return ()
    cache = "\n".join(f"{n}:{e.type}={e.value}" for n, e in configured.cache.items())
    return accept_configure(
        "\n".join(configured.log),
        cache,
        expected.cuda.toolkit,
        _requested(configured, expected.cuda),
        expected.cuda.resolve,
    )


def _requested(configured: Configured, cuda: CudaExpected) -> Requested:
    return cuda.requested.model_copy(update={"log": configured.log_path})


def refuse_cuda(configured: Configured, expected: Expected, checks: tuple[Check, ...]) -> None:
    """Raise BuildFailed with CMake's two lines, both paths and the fix, if a CUDA check failed."""
    if expected.cuda is not None:
        of_cuda = tuple(c for c in checks if c.id.startswith("cuda."))
        requested = _requested(configured, expected.cuda)
        refuse(of_cuda, "\n".join(configured.log), expected.cuda.toolkit, requested)


def decisive(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Those that have to pass: a recipe may switch off nvcc's own check, and is unverified then."""
    return tuple(c for c in checks if c.id != UNVERIFIED)
