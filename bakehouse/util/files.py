"""Write files atomically, hash them, lock them.

A new file is written beside its target under a unique name, and locked. The kernel releases the
lock when the writer ends, however it ends, so that the next writer in that folder can tell a
leftover from a file that is still being written.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from bakehouse.errors import BakehouseError, os_error

SUFFIX = ".bakehouse-part"
"""Suffix of every half-written file; `.gitignore` lists it."""
ATTEMPTS = 100


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[IO[bytes]]:
    """Open a new file that replaces `path` when the block ends without an error.

    With `sync` it survives a power cut. Does not make folders. Raises OSError.
    """
    sweep(path.parent)
    part, file = _begin(path)
    with file:
        try:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    if sync:
        fsync_folder(path.parent)


def write(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Replace a file by `data`; readers see the old file or the new one, whole. Raises OSError."""
    with replacing(path, sync=sync) as file:
        file.write(data)


def fsync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _begin(path: Path) -> tuple[Path, IO[bytes]]:
    """Make and lock a file; one that was swept before it was locked is made again."""
    for _ in range(ATTEMPTS):
        part = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}{SUFFIX}")
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        file = os.fdopen(handle, "wb")
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # a sweeper was quicker
                raise
            except OSError:  # a file system without locks is never swept
                pass
            if os.path.samestat(os.stat(part), os.fstat(handle)):
                return part, file
        except (FileNotFoundError, BlockingIOError):
            pass
        file.close()
    raise OSError(errno.EAGAIN, "the temporary file was deleted by another process", str(path))


def sweep(folder: Path) -> int:
    """Remove half-written files of dead writers; return their number."""
    with suppress(OSError), os.scandir(folder) as entries:
        names = [e.name for e in entries if e.name[0] == "." and e.name.endswith(SUFFIX)]
        return sum(_removed(folder / name) for name in names)
    return 0


def _removed(part: Path) -> bool:
    """Remove a half-written file unless it is locked."""
    try:
        handle = os.open(part, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.stat(part), os.fstat(handle)):
            return False
        part.unlink()
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(handle)


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
    write(path, data)


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
