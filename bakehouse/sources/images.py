"""Container images: pin a reference to content, and pull exactly that."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from bakehouse.context import Context
from bakehouse.errors import BakehouseError, HostError, LockError, NotFound
from bakehouse.lock import Drift, ImagePin, Lock
from bakehouse.recipe.types import ImageReference, parse
from bakehouse.sources.registry import ImageRun, Manifest, Platform, Registry, missing
from bakehouse.system.docker.models import ARCHITECTURES, ImageFacts, machine_arch, words

UNPACKED = 3
"""Bytes of disk for each byte of packed layers during a pull: itself, and unpacked. Engine images
of CUDA and PyTorch unpack to about twice their packed size."""


def pin_image(ctx: Context, reference: str, arch: str) -> ImagePin:
    """Resolve a reference for one architecture, down to the layers, pulling nothing.

    An image that only the local engine has is pinned by its id. Raises LockError for an image that
    does not exist or is incomplete, HostError for another platform, a login, the network.
    """
    if reference.startswith("sha256:"):
        local = ctx.docker.image(reference)
        if local is None:
            raise NotFound(
                "the local engine does not have this image, and an id names no registry",
                where=reference,
                hint="build, load or import it first; 'docker images --no-trunc' lists images",
                id="image-missing",
            )
        return _pin_local(reference, arch, local)
    at = parse(reference)
    local = _find_local(ctx, reference) if at.digest is None else None
    pulled = local and any(parse(known).name == at.name for known in local.digests)
    if local and local.arch == arch and not pulled:
        ctx.progress.say(f"{reference} exists only locally; pinned by image ID")
        return _pin_local(reference, arch, local)
    registry = Registry(ctx, at)
    found, index = registry.manifest(at.tag_or_digest), None
    if found.manifests is not None:
        index, found = found.digest, _platform(registry, found, at, arch)
    if found.config is None or found.layers is None:  # an index in an index
        raise no_platform(f"{at.name}, {at.tag_or_digest}", arch, "")
    config = registry.config(found.config)
    system = (str(config.os), machine_arch(str(config.architecture)))
    if system != ("linux", arch):
        raise no_platform(f"{at.name}, {at.tag_or_digest}", arch, "/".join(system))
    for layer in found.layers:
        if not registry.has(layer):
            raise missing(f"{at.name}, {at.tag_or_digest}: a layer", layer.digest, "")
    run = config.config or ImageRun()
    return ImagePin(
        reference=reference,
        name=at.name,
        index=index,
        digest=found.digest,
        id=found.config.digest,
        size=sum(layer.size for layer in found.layers),
        layers=len(found.layers),
        created=config.created or "",
        entrypoint=words(run.entrypoint),
        cmd=words(run.cmd),
        user=run.user or "",
        workdir=run.workdir or "",
        labels=run.labels or {},
    )


def _find_local(ctx: Context, reference: str) -> ImageFacts | None:
    """Find a local image; None without an engine. Raises HostError for one that hangs."""
    try:
        return ctx.docker.image(reference)
    except HostError as error:
        if error.id == "docker-timeout":
            raise
        return None


def _pin_local(reference: str, arch: str, local: ImageFacts) -> ImagePin:
    check_platform(local, arch, reference)
    fields = ("id", "size", "created", "entrypoint", "cmd", "user", "workdir", "labels")
    return ImagePin(
        reference=reference,
        name=reference.partition("@")[0],
        local=True,
        **{name: getattr(local, name) for name in fields},
    )


def _platform(registry: Registry, index: Manifest, at: ImageReference, arch: str) -> Manifest:
    """Read the manifest for linux on `arch` in an index. Raises HostError, LockError."""
    wanted = ("linux", ARCHITECTURES[arch])
    there: dict[tuple[str, str], str] = {}
    for entry in index.manifests or ():
        platform = entry.platform or Platform()
        key = (str(platform.os), str(platform.architecture))
        if key != wanted or platform.variant in (None, "", "v8"):
            there.setdefault(key, entry.digest)
    if wanted not in there:
        names = ", ".join("/".join(key) for key in sorted(there) if "unknown" not in key)
        raise no_platform(f"{at.name}, {at.tag_or_digest}", arch, names)
    try:
        return registry.manifest(there[wanted])
    except LockError as error:
        if error.id != "manifest-unknown":
            raise
        raise LockError(
            f"the index lists manifest {there[wanted]} for {arch}, but the registry no longer "
            "has it",
            where=f"{at.name}, {at.tag_or_digest} (index {index.digest})",
            hint="the registry was cleaned up wrongly: use another tag, and tell its publisher",
            id="manifest-vanished",
        ) from None


def no_platform(where: str, arch: str, there: str) -> HostError:
    """Make the error for an image of another platform."""
    return HostError(
        f"the image is not built for linux on {arch}, only for {there or 'unknown platforms'}",
        where=where,
        hint=f"use one for {arch} in image.ref of the recipe; another would not start",
        id="image-platform",
    )


def check_platform(found: ImageFacts, arch: str, where: str) -> None:
    """Refuse an image for another platform: it would fail with `exec format error`."""
    if (found.system, found.arch) != ("linux", arch):
        raise no_platform(where, arch, f"{found.system}/{found.arch}")


def ensure_image(ctx: Context, pin: ImagePin, arch: str) -> ImageFacts:
    """Pull the pinned image if the engine does not have it.

    Checks platform, registry and disk first. Raises HostError, LockError if the registry no longer
    has it, NotFound for a local image that is gone.
    """
    if found := ctx.docker.image(pin.ref):
        check_platform(found, arch, pin.reference)
        return found
    if pin.local:
        raise NotFound(
            f"the local image {pin.reference} is gone",
            where=pin.id,
            hint="build or import it again, then 'invoke lock --update'; it is in no registry",
            id="image-missing",
        )
    facts = ctx.docker.facts()
    if (facts.system, facts.arch) != ("linux", arch):
        raise no_platform(f"the engine at {facts.host}", facts.arch, f"linux/{arch}")
    _still_there(ctx, pin)
    if facts.host.startswith("unix://") and os.path.isdir(facts.root):
        free, need = shutil.disk_usage(facts.root).free, pin.size * UNPACKED
        if free < need:
            raise HostError(
                f"not enough disk space for the image: about {need:,} bytes needed ({pin.size:,} "
                f"packed, and unpacked), {free:,} free",
                where=facts.root,
                hint="free space ('docker system df' shows what uses it), or move the data root",
                id="disk-full",
            )
    found = _pull(ctx, pin, arch)
    check_platform(found, arch, pin.reference)
    if not any(known.endswith(f"@{pin.digest}") for known in found.digests):
        raise LockError(
            f"the engine has another image than the pinned one: {', '.join(found.digests)}",
            where=pin.ref, hint="pull it by hand to see why: docker pull " + pin.ref,
            id="digest-mismatch",
        )  # fmt: skip
    return found


def _still_there(ctx: Context, pin: ImagePin) -> None:
    """Ask the registry for the manifest: its errors are clearer than the engine's.

    An engine may have a way to the registry (a mirror, a proxy) that we have not.
    """
    try:
        Registry(ctx, parse(pin.ref)).manifest(str(pin.digest))
    except LockError as error:
        raise LockError(
            f"the registry no longer has the pinned image: {pin.ref}",
            where=f"pinned from {pin.reference}",
            hint="move the pin with 'invoke lock --update', or copy the image from another "
            "machine: docker save, docker load",
            id=error.id,
        ) from None
    except HostError as error:
        if error.id != "registry-unreachable":
            raise
        ctx.progress.say(f"could not check the registry before the pull: {error.what}")


def _pull(ctx: Context, pin: ImagePin, arch: str) -> ImageFacts:
    """Pull and show progress by layers."""
    layers: dict[str, int] = {}
    with ctx.progress.bar(f"pull {pin.reference}", "B") as bar:

        def on_layer(layer: str, status: str, done: int, total: int) -> None:
            if status == "Downloading":
                layers[layer] = done
            elif status in ("Download complete", "Pull complete") and total:
                layers[layer] = total
            note = f"{layer} {status.lower()}"
            bar.update(min(sum(layers.values()), pin.size), pin.size, note)

        return ctx.docker.pull(pin.ref, arch=arch, on_layer=on_layer)


def moved_tags(ctx: Context, lock: Lock) -> tuple[Drift, ...]:
    """List tags that moved since they were locked. Raises HostError, LockError."""
    found = []
    for role, by_arch in lock.images.items():
        for arch, pin in by_arch.items():
            if pin.local:
                now = _find_local(ctx, pin.reference)
                locked, current = pin.id, now.id if now else pin.id
            elif (at := parse(pin.reference)).digest is None:
                locked, current = str(pin.index or pin.digest), _current(ctx, at)
            else:
                continue
            if locked != current:
                where = f"{role} {arch}"
                found.append(Drift(reason="tag-moved", where=where, locked=locked, now=current))
    return tuple(found)


def _current(ctx: Context, at: ImageReference) -> str:
    try:
        return Registry(ctx, at).manifest(at.tag_or_digest).digest
    except LockError as error:
        if error.id != "manifest-unknown":
            raise
        return "nothing: the tag is gone"


def pin_images(
    ctx: Context, images: Mapping[str, Mapping[Any, str]]
) -> dict[str, dict[str, ImagePin]]:
    """Pin every image of a recipe, for every architecture that it names.

    Images for other machines are pinned as well: one lock serves all. Raises as `pin_image` does,
    with role and architecture.
    """
    pins: dict[str, dict[str, ImagePin]] = {}
    for role, by_arch in images.items():
        for arch, reference in by_arch.items():
            try:
                pins.setdefault(role, {})[arch] = pin_image(ctx, reference, arch)
            except BakehouseError as error:
                error.where = f"{role} for {arch}: {error.where or reference}"
                raise
    return pins
