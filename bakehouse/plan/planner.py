"""Plan a whole recipe: fetch, build and serve.

`inspect_host` inspects this machine, once a command; everything after that is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bakehouse.context import Context
from bakehouse.cuda.configure import for_builder, wants_cuda
from bakehouse.cuda.install import provide
from bakehouse.engines.base import Requirements
from bakehouse.engines.llamacpp.cmake import NOTHING, Extra, prepared
from bakehouse.host import HostFacts, read_host
from bakehouse.lock import FilePin, GitPin, Lock
from bakehouse.models import digest
from bakehouse.paths import Places
from bakehouse.plan.build import plan_build
from bakehouse.plan.image import plan_image, plan_image_build, uses_image
from bakehouse.plan.serve import plan_serve
from bakehouse.plan.types import BuildPlan, ImagePlan, Plan, Step
from bakehouse.recipe.loader import LoadedRecipe
from bakehouse.recipe.models import Recipe
from bakehouse.recipe.template import Paths
from bakehouse.sources.weights import locate
from bakehouse.toolchain import Tools, find_tools


@dataclass(frozen=True)
class HostEnvironment:
    """This machine's part of a plan."""

    tools: Tools | None
    """None for a container image, which has its own."""
    host: HostFacts
    recipe: Recipe
    """The recipe as it is built here: `native` expanded to this machine's GPUs."""
    extra: Extra
    """Added by a CUDA toolkit."""


def inspect_host(
    ctx: Context, recipe: Recipe, lock: Lock, *, make: bool = False
) -> HostEnvironment:
    """Find tools, host facts and toolkit; `make` installs a toolkit that is to be provided.

    Raises HostError, LockError as `find_tools` and `select_toolkit` do.
    """
    if uses_image(recipe):
        return HostEnvironment(None, read_host(), for_builder(ctx, recipe), NOTHING)
    tools = find_tools(ctx)
    built, extra = prepared(ctx, recipe, lock, tools, make=make)
    return HostEnvironment(tools, read_host(), built, extra)


def provide_toolkit(ctx: Context, recipe: Recipe, lock: Lock) -> None:
    """Install the CUDA toolkit that the lock pins, if the build uses it. Raises HostError."""
    build = recipe.build
    cuda = build.cuda if build and wants_cuda(build) else None
    if cuda and cuda.provide == "pypi" and lock.toolkit:
        provide(ctx, lock.toolkit)


def plan_engine(
    loaded: LoadedRecipe,
    lock: Lock,
    machine: HostEnvironment,
    places: Places,
    *,
    jobs: int | None = None,
) -> BuildPlan | ImagePlan:
    """Plan the build or the image. Raises as `plan_build` and `plan_image` do."""
    if machine.tools is None and machine.recipe.build:
        return plan_image_build(machine.recipe, lock, machine.host, jobs=jobs)
    if machine.tools is None:
        return plan_image(machine.recipe, lock, machine.host.arch, loaded.command)
    return plan_build(
        machine.recipe, lock, machine.tools, machine.host, places, extra=machine.extra, jobs=jobs,
        where=lambda keys: loaded.origin(*keys),
    )  # fmt: skip


def make_plan(
    loaded: LoadedRecipe,
    lock: Lock,
    machine: HostEnvironment,
    places: Places,
    *,
    host: str | None = None,
    port: int | None = None,
    jobs: int | None = None,
) -> tuple[Plan, Requirements]:
    """Plan everything; also return the server's expected features.

    `host` and `port` override the recipe's. Raises RecipeError, UsageError, HostError.
    """
    build = plan_engine(loaded, lock, machine, places, jobs=jobs)
    weights = locate(places, loaded.folder, loaded.recipe, lock)
    serve, requirements = plan_serve(
        loaded.recipe,
        lock,
        build.server,
        weights,
        places=places,
        origin=loaded.origin("serve", "command"),
        host=host,
        port=port,
        image=build.image if isinstance(build, ImagePlan) else None,
        folder=str(loaded.folder.absolute()),
    )
    return Plan(
        recipe=loaded.recipe.name, lock=digest(lock), fetch=_fetch_steps(lock, weights),
        build=build, serve=serve,
    ), requirements  # fmt: skip


def _fetch_steps(lock: Lock, weights: Mapping[str, Paths]) -> tuple[Step, ...]:
    steps = []
    if source := lock.source:
        if isinstance(source, GitPin):
            origin, expects = f"git {source.url}", [f"commit {source.commit}"]
        else:
            origin, expects = source.origin, [_expected(source.file)]
        expects += [f"patch {p.id}: sha256 {p.file.sha256}" for p in lock.patches]
        expects.append(f"git tree {lock.source_tree}")
        title = f"fetch the source, unless it is here: {origin}"
        steps.append(Step(id="fetch-source", title=title, expects=tuple(expects)))
    if pin := lock.toolkit:
        title = f"fetch CUDA {pin.version}, unless it is here: {len(pin.wheels)} wheels"
        wheels = tuple(map(_expected, pin.wheels))
        steps.append(Step(id="fetch-toolkit", title=title, expects=wheels))
    for role, paths in weights.items():
        origin, files = lock.weights[role].origin, lock.weights[role].files
        title = f"fetch the {role}, unless it is here: {origin}, to {paths.path}"
        steps.append(Step(id=f"fetch-{role}", title=title, expects=tuple(map(_expected, files))))
    return tuple(steps)


def _expected(file: FilePin) -> str:
    return f"{file.path}: {file.size:,} bytes, sha256 {file.sha256}"
