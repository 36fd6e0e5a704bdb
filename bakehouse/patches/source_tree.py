"""Source trees: every source becomes a git tree in a bare repository."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bakehouse.context import Context
from bakehouse.errors import HostError, LockError
from bakehouse.lock import ArchivePin, GitPin, Lock, PatchPin
from bakehouse.models import digest
from bakehouse.patches.apply import apply_patches
from bakehouse.paths import Places
from bakehouse.sources.archives import ARCHIVES, archive_is_ready, ensure_archive_tree
from bakehouse.sources.files import guarded
from bakehouse.sources.git_mirror import (
    TREES,
    commit_is_ready,
    ensure_commit,
    make_bare,
    mirror_folder,
    set_aside,
    tree_is_whole,
)
from bakehouse.system.git import Git, GitFailed

MADE = "refs/bakehouse/made"


@dataclass(frozen=True)
class TreeEntry:
    """One file of a tree. `mode` is git's: 100644, 100755, 120000 (link), 160000 (submodule)."""

    mode: str
    id: str
    path: str


def repository_of(places: Places, source: GitPin | ArchivePin) -> Path:
    """Give the bare repository of a source's tree."""
    if isinstance(source, GitPin):
        return mirror_folder(places, source.url)
    return places.git / ARCHIVES


def ensure_tree(ctx: Context, lock: Lock) -> None:
    """Fetch the pinned source and its submodules, and make its patched tree, if they are missing.

    Raises LockError for content that differs from its pin, PatchError, HostError.
    """
    source = lock.source
    if source is None:
        return
    git = Git(ctx.processes, ctx.environment)
    ensure_source(ctx, git, source)
    if not lock.source_tree:
        raise LockError(
            "the lock pins a source and no tree",
            where=lock.recipe,
            hint="write it again with 'invoke lock --update'",
        )
    repository = repository_of(ctx.places, source)
    known = _made_before(git, repository, source.tree, lock.patches)
    if known != lock.source_tree or not tree_is_whole(git, repository, lock.source_tree):
        made = patched_tree(ctx, git, source, lock.patches)
        _same("the patched source tree", lock.source_tree, made, lock.recipe)


def ensure_source(ctx: Context, git: Git, source: GitPin | ArchivePin) -> None:
    """Fetch a source without its patches if it is missing. Raises as `ensure_tree` does."""
    if isinstance(source, GitPin):
        _ensure_git(ctx, git, source)
    else:
        ensure_archive_tree(ctx, git, source)


def source_is_here(ctx: Context, git: Git, source: GitPin | ArchivePin) -> bool:
    """Whether a source is on this machine and whole; without network."""
    if isinstance(source, GitPin):
        return commit_is_ready(git, mirror_folder(ctx.places, source.url), source.commit)
    return archive_is_ready(ctx, git, source.tree)


def patched_tree(
    ctx: Context, git: Git, source: GitPin | ArchivePin, patches: Sequence[PatchPin]
) -> str:
    """Apply patches to a fetched source; give the resulting tree, kept under a ref."""
    if not patches:
        return source.tree
    repository = repository_of(ctx.places, source)
    with guarded(ctx, repository.with_suffix(".lock"), "the source tree"):
        made = apply_patches(ctx, git, repository, source.tree, patches)
        git.ask(repository, "update-ref", f"{TREES}/{made}", made)
        git.ask(repository, "update-ref", _made_ref(source.tree, patches), made)
    return made


def _made_ref(tree: str, patches: Sequence[PatchPin]) -> str:
    """Name the ref that maps a tree and its patches to the result.

    That the result exists is not enough: it does not tell what it was made from.
    """
    return f"{MADE}/{digest([tree, *([pin.file.sha256, pin.allow] for pin in patches)])}"


def _made_before(git: Git, repository: Path, tree: str, patches: Sequence[PatchPin]) -> str | None:
    try:
        return git.object_id(repository, _made_ref(tree, patches)) if patches else tree
    except GitFailed:
        return None


def _ensure_git(ctx: Context, git: Git, pin: GitPin) -> None:
    repository = ensure_commit(ctx, git, pin.url, pin.commit, ref=pin.ref)
    _same(
        "the commit's tree", pin.tree, git.object_id(repository, f"{pin.commit}^{{tree}}"), pin.url
    )
    for part in pin.submodules:
        repository = ensure_commit(ctx, git, part.url, part.commit)
        tree = git.object_id(repository, f"{part.commit}^{{tree}}")
        _same(f"the tree of submodule {part.path}", part.tree, tree, part.url)


def _same(what: str, pinned: str, found: str, where: str) -> None:
    if pinned != found:
        raise LockError(
            f"{what} differs from its pin: expected {pinned}, found {found}",
            where=where,
            hint="to accept the change, move the pin with 'invoke lock --update'",
            id="tree-mismatch",
        )


def list_tree(git: Git, repository: Path, tree: str) -> tuple[TreeEntry, ...]:
    """List all files of a tree. Raises LockError for names that are not UTF-8."""
    entries = []
    for row in git.ask(repository, "ls-tree", "-r", "-z", "--full-tree", tree).split("\0"):
        if not row:
            continue
        head, _, path = row.partition("\t")
        if "\ufffd" in path:
            raise LockError("the source has a file name that is not UTF-8", where=path)
        mode, _, object_id = head.split()
        entries.append(TreeEntry(mode, object_id, path))
    return tuple(entries)


def materialise(ctx: Context, lock: Lock, target: Path) -> None:
    """Write the patched tree, submodules inside, to a new or empty folder.

    Nothing in the tree can alter what is written (no filters, no line-ending rules); every file is
    hashed as it lies on disk and compared with the tree. Modes are 644 and 755, times the pin's
    date, without a `.git`. A damaged repository is fetched again, once. Raises HostError if the
    folder is not empty.
    """
    source = lock.source
    if source is None or lock.source_tree is None:
        raise LockError("the lock pins no source tree", where=lock.recipe)
    if target.exists() and any(target.iterdir()):
        raise HostError(
            "the folder for the source is not empty", where=str(target), hint="remove it first"
        )
    git = Git(ctx.processes, ctx.environment)
    parts = [(repository_of(ctx.places, source), lock.source_tree, Path())]
    if isinstance(source, GitPin):
        parts += [
            (mirror_folder(ctx.places, part.url), part.tree, Path(part.path))
            for part in source.submodules
        ]
    try:
        ensure_tree(ctx, lock)
        for repository, tree, below in parts:
            try:
                write_tree(git, repository, tree, target / below)
            except (GitFailed, _Damaged) as error:
                if isinstance(error, GitFailed) and _NO_WRITE.search(error.said):
                    raise  # the disk, not the mirror, which may be the last copy
                _clear(target / below)
                with guarded(ctx, repository.with_suffix(".lock"), "the mirror"):
                    set_aside(ctx, repository)
                    make_bare(ctx, git, repository)
                ensure_tree(ctx, lock)
                write_tree(git, repository, tree, target / below)
        _settle(target, source)
    except (GitFailed, _Damaged, OSError) as error:
        where = str(target)
        if isinstance(error, OSError):
            reason, where = error.strerror, str(error.filename or target)
        elif isinstance(error, GitFailed) and (found := _NO_WRITE.search(error.said)):
            reason = next(row for row in error.said.splitlines() if found[0] in row)
        else:
            raise HostError(
                f"the pinned source tree cannot be written: {error}",
                where=where,
                hint="check the disk; remove the folder of mirrors to fetch them again",
                id="source-damaged",
            ) from error
        raise HostError(
            f"the source cannot be written: {reason}",
            where=where,
            hint="check the free space and that the folder is writable",
            id="disk",
        ) from error


_NO_WRITE = re.compile(
    "unable to (?:create|write)|cannot create|could not (?:create|write)|No space left|Read-only "
    "file system|Disk quota|File name too long|Permission denied",
    re.IGNORECASE,
)
"""Git's messages if a file cannot be written; the repository may be fine."""


class _Damaged(Exception):
    """A written file differs from the tree."""


def _clear(folder: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_tree(git: Git, repository: Path, tree: str, target: Path) -> None:
    """Check a tree out through a temporary index and verify every file. Raises GitFailed."""
    target.mkdir(parents=True, exist_ok=True)
    index = target / ".bakehouse-index"
    extra = {"GIT_INDEX_FILE": str(index), "GIT_WORK_TREE": str(target)}
    git.ask(repository, "read-tree", tree, extra=extra)
    git.ask(
        repository, "checkout-index", "--all", "--force", f"--prefix={target}/", extra=extra,
        timeout=600,
    )  # fmt: skip
    index.unlink()
    entries = [e for e in list_tree(git, repository, tree) if e.mode != "160000"]
    for entry in entries:
        if _blob_id(target / entry.path, entry.mode) != entry.id:
            raise _Damaged(f"{entry.path} differs from the tree")
    found = sum(1 for _ in _files(target))
    if found != len(entries):
        raise _Damaged(f"wrote {found} files, expected {len(entries)}")


def _files(folder: Path) -> Iterator[str]:
    """Every file and link below a folder, in no order."""
    for place, folders, files in os.walk(folder):
        yield from (os.path.join(place, name) for name in files)
        yield from (p for name in folders if os.path.islink(p := os.path.join(place, name)))


def _blob_id(path: Path, mode: str) -> str:
    """Compute git's id of a file's bytes, or of a link's target."""
    try:
        if mode == "120000":
            data = os.readlink(path).encode(errors="surrogateescape")
        else:
            data = path.read_bytes() if not path.is_symlink() else b""
    except OSError as error:
        raise _Damaged(f"{path}: {error.strerror}") from error
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _settle(target: Path, source: GitPin | ArchivePin) -> None:
    """Set reproducible modes and times."""
    when = (source.date, source.date)
    for place, folders, files in os.walk(target, topdown=False):
        for name in (*files, *folders):
            path = os.path.join(place, name)
            if not os.path.islink(path):
                executable = os.path.isdir(path) or os.stat(path).st_mode & 0o100
                os.chmod(path, 0o755 if executable else 0o644)
            os.utime(path, when, follow_symlinks=False)
    target.chmod(0o755)
    os.utime(target, when)
