"""A small recipe that is right, and ways to write and load others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bakehouse.errors import Fault, RecipeError
from bakehouse.recipe.loader import LoadedRecipe, load

GOOD = """\
schema: 1
name: small
engine: llama.cpp
source:
  git: https://example.org/engine.git
  commit: 8a8d0bcc4d5fdf024c457526245bec4bc3a12adc
weights:
  model: {path: model.gguf}
serve:
  context: 2048
  command: |
    {{ server }} -m {{ weights.model.first }}
    -c {{ serve.context }}
"""


def write(folder: Path, text: str | bytes, name: str = "r.yaml") -> Path:
    """Write a recipe file, and give its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def loaded(folder: Path, text: str | bytes, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load a recipe of this text."""
    return load(write(folder, text), overrides)


def faults(
    folder: Path, text: str | bytes, overrides: Sequence[str] = (), name: str = "r.yaml"
) -> tuple[Fault, ...]:
    """Give the faults of a recipe that must not load."""
    path = write(folder, text, name)
    with pytest.raises(RecipeError) as caught:
        load(path, overrides)
    assert caught.value.faults, "an error without a fault"
    assert caught.value.exit_code == 2
    return caught.value.faults


def lines(found: Sequence[Fault], folder: Path) -> list[str]:
    """Give faults as text, with file names relative to the folder."""
    return [str(f).replace(f"{folder}/", "") for f in found]
