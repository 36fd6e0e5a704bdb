"""How a recipe differs from its lock, with a reason for each difference. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from bakehouse.lock import ArchivePin, Drift, GitPin, Lock, WeightPin
from bakehouse.recipe.model import Recipe, Source
from bakehouse.recipe.weights import Weights
from bakehouse.sources.choice import fitting


def _drift(reason: str, where: str, locked: str | None, now: str | None) -> Drift:
    return Drift(reason=reason, where=where, locked=locked or "none", now=now or "none")


def _list(names: list[str]) -> str:
    return ", ".join(names)


def provided_toolkit(recipe: Recipe) -> str | None:
    """Return the version of the CUDA toolkit that Bakehouse provides; None if it does not."""
    cuda = recipe.build.cuda if recipe.build else None
    return cuda.version if cuda and cuda.provide == "pypi" else None


def differences(recipe: Recipe, lock: Lock) -> Iterator[Drift]:
    """Yield every difference between a recipe and its lock that has a name."""
    if lock.engine != recipe.engine:
        yield _drift("engine-changed", "engine", lock.engine, recipe.engine)
    yield from _source_drift(recipe, lock)
    yield from _image_drift(recipe, lock)
    toolkit, pinned = provided_toolkit(recipe), lock.toolkit.version if lock.toolkit else None
    if toolkit != pinned and not f"{pinned}.".startswith(f"{toolkit}."):
        yield _drift("toolkit-changed", "build.cuda", pinned or "none", toolkit or "none")
    locked, wanted = lock.weights, dict(recipe.weights.items())
    for role in sorted({*locked, *wanted}):
        where = f"weights.{role}"
        if role not in wanted:
            yield _drift("weights-changed", where, locked[role].origin, "nothing")
        elif role not in locked:
            yield _drift("weights-changed", where, "nothing", _origin(wanted[role]))
        else:
            yield from _weight_drift(where, wanted[role], locked[role])


def source_drift(recipe: Recipe, lock: Lock) -> bool:
    """Whether a lock pins another source than the recipe's, patches aside."""
    found = _source_drift(recipe, lock)
    return any(not drift.where.startswith("source.patches") for drift in found)


def _source_drift(recipe: Recipe, lock: Lock) -> Iterator[Drift]:
    source, pin = recipe.tree, lock.source
    if source is None or pin is None:
        if (source is None) != (pin is None):
            yield _drift(
                "source-changed", "source", pin.kind if pin else "none", "given" if source else ""
            )
        return
    if source.archive is None and isinstance(pin, GitPin):
        if source.git != pin.url:
            yield _drift("source-changed", "source.git", pin.url, str(source.git))
        if not pin.commit.startswith(str(source.commit)):
            yield _drift("commit-changed", "source.commit", pin.commit, str(source.commit))
        if source.ref != pin.ref:
            yield _drift("ref-changed", "source.ref", pin.ref or "none", source.ref or "none")
    elif source.archive is not None and isinstance(pin, ArchivePin):
        archive = source.archive
        origin = f"pypi:{archive.pypi}" if archive.pypi else str(archive.url or archive.path)
        for name, now, locked in (
            ("origin", origin, pin.origin),
            ("sha256", archive.sha256, pin.file.sha256),
            ("folder", archive.folder, pin.folder),
            ("number", str(archive.number), str(pin.number)),
        ):
            if now != locked:
                yield _drift("archive-changed", f"source.archive.{name}", locked, now)
    else:
        yield _drift("source-changed", "source", pin.kind, "git" if source.git else "archive")
    yield from _patch_drift(recipe, source, lock)


def _patch_drift(recipe: Recipe, source: Source, lock: Lock) -> Iterator[Drift]:
    now_patches = [patch.key(recipe.engine) for patch in source.patches]
    locked_patches = [patch.file.path for patch in lock.patches]
    if now_patches != locked_patches:
        yield _drift("patch-changed", "source.patches", _list(locked_patches), _list(now_patches))
        return
    for number, (patch, was) in enumerate(zip(source.patches, lock.patches, strict=True)):
        where = f"source.patches.{number}"
        if patch.sha256 and patch.sha256 != was.file.sha256:
            yield _drift("patch-changed", where, was.file.sha256, patch.sha256)
        if patch.allow != was.allow:
            yield _drift("patch-allowed-changed", where, was.allow, patch.allow)
        commit = source.commit or was.base or ""
        if was.base and isinstance(lock.source, GitPin) and not was.base.startswith(commit):
            yield _drift("patch-base-changed", where, was.base, commit)
        elif was.base and was.base != lock.base:  # a lock that was merged or edited by hand
            yield _drift("patch-base-changed", where, was.base, lock.base or "none")


def _origin(weights: Weights) -> str:
    if weights.hub:
        return f"hub:{weights.hub}"
    return f"pypi:{weights.pypi}" if weights.pypi else str(weights.url or weights.path)


def _weight_drift(where: str, weights: Weights, pin: WeightPin) -> Iterator[Drift]:
    if _origin(weights).rstrip("/") != pin.origin.rstrip("/"):
        yield _drift("weights-changed", where, pin.origin, _origin(weights))
        return
    full = weights.revision and len(weights.revision) == 40
    if full and weights.revision != pin.revision:
        yield _drift(
            "weights-changed", f"{where}.revision", str(pin.revision), str(weights.revision)
        )
    paths = [file.path for file in pin.files]
    if weights.files and fitting(paths, weights.files) != paths:
        yield _drift("weights-changed", f"{where}.files", ", ".join(paths), weights.files)
    hashes = [file.sha256 for file in pin.files]
    if weights.sha256 and hashes != [weights.sha256]:
        yield _drift("weights-changed", f"{where}.sha256", ", ".join(hashes), weights.sha256)


def _image_drift(recipe: Recipe, lock: Lock) -> Iterator[Drift]:
    now = {(r, str(a)): text for r, refs in recipe.images.items() for a, text in refs.items()}
    locked = {(r, str(a)): p.reference for r, pins in lock.images.items() for a, p in pins.items()}
    for role, arch in sorted({*locked, *now}):
        pair = locked.get((role, arch)), now.get((role, arch))
        if pair[0] != pair[1]:
            where = f"image.ref.{arch}" if role == "image" else f"build.bases.{role}.{arch}"
            yield _drift("image-changed", where, pair[0] or "nothing", pair[1] or "nothing")
    if recipe.image and not recipe.image.source:
        patches = [patch.key(recipe.engine) for patch in recipe.image.patches]
        pinned = [patch.file.path for patch in lock.patches]
        if patches != pinned:
            yield _drift("patch-changed", "image.patches", _list(pinned), _list(patches))
    mods = [mod.folder for mod in recipe.image.mods] if recipe.image else []
    if mods != [mod.folder for mod in lock.mods]:
        yield _drift("mod-changed", "image.mods", _list([m.folder for m in lock.mods]), _list(mods))
