"""Recipe, lock, build and weights to the argument list of a server. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from bakehouse.engines.engine import Asked, engine_of
from bakehouse.lock import Lock
from bakehouse.places import Places
from bakehouse.plan.container import ANY, inside, plan_container, weight_mounts
from bakehouse.plan.types import ServePlan
from bakehouse.preflight.address import bind_address
from bakehouse.recipe.faults import Origin
from bakehouse.recipe.model import Recipe
from bakehouse.recipe.template import Paths, render, template_variables


def plan_serve(
    recipe: Recipe,
    lock: Lock,
    binary: str,
    weights: Mapping[str, Paths],
    *,
    places: Places,
    origin: Origin,
    host: str | None = None,
    port: int | None = None,
    image: str | None = None,
    folder: str = "/",
) -> tuple[ServePlan, Asked]:
    """Plan a server that runs `binary`, inside a container of `image` where there is one.

    `host` and `port` take the place of the recipe's; `origin` is where the command stands in the
    recipe, `folder` what its volumes are relative to. Raises RecipeError for a template that gives
    no command, or one that sets what Bakehouse sets; UsageError for an address that must not be
    listened at.
    """
    engine = engine_of(recipe.engine)
    state = places.servers / recipe.name
    has_key = recipe.serve.api_key is not None
    address = bind_address(host or recipe.serve.host, has_key=has_key)
    chosen = recipe.serve.port if port is None else port
    seen: Mapping[str, Paths] = {role: inside(role, lock) for role in weights} if image else weights
    variables = template_variables(recipe, server=binary, weights=seen)
    command = render(recipe.serve.command, variables, origin=origin)
    engine.refuse(command, recipe, origin, lock)
    added, late = engine.additions(
        command, recipe,
        host=ANY if image else address,
        port=engine.inside_port if image else chosen,
        key_file=str(state / "api-key") if has_key and not image else None,
    )  # fmt: skip
    asked = engine.features(recipe, lock, command, engine.served(seen["model"]))
    container = None
    if image:
        container = plan_container(
            recipe, engine, image, weight_mounts(lock, weights), folder=folder, host=address,
            port=chosen,
        )  # fmt: skip
    plan = ServePlan(
        name=recipe.name,
        argv=(*command, *added),
        late=(len(command) + late,),
        env={} if image else {**recipe.serve.env, "XDG_CONFIG_HOME": str(state / "config")},
        host=address,
        port=chosen,
        expects=engine.expectations(asked),
        suites=recipe.asked.suites or (),
        container=container,
    )
    return plan, asked
