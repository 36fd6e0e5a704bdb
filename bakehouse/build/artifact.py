"""Artifacts on disk: what a finished build says of itself, and whether its files still agree.

Hashing a CUDA build takes a second or more, so hashes are remembered beside the artifact for as
long as a file keeps its size, modification and change time and inode. Change time is what a later
write cannot set back.
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

from bakehouse import atomic
from bakehouse.base import Frozen, digest, to_json
from bakehouse.checks import Check
from bakehouse.plan.types import ARTIFACT_RECORD as RECORD
from bakehouse.plan.types import BuildInputs
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
    """`build.json`: what an artifact was made of and what it consists of."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    digest: str
    content: str
    """Digest of `files`: two builds with the same content are the same, bit for bit."""
    inputs: BuildInputs
    tools: dict[str, str]
    """Paths of the tools that were used."""
    files: tuple[BuiltFile, ...]
    system_libraries: tuple[str, ...]
    """What the files load and the artifact does not hold."""
    checks: tuple[Check, ...]
    steps: tuple[StepTime, ...]
    seconds: float
    built: str
    """UTC, ISO 8601."""
    run: str
    """Id of the run that built it."""
    not_reproducible: str = ""
    """Why another build of the same inputs may differ; empty where it does not."""


class Artifact(Frozen):
    """A build that is there and whose files verify."""

    folder: str
    server: str
    digest: str
    content: str
    files: tuple[BuiltFile, ...]
    checks: tuple[Check, ...]
    reused: bool
    seconds: float
    """How long this took now: building it, or finding it."""
    build_seconds: float
    """How long it took to build, whenever that was."""


def content_digest(files: Iterable[BuiltFile]) -> str:
    """Give the digest of a set of files: paths, modes and bytes."""
    return digest([f.to_data() for f in sorted(files, key=lambda f: f.path)])


def list_files(folder: Path) -> tuple[BuiltFile, ...]:
    """Hash every file below an artifact's folder, its record left out."""
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
    """An artifact that is not what its record says; the text says why."""


def read_record(folder: Path) -> BuildRecord:
    """Read an artifact's record; Damaged where it cannot be one of this folder."""
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
    """Give an artifact's record if every file agrees with it; Damaged where one does not."""
    record = read_record(folder)
    memory = _memory_file(folder)
    seen = _recall(memory)
    now: dict[str, list[int | str]] = {}
    wanted = {file.path: file for file in record.files}
    for path in _walk(folder):
        name = path.relative_to(folder).as_posix()
        found = path.lstat()
        if (file := wanted.pop(name, None)) is None:
            raise Damaged(f"{name} does not belong to it")
        if not stat.S_ISREG(found.st_mode) or _mode(found) != file.mode:
            raise Damaged(f"{name} has another mode")
        if found.st_size != file.size:
            raise Damaged(f"{name} has {found.st_size} bytes in place of {file.size}")
        mark: list[int | str] = [
            found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, file.sha256
        ]  # fmt: skip
        if seen.get(name) != mark and sha256_file(path) != file.sha256:
            raise Damaged(f"{name} has other bytes than were built")
        now[name] = mark
    if wanted:
        raise Damaged(f"{min(wanted)} is missing")
    if now != seen:
        _remember(memory, now)
    return record


def _memory_file(folder: Path) -> Path:
    return folder.parent / ".seen" / f"{folder.name}.json"


def _recall(memory: Path) -> dict[str, list[int | str]]:
    try:
        return dict(json.loads(memory.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _remember(memory: Path, marks: dict[str, list[int | str]]) -> None:
    """Keep what was seen; where that cannot be written, the next look hashes again."""
    with suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(memory, to_json(marks).encode(), sync=False)
