"""In which ways a recipe's images are no longer those that its lock pins. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from bakehouse.lock import Lock
from bakehouse.recipe.model import Recipe


def image_drift(recipe: Recipe, lock: Lock) -> Iterator[tuple[str, str, str, str]]:
    """Reason, where in the recipe, what is locked, what the recipe says now."""
    wanted: dict[tuple[str, str], str] = {
        (r, a): text for r, refs in recipe.images.items() for a, text in refs.items()
    }
    locked = {(r, a): pin.reference for r, pins in lock.images.items() for a, pin in pins.items()}
    for role, arch in sorted({*wanted, *locked}):
        was, now = locked.get((role, arch)), wanted.get((role, arch))
        if was != now:
            where = f"image.ref.{arch}" if role == "image" else f"build.bases.{role}.{arch}"
            yield "image-changed", where, was or "nothing", now or "nothing"
    if recipe.image and not recipe.image.source:
        named = [patch.key(recipe.engine) for patch in recipe.image.patches]
        pinned = [patch.file.path for patch in lock.patches]
        if named != pinned:
            yield "patch-changed", "image.patches", ", ".join(pinned), ", ".join(named)
    mods = [mod.folder for mod in recipe.image.mods] if recipe.image else []
    if mods != [mod.folder for mod in lock.mods]:
        were = ", ".join(mod.folder for mod in lock.mods)
        yield "mod-changed", "image.mods", were or "none", ", ".join(mods) or "none"
