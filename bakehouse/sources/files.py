"""Fetch pinned files; hash them, and cache hashes.

A hash is valid while size, modification and change time (in nanoseconds), inode and device are
unchanged. The modification time alone would not do: a writer can set it back, as
`rsync --inplace --times` does. Nobody can set the change time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from bakehouse.context import Context
from bakehouse.errors import LockError, os_error
from bakehouse.models import to_json
from bakehouse.paths import Places
from bakehouse.progress import Silent
from bakehouse.redact import clean
from bakehouse.util.files import file_lock, fsync_folder, sha256_file, write_atomic
from bakehouse.util.parallel import SharedProgress, run_parallel

SHOWN = 2**28
"""Bytes; hashing a larger file shows progress."""


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn OSError into HostError for files below `folder`."""
    try:
        yield
    except OSError as error:
        hint = "check permissions and free space there, or set BAKEHOUSE_HOME"
        raise os_error(error, "files cannot be written", folder, hint) from error


def guarded(ctx: Context, lock_file: Path, what: str) -> AbstractContextManager[None]:
    """Hold a lock file; see `file_lock`."""
    return file_lock(lock_file, what, ctx.progress.say)


def fetch_pinned(
    ctx: Context,
    url: str,
    target: Path,
    *,
    sha256: str,
    size: int | None = None,
    title: str = "",
    headers: Mapping[str, str] | None = None,
) -> None:
    """Download `target` if it is missing, and verify its content.

    A download in several pieces that does not verify is repeated once from its start: the host may
    have no validators. Raises LockError (other content), HostError.
    """
    with guarded(ctx, target.with_name(target.name + ".lock"), title or target.name):
        if target.is_file():
            if sha256_file(target) == sha256:
                return
            target.unlink()  # damaged on disk
        incoming = target.with_name(target.name + ".incoming")
        found, pieced = _fetch(ctx, url, incoming, size, title, headers)
        if found != sha256 and pieced:
            incoming.unlink()
            found, _ = _fetch(ctx, url, incoming, size, title, headers)
        if found != sha256:
            nature = describe_wrong(incoming)
            incoming.unlink()
            raise LockError(
                f"the download differs from its pin: expected sha256 {sha256}, found {found}"
                + (f"; it is {nature}" if nature else ""),
                where=clean(ctx.redactor.text(url)),
                hint="the host serves other content under this name; find out why before "
                "you use it, then move the pin with 'invoke lock --update'",
                id="hash-mismatch",
            )
        os.replace(incoming, target)
        fsync_folder(target.parent)


def _fetch(
    ctx: Context,
    url: str,
    incoming: Path,
    size: int | None,
    title: str,
    headers: Mapping[str, str] | None,
) -> tuple[str, bool]:
    """Download; give the sha256, and whether it came in more than one piece."""
    pieced = True
    if not incoming.is_file():
        with ctx.progress.bar(f"fetch {title or incoming.name}", "B") as bar:
            pieced = ctx.http.download(
                url, incoming, headers=headers, size=size,
                on_bytes=bar.update, on_wait=ctx.progress.say,
            )  # fmt: skip
    bars = ctx.progress if incoming.stat().st_size >= SHOWN else Silent()
    with bars.bar(f"hash {title or incoming.name}", "B") as bar:
        return sha256_file(incoming, bar.update), pieced


_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs.github.com/spec/", "a git-lfs pointer, not the file itself"),
    (b"<!doctype html", "an HTML page"),
    (b"<html", "an HTML page"),
    (b'{"error', "a JSON error message"),
    (b"<?xml", "an XML document"),
)


def describe_wrong(path: Path) -> str | None:
    """Name by its first bytes what an unexpected file is; None if unknown."""
    with path.open("rb") as file:
        head = file.read(512).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not head:
        return "empty"
    return next((words for magic, words in _MAGIC if head.startswith(magic)), None)


SETTLED_NS = 50_000_000
"""A file that changed less than this ago may change again within one clock tick."""


def _note(places: Places, path: Path) -> Path:
    name = hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:40]
    return places.weights / ".known" / f"{name}.json"


def _identity(path: Path) -> dict[str, Any]:
    seen = path.stat()
    return {
        "path": str(path.absolute()), "size": seen.st_size, "mtime_ns": seen.st_mtime_ns,
        "ctime_ns": seen.st_ctime_ns, "inode": seen.st_ino, "device": seen.st_dev,
    }  # fmt: skip


def remembered(places: Places, path: Path) -> str | None:
    """Give the file's sha256 if it was hashed before and has not changed since."""
    try:
        note = json.loads(_note(places, path).read_bytes())
        sha256 = note.pop("sha256")
        return sha256 if note == _identity(path) and isinstance(sha256, str) else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def forget(places: Places, path: Path) -> None:
    """Drop the hash of a path that is no longer used."""
    _note(places, path).unlink(missing_ok=True)


def cached_sha256(ctx: Context, path: Path) -> str:
    """Give the file's sha256; reads it only if the hash is not cached."""
    return known_sha256s(ctx, [path])[path]


def known_sha256s(ctx: Context, paths: Sequence[Path], *, again: bool = False) -> dict[Path, str]:
    """Give several files' sha256, hashed on all cores if they are not cached.

    `again` reads them in any case. Raises OSError for a file that cannot be read.
    """
    found = {} if again else {p: sha for p in paths if (sha := remembered(ctx.places, p))}
    sizes = {path: path.stat().st_size for path in dict.fromkeys(paths) if path not in found}
    if not sizes:
        return found
    title = next(iter(sizes)).name if len(sizes) == 1 else f"{len(sizes)} files"
    with ctx.progress.bar(f"hash {title}", "B") as bar:
        count = SharedProgress(bar, sum(sizes.values()))
        # The largest first: the last one to end should be a small one.
        order = sorted(sizes, key=lambda path: -sizes[path])
        made = run_parallel(
            [partial(hash_now, ctx, path, count.of(path)) for path in order],
            len(os.sched_getaffinity(0)),
        )
    return {**found, **dict(zip(order, made, strict=True))}


def hash_now(ctx: Context, path: Path, on_bytes: Callable[[int, int | None], None]) -> str:
    """Hash a file and remember it."""
    before = _identity(path)
    found = sha256_file(path, on_bytes)
    store_sha256(ctx, path, found, before)
    return found


def hash_fetched(ctx: Context, path: Path, name: str) -> str:
    """Hash a downloaded file and remember it; a large one shows progress."""
    size = path.stat().st_size
    bars = ctx.progress if size >= SHOWN else Silent()
    with bars.bar(f"hash {name}", "B") as bar:
        return hash_now(ctx, path, SharedProgress(bar, size).of(path))


def store_sha256(
    ctx: Context, path: Path, sha256: str, before: dict[str, Any] | None = None
) -> None:
    """Store a hash, unless the file changed while it was read, or just now."""
    now = _identity(path)
    fresh = ctx.clock.now().timestamp() * 1e9 - now["ctime_ns"] < SETTLED_NS
    if before not in (None, now) or (before is not None and fresh):
        return
    with suppress(OSError):  # a full or read-only disk: then it is hashed again next time
        write_atomic(_note(ctx.places, path), to_json({**now, "sha256": sha256}).encode())
