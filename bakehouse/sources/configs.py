"""The architectures that a model's config.json declares, read without its weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path, PurePosixPath

from bakehouse.context import Context
from bakehouse.errors import CheckpointError, LockError, NotFound
from bakehouse.lock import FilePin, Lock, WeightPin
from bakehouse.recipe.model import Recipe
from bakehouse.redact import clean
from bakehouse.sources import hub
from bakehouse.sources.weights import folder_of, is_local, local_base
from bakehouse.util.files import write_atomic

CONFIG = "config.json"
MAX_BYTES = 4 * 2**20


def architectures(
    ctx: Context, folder: Path, recipe: Recipe, lock: Lock, role: str
) -> tuple[str, ...]:
    """Give the architectures that a role's config.json declares; `folder` is the recipe's.

    The file is read from the weights where they are here, else from the hub at the pinned revision,
    and verified either way. Raises LockError if none is pinned or it differs, NotFound if the
    weights have to be fetched first, CheckpointError for a file that declares none.
    """
    pin = lock.weights[role]
    file = _pinned(pin, recipe, role)
    data = _read(ctx, folder, pin, file)
    where = f"{role}: {pin.origin}, {file.path}"
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise LockError(
            "config.json differs from its pin", where=where,
            hint="check what changed it; 'invoke lock --update' pins the new one",
            id="hash-mismatch",
        )  # fmt: skip
    try:
        named = json.loads(data)["architectures"]
        found = tuple(str(name) for name in named if isinstance(name, str) and name)
    except (ValueError, KeyError, TypeError):
        found = ()
    if not found:
        raise CheckpointError(
            "config.json declares no architecture", where=where,
            hint="vLLM cannot load it either; get the file from the model's publisher",
        )  # fmt: skip
    return tuple(map(clean, found))


def _pinned(pin: WeightPin, recipe: Recipe, role: str) -> FilePin:
    named = [file for file in pin.files if PurePosixPath(file.path).name == CONFIG]
    if not named:
        raise LockError(
            f"the lock pins no config.json of the {role}, which declares its architecture",
            where=f"recipe {recipe.name}, weights.{role}.files",
            hint="vLLM needs every file of the repository: widen the glob, as in files: '*'",
            id="weights-config",
        )
    return min(named, key=lambda file: file.path.count("/"))


def _read(ctx: Context, folder: Path, pin: WeightPin, file: FilePin) -> bytes:
    base = local_base(folder, pin.origin) if is_local(pin) else folder_of(ctx.places, pin.files)
    kept = ctx.places.downloads / f"{file.sha256}-{CONFIG}"
    for path in (base / file.path, kept):
        try:
            return path.read_bytes()
        except OSError:
            continue
    if not pin.origin.startswith("hub:"):
        raise NotFound(
            "the weights were not fetched, and their config.json is needed first",
            where=str(base / file.path), hint="run 'invoke fetch' first", id="weights-missing",
        )  # fmt: skip
    repository = pin.origin.removeprefix("hub:")
    data = hub.small_file(ctx, repository, str(pin.revision), file.path, MAX_BYTES)
    if hashlib.sha256(data).hexdigest() == file.sha256:
        write_atomic(kept, data)
    return data
