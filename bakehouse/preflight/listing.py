"""The quantisations of a model on the Hub or on disk, and the largest that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from bakehouse.checkpoints.files import join_gguf
from bakehouse.checkpoints.gguf import read_gguf
from bakehouse.checkpoints.hf_shape import MAX_CONFIG, hf_shape, parse_config
from bakehouse.checkpoints.safetensors import read_safetensors
from bakehouse.checkpoints.whole import Checkpoint, CheckpointFile
from bakehouse.context import Context
from bakehouse.errors import BakehouseError, CheckpointError, NotFound
from bakehouse.memory.demand import demand_of
from bakehouse.memory.ladder import (
    Figures,
    Variant,
    make_ladder,
    model_name,
    names_quant,
    variants_in,
)
from bakehouse.memory.machine import Machine
from bakehouse.memory.weight import Weight
from bakehouse.recipe.model import Recipe
from bakehouse.sources import hub
from bakehouse.sources.choice import is_usable
from bakehouse.sources.hub import RemoteFile
from bakehouse.sources.together import all_at_once

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
            listing = hub.list_files(ctx, source.hub, source.revision or "main", patient=False)
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


def sizes_in(listing: hub.HubListing) -> dict[str, int]:
    """Return the sizes of usable, non-empty files by name, in bytes."""
    return {f.path: f.size for f in listing.files if f.size and is_usable(f.path)}


def on_hub(ctx: Context, repository: str, revision: str) -> Found:
    """List a model's variants on the Hub, and read the header of the smallest.

    Raises NotFound, HostError, UsageError.
    """
    listing = hub.list_files(ctx, repository, revision)
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


def _remote(ctx: Context, listing: hub.HubListing, variant: Variant) -> Checkpoint:
    if len(variant.files) > MAX_HEADERS:
        raise CheckpointError(f"{len(variant.files)} files are too many to read")
    sources = [RemoteFile.of(ctx, listing, path, size) for path, size in variant.files]
    if variant.format == "gguf":
        return join_gguf(all_at_once([partial(read_gguf, s) for s in sources], AT_ONCE))
    files = [
        CheckpointFile(header.name, header.file_size, header.tensors)
        for header in all_at_once([partial(read_safetensors, s) for s in sources], AT_ONCE)
    ]
    path = str(PurePosixPath(variant.files[0][0]).parent / "config.json")
    raw = hub.small_file(ctx, listing.repository, listing.commit, path, MAX_CONFIG)
    config = parse_config(raw, path)
    return Checkpoint("safetensors", tuple(files), hf_shape(config, path), config)
