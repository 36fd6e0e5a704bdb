"""Files by content: download once, verify by sha256, guard by a lock file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from bakehouse.atomic import fsync_folder
from bakehouse.context import Context
from bakehouse.errors import LockError, os_error
from bakehouse.progress import Silent
from bakehouse.redact import clean
from bakehouse.util.files import file_lock, sha256_file

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
