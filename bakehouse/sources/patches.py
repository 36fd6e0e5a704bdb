"""Patches of a source tree: pinned by content, applied in order, all or none."""

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
from bakehouse.sources.diffs import LARGE_HINT, MAX_BYTES, read_diff
from bakehouse.sources.fitting import Fit, try_patch
from bakehouse.sources.manifests import (
    find_manifest,
    manifest_path,
    patches_folder,
    read_manifest,
)
from bakehouse.util.files import write_atomic


def stored(places: Places, sha256: str) -> Path:
    """Path of a pinned diff in the cache; with it a build needs no recipe folder."""
    return places.cache / "patches" / f"{sha256}.patch"


def pin_patches(
    ctx: Context, folder: Path, patches: Sequence[Patch], engine: str = "llama.cpp"
) -> tuple[PatchPin, ...]:
    """Pin a recipe's patches by content, in order, and copy those that are files to the cache.

    Raises PatchError, LockError, RecipeError (an invalid manifest), NotFound (no manifest).
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
        raise _other_sha256("the patch", patch.sha256, f"{sha256} found", str(path))
    read_diff(data, str(path))
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
        raise _other_sha256(f"patch {key}", patch.sha256, f"{manifest.sha256} pinned", path)
    return PatchPin(
        id=manifest.id,
        file=FilePin(path=key, size=manifest.size, sha256=manifest.sha256),
        repo=manifest.repo, source=manifest.source, head=manifest.head, allow=patch.allow,
    )  # fmt: skip


def _other_sha256(what: str, expected: str, found: str, where: str) -> LockError:
    return LockError(
        f"{what} is not the one in the recipe: expected sha256 {expected}, {found}", where=where,
        hint="review the change; then restore the patch, or put its new sha256 into the recipe",
        id="patch-changed",
    )  # fmt: skip


def not_pinned(manifest: Manifest, path: str) -> LockError:
    """The error for a patch that has a manifest but no sha256 yet."""
    return LockError(
        f"patch {manifest.name} is not pinned yet", where=path, id="patch-unpinned",
        hint=f"run '{pin_command(manifest)}', which fetches it and writes its sha256 there",
    )  # fmt: skip


def pin_command(manifest: Manifest) -> str:
    """The shell command that pins a patch."""
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
    """Store a diff in the cache unless it is there already."""
    path = stored(places, sha256)
    if not path.is_file() or path.read_bytes() != data:
        write_atomic(path, data)


def bring_patches(ctx: Context, folder: Path, pins: Sequence[PatchPin]) -> None:
    """Check that pinned patches are unchanged, and copy those that are files to the cache.

    Fetches nothing. Raises LockError `patch-changed` for a file, `patch-moved` if a manifest now
    pins another diff.
    """
    for pin in pins:
        if pin.repo is not None:
            _check_manifest(ctx, pin)
            continue
        path = folder / Path(os.path.expanduser(pin.file.path))
        data = read_patch(path)
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 != pin.file.sha256:
            raise LockError(
                f"the patch changed since it was pinned: expected sha256 {pin.file.sha256}, found "
                f"{sha256}", where=str(path), id="patch-changed",
                hint="restore it, or accept it with 'invoke lock --update'",
            )  # fmt: skip
        keep(ctx.places, sha256, data)


def _check_manifest(ctx: Context, pin: PatchPin) -> None:
    path = manifest_path(patches_folder(ctx.recipes), str(pin.repo), pin.id)
    manifest = read_manifest(path)
    if manifest.sha256 != pin.file.sha256:
        raise LockError(
            f"the recipe and its lock differ: patch-moved: {pin.file.path} is now pinned as sha256 "
            f"{manifest.sha256 or 'nothing yet'}, the lock has {pin.file.sha256}",
            where=shown(path), id="patch-moved",
            hint="restore the manifest, or accept it with 'invoke lock --update'",
        )  # fmt: skip


def read_patch(path: Path) -> bytes:
    """Read a patch file of at most MAX_BYTES; anything but a regular file could block for ever.

    Raises NotFound, PatchError.
    """
    hint = "check the path; paths in a recipe are relative to the recipe"
    where = clean(str(path), one_line=True)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise PatchError("the patch is not a regular file", where=where, hint=hint)
        if status.st_size > MAX_BYTES:
            what = f"the patch is larger than {MAX_BYTES // 2**20} MiB"
            raise PatchError(what, where=where, hint=LARGE_HINT, id="patch-large")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound.named("patch", path.name, where=where, hint=hint) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise PatchError(f"cannot read the patch: {why}", where=where, hint=hint) from error


def kept_diff(ctx: Context, sha256: str, vendored: Path | None = None) -> bytes | None:
    """Return a pinned diff from the cache or from beside its manifest; None if in neither.

    A corrupt copy in the cache is deleted. Raises HostError if there was no other.
    """
    path, corrupt = stored(ctx.places, sha256), False
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
            corrupt = True
    if corrupt:
        raise HostError(
            "the cached copy of a patch was corrupt and has been deleted", where=str(path),
            hint="run it again; if it happens again, check the disk",
        )  # fmt: skip
    return None


def diff_of(ctx: Context, pin: PatchPin) -> bytes:
    """Return a pinned diff: cached, vendored, or fetched and verified.

    Raises LockError if it is nowhere, or if the fetched one differs; PatchError.
    """
    vendored = None
    if pin.repo is not None:
        path = manifest_path(patches_folder(ctx.recipes), pin.repo, pin.id)
        vendored = path.with_suffix(".diff")
    if (data := kept_diff(ctx, pin.file.sha256, vendored)) is not None:
        return data
    if pin.repo is None or pin.source is None:
        raise LockError(
            f"the pinned patch {pin.id} is not in the cache", id="patch-missing",
            where=f"{pin.file.path}, sha256 {pin.file.sha256}",
            hint="run 'invoke fetch' for the recipe, which copies its patches there",
        )  # fmt: skip
    data = _fetch_again(ctx, pin)
    found = hashlib.sha256(data).hexdigest()
    if found != pin.file.sha256 and (old := _fetch_old_head(ctx, pin)) is not None:
        data, found = old, pin.file.sha256
    if found != pin.file.sha256:
        raise LockError(
            f"patch {pin.file.path} moved: sha256 {pin.file.sha256} is pinned, the host now has "
            f"{found}", where=pin.source, id="patch-moved",
            hint="the pinned diff is no longer available: review the new one with 'invoke patch', "
            "accept it with its --update, then 'invoke lock --update'",
        )  # fmt: skip
    keep(ctx.places, found, data)
    return data


def _fetch_again(ctx: Context, pin: PatchPin) -> bytes:
    """Fetch a diff from its source. Raises PatchError, LockError."""
    from bakehouse.sources import upstream  # only a first build after a clone needs the network

    source, repo = str(pin.source), str(pin.repo)
    *_, kind, name = ("", *source.rstrip("/").split("/"))
    if kind == "pull" and name == pin.id:
        return upstream.get_diff(ctx, upstream.pull_address(ctx.environment, repo, int(pin.id)))
    if kind == "commit":
        return upstream.get_diff(ctx, upstream.commit_address(ctx.environment, repo, name))
    if "://" in source:
        return upstream.fetch_address(ctx, source).data
    raise LockError(
        f"the pinned patch {pin.file.path} is not in the cache, and came from a file",
        where=f"{source}, sha256 {pin.file.sha256}", id="patch-missing",
        hint=f"'invoke patch --file {source} --vendor' stores it beside its manifest",
    )  # fmt: skip


def _fetch_old_head(ctx: Context, pin: PatchPin) -> bytes | None:
    """The pinned diff of a pull request that was pushed to since, if its old head still exists."""
    from bakehouse.sources import upstream

    manifest = find_manifest(patches_folder(ctx.recipes), str(pin.repo), pin.id)
    if manifest is None or None in (manifest.pr, manifest.base, manifest.head):
        return None
    host = f"{upstream.host_of(ctx.environment)}/{manifest.repo}"
    try:
        data = upstream.get_diff(ctx, f"{host}/compare/{manifest.base}...{manifest.head}")
    except PatchError:
        return None
    return data if hashlib.sha256(data).hexdigest() == pin.file.sha256 else None


def apply_patches(
    ctx: Context, git: Git, repository: Path, tree: str, pins: Sequence[PatchPin]
) -> str:
    """Apply pinned patches in order to a tree; return the id of the resulting tree.

    Works in scratch indexes: if any hunk of any patch fails, nothing has changed.
    Raises PatchError with patch, file and hunk; LockError.
    """
    for pin in pins:
        fit = try_patch(git, repository, tree, diff_of(ctx, pin), pin.file.path)
        if not fit.good(pin.allow) or fit.tree is None:
            raise does_not_apply(pin, fit)
        tree = fit.tree
    return tree


def does_not_apply(pin: PatchPin, fit: Fit) -> PatchError:
    """The error for a pinned patch that does not apply: first hunk, then all notes."""
    where = f"{pin.file.path}:{fit.line}" if fit.line else pin.file.path
    first, *rest = fit.notes or (fit.word,)
    what = f"patch {pin.id} does not apply: {first}"
    if fit.word == "partly upstream":
        what = f"patch {pin.id} does not apply: it is partly upstream, {first}"
    elif fit.word.startswith("applies with"):
        need = loose_fit(fit.word)
        what = f"patch {pin.id} applies only with {need}, which is not allowed: {first}"
    return PatchError(what, where="\n".join((where, *rest)), hint=fit_hint(fit), id=fit_id(fit))


def loose_fit(word: str) -> str:
    """`offset` or `fuzz` for a patch that applies with one of them, else empty."""
    return word.removeprefix("applies with ") if word.startswith("applies with ") else ""


def fit_hint(fit: Fit) -> str:
    """What to do about a patch that does not apply as it is."""
    if need := loose_fit(fit.word):
        return f"check where it lands; then allow it: allow: {need} beside the patch, or --allow"
    hints = {
        "already upstream": "remove it from the recipe's patches, then 'invoke lock --update'",
        "partly upstream": "recreate it without what the source already has",
    }
    return hints.get(fit.word, "recreate it for the pinned commit, or pin a commit that it fits")


def fit_id(fit: Fit) -> str:
    """The id of its error."""
    return f"patch-{(loose_fit(fit.word) or fit.word).replace(' ', '-')}"
