"""The task `show`: print a recipe after includes and overrides."""

from __future__ import annotations

from itertools import chain

from bakehouse import flags
from bakehouse.context import Context, Outcome
from bakehouse.recipe.export import resolved, sources, to_yaml
from bakehouse.recipe.loader import LoadedRecipe, find, load
from bakehouse.recipe.types import shown
from bakehouse.redact import Redactor, secret_values

Options = flags.Show


def run(ctx: Context, options: Options) -> Outcome:
    """Print the recipe and where its values come from. Raises NotFound, RecipeError."""
    loaded = load(find(options.recipe, ctx.recipes), options.set_)
    data = _redactor(ctx, loaded).data(resolved(loaded))
    result = {
        "recipe": data,
        "files": [shown(path) for path in loaded.files],
        "set": [f"--set {text.partition('=')[0].strip()}" for text in options.set_],
        "sources": sources(loaded, data),
    }
    return Outcome(result, to_yaml(loaded, data))


def _redactor(ctx: Context, loaded: LoadedRecipe) -> Redactor:
    """Hide the recipe's secrets, and variables with the name of a secret."""
    recipe = loaded.recipe
    given = {**(recipe.container.env if recipe.container else {}), **recipe.serve.env}
    named = secret_values(ctx.environment, recipe.secrets)
    return Redactor(chain(named, secret_values(given, recipe.secrets)))
