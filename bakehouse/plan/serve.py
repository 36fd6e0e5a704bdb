"""Recipe, lock, build and weights to the argument list of a server. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from bakehouse.engines.llamacpp import server
from bakehouse.lock import Lock
from bakehouse.places import Places
from bakehouse.plan.types import ServePlan
from bakehouse.preflight.address import bind_address
from bakehouse.recipe.argv import Origin, render
from bakehouse.recipe.model import Recipe
from bakehouse.recipe.variables import Paths, template_variables


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
) -> tuple[ServePlan, server.Features]:
    """Plan a server that runs `binary`; `host` and `port` take the place of the recipe's.

    `origin` is where the command stands in the recipe. Raises RecipeError for a template that gives
    no command, or one that sets what Bakehouse sets; UsageError for an address that must not be
    listened at.
    """
    folder = places.servers / recipe.name
    has_key = recipe.serve.api_key is not None
    address = bind_address(host or recipe.serve.host, has_key=has_key)
    chosen = recipe.serve.port if port is None else port
    variables = template_variables(recipe, server=binary, weights=weights)
    command = render(recipe.serve.command, variables, origin=origin)
    server.refuse(command, recipe, origin)
    added, alias = server.additions(
        command, name=recipe.name, host=address, port=chosen, slots=recipe.serve.slots,
        key_file=str(folder / "api-key") if has_key else None,
    )  # fmt: skip
    asked = server.features(recipe, lock, command, weights["model"].first)
    plan = ServePlan(
        name=recipe.name,
        argv=(*command, *added),
        late=(len(command) + alias,),
        env={**recipe.serve.env, "XDG_CONFIG_HOME": str(folder / "config")},
        host=address,
        port=chosen,
        expects=server.expectations(asked),
        suites=recipe.asked.suites or (),
    )
    return plan, asked
