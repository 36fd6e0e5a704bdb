"""Small models, and the pins and locks of recipes that name them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bakehouse.context import Context
from bakehouse.errors import BakehouseError
from bakehouse.lock import Lock, WeightPin
from bakehouse.recipe.loader import LoadedRecipe
from bakehouse.recipe.models import WeightPaths
from bakehouse.sources.weights import ensure, locate, pin_weights
from tests.support.checkpoints import f32, gguf_bytes, llama_metadata
from tests.support.recipes import make_loaded

MODEL = gguf_bytes(llama_metadata(), [f32("token_embd.weight", 64, 3)])
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def splits(count: int) -> dict[str, bytes]:
    """A model in several files, by their names."""
    files = {}
    for number in range(count):
        own = {"split.no": number, "split.count": count, "split.tensors.count": 0}
        metadata = {**llama_metadata(), **own} if not number else own
        files[f"m-{number + 1:05d}-of-{count:05d}.gguf"] = gguf_bytes(metadata) + bytes(number)
    return files


def lock_of(pin: WeightPin) -> Lock:
    return Lock(recipe="test", engine="llama.cpp", wants="", weights={"model": pin})


def pinned(ctx: Context, folder: Path, **weights: Any) -> tuple[LoadedRecipe, Lock]:
    """Pin a recipe's model only: what the rest is made of does not matter here."""
    loaded = make_loaded(folder, weights={"model": weights})
    return loaded, lock_of(pin_weights(ctx, loaded.folder, "model", loaded.recipe.weights.model))


def have(ctx: Context, loaded: LoadedRecipe, lock: Lock) -> WeightPaths:
    """Fetch a model, to where `locate` says that it will be."""
    located = locate(ctx.places, loaded.folder, loaded.recipe, lock)
    assert ensure(ctx, loaded, lock) == located
    return located["model"]


def refusal(call: Callable[[], object]) -> str:
    """Call, and give the id and message of its error; `accepted` when there is none."""
    try:
        call()
    except BakehouseError as error:
        return f"{error.id}: {error.what}"
    return "accepted"
