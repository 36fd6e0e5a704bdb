"""Select the files of a recipe's model: one model, with all its shards."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

from bakehouse.errors import LockError
from bakehouse.redact import clean

WEIGHTS = (".gguf", ".safetensors", ".bin", ".pt", ".pth")
MAX_NAME, MAX_PATH = 200, 1024
"""Bytes of a file's name, and characters of a path; a little below the system's own limits."""
SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.(gguf|safetensors)")


def pattern(glob: str) -> re.Pattern[str]:
    """Compile a glob over paths: `*` and `?` stay within a folder, `**` does not."""
    out = ""
    for piece in re.findall(r"\*\*/?|\*|\?|\[[^\]/]+\]|.", glob, re.S):
        if piece == "**/":
            out += "(?:.*/)?"
        elif piece == "**":
            out += ".*"
        elif piece in ("*", "?"):
            out += "[^/]*" if piece == "*" else "[^/]"
        elif piece.startswith("[") and len(piece) > 2:
            out += "[^" + piece[2:] if piece[1] in "!^" else piece
        else:
            out += re.escape(piece)
    return re.compile(out, re.S)


def fitting(names: Sequence[str], glob: str) -> list[str]:
    """Match names with a glob; one without a folder looks at the top first, then below."""
    wanted = pattern(glob)
    chosen = [name for name in names if wanted.fullmatch(name)]
    if not chosen and "/" not in glob:
        chosen = [name for name in names if wanted.fullmatch(name.rpartition("/")[2])]
    return chosen


def choose(names: Iterable[str], glob: str, where: str) -> list[str]:
    """Select the names that match a glob, sorted: one model, with all its shards.

    Raises LockError if nothing matches, a shard is missing, or several models match.
    """
    listed = sorted(names)
    chosen = fitting(listed, glob)
    if not chosen:
        suffix = glob.rpartition(".")[2]
        near = [name for name in listed if name.endswith(f".{suffix}")] or listed
        shown = ", ".join(clean(name) for name in near[:8]) + (" ..." if len(near) > 8 else "")
        raise LockError(
            f"no file matches '{clean(glob)}'",
            where=where,
            hint=f"found: {shown or 'no files at all'}",
            id="weights-missing",
        )
    for name in chosen:
        check_name(name, where)
    folders = {name[:i] for name in chosen for i, mark in enumerate(name) if mark == "/"}
    if both := sorted(folders.intersection(chosen)):
        raise LockError(f"'{clean(both[0])}' is a file and a folder", where=where)
    check_shards(chosen, where)
    return chosen


def check_weights(names: Sequence[str], glob: str, where: str) -> None:
    """Refuse a download without weight files, such as the configuration only."""
    if not any(name.endswith(WEIGHTS) for name in names):
        raise LockError(
            f"no weight file among the {len(names)} that match '{clean(glob)}', only files "
            f"such as {clean(names[0])}",
            where=where,
            hint="download the weights too, or widen the glob",
            id="weights-missing",
        )


def check_name(name: str, where: str) -> None:
    """Refuse a file name that leaves the folder or cannot be shown."""
    if not is_usable(name):
        shown = clean(name, one_line=True)
        raise LockError(f"unsafe file name '{shown[:80]}{'...' * (len(shown) > 80)}'", where=where)


def is_usable(name: str) -> bool:
    """Whether a listed name stays in its folder and can be shown as it is."""
    parts = name.split("/")
    if {"..", ".", ""}.intersection(parts) or clean(name, one_line=True) != name:
        return False
    return len(name) < MAX_PATH and all(len(os.fsencode(part)) <= MAX_NAME for part in parts)


def check_shards(names: Sequence[str], where: str) -> None:
    """Refuse a model with missing shards, and several models."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        if found := SHARD.fullmatch(name):
            sets.setdefault((found[1], found[3], found[4]), set()).add(int(found[2]))
    for (stem, count, suffix), have in sets.items():
        missing = sorted(set(range(1, int(count) + 1)) - have)
        if have - set(range(1, int(count) + 1)):
            raise LockError(
                f"'{clean(stem)}' has shards that are not among its own {int(count)}", where=where,
                id="weights-shards",
            )  # fmt: skip
        if missing:
            shown = ", ".join(f"{stem}-{n:05d}-of-{count}.{suffix}" for n in missing[:6])
            raise LockError(
                f"{len(missing)} of {int(count)} shards are missing: {clean(shown)}",
                where=where,
                hint="a model is loaded whole: widen the glob, or complete the download",
                id="weights-shards",
            )
    whole = [n for n in names if n.endswith(".gguf") and not SHARD.fullmatch(n)]
    models = [*whole, *(f"{stem}-*.gguf" for stem, _, suffix in sets if suffix == "gguf")]
    if len(models) > 1:
        shown = ", ".join(clean(name) for name in models[:8])
        raise LockError(
            f"the files are {len(models)} models, expected one: {shown}",
            where=where,
            hint="narrow the glob to one of them",
            id="weights-ambiguous",
        )
