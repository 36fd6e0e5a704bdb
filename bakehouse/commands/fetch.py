"""The task `fetch`: download and verify the pinned source, images and weights."""

from __future__ import annotations

from dataclasses import asdict

from bakehouse import flags
from bakehouse.context import Context, Outcome
from bakehouse.cuda.install import fetch as fetch_toolkit
from bakehouse.host import read_host
from bakehouse.lock import Lock
from bakehouse.patches import pin as pinned
from bakehouse.patches.source_tree import ensure_tree, repository_of
from bakehouse.preflight.rules import load_and_check
from bakehouse.recipe.loader import find
from bakehouse.resolver import ensure_lock, lock_path
from bakehouse.sources.images import ensure_image
from bakehouse.sources.weights import ensure, refuse_offline

Options = flags.Fetch


def run(ctx: Context, options: Options) -> Outcome:
    """Download what is missing and verify all of it."""
    loaded = load_and_check(find(options.recipe, ctx.recipes), options.set_, combinations=False)
    pinned.require_manifests(ctx, loaded)
    lock = ensure_lock(ctx, loaded, locked=options.locked)
    refuse_offline(ctx, lock)
    ensure_tree(ctx, lock)
    wheels = fetch_toolkit(ctx, lock.toolkit) if lock.toolkit else ()
    images = _images(ctx, lock)
    weights = ensure(ctx, loaded, lock, rehash=options.rehash)
    lines = []
    source = None
    if lock.source and lock.source_tree:
        source = {
            "repository": str(repository_of(ctx.places, lock.source)),
            "tree": lock.source_tree,
        }
        lines.append(f"source: tree {lock.source_tree} in {source['repository']}")
    lines += [f"{role}: {ref}" for role, ref in images.items()]
    for role, paths in weights.items():
        size = sum(file.size for file in lock.weights[role].files)
        lines.append(f"{role}: {paths.path} ({size:,} bytes, verified)")
    if lock.toolkit:
        lines.append(f"toolkit: CUDA {lock.toolkit.version}, {len(wheels)} wheels")
    return Outcome(
        result={
            "lock": str(lock_path(loaded.path)),
            "source": source,
            "images": images,
            "toolkit": [str(path) for path in wheels],
            "weights": {role: asdict(paths) for role, paths in weights.items()},
        },
        text="\n".join(lines),
    )


def _images(ctx: Context, lock: Lock) -> dict[str, str]:
    """Pull this machine's images, by digest."""
    if not lock.images:
        return {}
    arch = read_host().arch
    pins = {role: lock.image(arch, role) for role in lock.images}
    for pin in pins.values():
        ensure_image(ctx, pin, arch)
    return {role: pin.ref for role, pin in pins.items()}
