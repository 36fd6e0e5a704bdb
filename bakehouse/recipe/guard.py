"""The limits of the memory guard in a recipe."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from bakehouse.base import Frozen
from bakehouse.recipe.scalars import Flag, Misplaced, Number, Size


class MemoryGuard(Frozen):
    """When a server that eats up the machine's memory is warned about, and when it is stopped.

    What is left out goes by the machine: see `serve.guard.Bounds.usual`.
    """

    enabled: Flag = True
    warn: Size | None = None
    """Memory that can still be had (MemAvailable) below which a warning is noted."""
    stop: Size | None = None
    """Memory below which the server is stopped."""
    stall: Annotated[Number, Field(gt=0, le=1)] | None = None
    """Share of a second in which every task waits for memory; stops the server once below warn."""
    swap: Size | None = None
    """Bytes swapped in a second, in and out together; stop the server once below warn."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.warn is not None and self.stop is not None and self.warn < self.stop:
            raise Misplaced(
                f"warn is {self.warn} bytes, below stop at {self.stop}: there would be no warning",
                "warn",
            )
        return self
