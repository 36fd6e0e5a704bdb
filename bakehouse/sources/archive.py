"""Archives: download by sha256, unpack, and write as a git tree."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from bakehouse import atomic
from bakehouse.context import Context
from bakehouse.errors import LockError, NotFound
from bakehouse.lock import ArchivePin, FilePin, GitPin
from bakehouse.ports.git import COMMIT, Git, GitFailed
from bakehouse.recipe.model import Archive
from bakehouse.sources.files import describe_wrong, fetch_pinned, guarded
from bakehouse.sources.mirror import TREES, is_ready, make_bare
from bakehouse.sources.registry import fetch_file, find_file, index_url
from bakehouse.sources.unpack import check_links, choose_folder, unpack
from bakehouse.util.files import sha256_file

ARCHIVES = "archives.git"
Pin = GitPin | ArchivePin


def origin_of(archive: Archive) -> str:
    """Give an archive's origin as a lock names it."""
    return f"pypi:{archive.pypi}" if archive.pypi else str(archive.url or archive.path)


def kept(ctx: Context, pin: FilePin) -> Path:
    """Give the archive's path in the cache."""
    return ctx.places.downloads / pin.sha256 / pin.path


def bring_archive(ctx: Context, archive: Archive, folder: Path) -> FilePin:
    """Download or copy an archive into the cache; give its pin. Raises LockError, HostError."""
    if archive.pypi:
        name = _from_registry(ctx, archive.pypi, archive.sha256)
    elif archive.url:
        name = archive.url.partition("?")[0].rstrip("/").rpartition("/")[2] or "archive"
        target = ctx.places.downloads / archive.sha256 / name
        fetch_pinned(ctx, archive.url, target, sha256=archive.sha256, title=name)
    else:
        name = _from_disk(ctx, folder / Path(os.path.expanduser(str(archive.path))), archive.sha256)
    path = ctx.places.downloads / archive.sha256 / name
    return FilePin(path=name, size=path.stat().st_size, sha256=archive.sha256)


def _from_registry(ctx: Context, requirement: str, sha256: str) -> str:
    """Download the file of a release that has this hash: its sdist, or one of its wheels."""
    index = index_url(ctx.environment)
    file = find_file(ctx.http, requirement, want="any", sha256=sha256, index=index)
    fetch_file(ctx, file)
    return file.filename


def _from_disk(ctx: Context, path: Path, sha256: str) -> str:
    """Copy a local archive into the cache: a build then needs no recipe folder."""
    if not path.is_file():
        hint = "check the path; paths are relative to the recipe"
        raise NotFound.named("archive", path.name, where=str(path), hint=hint, id="archive-missing")
    target = ctx.places.downloads / sha256 / path.name
    if target.is_file():
        return path.name
    found = sha256_file(path)
    if found != sha256:
        nature = describe_wrong(path)
        raise LockError(
            f"the archive differs from its pin: expected sha256 {sha256}, found {found}"
            + (f"; it is {nature}" if nature else ""),
            where=str(path),
            hint="restore it, or write its sha256 into the recipe to accept the change",
            id="archive-changed",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with path.open("rb") as content, atomic.replacing(target) as copy:
        shutil.copyfileobj(content, copy)
    return path.name


def pin_archive(
    ctx: Context, git: Git, archive: Archive, folder: Path, before: Pin | None = None
) -> ArchivePin:
    """Download, unpack and pin an archive; `before` is the recipe's last pin."""
    if isinstance(before, ArchivePin) and archive_is_ready(ctx, git, before.tree):
        return before
    file = bring_archive(ctx, archive, folder)
    tree, date = import_archive(ctx, git, kept(ctx, file), archive.folder)
    return ArchivePin(
        origin=origin_of(archive), file=file, folder=archive.folder, tree=tree, date=date,
        number=archive.number,
    )  # fmt: skip


def ensure_archive_tree(ctx: Context, git: Git, pin: ArchivePin) -> None:
    """Fetch and unpack a pinned archive if its tree is missing. Raises LockError, HostError."""
    if archive_is_ready(ctx, git, pin.tree):
        return
    if pin.origin.startswith("pypi:"):
        _from_registry(ctx, pin.origin.removeprefix("pypi:"), pin.file.sha256)
    elif "://" in pin.origin:
        fetch_pinned(ctx, pin.origin, kept(ctx, pin.file), sha256=pin.file.sha256,
                     size=pin.file.size, title=pin.file.path)  # fmt: skip
    elif not kept(ctx, pin.file).is_file():
        raise LockError(
            "the pinned archive is missing",
            where=f"{pin.origin}, sha256 {pin.file.sha256}",
            hint="run 'invoke fetch' for the recipe, which copies its archive",
            id="archive-missing",
        )
    tree, _ = import_archive(ctx, git, kept(ctx, pin.file), pin.folder)
    if tree != pin.tree:
        raise LockError(
            f"the archive's tree differs from its pin: expected {pin.tree}, found {tree}",
            where=pin.origin,
            hint="write the lock again with 'invoke lock --update'",
            id="tree-mismatch",
        )


def archive_is_ready(ctx: Context, git: Git, tree: str) -> bool:
    """Whether a tree was imported completely, and is still whole."""
    return is_ready(git, ctx.places.git / ARCHIVES, f"{TREES}/{tree}", tree)


def import_archive(ctx: Context, git: Git, archive: Path, folder: str) -> tuple[str, int]:
    """Write a folder of an archive as a git tree.

    Give the tree's id and its newest date, in seconds since 1970. Raises LockError.
    """
    repository = ctx.places.git / ARCHIVES
    with guarded(ctx, repository.with_suffix(".lock"), "the unpacked archives"):
        make_bare(ctx, git, repository)
        for left in ctx.places.git.glob(".unpack-*"):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".unpack-", dir=ctx.places.git) as scratch:
            root = Path(scratch, "tree")
            ctx.progress.say(f"unpack {archive.name}")
            dates = unpack(archive, root)
            chosen = choose_folder(archive, root, folder)
            check_links(archive, chosen)
            tree = to_objects(git, repository, chosen, Path(scratch, "index"))
            below = "" if chosen == root else f"{chosen.relative_to(root).as_posix()}/"
            date = max(when for name, when in dates.items() if name.startswith(below))
        git.ask(repository, "update-ref", f"{TREES}/{tree}", tree)
        return tree, date


def to_objects(git: Git, repository: Path, folder: Path, index: Path) -> str:
    """Write a folder as a git tree, without filters; give the tree's id. Raises GitFailed."""
    files: list[tuple[str, Path]] = []
    rows: list[str] = []
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted((*names, *(f for f in folders if Path(place, f).is_symlink()))):
            path = Path(place, name)
            relative = path.relative_to(folder).as_posix()
            if path.is_symlink():
                target = os.readlink(path).encode()
                blob = git.ask(repository, "hash-object", "-w", "--stdin", stdin=target).strip()
                rows.append(f"120000 {blob}\t{relative}")
            else:
                files.append((relative, path))
    paths = "".join(f"{path}\n" for _, path in files).encode()
    ids = git.ask(
        repository, "hash-object", "-w", "--no-filters", "--stdin-paths", stdin=paths, timeout=900
    ).split()
    for (relative, path), blob in zip(files, ids, strict=True):
        mode = "100755" if os.access(path, os.X_OK) else "100644"
        rows.append(f"{mode} {blob}\t{relative}")
    extra = {"GIT_INDEX_FILE": str(index)}
    listing = "".join(f"{row}\0" for row in rows).encode()
    git.ask(repository, "update-index", "-z", "--index-info", stdin=listing, extra=extra)
    tree = git.ask(repository, "write-tree", extra=extra).strip()
    if not COMMIT.fullmatch(tree):
        raise GitFailed("write-tree", 0, f"error: '{tree}' is not an object id")
    return tree
