"""`fit`: which quantisations of a model fit a machine, with what context and maximum speed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from bakehouse import flags
from bakehouse.checkpoints.checkpoint import read_path
from bakehouse.context import Context, Outcome
from bakehouse.errors import HostError, NotFound, UsageError
from bakehouse.memory.budget import Weight
from bakehouse.memory.fit import (
    Figures,
    FitTable,
    Found,
    Variant,
    beside_files,
    find_machine,
    ladder_text,
    locked_weights,
    make_ladder,
    on_hub,
    recipe_budget,
    table,
    variants_in,
)
from bakehouse.memory.machines import Machine, named_machine
from bakehouse.memory.requirements import Budget, Demand, cache_types, demand_of
from bakehouse.recipe.loader import LoadedRecipe, find, load
from bakehouse.resolver import lock_path, read_lock
from bakehouse.sources.weights import locate

Options = flags.Fit


def run(ctx: Context, options: Options) -> Outcome:
    """Check each variant. Raises UsageError, RecipeError, NotFound, HostError, CheckpointError."""
    if (options.recipe is None) == (options.hub is None):
        raise UsageError("give either --recipe or --hub", hint="e.g. --hub OWNER/NAME")
    if options.revision and not options.hub:
        raise UsageError("--revision needs --hub")
    if options.context is not None and not re.fullmatch(r"[1-9]\d{0,8}", options.context):
        raise UsageError(f"--context {options.context}: expected a number of tokens")
    context = int(options.context) if options.context else None
    if options.machine and options.host not in (None, options.machine):
        raise UsageError("--machine and --host name two machines", hint="use --machine alone")
    profile = options.machine or options.host
    machine = named_machine(profile) if profile else find_machine(ctx)
    speculation = _factor(options.speculation)
    budget: Budget | None = None
    if options.hub:
        demand = Demand("llama.cpp")
        found = on_hub(ctx, options.hub, options.revision or "main")
        beside: dict[str, Weight] = {}
    else:
        loaded = load(find(options.recipe or "", ctx.recipes), options.set_)
        demand = demand_of(loaded.recipe)
        weights = _weights(ctx, loaded)
        beside = {role: weight for role, weight in weights.items() if role != "model"}
        if "model" in weights:
            budget = recipe_budget(machine, loaded.recipe, weights)
        found = _of_recipe(ctx, loaded, weights)
    known = cache_types(demand.engine)
    if options.kv_cache is not None and options.kv_cache not in known:
        raise UsageError(
            f"--kv-cache {options.kv_cache}: {demand.engine} has no such cache type",
            hint=f"one of {', '.join(known)}",
        )
    demand = replace(demand, context=context or demand.context,
                     keys=options.kv_cache or demand.keys,
                     values=options.kv_cache or demand.values)  # fmt: skip
    ladder = make_ladder(machine, demand, found.variants, found.figures, beside=beside,
                         tokens_per_pass=speculation)  # fmt: skip
    return _outcome(ladder, found, budget, machine, speculation)


def _outcome(
    ladder: FitTable, found: Found, budget: Budget | None, machine: Machine, speculation: float
) -> Outcome:
    notes = list(found.notes)
    if found.figures is None:
        notes.append("no header was read: contexts and speeds are unknown")
    elif machine.bandwidth:
        share = found.figures.read_share
        notes.append(
            f"speed: {machine.bandwidth / 1e9:g} GB/s over {share:.1%} of the bytes read per token "
            f"(by {found.figures.of}), times {speculation:g} tokens per pass; "
            "without caches and overheads"
        )
    else:
        notes.append("speed: this machine's memory bandwidth is unknown; --machine names others")
    text = [ladder_text(ladder), *notes]
    if budget is not None:
        text += ["", "the recipe as it is:", table(budget)]
    result = {
        **ladder.to_data(),
        "shape": found.figures.shape.to_data() if found.figures else None,
        "budget": budget.to_data() if budget else None,
        "notes": notes,
    }
    checks = (ladder.check(), *(budget.checks() if budget else ()))
    error = None
    if ladder.recommended is None:  # exit code 9, as for `serve`
        error = HostError(
            f"no quantisation fits: {ladder.why}",
            where=machine.name,
            hint="try a smaller --context or --kv-cache q8_0, free memory that other processes "
            "use, or choose a smaller model",
            id="memory",
        )
    return Outcome(result, "\n".join(text), checks, error=error)


def _factor(value: str | None) -> float:
    if value is None:
        return 1.0
    if not re.fullmatch(r"\d{1,2}(\.\d{1,3})?", value) or float(value) < 1:
        raise UsageError(
            f"--speculation {value}: expected a number of at least 1",
            hint="mean acceptance length: 1 + accepted / drafts",
        )
    return float(value)


def _weights(ctx: Context, loaded: LoadedRecipe) -> dict[str, Weight]:
    """The recipe's weights: by its lock if there is one, else those on this machine."""
    lock = read_lock(lock_path(loaded.path))
    if lock is not None:
        paths = locate(ctx.places, loaded.folder, loaded.recipe, lock)
        return locked_weights(lock, {role: found.files for role, found in paths.items()})
    return {
        role: Weight.read(read_path(_local(loaded, weights.path, weights.files)))
        for role, weights in loaded.recipe.weights.items()
        if weights.path
    }


def _local(loaded: LoadedRecipe, path: str, files: str | None) -> Path:
    whole = loaded.folder / Path(os.path.expanduser(path))
    if files and whole.is_dir() and (found := sorted(whole.glob(files))):
        return found[0] if found[0].suffix == ".gguf" else whole
    return whole


def _of_recipe(ctx: Context, loaded: LoadedRecipe, weights: Mapping[str, Weight]) -> Found:
    """All quantisations in the recipe's repository; its own files if it has none."""
    model = loaded.recipe.weights.model
    weight = weights.get("model")
    if model.hub:
        try:
            found = on_hub(ctx, model.hub, model.revision or "main")
        except HostError as error:
            if weight is None:
                raise
            return _own(loaded, weight, (f"other quantisations are unknown: {error.what}",))
        if weight and weight.checkpoint:
            return replace(found, figures=Figures.read(weight.checkpoint, "the recipe's files"))
        return found
    if weight is None:
        raise NotFound(
            "the recipe has no lock, and its weights are not on this machine",
            where=str(loaded.path),
            hint="run `invoke lock` first, or use --hub",
        )
    return _own(loaded, weight)


def _own(loaded: LoadedRecipe, weight: Weight, notes: tuple[str, ...] = ()) -> Found:
    """The recipe's own files as the only variant."""
    model = loaded.recipe.weights.model
    if weight.checkpoint is None:
        name = PurePosixPath(str(model.files or model.path or model.url)).name
        return Found((Variant(name, (("model.gguf", weight.size),)),), None, notes)
    files = tuple((f.name, f.size) for f in weight.checkpoint.files)
    figures = Figures.read(weight.checkpoint, "its own files")
    beside = beside_files([Path(f.name) for f in weight.checkpoint.files]) if model.path else ()
    if any({name for name, _ in files} == {name for name, _ in v.files} for v in beside):
        return Found(beside, figures, notes)
    names = variants_in(files)
    name = names[0].name if len(names) == 1 else "the model"
    return Found((Variant(name, files),), figures, notes)
