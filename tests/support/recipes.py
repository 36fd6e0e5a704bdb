"""Recipes for tests that are about what is locked, not about how it is served."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bakehouse.models import to_json
from bakehouse.recipe.loader import LoadedRecipe, load

SHA = "0" * 64


def recipe_data(**over: Any) -> dict[str, Any]:
    """A recipe as plain data; a key that is None is left out."""
    data: dict[str, Any] = {
        "schema": 1,
        "name": "test",
        "engine": "llama.cpp",
        "source": {"archive": {"path": "a.tar.gz", "sha256": SHA}},
        "weights": {"model": {"path": "model.gguf"}},
        "serve": {"command": "{{ server }} -m {{ weights.model.first }}"},
    }
    data |= over
    return {key: value for key, value in data.items() if value is not None}


def write_recipe(folder: Path, data: Mapping[str, Any], name: str = "test") -> Path:
    """Write a recipe (JSON is YAML) and give its path."""
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(dict(data)))
    return path


def make_loaded(folder: Path, **over: Any) -> LoadedRecipe:
    """Write a recipe and load it."""
    return load(write_recipe(folder, recipe_data(**over)))
