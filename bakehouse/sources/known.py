"""A cache of the hashes of large files: hashing a model takes long.

A hash is valid while size, modification and change time (in nanoseconds), inode and device are
unchanged. The modification time alone would not do: a writer can set it back, as
`rsync --inplace --times` does. Nobody can set the change time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from bakehouse.base import to_json
from bakehouse.context import Context
from bakehouse.places import Places
from bakehouse.progress import Silent
from bakehouse.sources.files import SHOWN
from bakehouse.sources.together import Together, all_at_once
from bakehouse.util.files import sha256_file, write_atomic

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


def known_sha256(ctx: Context, path: Path) -> str:
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
        count = Together(bar, sum(sizes.values()))
        # The largest first: the last one to end should be a small one.
        order = sorted(sizes, key=lambda path: -sizes[path])
        made = all_at_once(
            [partial(hash_now, ctx, path, count.of(path)) for path in order],
            len(os.sched_getaffinity(0)),
        )
    return {**found, **dict(zip(order, made, strict=True))}


def hash_now(ctx: Context, path: Path, on_bytes: Callable[[int, int | None], None]) -> str:
    """Hash a file and remember it."""
    before = _identity(path)
    found = sha256_file(path, on_bytes)
    remember(ctx, path, found, before)
    return found


def hash_fetched(ctx: Context, path: Path, name: str) -> str:
    """Hash a downloaded file and remember it; a large one shows progress."""
    size = path.stat().st_size
    bars = ctx.progress if size >= SHOWN else Silent()
    with bars.bar(f"hash {name}", "B") as bar:
        return hash_now(ctx, path, Together(bar, size).of(path))


def remember(ctx: Context, path: Path, sha256: str, before: dict[str, Any] | None = None) -> None:
    """Store a hash, unless the file changed while it was read, or just now."""
    now = _identity(path)
    fresh = ctx.clock.now().timestamp() * 1e9 - now["ctime_ns"] < SETTLED_NS
    if before not in (None, now) or (before is not None and fresh):
        return
    with suppress(OSError):  # a full or read-only disk: then it is hashed again next time
        write_atomic(_note(ctx.places, path), to_json({**now, "sha256": sha256}).encode())
