"""A memory budget: every number with its formula, its source, and whether anybody measured it."""

from __future__ import annotations

from enum import StrEnum

from bakehouse.base import Frozen
from bakehouse.checks import Check, check
from bakehouse.util.text import size_text as gib

GIB = 2**30


class Basis(StrEnum):
    """How a number came to be."""

    MEASURED = "measured"
    COMPUTED = "computed"
    """From sizes and figures that files declare."""
    ASSUMED = "assumed"
    """A rule of thumb; its source says whose."""


class Pool(StrEnum):
    """Which memory a line draws on."""

    SYSTEM = "memory"
    """The machine's memory; on a unified machine the accelerator's too."""
    GPU = "GPU memory"


class Phase(StrEnum):
    """When memory is held."""

    ALWAYS = "always"
    LOADING = "while loading"
    SERVING = "once loaded"


class Line(Frozen):
    """One number of a budget, in bytes."""

    item: str
    bytes: int
    formula: str
    source: str
    basis: Basis
    pool: Pool = Pool.SYSTEM
    phase: Phase = Phase.ALWAYS


class Purse(Frozen):
    """One pool of a machine against what is asked of it, in bytes."""

    pool: Pool
    total: int
    available: int
    reserve: int
    loading: int
    """The most that is held while weights are loaded."""
    serving: int
    """What is held once the server runs."""

    @property
    def need(self) -> int:
        """The larger of both."""
        return max(self.loading, self.serving)

    @property
    def left(self) -> int:
        """What is left of the available memory once the server runs; negative where it lacks."""
        return self.available - self.serving

    @property
    def fits(self) -> bool:
        """Whether both phases leave the reserve untouched."""
        return self.available - self.need >= self.reserve


class Budget(Frozen):
    """What serving a recipe takes on a machine."""

    machine: str
    context: int | None
    """Tokens, over all sequences."""
    lines: tuple[Line, ...]
    purses: tuple[Purse, ...]
    unknown: tuple[str, ...] = ()
    """What could not be counted; with any of these, fitting is not proven."""
    lacking: tuple[str, ...] = ()
    """What cannot work whatever the machine has left."""

    @property
    def fits(self) -> bool:
        """Whether every pool holds out, as far as it could be counted."""
        return not self.lacking and all(purse.fits for purse in self.purses)

    def checks(self) -> tuple[Check, ...]:
        """One check a pool, one for each thing that lacks; not passed while anything is unknown."""
        made = []
        for purse in self.purses:
            phase = "while loading" if purse.loading > purse.serving else "once loaded"
            observed = (
                f"{gib(purse.need)} needed {phase} of {gib(purse.available)} available, "
                f"{gib(purse.available - purse.need)} left"
            )
            if self.unknown:
                observed += "; not counted: " + "; ".join(self.unknown)
            ok = purse.fits if not (purse.fits and self.unknown) else None
            name = "memory-fits-gpu" if purse.pool is Pool.GPU else "memory-fits"
            wanted = f"at least {gib(purse.reserve)} of {purse.pool.value} stay free"
            made.append(check(name, wanted, observed, self.machine, ok=ok))
        for lack in self.lacking:
            wanted = "room for the cache of the served context"
            made.append(check("memory-cache", wanted, lack, self.machine, ok=False))
        return tuple(made)
