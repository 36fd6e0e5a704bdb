"""Files: their hash, a whole write, fsync, and a lock file that says that it waits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bakehouse import atomic
from bakehouse.errors import BakehouseError, os_error

HASH_CHUNK = 2**19
"""Bytes read at once: they fit in a core's own cache."""
REPORT_EVERY = 2**24
"""Bytes between two reports of progress."""


def sha256_file(path: Path, on_bytes: Callable[[int, int | None], None] | None = None) -> str:
    """Give a file's sha256, in hex; `on_bytes` gets bytes read and the size. Raises OSError."""
    hashed = hashlib.sha256()
    buffer = memoryview(bytearray(HASH_CHUNK))
    done = 0
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        while count := file.readinto(buffer):
            hashed.update(buffer[:count])
            done += count
            if on_bytes and (done % REPORT_EVERY < count or done == size):
                on_bytes(done, size)
    return hashed.hexdigest()


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file whole, and make its folder if needed. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path, data)


@contextmanager
def file_lock(
    path: Path,
    what: str,
    say: Callable[[str], None],
    *,
    busy: BakehouseError | None = None,
) -> Iterator[None]:
    """Hold a lock file; if another process holds it, say so and wait, or raise `busy`.

    The kernel releases it when its holder ends, however it ends. Raises HostError if the file
    cannot be locked.
    """
    import filelock  # most tasks only read

    lock = filelock.FileLock(path, mode=0o644, thread_local=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0.2 if busy is None else 0)
        except filelock.Timeout:
            if busy is not None:
                raise busy from None
            say(f"waiting for another process that is working on {what}")
            lock.acquire()
    except OSError as error:
        hint = "check that the folder is writable, or set BAKEHOUSE_HOME"
        raise os_error(error, f"cannot lock {what}", path, hint) from error
    try:
        yield
    finally:
        lock.release()
