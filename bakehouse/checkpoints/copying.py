"""Moving and comparing bytes of files by offset, with little memory and little page cache."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable

BUFFER = 8 * 2**20
"""Bytes that are held at once."""


def copy_range(
    source: int, offset: int, target: int, length: int, on_bytes: Callable[[int], None]
) -> None:
    """Copy `length` bytes from `offset` of one open file to the end of another.

    The kernel copies where it can, so that nothing passes through this process. Raises OSError,
    and EOFError where the source ends early.
    """
    by_kernel = True
    while length:
        step = min(length, 8 * BUFFER)
        if by_kernel:
            try:
                done = os.copy_file_range(source, target, step, offset)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                by_kernel = False
                continue
        else:
            done = _write_all(target, os.pread(source, min(step, BUFFER), offset))
        if not done:
            raise EOFError
        offset += done
        length -= done
        on_bytes(done)


def _write_all(target: int, data: bytes) -> int:
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]
    return len(data)


def sha256_range(file: int, offset: int, length: int, on_bytes: Callable[[int], None]) -> str:
    """Hash a part of an open file, in hex. Raises OSError, and EOFError for a short file."""
    summed = hashlib.sha256()
    while length:
        data = os.pread(file, min(length, BUFFER), offset)
        if not data:
            raise EOFError
        summed.update(data)
        offset += len(data)
        length -= len(data)
        on_bytes(len(data))
    return summed.hexdigest()


def forget(file: int) -> None:
    """Give a file's pages back to the machine; on unified memory they stand in the way."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
