"""Errors for a disk that is full or not writable."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bakehouse.errors import HostError, is_disk_full, os_error

NO_SPACE = "No space left on device"
STARVED_BYTES = 64 * 2**20
"""Free bytes below which a failure without a named cause counts as a full disk: what could not be
written has been removed by then, so that a little is free again."""


def starved(folder: Path) -> bool:
    """Whether so little is free that programs fail without a message."""
    return shutil.disk_usage(folder).free < STARVED_BYTES


def says_full(lines: Iterable[str]) -> bool:
    """Whether a program reported a full disk."""
    return any(NO_SPACE in line for line in lines)


def disk_full(where: str) -> HostError:
    """Make the error for a full disk."""
    return HostError(
        "the disk is full; the unfinished build has been removed",
        where=where,
        hint="free some space (a CPU build takes about 1 GiB, a CUDA build 10 GiB), then repeat",
        id="disk-full",
    )


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Translate OSErrors of a full or read-only disk into HostError."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(str(error.filename or folder)) from error
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}:
            hint = "fix its permissions, or set BAKEHOUSE_HOME to a folder of your own"
            what = "the cache folder is not writable"
            raise os_error(error, what, folder, hint, HostError.default_id) from error
        raise
