"""Artifacts on disk: the record of a finished build, and the check of its files against it.

Hashing a CUDA build takes a second or more, so hashes are cached beside the artifact for as long as
a file keeps its size, modification and change time and inode. A later write cannot set the change
time back.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from bakehouse.models import Check, Frozen, digest, to_json
from bakehouse.plan.types import ARTIFACT_RECORD as RECORD
from bakehouse.plan.types import BuildInputs
from bakehouse.util import files as atomic
from bakehouse.util.files import sha256_file


class BuiltFile(Frozen):
    """A file of an artifact. Size in bytes; mode as in `0755`."""

    path: str
    size: int
    sha256: str
    mode: str


class StepTime(Frozen):
    """How long a step took, in seconds of wall time."""

    id: str
    seconds: float


class BuildRecord(Frozen):
    """`build.json`: inputs and files of an artifact."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    digest: str
    content: str
    """Digest of `files`: two builds with the same content are the same, bit for bit."""
    inputs: BuildInputs
    tools: dict[str, str]
    """Paths of the tools."""
    files: tuple[BuiltFile, ...]
    system_libraries: tuple[str, ...]
    """Libraries that the files load from the system."""
    checks: tuple[Check, ...]
    steps: tuple[StepTime, ...]
    seconds: float
    built: str
    """UTC, ISO 8601."""
    run: str
    """Id of the run that built it."""
    not_reproducible: str = ""
    """Why another build of the same inputs may differ; empty if it does not."""


class Artifact(Frozen):
    """A build whose files verify."""

    folder: str
    server: str
    digest: str
    content: str
    files: tuple[BuiltFile, ...]
    checks: tuple[Check, ...]
    reused: bool
    seconds: float
    """Time of this call: to build it, or to verify it."""
    build_seconds: float
    """Time of the build, whenever that was."""


def content_digest(files: Iterable[BuiltFile]) -> str:
    """Digest of a set of files: paths, modes and bytes."""
    return digest([f.to_data() for f in sorted(files, key=lambda f: f.path)])


def list_files(folder: Path) -> tuple[BuiltFile, ...]:
    """Hash every file below an artifact's folder, except its record."""
    return tuple(
        BuiltFile(
            path=path.relative_to(folder).as_posix(),
            size=path.stat().st_size,
            sha256=sha256_file(path),
            mode=_mode(path.lstat()),
        )
        for path in _walk(folder)
    )


def _walk(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if not (path.is_dir() and not path.is_symlink()) and path != folder / RECORD
    )


def _mode(found: os.stat_result) -> str:
    return f"{stat.S_IMODE(found.st_mode):04o}"


class Damaged(Exception):
    """An artifact that differs from its record; the text says how."""


def read_record(folder: Path) -> BuildRecord:
    """Read an artifact's record. Raises Damaged if it is not the record of this folder."""
    try:
        record = BuildRecord.model_validate_json((folder / RECORD).read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{RECORD} is missing") from None
    except (OSError, ValidationError) as error:
        first = str(error).partition("\n")[0]
        raise Damaged(f"{RECORD} cannot be read: {first}") from error
    if record.digest != folder.name or record.inputs.digest != folder.name:
        raise Damaged(f"{RECORD} belongs to another build")
    if content_digest(record.files) != record.content:
        raise Damaged(f"{RECORD} contradicts itself")
    return record


def verify(folder: Path) -> BuildRecord:
    """Check every file of an artifact and give its record. Raises Damaged if a file differs."""
    record = read_record(folder)
    cache = folder.parent / ".seen" / f"{folder.name}.json"
    seen: dict[str, list[int | str]] = {}
    with suppress(OSError, ValueError, TypeError):
        seen = dict(json.loads(cache.read_text()))
    now: dict[str, list[int | str]] = {}
    wanted = {file.path: file for file in record.files}
    for path in _walk(folder):
        name = path.relative_to(folder).as_posix()
        found = path.lstat()
        if (file := wanted.pop(name, None)) is None:
            raise Damaged(f"{name} is not in the record")
        if not stat.S_ISREG(found.st_mode) or _mode(found) != file.mode:
            raise Damaged(f"{name} has another mode")
        if found.st_size != file.size:
            raise Damaged(f"{name} has {found.st_size} bytes instead of {file.size}")
        mark: list[int | str] = [
            found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, file.sha256
        ]  # fmt: skip
        if seen.get(name) != mark and sha256_file(path) != file.sha256:
            raise Damaged(f"{name} has changed since the build")
        now[name] = mark
    if wanted:
        raise Damaged(f"{min(wanted)} is missing")
    if now != seen:
        with suppress(OSError):  # if that cannot be written, the next call hashes again
            cache.parent.mkdir(parents=True, exist_ok=True)
            atomic.write(cache, to_json(now).encode(), sync=False)
    return record
