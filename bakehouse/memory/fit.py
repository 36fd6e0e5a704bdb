"""Quantisations that fit, and what to advise."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath

from bakehouse.checkpoints.checkpoint import SHARD_NAME, Checkpoint, CheckpointFile, join_gguf
from bakehouse.checkpoints.gguf import read_gguf
from bakehouse.checkpoints.hf_config import MAX_CONFIG, hf_shape, parse_config
from bakehouse.checkpoints.model_shape import ModelShape
from bakehouse.checkpoints.safetensors import read_safetensors
from bakehouse.context import Context
from bakehouse.errors import BakehouseError, CheckpointError, HostError, NotFound
from bakehouse.host import read_host
from bakehouse.lock import Lock
from bakehouse.memory.budget import Weight, make_budget
from bakehouse.memory.machines import Machine, this_machine
from bakehouse.memory.requirements import Budget, Demand, Phase, demand_of
from bakehouse.models import Check, Frozen, check
from bakehouse.recipe.models import Recipe
from bakehouse.sources import huggingface
from bakehouse.sources.huggingface import RemoteFile
from bakehouse.sources.weights import is_usable
from bakehouse.util.parallel import run_parallel
from bakehouse.util.text import size_text as gib

STEP = 256
"""Suggested contexts are multiples of this."""
MOST = 2**24


def largest_context(budget_at: Callable[[int], Budget], most: int | None) -> int | None:
    """The largest context that fits, at most `most`; None if 256 does not, or for unknown caches.

    `budget_at` gives the budget for a context in tokens; its need must grow with the context.
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

    `context` is the largest one that fits, `quant` the best quantisation that fits, `mapped`
    whether loading without mmap is worth trying.
    """
    hints = []
    tight = [purse for purse in budget.purses if not purse.fits]
    causes = [
        f"{gib(purse.need)} of {purse.pool.value} needed, {gib(purse.available)} available, "
        f"of which {gib(purse.reserve)} must stay free"
        for purse in tight
    ]
    what = "this does not fit: " + "; ".join([*causes, *budget.lacking])
    staging = [line for line in budget.lines if line.phase is Phase.LOADING]
    if tight and staging and all(purse.left >= purse.reserve for purse in tight):
        what += f" (only loading fails: {staging[0].item} takes {gib(staging[0].bytes)})"
        if mapped:
            hints.append("load without mmap (--load-mode none; --no-mmap in older builds)")
        else:
            hints.append("write smaller shards with `invoke reshard --max-shard 4GB`")
    if context and context < (budget.context or 0):
        hints.append(f"serve a context of at most {context}")
    if quant:
        hints.append(f"use {quant}, the largest quantisation that fits")
    hints.append("or free memory that other processes use")
    return HostError(
        what,
        where=budget.machine,
        hint="; ".join(hints),
        id="memory",
        checks=budget.checks(),
    )


def table(budget: Budget) -> str:
    """The budget as text, one number per line with its formula and source."""
    rows = [
        (line.item, gib(line.bytes), line.pool.value, line.phase.value, line.basis.value,
         f"{line.formula} [{line.source}]")
        for line in budget.lines
    ]  # fmt: skip
    text = aligned(rows, right=(1,))
    text += [
        f"{purse.pool.value}: {gib(purse.loading)} while loading, {gib(purse.serving)} once "
        f"loaded, of {gib(purse.available)} available; {gib(purse.left)} left, "
        f"{gib(purse.reserve)} must stay free: {'fits' if purse.fits else 'does NOT fit'}"
        for purse in budget.purses
    ]
    text += [f"not counted: {item}" for item in budget.unknown]
    text += [f"lacking: {item}" for item in budget.lacking]
    return "\n".join(text)


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows of equal length as lines of aligned columns; `right` lists right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


_QUANT = re.compile(
    r"(?:UD-)?(?:IQ\d_\w+|TQ\d_\d|Q\d_K(?:_[A-Z]{1,3})?|Q\d_\d\w*|MXFP4\w*|NVFP4|BF16|F16|F32|FP8)",
    re.IGNORECASE,
)
_BESIDE = re.compile(r"(^|/)(mmproj|imatrix|mtp-|draft)|imatrix|/original/", re.IGNORECASE)


@dataclass(frozen=True)
class Variant:
    """One quantisation."""

    name: str
    files: tuple[tuple[str, int], ...]
    """Path and bytes of each file."""
    complete: bool = True
    """Whether all splits of the model are listed."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size in self.files)

    @property
    def largest(self) -> int:
        """Bytes of the largest file."""
        return max(size for _, size in self.files)

    @property
    def format(self) -> str:
        """`gguf` or `safetensors`."""
        return "gguf" if self.files[0][0].endswith(".gguf") else "safetensors"


def variants_in(files: Iterable[tuple[str, int]]) -> tuple[Variant, ...]:
    """Group a listing of (path, bytes) into variants, smallest first, without projectors."""
    groups: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for path, size in files:
        pure = PurePosixPath(path)
        if pure.suffix not in {".gguf", ".safetensors"} or _BESIDE.search(path):
            continue
        found = SHARD_NAME.match(pure.name)
        stem = str(pure.parent / found["stem"]) if found else path
        groups.setdefault((stem, int(found["count"]) if found else 1), []).append((path, size))
    made = [
        Variant(_variant_name(stem), tuple(sorted(members)), complete=len(members) == count)
        for (stem, count), members in groups.items()
    ]
    return tuple(sorted(made, key=lambda v: (v.size, v.name)))


def _variant_name(stem: str) -> str:
    """The quantisation in a file name; else the name itself."""
    name = re.sub(r"\.(gguf|safetensors)$", "", PurePosixPath(stem).name)
    found = _QUANT.findall(name) or _QUANT.findall(str(PurePosixPath(stem).parent))
    return found[-1] if found else name


def model_name(stem: str) -> str:
    """A file's name without folder, quantisation and split: the same for all variants."""
    name = re.sub(r"\.(gguf|safetensors)$", "", PurePosixPath(stem).name)
    name = re.sub(r"-\d{5}-of-\d{5}$", "", name)
    return re.sub(r"[-._]+", "-", _QUANT.sub("", name)).strip("-").casefold()


def names_quant(name: str) -> bool:
    """Whether a name contains a quantisation."""
    return bool(_QUANT.search(name))


class Candidate(Frozen):
    """One row: bytes, tokens, tokens per second."""

    name: str
    files: int
    size: int
    largest_file: int
    left: int
    """Memory left while serving, without the reserve; negative if short."""
    fits: bool
    """Whether it fits, as far as it could be counted."""
    proven: bool
    """Whether everything could be counted; without headers the cache cannot."""
    lacks: int
    """Memory missing in the phase that needs most, with the reserve; negative if it fits."""
    context: int | None
    """The largest that fits; None if none does, or if unknown."""
    speed: float | None
    """Upper bound of decoding: the memory's bandwidth over bytes read per token."""
    note: str = ""


class FitTable(Frozen):
    """All rows, and the recommended one."""

    machine: str
    context: int
    """Requested tokens."""
    rungs: tuple[Candidate, ...]
    recommended: str | None
    why: str

    def check(self) -> Check:
        """Whether anything fits; unknown if that could not be counted."""
        taken = next((r for r in self.rungs if r.fits and r.name == self.recommended), None)
        wanted = f"a quantisation that fits with {self.context} tokens"
        ok = None if taken and not taken.proven else taken is not None
        return check("fit", wanted, self.why, self.machine, ok=ok)


@dataclass(frozen=True)
class Figures:
    """What one variant's headers declare; the other variants have the same layers."""

    shape: ModelShape
    read_share: float
    """Bytes read per token over all bytes; nearly the same in every quantisation."""
    of: str

    @classmethod
    def read(cls, checkpoint: Checkpoint, of: str) -> Figures:
        """The figures of a checkpoint."""
        share = checkpoint.bytes_per_token / max(1, checkpoint.tensor_bytes)
        return cls(checkpoint.shape, share, of)


def make_ladder(
    machine: Machine,
    demand: Demand,
    variants: Iterable[Variant],
    figures: Figures | None,
    *,
    beside: Mapping[str, Weight] | None = None,
    tokens_per_pass: float = 1.0,
) -> FitTable:
    """Check every variant with `demand.context` tokens. Pure.

    `beside` are the weights of drafter and projector, `tokens_per_pass` the mean tokens per pass
    with speculation. On unified memory GGUF files count as loaded without mmap, which would hold
    the weights twice.
    """
    context = demand.context or min((figures and figures.shape.context_limit) or 32_768, 32_768)
    wanted = replace(demand, context=context, mmap=demand.mmap and not machine.unified)
    rungs = tuple(
        _rung(machine, wanted, variant, figures, beside or {}, tokens_per_pass)
        for variant in variants
    )
    fitting = [rung for rung in rungs if rung.fits]
    best = max(fitting, key=lambda rung: rung.size, default=None)
    return FitTable(
        machine=machine.name,
        context=context,
        rungs=rungs,
        recommended=best.name if best else None,
        why=_why(rungs, best, context),
    )


def _rung(
    machine: Machine, demand: Demand, variant: Variant, figures: Figures | None,
    beside: Mapping[str, Weight], tokens_per_pass: float,
) -> Candidate:  # fmt: skip
    shape = figures.shape if figures else None
    kind = demand if variant.format == "gguf" else replace(demand, engine="vllm", keys="auto",
                                                           values="auto", mmap=True)  # fmt: skip
    weights = {"model": Weight(variant.size, variant.largest, figures=shape), **beside}

    def at(tokens: int) -> Budget:
        return make_budget(machine, replace(kind, context=tokens), weights)

    budget = at(demand.context or 256)
    purse = next(p for p in budget.purses if p.pool is machine.pool)
    read = variant.size * (figures.read_share if figures else 1.0)
    speed = machine.bandwidth / read * tokens_per_pass if machine.bandwidth and read else None
    fits = budget.fits and variant.complete
    return Candidate(
        name=variant.name,
        files=len(variant.files),
        size=variant.size,
        largest_file=variant.largest,
        left=purse.left - purse.reserve,
        fits=fits,
        proven=not budget.unknown,
        lacks=max(p.reserve - (p.available - p.need) for p in budget.purses),
        context=largest_context(at, shape.context_limit) if shape and variant.complete else None,
        speed=speed if figures or not speed else None,
        note="" if variant.complete else "files are missing from the listing",
    )


def _why(rungs: tuple[Candidate, ...], best: Candidate | None, context: int) -> str:
    if not rungs:
        return "the listing holds no weight files"
    whole = [rung for rung in rungs if not rung.note]
    if not whole:
        return "none is complete: files are missing from the listing"
    if best is None:
        smallest = min(whole, key=lambda rung: rung.size)
        return f"none fits with {context} tokens; the smallest lacks {gib(smallest.lacks)}"
    above = [rung for rung in rungs if rung.size > best.size and not rung.fits]
    text = f"the largest that fits with {context} tokens, {gib(best.left)} to spare"
    if not best.proven:
        text = (
            f"the largest whose weights fit, {gib(best.left)} to spare; the size of the cache is "
            f"unknown, so whether {context} tokens fit is not known"
        )
    if above:
        following = min(above, key=lambda rung: rung.size)
        lack = following.note or f"lacks {gib(following.lacks)}"
        text += f"; the next, {following.name}, {lack}"
    return text


def ladder_text(ladder: FitTable) -> str:
    """The rows and the recommendation as text."""
    head = ("", "quant", "files", "size", "left", "context", "tok/s at most")
    rows = [head] + [
        (
            "*" if rung.name == ladder.recommended and rung.fits else "",
            rung.name,
            str(rung.files),
            f"{rung.size / 1e9:.2f} GB",
            gib(rung.left),
            str(rung.context) if rung.context else ("none" if not rung.fits else "?"),
            (f"{rung.speed:.1f}" if rung.speed else "?") + (f"  {rung.note}" if rung.note else ""),
        )
        for rung in ladder.rungs
    ]
    chosen = f"use {ladder.recommended}: " if ladder.recommended else ""
    title = f"on {ladder.machine}, {ladder.context} tokens"
    return "\n".join([title, *aligned(rows, right=range(2, 7)), f"{chosen}{ladder.why}"])


def find_machine(ctx: Context) -> Machine:
    """Measure this machine's memory, and its GPUs' with nvidia-smi if there is one."""
    return this_machine(read_host(), ctx.gpus)


def locked_weights(lock: Lock, files: Mapping[str, Sequence[str]]) -> dict[str, Weight]:
    """The weights of a lock, with headers for roles whose files are on this machine.

    `files` maps a role to the paths of its files, fetched or not. Raises CheckpointError for
    damaged files.
    """
    return {
        role: Weight.locate(pin, [Path(name) for name in files.get(role, ())])
        for role, pin in lock.weights.items()
    }


def recipe_budget(
    machine: Machine, recipe: Recipe, weights: Mapping[str, Weight], argv: Sequence[str] = ()
) -> Budget:
    """The budget of a recipe; `argv` is the rendered command, if there is one."""
    demand = demand_of(recipe, argv)
    return make_budget(machine, demand, weights, measured=recipe.memory.measured,
                       reserve=recipe.memory.reserve)  # fmt: skip


def best_context(
    machine: Machine, recipe: Recipe, weights: Mapping[str, Weight], argv: Sequence[str] = ()
) -> int | None:
    """The largest context with which the recipe fits; None if none does, or if unknown."""
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


AT_ONCE = 8
"""Headers read at the same time."""
MAX_FOLDERS = 64
"""Maximum number of folders searched beside a model's own."""
MAX_HEADERS = 40
"""Maximum number of headers read for one variant."""


@dataclass(frozen=True)
class Found:
    """The variants of a model, and figures from their headers. `notes` are for the user."""

    variants: tuple[Variant, ...]
    figures: Figures | None
    notes: tuple[str, ...] = ()


def fitting_quant(
    ctx: Context,
    machine: Machine,
    recipe: Recipe,
    weights: Mapping[str, Weight],
    argv: Sequence[str] = (),
    *,
    files: Sequence[Path] = (),
) -> str | None:
    """Return the largest quantisation that fits and is smaller than the recipe's own.

    It comes from the recipe's Hub repository, or from the folder of the user's own model
    (`files`). None if there is none, or if the Hub does not answer quickly.
    """
    source, own = recipe.weights.model, weights["model"]
    if source.hub is not None:
        try:
            listing = huggingface.list_files(
                ctx, source.hub, source.revision or "main", patient=False
            )
        except BakehouseError:
            return None
        variants = variants_in(sizes_in(listing).items())
    else:
        variants = beside_files(files) if source.path is not None else ()
    figures = Figures.read(own.checkpoint, "the recipe's files") if own.checkpoint else None
    smaller = [v for v in variants if v.size < own.size]
    beside = {role: weight for role, weight in weights.items() if role != "model"}
    return make_ladder(
        machine, demand_of(recipe, argv), smaller, figures, beside=beside
    ).recommended


def beside_files(files: Sequence[Path]) -> tuple[Variant, ...]:
    """Return all quantisations of a model in the folder of its `files`, its own included.

    If that folder is named by a quantisation, those beside it are searched too. Only files with the
    model's name count.
    """
    ggufs = [path for path in files if path.suffix == ".gguf"]
    if not ggufs:
        return ()
    folder, wanted = ggufs[0].parent, model_name(ggufs[0].name)
    folders = [folder]
    if names_quant(folder.name):
        folders += [f for f in sorted(folder.parent.glob("*")) if f != folder and f.is_dir()]
    found = []
    for path in (p for place in folders[:MAX_FOLDERS] for p in sorted(place.glob("*.gguf"))):
        with suppress(OSError):  # a deleted file, or a dangling link
            if model_name(path.name) == wanted and path.is_file() and path.stat().st_size:
                found.append((str(path), path.stat().st_size))
    return variants_in(found)


def sizes_in(listing: huggingface.HubListing) -> dict[str, int]:
    """Return the sizes of usable, non-empty files by name, in bytes."""
    return {f.path: f.size for f in listing.files if f.size and is_usable(f.path)}


def on_hub(ctx: Context, repository: str, revision: str) -> Found:
    """List a model's variants on the Hub, and read the header of the smallest.

    Raises NotFound, HostError, UsageError.
    """
    listing = huggingface.list_files(ctx, repository, revision)
    sizes = sizes_in(listing)
    variants = variants_in(sizes.items())
    if not variants:
        raise NotFound(f"{repository} has no GGUF and no safetensors files",
                       where=f"revision {listing.commit}", hint="check the name")  # fmt: skip
    smallest = next((v for v in variants if v.complete), None)
    if smallest is None:
        return Found(variants, None)
    try:
        checkpoint = _remote(ctx, listing, smallest)
    except BakehouseError as error:
        # Sizes alone give a table; the rest is reported as unknown.
        return Found(variants, None, (f"header of {smallest.name}: {error.what}",))
    return Found(variants, Figures.read(checkpoint, smallest.name))


def _remote(ctx: Context, listing: huggingface.HubListing, variant: Variant) -> Checkpoint:
    if len(variant.files) > MAX_HEADERS:
        raise CheckpointError(f"{len(variant.files)} files are too many to read")
    sources = [RemoteFile.of(ctx, listing, path, size) for path, size in variant.files]
    if variant.format == "gguf":
        return join_gguf(run_parallel([partial(read_gguf, s) for s in sources], AT_ONCE))
    files = [
        CheckpointFile(header.name, header.file_size, header.tensors)
        for header in run_parallel([partial(read_safetensors, s) for s in sources], AT_ONCE)
    ]
    path = str(PurePosixPath(variant.files[0][0]).parent / "config.json")
    raw = huggingface.small_file(ctx, listing.repository, listing.commit, path, MAX_CONFIG)
    config = parse_config(raw, path)
    return Checkpoint("safetensors", tuple(files), hf_shape(config, path), config)
