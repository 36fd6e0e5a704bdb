"""The memory that serving takes, as far as a recipe knows it."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from bakehouse.base import Frozen
from bakehouse.recipe.scalars import Size, Text


class Measured(Frozen):
    """A figure that somebody measured, in place of what would be computed or assumed."""

    what: Literal["weights", "cache", "compute", "engine", "staging", "left"]
    """`left`: what the machine still had available once the server was loaded; it stands for all
    but the weights, and proves that loading went through."""
    size: Size
    source: Text
    """Who measured it, where."""
    of: Size | None = None
    """For `left`: the memory of the machine that it was measured on."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.what == "left") != (self.of is not None):
            raise ValueError("`of` belongs to `left`, and `left` needs it")
        return self


class Memory(Frozen):
    """What is known about the memory that serving takes."""

    measured: tuple[Measured, ...] = ()
    reserve: Size | None = None
    """What must stay free, in place of the default."""
