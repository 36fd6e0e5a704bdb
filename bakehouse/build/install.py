"""Strip and collect files of a build."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bakehouse.context import Context
from bakehouse.cuda.elf import ElfFile, NotElf, read_dynamic
from bakehouse.engines.base import Configured
from bakehouse.errors import BuildFailed, HostError, is_disk_full, os_error
from bakehouse.models import Check, check
from bakehouse.plan.types import BuildPlan, Step
from bakehouse.system.process import environment

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
        files = [folder / name for name in target.artifacts]
        if target.type == "SHARED_LIBRARY":
            for file in filter(Path.exists, files):
                libraries[_dynamic(file).soname or file.name] = file
        elif target.type == "MODULE_LIBRARY":
            chosen |= {file.name: file for file in files if file.exists()}
    for name in targets:
        target = configured.targets[name]
        files = [folder / a for a in target.artifacts]
        if target.type in {"EXECUTABLE", "SHARED_LIBRARY"} and not any(map(Path.exists, files)):
            raise BuildFailed(
                f"the build succeeded but left no {name}",
                where=str(files[0]) if files else name,
                hint="see the compile log",
            )
        if target.type == "EXECUTABLE":
            chosen |= {file.name: file for file in files if file.exists()}
        elif target.type == "SHARED_LIBRARY":
            chosen |= {n: f for n, f in libraries.items() if f in files}
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
        out.chmod(PROGRAM_MODE if _is_program(configured, name) else LIBRARY_MODE)
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


def _is_program(configured: Configured, name: str) -> bool:
    return any(
        t.type == "EXECUTABLE" and name in {Path(a).name for a in t.artifacts}
        for t in configured.targets.values()
    )


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
    checks = (
        check(
            "artifact.run_path",
            "$ORIGIN in every file that loads another",
            "; ".join(astray) if astray else "$ORIGIN",
            str(Path(artifact) / "bin"),
            ok=not astray,
        ),
    )
    return Installed(checks, tuple(sorted(system)))
