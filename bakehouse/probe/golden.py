"""Golden values: what a proven server makes of the fixed texts, kept in git beside the recipes.

One file for a set of weights and a type of KV cache: `golden/<weights16>-<kv>.json`. The digest is
over the weights' content, so that two recipes that serve the same files share it.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import ValidationError

from bakehouse.errors import HostError, LockError
from bakehouse.lock import Lock
from bakehouse.models import digest, to_json
from bakehouse.paths import current_copy, writable_copy
from bakehouse.probe.models import Golden, ServedModel
from bakehouse.recipe.models import Recipe
from bakehouse.util import files

SCHEMA = 1


def weights16(lock: Lock) -> str:
    """Give the first 16 hex digits of the digest over the model's files, by size and sha256.

    The drafter and the projector do not count: they change no probability of a text.
    """
    return digest(sorted([file.size, file.sha256] for file in lock.weights["model"].files))[:16]


def known_of(recipe: Recipe, lock: Lock, folder: Path, identity: str = "") -> ServedModel:
    """Give what is known of a recipe's model; `folder` is where the recipe lies.

    `identity` is the digest of the server as it was started, where there is one.
    """
    return ServedModel(
        weights16=weights16(lock),
        kv_cache=recipe.serve.kv_cache or ("f16" if recipe.engine == "llama.cpp" else "auto"),
        backend=backend_of(recipe),
        identity=identity,
        goldens=folder / "golden",
    )


def backend_of(recipe: Recipe) -> str:
    """Name what computes: two backends round differently."""
    if recipe.engine != "llama.cpp":
        return recipe.engine
    if recipe.build is None:
        return "cpu"
    on = (name for name in BACKENDS if recipe.build.cmake.get(f"GGML_{name.upper()}") is True)
    return "cuda" if recipe.build.cuda else next(on, "cpu")


BACKENDS = ("cuda", "hip", "vulkan", "sycl", "metal")


def golden_path(known: ServedModel) -> Path:
    """Return the path of the golden values of these weights."""
    kv = "".join(c if c.isalnum() or c in "_-" else "-" for c in known.kv_cache)
    return current_copy(known.goldens / f"{known.weights16}-{kv}.json")


def read_golden(known: ServedModel | None) -> Golden | None:
    """Read the golden values; None where there are none yet. Raises LockError."""
    if known is None:
        return None
    path = golden_path(known)
    try:
        golden = Golden.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HostError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except ValidationError as error:
        raise _damaged(error, path) from error
    if (golden.weights16, golden.kv_cache) != (known.weights16, known.kv_cache):
        raise LockError(
            f"these golden values belong to {golden.weights16}-{golden.kv_cache}",
            where=str(path),
            hint="restore the file from git, or remove it and run probe --accept-golden",
            id="golden",
        )
    return golden


def _damaged(error: ValidationError, path: Path) -> LockError:
    """Say what is wrong with a file of golden values."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    hint = "restore the file from git, or remove it and run probe --accept-golden"
    what = f"these are no golden values: {first['msg']}{f' at {place}' if place else ''}"
    if place == "schema" and isinstance(first["input"], int) and first["input"] > SCHEMA:
        what = f"these are golden values of schema {first['input']}; this one reads {SCHEMA}"
        hint = "a newer Bakehouse wrote them: update this one"
    return LockError(what, where=str(path), hint=hint, id="golden")


_LIST = re.compile(r"\[\s+([^][{}]*?)\s+\]")
"""A list of numbers in indented JSON."""


def _on_one_line(found: re.Match[str]) -> str:
    return f"[{' '.join(found[1].split())}]"


def write_golden(known: ServedModel, golden: Golden) -> Path:
    """Write golden values; an older file is replaced, at once or not at all. Raises HostError."""
    path = writable_copy(golden_path(known))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, _LIST.sub(_on_one_line, to_json(golden)).encode())
    except OSError as error:
        raise HostError(f"cannot be written: {error.strerror}", where=str(path)) from error
    return path
