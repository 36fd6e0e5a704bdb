"""Patches of a source tree: pinned by content, applied in their order, all or not at all."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from bakehouse.context import Context
from bakehouse.errors import HostError, LockError, NotFound, PatchError
from bakehouse.lock import FilePin, PatchPin
from bakehouse.patches.manifest import Manifest
from bakehouse.places import Places
from bakehouse.ports.git import Git
from bakehouse.recipe.faults import shown
from bakehouse.recipe.patches import UPSTREAM, Patch
from bakehouse.redact import clean
from bakehouse.sources.diffs import MAX_BYTES, check_patch
from bakehouse.sources.fitting import Fit, try_patch
from bakehouse.sources.manifests import (
    find_manifest,
    manifest_path,
    patches_folder,
    read_manifest,
)
from bakehouse.util.files import write_atomic


def stored(places: Places, sha256: str) -> Path:
    """Where a pinned patch lies in the cache, so that a build needs no recipe folder."""
    return places.cache / "patches" / f"{sha256}.patch"


def pin_patches(
    ctx: Context, folder: Path, patches: Sequence[Patch], engine: str = "llama.cpp"
) -> tuple[PatchPin, ...]:
    """Pin a recipe's patches by content, in their order, and keep a copy of those that are files.

    Raises PatchError, LockError, RecipeError (a manifest with faults), NotFound (no manifest).
    """
    return tuple(
        _pin_file(ctx, folder, patch) if patch.file else _pin_manifest(ctx, patch, engine)
        for patch in patches
    )


def _pin_file(ctx: Context, folder: Path, patch: Patch) -> PatchPin:
    name = str(patch.file)
    path = folder / Path(os.path.expanduser(name))
    data = read_patch(path)
    sha256 = hashlib.sha256(data).hexdigest()
    if patch.sha256 and patch.sha256 != sha256:
        raise LockError(
            f"the patch is not the one that the recipe names: sha256 {patch.sha256} expected, "
            f"{sha256} found",
            where=str(path),
            hint="bring the patch back, or write its new sha256 into the recipe",
            id="patch-changed",
        )
    check_patch(data, str(path))
    keep(ctx.places, sha256, data)
    pin = FilePin(path=name, size=len(data), sha256=sha256)
    return PatchPin(id=Path(name).stem, file=pin, allow=patch.allow)


def _pin_manifest(ctx: Context, patch: Patch, engine: str) -> PatchPin:
    manifest = manifest_of(ctx, patch, engine)
    key = patch.key(engine)
    path = shown(manifest_path(patches_folder(ctx.recipes), manifest.repo, manifest.id))
    if manifest.sha256 is None or manifest.size is None:
        raise not_pinned(manifest, path)
    if patch.sha256 and patch.sha256 != manifest.sha256:
        raise LockError(
            f"patch {key} is not the one that the recipe names: sha256 {patch.sha256} expected, "
            f"{manifest.sha256} pinned",
            where=path,
            hint="look at what changed, then write its sha256 into the recipe",
            id="patch-changed",
        )
    return PatchPin(
        id=manifest.id,
        file=FilePin(path=key, size=manifest.size, sha256=manifest.sha256),
        repo=manifest.repo, source=manifest.source, head=manifest.head, allow=patch.allow,
    )  # fmt: skip


def not_pinned(manifest: Manifest, path: str) -> LockError:
    """Make the error for a patch of which only hearsay is known."""
    return LockError(
        f"patch {manifest.name} is not pinned yet",
        where=path,
        hint=f"run '{pin_command(manifest)}', which fetches it and writes its sha256 there",
        id="patch-unpinned",
    )


def pin_command(manifest: Manifest) -> str:
    """The command that pins a patch, as it can be typed."""
    usual = "" if manifest.repo == UPSTREAM["llama.cpp"] else f" --repo {manifest.repo}"
    if manifest.pr is not None:
        return f"invoke patch --pr {manifest.pr}{usual}"
    if manifest.source.rpartition("/")[0].endswith("/commit"):
        return f"invoke patch --commit {manifest.source.rpartition('/')[2]}{usual}"
    flag = "--url" if "://" in manifest.source else "--file"
    return f"invoke patch {flag} {manifest.source}{usual}"


def manifest_of(ctx: Context, patch: Patch, engine: str) -> Manifest:
    """The manifest of a patch that a recipe names. Raises NotFound, RecipeError."""
    repo, _, name = patch.key(engine).rpartition("#")
    return read_manifest(manifest_path(patches_folder(ctx.recipes), repo, name))


def keep(places: Places, sha256: str, data: bytes) -> None:
    """Put a patch into the cache, where it is not there yet."""
    path = stored(places, sha256)
    if not path.is_file() or path.read_bytes() != data:
        write_atomic(path, data)


def bring_patches(ctx: Context, folder: Path, pins: Sequence[PatchPin]) -> None:
    """See that each pinned patch is still what it was; files get a copy in the cache.

    Nothing is fetched. Raises LockError `patch-changed` for a file, `patch-moved` for a manifest
    that pins another diff by now.
    """
    for pin in pins:
        if pin.repo is not None:
            _same_manifest(ctx, pin)
            continue
        path = folder / Path(os.path.expanduser(pin.file.path))
        data = read_patch(path)
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 != pin.file.sha256:
            raise LockError(
                f"the patch changed since it was pinned: sha256 {pin.file.sha256} expected, "
                f"{sha256} found",
                where=str(path),
                hint="bring it back, or accept it with 'invoke lock --update'",
                id="patch-changed",
            )
        keep(ctx.places, sha256, data)


def _same_manifest(ctx: Context, pin: PatchPin) -> None:
    path = manifest_path(patches_folder(ctx.recipes), str(pin.repo), pin.id)
    manifest = read_manifest(path)
    if manifest.sha256 != pin.file.sha256:
        raise LockError(
            f"the recipe and its lock differ: patch-moved: {pin.file.path} is pinned as sha256 "
            f"{manifest.sha256 or 'nothing yet'}, locked is {pin.file.sha256}",
            where=shown(path),
            hint="bring the manifest back, or accept it with 'invoke lock --update'",
            id="patch-moved",
        )


def read_patch(path: Path) -> bytes:
    """Read a patch file, bounded; only a regular file, since a pipe would make us wait for ever."""
    hint = "see that the path is right; those in a recipe are relative to the recipe"
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise PatchError("the patch is not a regular file", where=str(path), hint=hint)
        if status.st_size > MAX_BYTES:
            raise PatchError(
                f"the patch is larger than {MAX_BYTES // 2**20} MiB", where=str(path),
                hint="so large a change is a branch: make its commit the recipe's source",
                id="patch-large",
            )  # fmt: skip
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        where = clean(str(path), one_line=True)
        raise NotFound.named("patch", path.name, where=where, hint=hint) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise PatchError(
            f"the patch cannot be read: {why}", where=clean(str(path), one_line=True), hint=hint
        ) from error


def kept_diff(ctx: Context, sha256: str, vendored: Path | None = None) -> bytes | None:
    """A pinned diff from the cache, or from beside its manifest; None where it is in neither.

    A damaged copy in the cache is removed; HostError where there is no other.
    """
    path, damaged = stored(ctx.places, sha256), False
    for place in filter(None, (path, vendored)):
        try:
            data = place.read_bytes()
        except OSError:
            continue
        if hashlib.sha256(data).hexdigest() == sha256:
            keep(ctx.places, sha256, data)
            return data
        if place == path:
            path.unlink(missing_ok=True)
            damaged = True
    if damaged:
        raise HostError(
            "the kept copy of a patch was damaged on disk and has been removed",
            where=str(path),
            hint="run it again; if it comes back, check the disk",
        )
    return None


def diff_of(ctx: Context, pin: PatchPin) -> bytes:
    """The pinned diff: from the cache, from beside its manifest, or fetched and held to its hash.

    Raises LockError where it is nowhere, or where what comes is another one.
    """
    vendored = vendored_path(ctx, pin)
    if (data := kept_diff(ctx, pin.file.sha256, vendored)) is not None:
        return data
    if pin.repo is None or pin.source is None:
        raise LockError(
            f"the pinned patch {pin.id} is not at hand",
            where=f"{pin.file.path}, sha256 {pin.file.sha256}",
            hint="run 'invoke fetch' for the recipe, which keeps a copy of its patches",
            id="patch-missing",
        )
    data = fetch_again(ctx, pin)
    found = hashlib.sha256(data).hexdigest()
    if found != pin.file.sha256 and (old := _of_old_head(ctx, pin)) is not None:
        data, found = old, pin.file.sha256
    if found != pin.file.sha256:
        raise LockError(
            f"patch {pin.file.path} moved: sha256 {pin.file.sha256} is pinned, {found} came",
            where=pin.source,
            hint="what was pinned is not to be had any more: look at what changed with "
            "'invoke patch', accept it with its --update, then 'invoke lock --update'",
            id="patch-moved",
        )
    keep(ctx.places, found, data)
    return data


def _of_old_head(ctx: Context, pin: PatchPin) -> bytes | None:
    """The pinned diff of a pull request that was pushed to since, where its old head is left."""
    from bakehouse.sources import upstream

    manifest = find_manifest(patches_folder(ctx.recipes), str(pin.repo), pin.id)
    if manifest is None or None in (manifest.pr, manifest.base, manifest.head):
        return None
    page = f"{upstream.host_of(ctx.environment)}/{manifest.repo}/compare"
    try:
        data = upstream.get(
            ctx, f"{page}/{manifest.base}...{manifest.head}.diff{upstream.FULL_INDEX}"
        )
    except PatchError:
        return None
    return data if hashlib.sha256(data).hexdigest() == pin.file.sha256 else None


def vendored_path(ctx: Context, pin: PatchPin) -> Path | None:
    """Where a pinned diff would lie beside its manifest."""
    if pin.repo is None:
        return None
    return manifest_path(patches_folder(ctx.recipes), pin.repo, pin.id).with_suffix(".diff")


def fetch_again(ctx: Context, pin: PatchPin) -> bytes:
    """Fetch a diff from where it was fetched when it was pinned. Raises PatchError, LockError."""
    from bakehouse.sources import upstream  # only a first build after a clone needs the network

    source, repo = str(pin.source), str(pin.repo)
    tail = source.rstrip("/").split("/")
    if tail[-2:-1] == ["pull"] and tail[-1] == pin.id:
        page = upstream.pull_address(ctx.environment, repo, int(pin.id))
        return upstream.get(ctx, f"{page}.diff{upstream.FULL_INDEX}")
    if tail[-2:-1] == ["commit"]:
        page = upstream.commit_address(ctx.environment, repo, tail[-1])
        return upstream.get(ctx, f"{page}.diff{upstream.FULL_INDEX}")
    if "://" in source:
        return upstream.fetch_address(ctx, source).data
    raise LockError(
        f"the pinned patch {pin.file.path} is not at hand: it came from a file",
        where=f"{source}, sha256 {pin.file.sha256}",
        hint=f"'invoke patch --file {source} --vendor' keeps it beside its manifest",
        id="patch-missing",
    )


def apply_patches(
    ctx: Context, git: Git, repository: Path, tree: str, pins: Sequence[PatchPin]
) -> str:
    """Apply pinned patches in order to a tree; give the id of the tree that results.

    It happens in scratch indexes: where any hunk of any patch fails, nothing at all has changed.
    Raises PatchError that names patch, file and hunk.
    """
    for pin in pins:
        fit = try_patch(git, repository, tree, diff_of(ctx, pin), pin.file.path)
        if not fit.good(pin.allow) or fit.tree is None:
            raise does_not_apply(pin, fit)
        tree = fit.tree
    return tree


def does_not_apply(pin: PatchPin, fit: Fit) -> PatchError:
    """Say how a patch fails: its word first, then the first hunk, then all that was seen."""
    where = f"{pin.file.path}:{fit.line}" if fit.line else pin.file.path
    first, *rest = fit.notes or (fit.word,)
    hint = "make it anew against the pinned commit, or move the pin to one that it fits"
    if fit.word in ("applies with offset", "applies with fuzz"):
        need = "offset" if fit.word.endswith("offset") else "fuzz"
        what = f"patch {pin.id} applies only with {need}, which is not allowed: {first}"
        hint = f"look at where it lands; then allow it: allow: {need} beside the patch, or --allow"
    elif fit.word == "already upstream":
        what = f"patch {pin.id} does not apply: {first}"
        hint = "take it out of the recipe's patches, then 'invoke lock --update'"
    elif fit.word == "partly upstream":
        what = f"patch {pin.id} does not apply: it is partly upstream, {first}"
        hint = "make it anew without what the source has already"
    else:
        what = f"patch {pin.id} does not apply: {first}"
    return PatchError(what, where="\n".join((where, *rest)), hint=hint, id=_id_of(fit))


def _id_of(fit: Fit) -> str:
    return f"patch-{fit.word.removeprefix('applies with ').replace(' ', '-')}"
