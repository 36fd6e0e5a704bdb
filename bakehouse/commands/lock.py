"""The tasks `lock` and `fetch`: resolve a recipe to exact pins; download and verify them."""

from __future__ import annotations

from dataclasses import asdict

from bakehouse import flags
from bakehouse.context import Context, Outcome
from bakehouse.cuda.install import fetch as fetch_toolkit
from bakehouse.errors import BakehouseError, LockError
from bakehouse.host import read_host
from bakehouse.lock import Drift, changes, describe, moved_line
from bakehouse.patches import pin
from bakehouse.patches.source_tree import ensure_tree, repository_of
from bakehouse.preflight.rules import load_and_check
from bakehouse.recipe.loader import find
from bakehouse.resolver import ensure_lock, lock_path, moved_refs, read_lock
from bakehouse.sources.images import ensure_image, moved_tags
from bakehouse.sources.weights import ensure, refuse_offline


def run_lock(ctx: Context, options: flags.Lock) -> Outcome:
    """Write the lock if there is none; with `update`, update its pins."""
    loaded = load_and_check(find(options.recipe, ctx.recipes), options.set_, combinations=False)
    pin.require_manifests(ctx, loaded)
    try:
        before = read_lock(lock_path(loaded.path))
    except LockError:  # reported by what follows
        before = None
    lock = ensure_lock(ctx, loaded, update=options.update, say=False)
    path = lock_path(loaded.path)  # of a shipped recipe: another one once it is written
    moved = changes(before, lock) if before else ()
    refs: tuple[Drift, ...] = ()
    if before and not options.update:
        try:
            refs = (*moved_refs(ctx, lock), *moved_tags(ctx, lock))
        except BakehouseError as error:
            ctx.progress.say(f"cannot check whether a ref or tag moved: {error.what}")
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


def run_fetch(ctx: Context, options: flags.Fetch) -> Outcome:
    """Download what is missing and verify all of it."""
    loaded = load_and_check(find(options.recipe, ctx.recipes), options.set_, combinations=False)
    pin.require_manifests(ctx, loaded)
    lock = ensure_lock(ctx, loaded, locked=options.locked)
    refuse_offline(ctx, lock)
    ensure_tree(ctx, lock)
    wheels = fetch_toolkit(ctx, lock.toolkit) if lock.toolkit else ()
    arch = read_host().arch
    images = {role: lock.image(arch, role) for role in lock.images}
    for image in images.values():
        ensure_image(ctx, image, arch)
    weights = ensure(ctx, loaded, lock, rehash=options.rehash)
    lines = []
    source = None
    if lock.source and lock.source_tree:
        source = {
            "repository": str(repository_of(ctx.places, lock.source)),
            "tree": lock.source_tree,
        }
        lines.append(f"source: tree {lock.source_tree} in {source['repository']}")
    lines += [f"{role}: {image.ref}" for role, image in images.items()]
    for role, paths in weights.items():
        size = sum(file.size for file in lock.weights[role].files)
        lines.append(f"{role}: {paths.path} ({size:,} bytes, verified)")
    if lock.toolkit:
        lines.append(f"toolkit: CUDA {lock.toolkit.version}, {len(wheels)} wheels")
    return Outcome(
        result={
            "lock": str(lock_path(loaded.path)),
            "source": source,
            "images": {role: image.ref for role, image in images.items()},
            "toolkit": [str(path) for path in wheels],
            "weights": {role: asdict(paths) for role, paths in weights.items()},
        },
        text="\n".join(lines),
    )
