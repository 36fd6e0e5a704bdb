"""Resolve a recipe to its lock: written beside the recipe, changed only by `lock --update`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bakehouse.base import digest, to_json
from bakehouse.errors import HostError, LockError
from bakehouse.lock import (
    ArchivePin,
    Drift,
    GitPin,
    Lock,
    ToolkitPin,
    changes,
    describe,
    moved_line,
)
from bakehouse.places import current_copy, writable_copy
from bakehouse.recipe.model import Recipe
from bakehouse.sources.drift import differences, provided_toolkit
from bakehouse.sources.mods import pin_mods

if TYPE_CHECKING:
    from bakehouse.context import Context
    from bakehouse.recipe.load import Loaded

SCHEMA = 1
MAX_LOCK = 16 * 2**20


def lock_path(recipe_path: Path) -> Path:
    """Return the path of a recipe's lock: beside it, as `NAME.lock.json`.

    The lock of a recipe that ships with an installed Bakehouse may have a newer copy of the user's.
    """
    return current_copy(recipe_path.with_name(f"{recipe_path.stem}.lock.json"))


def read_lock(path: Path) -> Lock | None:
    """Read a lock; None if there is no file.

    Raises LockError if it is damaged, or was written by a newer Bakehouse.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LockError(f"the lock cannot be read: {error.strerror}", where=str(path)) from error

    def damaged(why: str) -> LockError:
        return LockError(
            f"the lock is damaged: {why}",
            where=str(path),
            hint="restore it from git, or write a new one with 'invoke lock --update'",
            id="lock-damaged",
        )

    if any(data.startswith(m) or b"\n" + m in data for m in (b"<<<<<<< ", b">>>>>>> ")):
        raise damaged("it contains merge conflict markers")
    try:
        content = json.loads(data) if len(data) <= MAX_LOCK else None
    except ValueError as error:
        raise damaged(f"it is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise damaged("it is not a JSON object")
    schema = content.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise LockError(
            f"the lock was written by a newer Bakehouse (schema {schema}, supported is {SCHEMA})",
            where=str(path),
            hint="update Bakehouse, or write a new lock with 'invoke lock --update'",
            id="lock-newer",
        )
    try:
        return Lock.model_validate_json(data)
    except ValueError as error:
        raise damaged(_first_fault(error)) from None


def _first_fault(error: ValueError) -> str:
    faults: Any = getattr(error, "errors", list)()
    if not faults:
        return str(error)
    return f"{'.'.join(map(str, faults[0]['loc'])) or 'it'}: {faults[0]['msg']}"


def wants(recipe: Recipe) -> str:
    """Return the digest of all that a lock resolves: engine, source, patches, toolkit, weights."""
    data: dict[str, Any] = {
        "engine": recipe.engine,
        "source": recipe.tree.to_data() if recipe.tree else None,
        "toolkit": provided_toolkit(recipe),
        "weights": recipe.weights.to_data(),
    }
    if recipe.images:
        data |= {"images": recipe.images}
    if recipe.image and recipe.image.patches:
        data |= {"patches": [patch.to_data() for patch in recipe.image.patches]}
    if recipe.image and recipe.image.mods:
        data |= {"mods": [mod.folder for mod in recipe.image.mods]}
    return digest(data)


def drift(recipe: Recipe, lock: Lock) -> tuple[Drift, ...]:
    """Return how a recipe and its lock differ; empty if they agree. Pure."""
    found = tuple(differences(recipe, lock))
    if found or lock.wants == (now := wants(recipe)):
        return found
    where = "the digest of what is resolved"
    return (Drift(reason="recipe-changed", where=where, locked=lock.wants[:12], now=now[:12]),)


def resolve(ctx: Context, loaded: Loaded, before: Lock | None = None) -> Lock:
    """Pin everything that a recipe names; fetches what has to be hashed.

    `before` is an older lock: files that it pins for the same recipe are not fetched again. Raises
    LockError, PatchError, HostError, NotFound, UsageError.
    """
    # Imported here because `plan` and `show` pass through this module and need no network code.
    from bakehouse.ports.git import Git
    from bakehouse.sources import archive, gitpin, images, patches, pinning, tree

    recipe = loaded.recipe
    for _, wanted in recipe.weights.items():
        pinning.look_first(ctx, loaded.folder, wanted)
    known = before if before and before.wants == wants(recipe) else None
    git = Git(ctx.processes, ctx.environment)
    source: GitPin | ArchivePin | None = None
    patch_pins = patches.pin_patches(ctx, loaded.folder, recipe.patches, recipe.engine)
    source_tree = None
    if wanted_tree := recipe.tree:
        if wanted_tree.archive:
            source = archive.pin_archive(
                ctx, git, wanted_tree.archive, loaded.folder, known.source if known else None
            )
        else:
            source = gitpin.pin_git(ctx, git, wanted_tree)
        source_tree = tree.patched_tree(ctx, git, source, patch_pins)
    pins = known.weights if known else {}
    weights = {
        role: pinning.pin_weights(ctx, loaded.folder, role, wanted, pins.get(role))
        for role, wanted in recipe.weights.items()
    }
    lock = Lock(
        recipe=recipe.name,
        engine=recipe.engine,
        wants=wants(recipe),
        source=source,
        patches=patch_pins,
        source_tree=source_tree,
        toolkit=_pin_toolkit(ctx, recipe),
        weights=weights,
        images=images.pin_images(ctx, recipe.images),
        mods=pin_mods(loaded.folder, recipe.image.mods if recipe.image else ()),
    )
    on = {"base": lock.base}
    return lock.model_copy(update={"patches": tuple(p.model_copy(update=on) for p in patch_pins)})


def _pin_toolkit(ctx: Context, recipe: Recipe) -> ToolkitPin | None:
    version = provided_toolkit(recipe)
    if version is None:
        return None
    from bakehouse.toolkit.provide import pin_toolkit

    return pin_toolkit(ctx, version)


def ensure_lock(
    ctx: Context,
    loaded: Loaded,
    *,
    locked: bool = False,
    update: bool = False,
    say: bool = True,
) -> Lock:
    """Return the recipe's lock; a new one is written and (`say`) printed.

    With `locked` none is written; with `update` existing pins are updated and the changes printed.
    Patches and local archives are copied into the cache and verified. Raises LockError if the
    recipe and its lock differ.
    """
    path = lock_path(loaded.path)
    old = _old_lock(path, update=update)
    if old is not None and not update:
        _no_drift(ctx, loaded, old, path)
        bring_local_files(ctx, loaded, old)
        return old
    if locked:
        raise LockError(
            "no lock file found, and this task does not create one"
            if old is None
            else "--locked does not allow updating the lock",
            where=str(path),
            hint=f"run '{_command(ctx, loaded)}' and keep the file in git",
            id="lock-missing",
        )
    _no_overrides(loaded)
    new = resolve(ctx, loaded, old)
    if new != old:
        _write(path, new)
        lines = describe(new) if old is None else map(moved_line, changes(old, new))
        for line in lines if say else ():
            ctx.progress.say(line)
    return new


def _old_lock(path: Path, *, update: bool) -> Lock | None:
    try:
        return read_lock(path)
    except LockError:
        if update:  # a new one replaces it
            return None
        raise


def _command(ctx: Context, loaded: Loaded) -> str:
    """Return the command that locks this recipe."""
    beside = loaded.folder.absolute() == ctx.recipes.absolute()
    return f"invoke lock --recipe {loaded.path.stem if beside else loaded.path}"


def _no_drift(ctx: Context, loaded: Loaded, lock: Lock, path: Path) -> None:
    hint = f"if the change is intended, update the pins with '{_command(ctx, loaded)} --update'"
    if lock.recipe != loaded.recipe.name:
        raise LockError(
            f"the lock belongs to another recipe: '{lock.recipe}', not '{loaded.recipe.name}'",
            where=str(path),
            hint=hint,
            id="lock-foreign",
        )
    if found := drift(loaded.recipe, lock):
        lines = "; ".join(f"{d.reason}: {d.where} is {d.now}, locked is {d.locked}" for d in found)
        raise LockError(
            f"the recipe and its lock differ: {lines}",
            where=str(path),
            hint=hint,
            id="lock-drift",
        )


def _no_overrides(loaded: Loaded) -> None:
    """Refuse to lock an override: the next run without `--set` would differ."""
    from bakehouse.recipe.load import load

    if wants(load(loaded.path).recipe) != wants(loaded.recipe):
        raise LockError(
            "--set changes what is locked",
            where=str(loaded.path),
            hint="write it into the recipe, or into another recipe that includes this one",
            id="lock-override",
        )


def bring_local_files(ctx: Context, loaded: Loaded, lock: Lock) -> None:
    """Verify a recipe's local patches and archive, and copy them to the cache for later steps."""
    tree = loaded.recipe.tree
    archive = tree.archive if tree else None
    if lock.patches:
        from bakehouse.sources.patches import bring_patches

        bring_patches(ctx, loaded.folder, lock.patches)
    if archive and archive.path:
        from bakehouse.sources.archive import bring_archive

        bring_archive(ctx, archive, loaded.folder)


def _write(path: Path, lock: Lock) -> None:
    from bakehouse.util.files import write_atomic

    try:
        path = writable_copy(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, to_json(lock).encode())
    except OSError as error:
        raise HostError(
            f"the lock cannot be written: {error.strerror}",
            where=str(path),
            hint="check that the recipe's folder is writable",
            id="disk",
        ) from error


def moved_refs(ctx: Context, lock: Lock) -> tuple[Drift, ...]:
    """Return the drift of a git source's ref, by asking the repository."""
    if not isinstance(lock.source, GitPin) or not lock.source.ref:
        return ()
    from bakehouse.ports.git import Git
    from bakehouse.sources.refs import find_ref

    git = Git(ctx.processes, ctx.environment)
    _, now = find_ref(ctx, git, lock.source.url, lock.source.ref)
    if now == lock.source.ref_commit:
        return ()
    locked = str(lock.source.ref_commit)
    return (Drift(reason="ref-moved", where="source.ref", locked=locked, now=now),)
