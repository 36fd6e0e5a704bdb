"""Patches of a source tree: read with care, applied all or not at all."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bakehouse.context import Context
from bakehouse.errors import HostError, LockError, PatchError
from bakehouse.lock import FilePin, PatchPin
from bakehouse.places import Places
from bakehouse.ports.git import COMMIT, Git, GitFailed
from bakehouse.recipe.model import LocalPatch
from bakehouse.redact import clean
from bakehouse.sources.files import write_atomic

MAX_BYTES = 32 * 2**20
_HEADER = re.compile(rb"^(?:diff --git |--- |\+\+\+ |@@ |index [0-9a-f]+\.\.|rename |copy )")
_PATH = re.compile(
    r'^(?:--- |\+\+\+ |rename from |rename to |copy from |copy to )("(?:[^"\\]|\\.)*"|[^\t]+)'
)
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_BARE = re.compile(rb"(?m)^(?:rename from |copy from |new file mode |old mode )")
"""What a diff without any hunk may consist of."""


@dataclass(frozen=True)
class Hunk:
    """One hunk: its file in the tree, its first line there, and its line in the patch."""

    file: str
    begins: int
    line: int


def stored(places: Places, sha256: str) -> Path:
    """Where a pinned patch lies in the cache, so that a build needs no recipe folder."""
    return places.cache / "patches" / f"{sha256}.patch"


def pin_patches(ctx: Context, folder: Path, patches: Sequence[LocalPatch]) -> tuple[PatchPin, ...]:
    """Read a recipe's patches, keep a copy of each, and pin them by content in their order."""
    pins = []
    for patch in patches:
        path = folder / Path(patch.file).expanduser()
        data = read_patch(path)
        sha256 = hashlib.sha256(data).hexdigest()
        if patch.sha256 and patch.sha256 != sha256:
            raise LockError(
                f"the patch is not the one that the recipe names: sha256 {patch.sha256} expected, "
                f"{sha256} found",
                where=str(path),
                hint="bring the patch back, or write its new sha256 into the recipe",
                id="patch-changed",
            )
        check_patch(data, str(path))
        keep(ctx.places, sha256, data)
        pin = FilePin(path=patch.file, size=len(data), sha256=sha256)
        pins.append(PatchPin(id=Path(patch.file).stem, file=pin))
    return tuple(pins)


def keep(places: Places, sha256: str, data: bytes) -> None:
    """Put a patch into the cache, where it is not there yet."""
    path = stored(places, sha256)
    if not path.is_file() or path.read_bytes() != data:
        write_atomic(path, data)


def bring_patches(ctx: Context, folder: Path, pins: Sequence[PatchPin]) -> None:
    """See that each pinned patch is still what it was, and have a copy in the cache."""
    for pin in pins:
        path = folder / Path(pin.file.path).expanduser()
        data = read_patch(path)
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 != pin.file.sha256:
            raise LockError(
                f"the patch changed since it was pinned: sha256 {pin.file.sha256} expected, "
                f"{sha256} found",
                where=str(path),
                hint="bring it back, or accept it with 'invoke lock --update'",
                id="patch-changed",
            )
        keep(ctx.places, sha256, data)


def read_patch(path: Path) -> bytes:
    """Read a patch file, bounded."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise PatchError(f"the patch is larger than {MAX_BYTES:,} bytes", where=str(path))
        return path.read_bytes()
    except OSError as error:
        raise PatchError(
            f"the patch cannot be read: {error.strerror}",
            where=str(path),
            hint="paths of patches are relative to the recipe",
        ) from error


def check_patch(data: bytes, name: str) -> tuple[Hunk, ...]:
    """Refuse what is no clean text diff of files inside the tree; give its hunks.

    Raises PatchError naming the line.
    """
    if re.match(rb"\s*(?:<!doctype|<html|<head|<\?xml)", data, re.I):
        raise PatchError(
            "the patch is an HTML page, not a diff",
            where=f"{name}:1",
            hint="the host answered with a web page when it was fetched: fetch it again",
            id="patch-html",
        )
    hunks: list[Hunk] = []
    file = ""
    left = [0, 0]  # old and new lines that the open hunk still has to bring
    for number, raw in enumerate(data.split(b"\n"), 1):
        if max(left) > 0 and _consume(raw, left):
            continue
        _check_line(raw, f"{name}:{number}")
        line = raw.decode(errors="replace")
        if found := _PATH.match(line):
            file = _check_path(found[1], line, f"{name}:{number}") or file
        elif hunk := _HUNK.match(line):
            hunks.append(Hunk(file, int(hunk[1]), number))
            left = [int(count) if count else 1 for count in (hunk[2], hunk[3])]
    if not hunks and not _BARE.search(data):
        raise PatchError(
            "the patch holds no diff",
            where=name,
            hint="a patch is a unified diff, as 'git diff' and 'git format-patch' write it",
            id="patch-empty",
        )
    return tuple(hunks)


def _consume(raw: bytes, left: list[int]) -> bool:
    """Count a line of the open hunk; False where it cannot belong to one."""
    mark = raw[:1]
    if mark not in (b" ", b"", b"\r", b"-", b"+", b"\\"):
        left[:] = [0, 0]
        return False
    left[0] -= mark in (b" ", b"", b"\r", b"-")
    left[1] -= mark in (b" ", b"", b"\r", b"+")
    return True


def _check_line(raw: bytes, where: str) -> None:
    if raw.endswith(b"\r") and _HEADER.match(raw):
        raise PatchError(
            "the patch has Windows line endings (CRLF), also where git needs none",
            where=where,
            hint="store it with LF: dos2unix, and '*.patch -text' in .gitattributes",
            id="patch-crlf",
        )
    line = raw.decode(errors="replace")
    if line.startswith("GIT binary patch") or re.match(r"Binary files .* differ$", line):
        raise PatchError(
            "the patch changes a binary file",
            where=where,
            hint="only text can be reviewed in a patch: leave that file out of it",
            id="patch-binary",
        )
    if re.match(r"(?:new file mode|new mode|deleted file mode) 1[26]0000", line):
        raise PatchError(
            "the patch changes a symbolic link or a submodule",
            where=where,
            hint="patches may change plain files only",
            id="patch-special",
        )


def _check_path(written: str, line: str, where: str) -> str | None:
    """The path in the tree that a header line names; None for /dev/null."""
    path = written.strip()
    if path.startswith('"'):
        raw = _QUOTED.sub(_unquote, path[1:-1])
        path = raw.encode("latin-1", "replace").decode(errors="replace")
    if path == "/dev/null":
        return None
    if line.startswith(("--- ", "+++ ")):
        path = path.partition("/")[2] if re.match(r"[a-z]/", path) else path
    parts = path.split("/")
    if path.startswith("/") or ".." in parts or any(p.casefold() == ".git" for p in parts):
        raise PatchError(
            f"the patch leads out of the source tree: '{clean(path, one_line=True)}'",
            where=where,
            hint="paths in a patch are relative to the top of the tree",
            id="patch-path",
        )
    return path


_QUOTED = re.compile(r"\\([0-7]{1,3}|.)")
_LETTERS = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def _unquote(found: re.Match[str]) -> str:
    """One escape of git's quoted paths: an octal byte, or a letter as in C."""
    escape = found[1]
    if escape[0] in "01234567":
        return chr(int(escape, 8) & 0xFF)
    return _LETTERS.get(escape, escape)


def apply_patches(
    ctx: Context, git: Git, repository: Path, tree: str, pins: Sequence[PatchPin]
) -> str:
    """Apply pinned patches in order to a tree; give the id of the tree that results.

    It happens in a scratch index: where any hunk of any patch fails, nothing at all has changed.
    Raises PatchError that names patch, file and hunk.
    """
    if not pins:
        return tree
    with tempfile.TemporaryDirectory(prefix="bakehouse-index-") as scratch:
        extra = {"GIT_INDEX_FILE": str(Path(scratch, "index"))}
        git.ask(repository, "read-tree", tree, extra=extra)
        for pin in pins:
            path = stored(ctx.places, pin.file.sha256)
            try:
                data = path.read_bytes()
            except OSError:
                raise LockError(
                    f"the pinned patch {pin.id} is not at hand",
                    where=f"{pin.file.path}, sha256 {pin.file.sha256}",
                    hint="run 'invoke fetch' for the recipe, which keeps a copy of its patches",
                    id="patch-missing",
                ) from None
            if hashlib.sha256(data).hexdigest() != pin.file.sha256:
                path.unlink(missing_ok=True)
                raise HostError(
                    f"the kept copy of patch {pin.id} was damaged on disk and has been removed",
                    where=str(path),
                    hint="run it again; if it comes back, check the disk",
                )
            _apply(git, repository, pin, data, extra)
        made = git.ask(repository, "write-tree", extra=extra).strip()
    if not COMMIT.fullmatch(made):
        raise PatchError("git gave no tree for the patched source", where=str(repository))
    _same_submodules(git, repository, (tree, made))
    return made


def _apply(git: Git, repository: Path, pin: PatchPin, data: bytes, extra: dict[str, str]) -> None:
    hunks = check_patch(data, pin.file.path)
    apply = ("apply", "--cached", "--whitespace=nowarn")
    try:
        git.ask(repository, *apply, "--check", "-", stdin=data, extra=extra)
        git.ask(repository, *apply, "-", stdin=data, extra=extra)
    except GitFailed as error:
        try:
            git.ask(repository, *apply, "--check", "--reverse", "-", stdin=data, extra=extra)
            applied = True
        except GitFailed:
            applied = False
        raise _does_not_apply(pin, hunks, error, applied) from error


def _does_not_apply(
    pin: PatchPin, hunks: Sequence[Hunk], error: GitFailed, applied: bool
) -> PatchError:
    """Name the hunk that git complains about."""
    reason, where = error.first().removeprefix("error: "), pin.file.path
    if found := re.search(r"error: patch failed: (.+):(\d+)$", error.said, re.M):
        of_file = [hunk for hunk in hunks if hunk.file == found[1]]
        for number, hunk in enumerate(of_file, 1):
            if hunk.begins == int(found[2]):
                reason = f"hunk {number} of {len(of_file)} does not fit {hunk.file}:{hunk.begins}"
                where = f"{pin.file.path}:{hunk.line}"
    elif found := re.search(r"(?:corrupt|malformed) patch at (?:<stdin>:|line )(\d+)", error.said):
        reason, where = "the patch is malformed", f"{pin.file.path}:{found[1]}"
    hint = "make it anew against the pinned commit, or move the pin to one that it fits"
    if applied:
        reason += "; all of it is in the source already"
        hint = "take it out of the recipe's patches, then 'invoke lock --update'"
    return PatchError(f"patch {pin.id} does not apply: {reason}", where=where, hint=hint)


def _same_submodules(git: Git, repository: Path, trees: tuple[str, str]) -> None:
    """Refuse patches that move a submodule: those are pinned from the tree without patches."""
    before, after = (
        {line for line in git.ask(repository, "ls-tree", "-r", tree).splitlines()
         if line.startswith("160000") or line.endswith("\t.gitmodules")}
        for tree in trees
    )  # fmt: skip
    if before != after:
        raise PatchError(
            "the patches change a submodule",
            where="\n".join(sorted(clean(line) for line in before ^ after)),
            hint="patches may change plain files only",
            id="patch-special",
        )
