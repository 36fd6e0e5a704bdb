"""The quantisations of one model, largest first that fits: sizes, contexts, an upper speed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from bakehouse.base import Frozen
from bakehouse.checkpoints.files import SPLIT_NAME
from bakehouse.checkpoints.shape import ModelShape
from bakehouse.checkpoints.whole import Checkpoint
from bakehouse.checks import Check, check
from bakehouse.memory.advice import largest_context
from bakehouse.memory.budget import make_budget
from bakehouse.memory.demand import Demand
from bakehouse.memory.machine import Machine
from bakehouse.memory.types import Budget
from bakehouse.memory.weight import Weight
from bakehouse.util.text import size_text as gib

_QUANT = re.compile(
    r"(?:UD-)?(?:IQ\d_\w+|TQ\d_\d|Q\d_K(?:_[A-Z]{1,3})?|Q\d_\d\w*|MXFP4\w*|NVFP4|BF16|F16|F32|FP8)",
    re.IGNORECASE,
)
_BESIDE = re.compile(r"(^|/)(mmproj|imatrix|mtp-|draft)|imatrix|/original/", re.IGNORECASE)
SHARD_NAME = re.compile(r"^(?P<stem>.*?)-\d{5}-of-(?P<count>\d{5})\.safetensors$")


@dataclass(frozen=True)
class Variant:
    """One quantisation: all its files. Bytes."""

    name: str
    files: tuple[tuple[str, int], ...]
    complete: bool = True
    """Whether every split that the names speak of is listed."""

    @property
    def size(self) -> int:
        """All files together."""
        return sum(size for _, size in self.files)

    @property
    def largest(self) -> int:
        """The largest file."""
        return max(size for _, size in self.files)

    @property
    def format(self) -> str:
        """`gguf` or `safetensors`."""
        return "gguf" if self.files[0][0].endswith(".gguf") else "safetensors"


def variants_in(files: Iterable[tuple[str, int]]) -> tuple[Variant, ...]:
    """Group a listing (path, size) into variants, smallest first; projectors and such left out."""
    groups: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for path, size in files:
        pure = PurePosixPath(path)
        if pure.suffix not in {".gguf", ".safetensors"} or _BESIDE.search(path):
            continue
        found = SPLIT_NAME.match(pure.name) or SHARD_NAME.match(pure.name)
        stem = str(pure.parent / found["stem"]) if found else path
        groups.setdefault((stem, int(found["count"]) if found else 1), []).append((path, size))
    made = [
        Variant(_variant_name(stem), tuple(sorted(members)), complete=len(members) == count)
        for (stem, count), members in groups.items()
    ]
    return tuple(sorted(made, key=lambda v: (v.size, v.name)))


def _variant_name(stem: str) -> str:
    """The quantisation as the file name says it; else the name itself."""
    name = re.sub(r"\.(gguf|safetensors)$", "", PurePosixPath(stem).name)
    found = _QUANT.findall(name) or _QUANT.findall(str(PurePosixPath(stem).parent))
    return found[-1] if found else name


def model_name(stem: str) -> str:
    """A file's name without its folder, quantisation and split: what variants have in common."""
    name = re.sub(r"\.(gguf|safetensors)$", "", PurePosixPath(stem).name)
    name = re.sub(r"-\d{5}-of-\d{5}$", "", name)
    return re.sub(r"[-._]+", "-", _QUANT.sub("", name)).strip("-").casefold()


def names_quant(name: str) -> bool:
    """Whether a name speaks of a quantisation."""
    return bool(_QUANT.search(name))


class Rung(Frozen):
    """A row of the ladder. Bytes, tokens, tokens a second."""

    name: str
    files: int
    size: int
    largest_file: int
    left: int
    """For the cache and all else, besides the reserve; negative where it lacks."""
    fits: bool
    """As far as it could be counted."""
    proven: bool
    """Whether all could be counted; the cache cannot be where no header was read."""
    lacks: int
    """What is missing in the phase that needs most, the reserve kept; negative where it fits."""
    context: int | None
    """The largest that fits; None where none does, or where it cannot be known."""
    speed: float | None
    """Upper bound of decoding, from bytes read a token over the memory's bandwidth."""
    note: str = ""


class Ladder(Frozen):
    """All rows, and the one to take."""

    machine: str
    context: int
    """Tokens that were asked for."""
    rungs: tuple[Rung, ...]
    recommended: str | None
    why: str

    def check(self) -> Check:
        """Whether anything fits; unknown where that could not be counted."""
        taken = next((r for r in self.rungs if r.fits and r.name == self.recommended), None)
        wanted = f"a quantisation that fits with {self.context} tokens"
        ok = None if taken and not taken.proven else taken is not None
        return check("fit", wanted, self.why, self.machine, ok=ok)


@dataclass(frozen=True)
class Figures:
    """What one variant's headers told of the model; the others have the same layers."""

    shape: ModelShape
    read_share: float
    """Bytes read for a token, of all bytes; the same in every quantisation, nearly."""
    of: str

    @classmethod
    def read(cls, checkpoint: Checkpoint, of: str) -> Figures:
        """Of a checkpoint whose headers were read."""
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
) -> Ladder:
    """Judge every variant for `demand.context` tokens; pure.

    `beside` are the weights of drafter and projector; `tokens_per_pass` is what speculation is
    stated to bring. GGUF files are taken as loaded without mmap on unified memory, since with it
    the weights would be there twice.
    """
    context = demand.context or min((figures and figures.shape.context_limit) or 32_768, 32_768)
    wanted = replace(demand, context=context, mmap=demand.mmap and not machine.unified)
    rungs = tuple(
        _rung(machine, wanted, variant, figures, beside or {}, tokens_per_pass)
        for variant in variants
    )
    fitting = [rung for rung in rungs if rung.fits]
    best = max(fitting, key=lambda rung: rung.size, default=None)
    return Ladder(
        machine=machine.name,
        context=context,
        rungs=rungs,
        recommended=best.name if best else None,
        why=_why(rungs, best, context),
    )


def _rung(
    machine: Machine, demand: Demand, variant: Variant, figures: Figures | None,
    beside: Mapping[str, Weight], tokens_per_pass: float,
) -> Rung:  # fmt: skip
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
    return Rung(
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


def _why(rungs: tuple[Rung, ...], best: Rung | None, context: int) -> str:
    if not rungs:
        return "the listing holds no weight files"
    whole = [rung for rung in rungs if not rung.note]
    if not whole:
        return "none is whole: files are missing from the listing"
    if best is None:
        smallest = min(whole, key=lambda rung: rung.size)
        return f"none fits with {context} tokens; the smallest lacks {gib(smallest.lacks)}"
    above = [rung for rung in rungs if rung.size > best.size and not rung.fits]
    text = f"the largest that fits with {context} tokens, {gib(best.left)} to spare"
    if not best.proven:
        text = (
            f"the largest whose weights fit, {gib(best.left)} to spare; the cache could not be "
            f"counted, so whether {context} tokens fit is not known"
        )
    if above:
        following = min(above, key=lambda rung: rung.size)
        lack = following.note or f"lacks {gib(following.lacks)}"
        text += f"; the next, {following.name}, {lack}"
    return text


def ladder_text(ladder: Ladder) -> str:
    """The ladder as text."""
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
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), row[1].ljust(widths[1]),
             *(row[i].rjust(widths[i]) for i in range(2, 7))]
        ).rstrip()
        for row in rows
    ]  # fmt: skip
    chosen = f"take {ladder.recommended}: " if ladder.recommended else ""
    return "\n".join([f"on {ladder.machine}, {ladder.context} tokens", *lines,
                      f"{chosen}{ladder.why}"])  # fmt: skip
