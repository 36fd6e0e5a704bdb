"""The whole plan of a recipe: what is fetched, how it is built, how it is served.

`survey` looks at this machine, once; everything after that is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bakehouse.base import digest
from bakehouse.context import Context
from bakehouse.engines.engine import Asked
from bakehouse.engines.llamacpp.cmake import NOTHING, Extra
from bakehouse.engines.llamacpp.cuda import prepared
from bakehouse.errors import UsageError
from bakehouse.host import HostFacts, read_host
from bakehouse.lock import FilePin, GitPin, Lock
from bakehouse.places import Places
from bakehouse.plan.build import plan_build
from bakehouse.plan.image import plan_image, uses_image
from bakehouse.plan.image_build import plan_image_build
from bakehouse.plan.serve import plan_serve
from bakehouse.plan.types import BuildPlan, ImagePlan, Plan, Step
from bakehouse.recipe.load import Loaded
from bakehouse.recipe.model import Recipe
from bakehouse.recipe.template import Paths
from bakehouse.sources.weights import locate
from bakehouse.toolchain import Tools, find_tools
from bakehouse.toolkit.settle import for_builder


@dataclass(frozen=True)
class Here:
    """What this machine brings to a plan."""

    tools: Tools | None
    """None where a container image brings its own."""
    host: HostFacts
    recipe: Recipe
    """The recipe as it is built here: `native` architectures have become this machine's."""
    extra: Extra
    """What a CUDA toolkit adds."""


def survey(ctx: Context, recipe: Recipe, lock: Lock, *, make: bool = False) -> Here:
    """Find tools, host facts and toolkit; with `make` a toolkit to be provided is provided.

    Raises HostError, LockError as `find_tools` and `settle` do.
    """
    if uses_image(recipe):
        return Here(None, read_host(), for_builder(ctx, recipe), NOTHING)
    tools = find_tools(ctx)
    built, extra = prepared(ctx, recipe, lock, tools, make=make)
    return Here(tools, read_host(), built, extra)


def plan_engine(
    loaded: Loaded, lock: Lock, here: Here, places: Places, *, jobs: int | None = None
) -> BuildPlan | ImagePlan:
    """Plan build, CUDA toolkit included, or image. Raises as `plan_build` and `plan_image` do."""
    if here.tools is None and here.recipe.build:
        return plan_image_build(here.recipe, lock, here.host, jobs=jobs)
    if here.tools is None:
        return plan_image(here.recipe, lock, here.host.arch, loaded.command)

    def where(keys: tuple[str, ...]) -> tuple[str, int, int]:
        origin = loaded.origin(*keys)
        return origin.file, origin.line, origin.column

    return plan_build(
        here.recipe, lock, here.tools, here.host, places, extra=here.extra, jobs=jobs, where=where
    )


def compiled(plan: BuildPlan | ImagePlan) -> BuildPlan:
    """Give the plan of a build on this machine. Raises UsageError for an image."""
    if isinstance(plan, ImagePlan):
        raise UsageError(
            "this recipe is served from a container image, which is not supported here",
            where=f"image {plan.image}",
            hint="its image can be locked, planned, fetched and built",
            id="image",
        )
    return plan


def make_plan(
    loaded: Loaded,
    lock: Lock,
    here: Here,
    places: Places,
    *,
    host: str | None = None,
    port: int | None = None,
    jobs: int | None = None,
) -> tuple[Plan, Asked]:
    """Plan everything; also give what the server will be asked to show.

    `host` and `port` take the place of the recipe's. Raises RecipeError, UsageError, HostError.
    """
    build = plan_engine(loaded, lock, here, places, jobs=jobs)
    weights = locate(places, loaded.folder, loaded.recipe, lock)
    serve, asked = plan_serve(
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
    fetch = (*_fetch_source(lock), *_fetch_toolkit(lock), *_fetch_weights(lock, weights))
    return Plan(
        recipe=loaded.recipe.name, lock=digest(lock), fetch=fetch, build=build, serve=serve
    ), asked


def _fetch_source(lock: Lock) -> tuple[Step, ...]:
    source = lock.source
    if source is None:
        return ()
    if isinstance(source, GitPin):
        title, expects = f"git {source.url}", [f"commit {source.commit}"]
    else:
        title, expects = source.origin, _expected(source.file)
    expects += [f"patch {p.id}: sha256 {p.file.sha256}" for p in lock.patches]
    title = f"fetch the source, unless it is here: {title}"
    tree = f"git tree {lock.source_tree}"
    return (Step(id="fetch-source", title=title, expects=(*expects, tree)),)


def _fetch_toolkit(lock: Lock) -> tuple[Step, ...]:
    if lock.toolkit is None:
        return ()
    title = (
        f"fetch CUDA {lock.toolkit.version}, unless it is here: {len(lock.toolkit.wheels)} wheels"
    )
    expects = tuple(line for wheel in lock.toolkit.wheels for line in _expected(wheel))
    return (Step(id="fetch-toolkit", title=title, expects=expects),)


def _fetch_weights(lock: Lock, weights: Mapping[str, Paths]) -> tuple[Step, ...]:
    return tuple(
        Step(
            id=f"fetch-{role}",
            title=f"fetch the {role}, unless it is here: {lock.weights[role].origin}, "
            f"to {paths.path}",
            expects=tuple(line for file in lock.weights[role].files for line in _expected(file)),
        )
        for role, paths in weights.items()
    )


def _expected(file: FilePin) -> list[str]:
    return [f"{file.path}: {file.size:,} bytes, sha256 {file.sha256}"]
