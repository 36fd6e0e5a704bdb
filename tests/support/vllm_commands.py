"""Recipes, locks and commands of vLLM, without an image."""

from __future__ import annotations

from typing import Any

from bakehouse.engines.base import engine_of
from bakehouse.errors import RecipeError
from bakehouse.lock import FilePin, Lock, WeightPin
from bakehouse.recipe.models import Recipe
from bakehouse.recipe.types import Origin

GOOD = ("vllm", "serve", "/weights/model", "--max-model-len", "2k")


def vllm_recipe(**over: Any) -> Recipe:
    """A small vLLM recipe; `over` replaces keys at the top level."""
    data = {
        "schema": 1, "name": "r", "engine": "vllm", "image": {"ref": {"x86_64": "a/b:1"}},
        "weights": {"model": {"path": "m"}}, "serve": {"command": "vllm serve"}, **over,
    }  # fmt: skip
    return Recipe.model_validate(data)


def vllm_lock(*paths: str) -> Lock:
    """A lock that pins these files of the model."""
    pins = tuple(FilePin(path=path, size=1, sha256="0" * 64) for path in paths)
    weights = {"model": WeightPin(origin="m/", files=pins)}
    return Lock(recipe="r", engine="vllm", wants="", weights=weights)


def command_faults(*argv: str, recipe: Recipe | None = None, lock: Lock | None = None) -> str:
    """What vLLM's rules say of a command, a line each; empty for a good one."""
    origin = Origin("recipes/x.yaml", 9, 5)
    try:
        engine_of("vllm").refuse(argv, recipe or vllm_recipe(), origin, lock)
    except RecipeError as error:
        return "\n".join(str(fault) for fault in error.faults)
    return ""
