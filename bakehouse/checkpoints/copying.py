"""Moving and comparing bytes of files by offset, with little memory and little page cache."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

COPIED = 512 * 2**10
"""Bytes that are copied at once: what stays in a core's own cache. Larger pieces, and the kernel's
own copying from file to file at odd offsets, take half as long again (`scripts/bench`)."""
BUFFER = 8 * 2**20
"""Bytes that are hashed at once, and between two reports of progress."""


def copy_range(
    source: int, offset: int, target: int, length: int, on_bytes: Callable[[int], None]
) -> None:
    """Copy `length` bytes from `offset` of one open file to where the other one stands.

    Raises OSError, and EOFError where the source ends early.
    """
    buffer = memoryview(bytearray(min(COPIED, max(length, 1))))
    done = 0
    while length:
        piece = buffer[: min(len(buffer), length)]
        count = os.preadv(source, [piece], offset)
        if not count:
            raise EOFError
        _write_all(target, piece[:count])
        offset += count
        length -= count
        done += count
        if done >= BUFFER or not length:
            on_bytes(done)
            done = 0


def _write_all(target: int, view: memoryview) -> None:
    while view:
        view = view[os.write(target, view) :]


def sha256_range(file: int, offset: int, length: int, on_bytes: Callable[[int], None]) -> str:
    """Hash a part of an open file, in hex. Raises OSError, and EOFError for a short file."""
    summed = hashlib.sha256()
    buffer = memoryview(bytearray(min(COPIED, max(length, 1))))
    done = 0
    while length:
        count = os.preadv(file, [buffer[: min(len(buffer), length)]], offset)
        if not count:
            raise EOFError
        summed.update(buffer[:count])
        offset += count
        length -= count
        done += count
        if done >= BUFFER or not length:
            on_bytes(done)
            done = 0
    return summed.hexdigest()


def forget(file: int) -> None:
    """Give a file's pages back to the machine; on unified memory they stand in the way."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
