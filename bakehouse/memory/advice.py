"""What would fit instead, and the refusal that says so."""

from __future__ import annotations

from collections.abc import Callable

from bakehouse.errors import HostError
from bakehouse.memory.types import Budget, Phase
from bakehouse.util.text import size_text as gib

STEP = 256
"""Contexts are advised in multiples of this."""
MOST = 2**24


def largest_context(budget_at: Callable[[int], Budget], most: int | None) -> int | None:
    """The largest context that fits, at most the model's own; None where not even 256 does.

    `budget_at` gives the budget for a context; what it needs must grow with the context. Caches
    that are not known make the answer worthless, so None is given for those too.
    """
    low, high = 0, min(most or MOST, MOST) // STEP
    probe = budget_at(STEP)
    if high < 1 or probe.unknown or not probe.fits:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if budget_at(middle * STEP).fits:
            low = middle
        else:
            high = middle - 1
    return low * STEP


def refusal(
    budget: Budget, *, context: int | None = None, quant: str | None = None, mapped: bool = False
) -> HostError:
    """The error for a budget that does not fit.

    `context` is the largest one that would, `quant` the best quantisation that would, `mapped`
    says that loading without mmap is worth trying.
    """
    what = "this does not fit: " + "; ".join(
        [
            f"{gib(purse.need)} of {purse.pool.value} needed, {gib(purse.available)} available, "
            f"of which {gib(purse.reserve)} must stay free"
            for purse in budget.purses
            if not purse.fits
        ]
        + list(budget.lacking)
    )
    hints = []
    tight = [purse for purse in budget.purses if not purse.fits]
    loading = bool(tight) and all(
        purse.available - purse.serving >= purse.reserve for purse in tight
    )
    staging = [line for line in budget.lines if line.phase is Phase.LOADING]
    if loading and staging:
        what += f" (it is loading that fails: {staging[0].item} takes {gib(staging[0].bytes)})"
        if mapped:
            hints.append("load without mmap (--load-mode none; --no-mmap in older builds)")
        else:
            hints.append("write smaller shards with `invoke reshard --max-shard 4GB`")
    if context and context < (budget.context or 0):
        hints.append(f"serve a context of at most {context}")
    if quant:
        hints.append(f"take {quant}, the largest quantisation that fits")
    hints.append("or free memory that others use")
    return HostError(
        what,
        where=budget.machine,
        hint="; ".join(hints),
        id="memory",
        checks=budget.checks(),
    )


def table(budget: Budget) -> str:
    """The budget as text, a number a line with its formula and source."""
    rows = [
        (line.item, gib(line.bytes), line.pool.value, line.phase.value, line.basis.value,
         f"{line.formula} [{line.source}]")
        for line in budget.lines
    ]  # fmt: skip
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(5)]
    text = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                row[1].rjust(widths[1]),
                *(row[i].ljust(widths[i]) for i in range(2, 5)),
                row[5],
            ]
        )
        for row in rows
    ]
    for purse in budget.purses:
        text.append(
            f"{purse.pool.value}: {gib(purse.loading)} while loading, {gib(purse.serving)} once "
            f"loaded, of {gib(purse.available)} available; {gib(purse.left)} left, "
            f"{gib(purse.reserve)} must stay free: {'fits' if purse.fits else 'does NOT fit'}"
        )
    text += [f"not counted: {item}" for item in budget.unknown]
    text += [f"lacking: {item}" for item in budget.lacking]
    return "\n".join(text)
