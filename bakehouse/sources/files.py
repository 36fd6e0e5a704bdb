"""Files by content: download once, verify by sha256, guard by a lock file."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bakehouse import atomic
from bakehouse.atomic import fsync_folder
from bakehouse.context import Context
from bakehouse.errors import HostError, LockError
from bakehouse.progress import Silent
from bakehouse.redact import clean

CHUNK = 2**19
"""Bytes read at once: they stay in a core's own cache."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
REPORT = 2**24
"""Bytes between two reports of progress."""
SHOWN = 2**28
"""Bytes; hashing a larger file shows progress."""


def sha256_file(path: Path, on_bytes: Callable[[int, int | None], None] | None = None) -> str:
    """Give a file's sha256, in hex; `on_bytes` gets bytes read and the size."""
    hashed = hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK))
    done = 0
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        while count := file.readinto(buffer):
            hashed.update(buffer[:count])
            done += count
            if on_bytes and (done % REPORT < count or done == size):
                on_bytes(done, size)
    return hashed.hexdigest()


def write_atomic(path: Path, data: bytes) -> None:
    """Write a whole file or leave the old one; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path, data)


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn OSError into HostError for files below `folder`."""
    try:
        yield
    except OSError as error:
        raise HostError(
            f"cannot write files: {error.strerror or error}",
            where=str(error.filename2 or error.filename or folder),
            hint="check what is in the way there, free some space, or set BAKEHOUSE_HOME",
            id="disk-full" if error.errno in FULL else "disk",
        ) from error


@contextmanager
def guarded(ctx: Context, lock_file: Path, what: str) -> Iterator[None]:
    """Hold a lock file; if another run holds it, say so and wait.

    The kernel releases it when its holder ends, however it ends. Raises HostError.
    """
    import filelock  # many callers only read

    try:
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(lock_file, mode=0o644)
        try:
            lock.acquire(timeout=0.2)
        except filelock.Timeout:
            ctx.progress.say(f"another run is working on {what}; waiting")
            lock.acquire()
    except OSError as error:
        raise HostError(
            f"cannot lock {what}: {error.strerror or error}",
            where=str(lock_file),
            hint="check that the folder is writable, or set BAKEHOUSE_HOME",
            id="disk",
        ) from error
    try:
        yield
    finally:
        lock.release()


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
