"""Files that are replaced whole or not at all, and what a writer leaves that is killed meanwhile.

A new file is written beside its target, under a name that nothing else has, and held with a lock
that the kernel lets go of when the writer ends, however it ends. So whoever writes into that folder
next can tell a half-written file that was left behind from one that is still being written.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

SUFFIX = ".bakehouse-part"
"""Ends the name of every half-written file; `.gitignore` knows it."""
ATTEMPTS = 100


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[IO[bytes]]:
    """Give a file to write, which takes the place of `path` when the block ends without an error.

    With `sync` it is on disk by then, after a power cut as well. Makes no folder. Raises OSError.
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
    """Replace a file by `data`: a reader sees the old one or the new one, whole. Raises OSError."""
    with replacing(path, sync=sync) as file:
        file.write(data)


def fsync_folder(folder: Path) -> None:
    """Have a folder's entries on disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _begin(path: Path) -> tuple[Path, IO[bytes]]:
    """Make a file that is ours; one that was swept before it was locked is made again."""
    for _ in range(ATTEMPTS):
        part = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}{SUFFIX}")
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        file = os.fdopen(handle, "wb")
        try:
            _hold(handle)
            if os.path.samestat(os.stat(part), os.fstat(handle)):
                return part, file
        except (FileNotFoundError, BlockingIOError):
            pass
        file.close()
    raise OSError(errno.EAGAIN, "somebody removes what is being written", str(path))


def _hold(handle: int) -> None:
    """Hold a file that is ours; BlockingIOError where a sweeper was quicker, and removes it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks: then nobody sweeps there
        return


def sweep(folder: Path) -> int:
    """Remove what writers left half-written that live no more; give how many files those were."""
    with suppress(OSError), os.scandir(folder) as entries:
        names = [e.name for e in entries if e.name[0] == "." and e.name.endswith(SUFFIX)]
        return sum(_removed(folder / name) for name in names)
    return 0


def _removed(part: Path) -> bool:
    """Remove a half-written file that nobody holds."""
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
