"""Mods of an image: folders of the recipe with a script, pinned and copied file by file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from bakehouse.errors import LockError, NotFound
from bakehouse.lock import FilePin, ModPin
from bakehouse.recipe.model import Mod
from bakehouse.redact import clean

SCRIPT = "run.sh"
MAX_BYTES = 64 * 2**20


def pin_mods(folder: Path, mods: Sequence[Mod]) -> tuple[ModPin, ...]:
    """Hash every file of every mod; `folder` is the recipe's. Raises LockError, NotFound."""
    return tuple(ModPin(folder=mod.folder, files=_files(folder / mod.folder)) for mod in mods)


def copy_mod(folder: Path, pin: ModPin, target: Path) -> None:
    """Copy a mod as pinned. Raises LockError if it has changed."""
    if _files(folder / pin.folder) != pin.files:
        raise LockError(
            f"the mod {clean(pin.folder)} is not what is pinned", where=str(folder / pin.folder),
            hint="accept the change with 'invoke lock --update'",
            id="mod-changed",
        )  # fmt: skip
    for file in pin.files:
        data = (folder / pin.folder / file.path).read_bytes()
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise LockError("the mod changed while it was read", where=file.path, id="mod-changed")
        path = target / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o755 if file.path == SCRIPT else 0o644)


def _files(folder: Path) -> tuple[FilePin, ...]:
    where = str(folder)
    if not folder.is_dir():
        hint = "image.mods names folders, relative to the recipe"
        raise NotFound.named("folder of a mod", folder.name, where=where, hint=hint)
    if not (folder / SCRIPT).is_file():
        raise LockError(
            f"the mod has no {SCRIPT}", where=where, id="mod-missing",
            hint="image.mods names folders, relative to the recipe",
        )  # fmt: skip
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise LockError(
                "a mod may contain regular files only", where=str(path), id="mod-kind",
                hint="replace it by a copy of the file",
            )  # fmt: skip
        if path.is_file():
            data = path.read_bytes()
            name = path.relative_to(folder).as_posix()
            sha256 = hashlib.sha256(data).hexdigest()
            found.append(FilePin(path=name, size=len(data), sha256=sha256))
    if sum(file.size for file in found) > MAX_BYTES:
        raise LockError(
            f"the mod is larger than {MAX_BYTES // 2**20} MiB", where=where, id="mod-large",
            hint="put large files into the base image",
        )  # fmt: skip
    return tuple(found)
