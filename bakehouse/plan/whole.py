"""The whole plan of a recipe: what is fetched, how it is built, how it is served.

`survey` looks at this machine, once; everything after that is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bakehouse.base import digest
from bakehouse.context import Context
from bakehouse.engines.llamacpp.cmake import Extra
from bakehouse.engines.llamacpp.cuda import prepared
from bakehouse.engines.llamacpp.server import Features
from bakehouse.errors import UsageError
from bakehouse.host import HostFacts, read_host
from bakehouse.lock import FilePin, GitPin, Lock
from bakehouse.places import Places
from bakehouse.plan.build import plan_build
from bakehouse.plan.serve import plan_serve
from bakehouse.plan.types import BuildPlan, Plan, Step
from bakehouse.recipe.load import Loaded
from bakehouse.recipe.model import Recipe
from bakehouse.recipe.variables import Paths
from bakehouse.sources.weights import locate
from bakehouse.toolchain import Tools, find_tools


@dataclass(frozen=True)
class Here:
    """What this machine brings to a plan."""

    tools: Tools
    host: HostFacts
    recipe: Recipe
    """The recipe as it is built here: `native` architectures have become this machine's."""
    extra: Extra
    """What a CUDA toolkit adds."""


def survey(ctx: Context, recipe: Recipe, lock: Lock, *, make: bool = False) -> Here:
    """Find tools, host facts and toolkit; with `make` a toolkit to be provided is provided.

    Raises UsageError for an engine that is not built; HostError, LockError as `find_tools` and
    `settle` do.
    """
    if recipe.engine != "llama.cpp":
        raise UsageError(
            f"planning {recipe.engine} is not supported yet",
            where=f"recipe {recipe.name}, engine",
            hint="recipes with engine: llama.cpp can be planned, built and served",
            id="engine",
        )
    tools = find_tools(ctx)
    built, extra = prepared(ctx, recipe, lock, tools, make=make)
    return Here(tools, read_host(), built, extra)


def plan_engine(
    loaded: Loaded, lock: Lock, here: Here, places: Places, *, jobs: int | None = None
) -> BuildPlan:
    """Plan the build, its CUDA toolkit included. Raises as `plan_build` does."""

    def where(keys: tuple[str, ...]) -> tuple[str, int, int]:
        origin = loaded.origin(*keys)
        return origin.file, origin.line, origin.column

    return plan_build(
        here.recipe, lock, here.tools, here.host, places, extra=here.extra, jobs=jobs, where=where
    )


def make_plan(
    loaded: Loaded,
    lock: Lock,
    here: Here,
    places: Places,
    *,
    host: str | None = None,
    port: int | None = None,
    jobs: int | None = None,
) -> tuple[Plan, Features]:
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
    )
    fetch = (_fetch_source(lock), *_fetch_toolkit(lock), *_fetch_weights(lock, weights))
    return Plan(
        recipe=loaded.recipe.name, lock=digest(lock), fetch=fetch, build=build, serve=serve
    ), asked


def _fetch_source(lock: Lock) -> Step:
    source = lock.source
    if isinstance(source, GitPin):
        title, expects = f"git {source.url}", [f"commit {source.commit}"]
    elif source:
        title, expects = source.origin, _expected(source.file)
    else:
        title, expects = "nothing", []
    expects += [f"patch {p.id}: sha256 {p.file.sha256}" for p in lock.patches]
    return Step(
        id="fetch-source",
        title=f"fetch the source, unless it is here: {title}",
        expects=(*expects, f"git tree {lock.source_tree}"),
    )


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
