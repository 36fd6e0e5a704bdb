"""The last checks before weights are loaded: the files themselves, and whether they fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bakehouse.checks import Check, Verdict
from bakehouse.context import Context
from bakehouse.errors import BakehouseError, CheckpointError
from bakehouse.lock import Lock
from bakehouse.memory.advice import refusal
from bakehouse.memory.machine import Machine
from bakehouse.memory.recipe import (
    best_context,
    find_machine,
    locked_weights,
    recipe_budget,
)
from bakehouse.memory.types import Budget, Pool
from bakehouse.memory.weight import Weight
from bakehouse.ports.git import Git, GitFailed
from bakehouse.preflight.combinations import types_in
from bakehouse.preflight.listing import fitting_quant
from bakehouse.preflight.weights import ARCHITECTURE_TABLE, Inspected, architectures_in, inspect
from bakehouse.recipe.model import Recipe
from bakehouse.sources.tree import repository_of


@dataclass(frozen=True)
class Admission:
    """The checks of the weights, and the memory budget."""

    checks: tuple[Check, ...]
    budget: Budget
    types: frozenset[str]
    """Tensor types in the headers."""


def source_architectures(ctx: Context, lock: Lock) -> frozenset[str] | None:
    """Return the architectures that the patched source supports; None if it cannot be read."""
    if lock.source is None or lock.source_tree is None:
        return None
    place = f"{lock.source_tree}:{ARCHITECTURE_TABLE}"
    try:
        git = Git(ctx.processes, ctx.environment)
        text = git.ask(repository_of(ctx.places, lock.source), "cat-file", "blob", place)
    except (GitFailed, BakehouseError):
        return None
    return architectures_in(text) or None


def admit(
    ctx: Context,
    recipe: Recipe,
    lock: Lock,
    files: Mapping[str, Sequence[str]],
    argv: Sequence[str],
    *,
    risk_accepted: bool = False,
    machine: Machine | None = None,
) -> Admission:
    """Check weights that are all on this machine; `argv` is the server's command.

    Raises CheckpointError (exit 4) for files that cannot be served, HostError (exit 9) if they do
    not fit, unless `risk_accepted`. Unknown results are reported and not refused.
    """
    paths = {role: [Path(name) for name in names] for role, names in files.items()}
    chat = recipe.probe.facts.questions is None or any(
        question.mode == "chat" for question in recipe.probe.facts.questions
    )
    known = source_architectures(ctx, lock) if recipe.engine == "llama.cpp" else None
    seen = inspect(paths, architectures=known, chat=chat, argv=argv)
    _refuse_files(seen)
    weights = {role: Weight.read(made) for role, made in seen.checkpoints.items()}
    machine = machine or find_machine(ctx.processes)
    budget = recipe_budget(machine, recipe, weights, argv)
    checks = (*seen.checks, *budget.checks())
    if not budget.fits and not risk_accepted:
        raise refusal(
            budget,
            context=best_context(machine, recipe, weights, argv),
            quant=fitting_quant(ctx, machine, recipe, weights, argv, files=paths["model"]),
            mapped=recipe.engine == "llama.cpp",
        )
    return Admission(checks, budget, types_in(seen.checkpoints.values()))


def refuse_by_size(
    ctx: Context,
    recipe: Recipe,
    lock: Lock,
    argv: Sequence[str],
    machine: Machine | None = None,
    *,
    files: Sequence[str] = (),
) -> None:
    """Refuse weights larger than all memory, before hours of fetching them.

    Only their sizes count; `files` are the model's, if the user's own are used in place. Raises
    HostError (exit 9).
    """
    machine = machine or find_machine(ctx.processes)
    weights = locked_weights(lock, {})
    pools = (Pool.GPU, Pool.SYSTEM) if machine.discrete else (Pool.SYSTEM,)
    room = machine.available + (machine.gpu_free() if machine.discrete else 0)
    room -= sum(machine.reserve(pool) for pool in pools)
    if sum(weight.size for weight in weights.values()) <= room:
        return
    budget = recipe_budget(machine, recipe, weights, argv)
    if not budget.fits:
        at = [Path(name) for name in files]
        raise refusal(budget, quant=fitting_quant(ctx, machine, recipe, weights, argv, files=at))


def _refuse_files(seen: Inspected) -> None:
    failed = [check for check in seen.checks if check.verdict is Verdict.FAILED]
    if failed:
        first = failed[0]
        raise CheckpointError(
            f"the weights cannot be served: {first.observed}",
            where=first.where,
            hint=f"expected: {first.expected}",
            id=first.id,
            checks=seen.checks,
        )
