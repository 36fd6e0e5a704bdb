"""The task `lock`: resolve a recipe to exact pins, or report their drift."""

from __future__ import annotations

from bakehouse import flags
from bakehouse.context import Context, Outcome
from bakehouse.errors import BakehouseError, LockError
from bakehouse.lock import Drift, Lock, changes, describe, moved_line
from bakehouse.patches import pin
from bakehouse.preflight.rules import load_and_check
from bakehouse.recipe.loader import LoadedRecipe, find
from bakehouse.resolver import ensure_lock, lock_path, moved_refs, read_lock
from bakehouse.sources.images import moved_tags

Options = flags.Lock


def run(ctx: Context, options: Options) -> Outcome:
    """Write the lock if there is none; with `update`, update its pins."""
    loaded = load_and_check(find(options.recipe, ctx.recipes), options.set_, combinations=False)
    pin.require_manifests(ctx, loaded)
    before = _before(loaded)
    lock = ensure_lock(ctx, loaded, update=options.update, say=False)
    path = lock_path(loaded.path)
    moved = changes(before, lock) if before else ()
    refs = _refs(ctx, lock) if before and not options.update else ()
    lines = describe(lock)
    if before and options.update:
        lines = [moved_line(change) for change in moved] or ["nothing moved", *lines]
    lines += [
        f"{d.reason}: {d.where} pointed to {d.locked}, now to {d.now}; the pin is unchanged"
        for d in refs
    ]
    lines.append(f"lock: {path}")
    return Outcome(
        result={
            "path": str(path),
            "lock": lock.to_data(),
            "created": before is None,
            "moved": [change.to_data() for change in moved],
            "drift": [found.to_data() for found in refs],
        },
        text="\n".join(lines),
    )


def _before(loaded: LoadedRecipe) -> Lock | None:
    """Return the existing lock; None for one that cannot be read, which is reported later."""
    try:
        return read_lock(lock_path(loaded.path))
    except LockError:
        return None


def _refs(ctx: Context, lock: Lock) -> tuple[Drift, ...]:
    """Return the refs and tags that moved; if that is unknown, say so."""
    try:
        return (*moved_refs(ctx, lock), *moved_tags(ctx, lock))
    except BakehouseError as error:
        ctx.progress.say(f"cannot check whether a ref or tag moved: {error.what}")
        return ()
