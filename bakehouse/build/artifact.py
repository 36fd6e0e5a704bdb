"""The files of a build: select and strip them, record them, and check them against the record.

Hashing a CUDA build takes a second or more, so hashes are cached beside the artifact for as long as
a file keeps its size, modification and change time and inode. A later write cannot set the change
time back.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from bakehouse.context import Context
from bakehouse.cuda.elf import ElfFile, NotElf, read_dynamic
from bakehouse.engines.base import Configured
from bakehouse.errors import BuildFailed, HostError, is_disk_full, os_error
from bakehouse.models import Check, Frozen, check, digest, to_json
from bakehouse.plan.types import ARTIFACT_RECORD, BuildInputs, BuildPlan, Step
from bakehouse.system.process import environment
from bakehouse.util import files
from bakehouse.util.files import sha256_file

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


PROGRAM_MODE, LIBRARY_MODE, FOLDER_MODE = 0o755, 0o644, 0o755
STRIP_S = 300.0
"""Seconds for one file; CUDA libraries have hundreds of megabytes."""


@dataclass(frozen=True)
class Installed:
    """What was installed. `system` are the libraries that the machine has to provide."""

    checks: tuple[Check, ...]
    system: tuple[str, ...]


def choose(folder: Path, configured: Configured, targets: Iterable[str]) -> dict[str, Path]:
    """Select the built files of the artifact, by their name in `bin/`.

    The targets' own programs and libraries; every library of the build that they load, under the
    name by which they ask for it; and modules, which are loaded from beside the program at run time
    (GGML_BACKEND_DL). Raises BuildFailed if a target has no file.
    """
    libraries: dict[str, Path] = {}
    chosen: dict[str, Path] = {}
    for target in configured.targets.values():
        built = [folder / name for name in target.artifacts]
        if target.type == "SHARED_LIBRARY":
            for file in filter(Path.exists, built):
                libraries[_dynamic(file).soname or file.name] = file
        elif target.type == "MODULE_LIBRARY":
            chosen |= {file.name: file for file in built if file.exists()}
    for name in targets:
        target = configured.targets[name]
        built = [folder / a for a in target.artifacts]
        if target.type in {"EXECUTABLE", "SHARED_LIBRARY"} and not any(map(Path.exists, built)):
            raise BuildFailed(
                f"the build succeeded but left no {name}",
                where=str(built[0]) if built else name,
                hint="see the compile log",
            )
        if target.type == "EXECUTABLE":
            chosen |= {file.name: file for file in built if file.exists()}
        elif target.type == "SHARED_LIBRARY":
            chosen |= {n: f for n, f in libraries.items() if f in built}
    todo = list(chosen.values())
    while todo:
        for needed in _dynamic(todo.pop()).needed:
            if needed in libraries and needed not in chosen:
                chosen[needed] = libraries[needed]
                todo.append(libraries[needed])
    return dict(sorted(chosen.items()))


def _dynamic(file: Path) -> ElfFile:
    try:
        return read_dynamic(file) or ElfFile()
    except NotElf as error:
        raise BuildFailed(
            f"the linker left a damaged file: {error}", where=str(file), hint="build again"
        ) from error


def install(
    ctx: Context, plan: BuildPlan, step: Step, configured: Configured, log: Path
) -> Installed:
    """Strip every chosen file into `stage/bin`, with fixed modes, and check the result."""
    stage = Path(plan.work) / "stage"
    target = stage / "bin"
    target.mkdir(mode=FOLDER_MODE)
    chosen = choose(Path(plan.work) / "build", configured, plan.inputs.targets)
    executables = (t for t in configured.targets.values() if t.type == "EXECUTABLE")
    programs = {Path(file).name for target in executables for file in target.artifacts}
    for name, file in chosen.items():
        out = target / name
        if read_dynamic(file) is None:
            shutil.copyfile(file, out)
        else:
            argv = tuple(a.replace("{name}", name).replace("{file}", str(file)) for a in step.argv)
            done = ctx.processes.run(argv, env=environment(step.env), log=log, timeout=STRIP_S)
            if says_full(done.lines) or (not done.ok and starved(stage)):
                raise disk_full(str(out))
            if not done.ok:
                raise BuildFailed(
                    f"strip failed on {name}: {(done.lines or ('no message',))[0]}",
                    where=str(log),
                    hint="see the log",
                )
        out.chmod(PROGRAM_MODE if name in programs else LIBRARY_MODE)
    for name, file in toolkit_libraries(target, plan).items():
        shutil.copyfile(file, target / name)
        (target / name).chmod(LIBRARY_MODE)
        chosen[name] = file
    for folder in (stage, target):
        folder.chmod(FOLDER_MODE)
    return check_files(target, chosen, plan.artifact)


def toolkit_libraries(folder: Path, plan: BuildPlan) -> dict[str, Path]:
    """Find the CUDA libraries that the files in `folder` load, directly or not.

    They become part of the artifact, so that it still works when the machine's toolkit is upgraded
    or removed, and `$ORIGIN` is the whole run path. The driver's libcuda.so.1 is not one of them:
    it belongs to the machine.
    """
    if plan.expected.cuda is None:
        return {}
    toolkit = plan.expected.cuda.toolkit
    library = Path(toolkit.library)
    found: dict[str, Path] = {}
    todo = [file for file in folder.iterdir() if file.is_file()]
    while todo:
        for needed in _dynamic(todo.pop()).needed:
            file = library / needed
            if needed in found or (folder / needed).exists() or not file.exists():
                continue
            found[needed] = file.resolve()
            todo.append(found[needed])
    return found


def check_files(folder: Path, chosen: Iterable[str], artifact: str) -> Installed:
    """Check that the files find each other in any folder."""
    system: set[str] = set()
    astray = []
    for name in chosen:
        found = read_dynamic(folder / name)
        if found is None:
            continue
        own = [n for n in found.needed if (folder / n).exists()]
        system |= set(found.needed) - set(own)
        if set(found.run_path) - {"$ORIGIN"} or (own and found.run_path != ("$ORIGIN",)):
            astray.append(f"{name}: {':'.join(found.run_path) or 'none'}")
    run_path = check(
        "artifact.run_path",
        "$ORIGIN in every file that loads another",
        "; ".join(astray) or "$ORIGIN",
        str(Path(artifact) / "bin"),
        ok=not astray,
    )
    return Installed((run_path,), tuple(sorted(system)))


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
            path=name, size=found.st_size, sha256=sha256_file(folder / name), mode=_mode(found)
        )
        for name, found in _walk(folder)
    )


def _walk(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Relative path and state of everything below a folder but folders and the record."""
    for path in sorted(folder.rglob("*")):
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) and path != folder / ARTIFACT_RECORD:
            yield path.relative_to(folder).as_posix(), found


def _mode(found: os.stat_result) -> str:
    return f"{stat.S_IMODE(found.st_mode):04o}"


class Damaged(Exception):
    """An artifact that differs from its record; the text says how."""


def verify(folder: Path) -> BuildRecord:
    """Check every file of an artifact and give its record. Raises Damaged if one differs."""
    try:
        record = BuildRecord.model_validate_json((folder / ARTIFACT_RECORD).read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{ARTIFACT_RECORD} is missing") from None
    except (OSError, ValidationError) as error:
        first = str(error).partition("\n")[0]
        raise Damaged(f"{ARTIFACT_RECORD} cannot be read: {first}") from error
    if record.digest != folder.name or record.inputs.digest != folder.name:
        raise Damaged(f"{ARTIFACT_RECORD} belongs to another build")
    if content_digest(record.files) != record.content:
        raise Damaged(f"{ARTIFACT_RECORD} contradicts itself")
    cache = folder.parent / ".seen" / f"{folder.name}.json"
    before: dict[str, list[int | str]] = {}
    with suppress(OSError, ValueError, TypeError):
        before = dict(json.loads(cache.read_text()))
    now: dict[str, list[int | str]] = {}
    wanted = {file.path: file for file in record.files}
    for name, found in _walk(folder):
        if (file := wanted.pop(name, None)) is None:
            raise Damaged(f"{name} is not in the record")
        if not stat.S_ISREG(found.st_mode) or _mode(found) != file.mode:
            raise Damaged(f"{name} has another mode")
        if found.st_size != file.size:
            raise Damaged(f"{name} has {found.st_size} bytes instead of {file.size}")
        now[name] = [
            found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, file.sha256
        ]  # fmt: skip
        if before.get(name) != now[name] and sha256_file(folder / name) != file.sha256:
            raise Damaged(f"{name} has changed since the build")
    if wanted:
        raise Damaged(f"{min(wanted)} is missing")
    if now != before:
        with suppress(OSError):  # if that cannot be written, the next call hashes again
            cache.parent.mkdir(parents=True, exist_ok=True)
            files.write(cache, to_json(now).encode(), sync=False)
    return record
