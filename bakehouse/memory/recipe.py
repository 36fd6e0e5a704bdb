"""A recipe's budget on a machine: what `plan` prints and `serve` judges by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bakehouse.host import read_gpus, read_host
from bakehouse.lock import Lock
from bakehouse.memory.advice import largest_context
from bakehouse.memory.budget import make_budget
from bakehouse.memory.demand import demand_of
from bakehouse.memory.machine import Machine, this_machine
from bakehouse.memory.types import Budget
from bakehouse.memory.weight import Weight
from bakehouse.ports.process import Processes
from bakehouse.recipe.model import Recipe


def find_machine(processes: Processes) -> Machine:
    """Ask this machine for its memory, and its GPUs' through nvidia-smi where there is one."""
    return this_machine(read_host(), read_gpus(processes))


def locked_weights(lock: Lock, files: Mapping[str, Sequence[str]]) -> dict[str, Weight]:
    """The weights of a lock; headers are read of roles whose files are on this machine.

    `files` maps a role to the paths at which its files are or will be. Raises CheckpointError for
    files that are there and damaged.
    """
    return {
        role: Weight.locate(pin, [Path(name) for name in files.get(role, ())])
        for role, pin in lock.weights.items()
    }


def recipe_budget(
    machine: Machine, recipe: Recipe, weights: Mapping[str, Weight], argv: Sequence[str] = ()
) -> Budget:
    """The budget of a recipe; `argv` is the rendered command, where there is one."""
    demand = demand_of(recipe, argv)
    return make_budget(machine, demand, weights, measured=recipe.memory.measured,
                       reserve=recipe.memory.reserve)  # fmt: skip


def best_context(
    machine: Machine, recipe: Recipe, weights: Mapping[str, Weight], argv: Sequence[str] = ()
) -> int | None:
    """The largest context with which the recipe fits; None where none does, or none is known."""
    demand = demand_of(recipe, argv)
    shape = weights["model"].shape
    if shape is None or recipe.memory.measured:
        return None
    limits = [n for n in (shape.context_limit, recipe.serve.context_max) if n]
    return largest_context(
        lambda tokens: make_budget(machine, replace(demand, context=tokens), weights,
                                   reserve=recipe.memory.reserve),
        min(limits, default=None),
    )  # fmt: skip
