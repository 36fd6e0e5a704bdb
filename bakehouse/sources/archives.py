"""Pin, fetch and unpack archives.

tarfile's data filter is not enough: it knows no zip, no size limit, no `.git` and no names that
differ in case only, and it refuses links outside the folder that is used.
"""

from __future__ import annotations

import bz2
import calendar
import gzip
import lzma
import os
import re
import shutil
import stat
import tarfile
import tempfile
import unicodedata
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from bakehouse.context import Context
from bakehouse.errors import LockError, NotFound
from bakehouse.lock import ArchivePin, FilePin, GitPin
from bakehouse.recipe.models import Archive
from bakehouse.redact import clean
from bakehouse.sources.files import describe_wrong, fetch_pinned, guarded
from bakehouse.sources.git_mirror import TREES, is_ready, make_bare
from bakehouse.sources.pypi import fetch_release_file
from bakehouse.system.git import COMMIT, Git, GitFailed
from bakehouse.util import files as atomic
from bakehouse.util.files import sha256_file

MAX_FILES = 200_000
MAX_BYTES = 8 * 2**30
MAX_NAME_BYTES = 4096
MAX_LINK_BYTES = 4096
CHUNK = 2**20
LATEST_DATE = 2**32 - 1


@dataclass(frozen=True)
class Entry:
    """One member of an archive. `kind`: `file`, `folder`, `symlink`, `hardlink` or what else it is.

    `date` in seconds since 1970.
    """

    name: str
    kind: str
    executable: bool
    date: int
    content: IO[bytes] | None = None
    link: str = ""


def refuse(archive: Path, why: str) -> LockError:
    """Make the error for an archive that cannot be used."""
    return LockError(
        f"unsafe or damaged archive: {clean(why, one_line=True)}",
        where=str(archive),
        hint="its content is pinned, so it cannot be repaired: use another archive of this source",
        id="archive",
    )


@dataclass
class _Unpacking:
    """What was unpacked so far, to detect name collisions and archive bombs."""

    archive: Path
    target: Path
    kinds: dict[str, str] = field(default_factory=dict)
    spellings: dict[str, str] = field(default_factory=dict)
    dates: dict[str, int] = field(default_factory=dict)
    total: int = 0

    def take(self, entry: Entry) -> None:
        """Write one member to disk. Raises LockError."""
        name = self.safe_name(entry.name)
        if not name:
            return
        if entry.kind == "folder":
            self.enter(name)
            return
        self.enter(name.rpartition("/")[0])
        if name in self.kinds:
            raise refuse(self.archive, f"it contains '{name}' twice")
        if len(self.kinds) >= MAX_FILES:
            raise refuse(self.archive, f"it contains more than {MAX_FILES:,} files")
        self.note(name, entry.kind)
        self.dates[name] = min(max(entry.date, 0), LATEST_DATE)
        path = self.target / name
        if entry.kind == "file" and entry.content:
            self.write(entry.content, path)
            path.chmod(0o755 if entry.executable else 0o644)
        elif entry.kind == "symlink":
            if not entry.link or len(entry.link.encode()) > MAX_LINK_BYTES or "\0" in entry.link:
                raise refuse(self.archive, f"the link '{name}' has no valid target")
            path.symlink_to(entry.link)
        elif entry.kind == "hardlink":
            self.link(self.safe_name(entry.link), name, path)
        else:
            raise refuse(self.archive, f"'{name}' is {entry.kind}")

    def safe_name(self, name: str) -> str:
        """Give a member's path without `./`; empty for the root. Raises LockError."""
        if re.search(r"[\x00-\x1f\x7f\\]", name) or name.startswith("/") or name[1:2] == ":":
            raise refuse(self.archive, f"'{name}' is not a relative path")
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise refuse(self.archive, f"'{name}' leaves the folder")
        if any(_is_git_folder(part) for part in parts):
            raise refuse(self.archive, f"'{name}' would be a .git folder")
        joined = "/".join(parts)
        try:
            encoded = joined.encode()
        except UnicodeEncodeError:
            raise refuse(self.archive, f"the name '{name}' is not UTF-8") from None
        if len(encoded) > MAX_NAME_BYTES or any(len(part.encode()) > 255 for part in parts):
            raise refuse(self.archive, f"the name '{name[:60]}...' is too long")
        return joined

    def enter(self, name: str) -> None:
        """Make a folder and its parents; never through a file or a link."""
        so_far = ""
        for part in name.split("/") if name else ():
            so_far = f"{so_far}/{part}" if so_far else part
            kind = self.kinds.get(so_far)
            if kind is None:
                self.note(so_far, "folder")
                (self.target / so_far).mkdir()
            elif kind != "folder":
                raise refuse(self.archive, f"'{so_far}' is both a {kind} and a folder")

    def note(self, name: str, kind: str) -> None:
        """Remember a name; refuse two that differ in case or Unicode form only."""
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
        other = self.spellings.setdefault(folded, name)
        if other != name:
            raise refuse(self.archive, f"'{other}' and '{name}' differ only in case or accents")
        self.kinds[name] = kind

    def write(self, content: IO[bytes], path: Path) -> None:
        """Copy one file and count its bytes."""
        with path.open("xb") as file:
            while chunk := content.read(CHUNK):
                self.total += len(chunk)
                if self.total > MAX_BYTES:
                    raise refuse(self.archive, f"it unpacks to more than {MAX_BYTES:,} bytes")
                file.write(chunk)

    def link(self, source: str, name: str, path: Path) -> None:
        """Copy an earlier file in place of a hard link."""
        if self.kinds.get(source) != "file":
            raise refuse(
                self.archive, f"'{name}' links to '{source}', which is not an earlier file"
            )
        origin = self.target / source
        with origin.open("rb") as content:
            self.write(content, path)
        shutil.copymode(origin, path)
        self.kinds[name] = "file"


def _is_git_folder(part: str) -> bool:
    """Whether a file system may read this name as `.git`."""
    ignorable = re.sub("[\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]", "", part)
    folded = ignorable.rstrip(". ").casefold()
    return folded == ".git" or folded.startswith("git~")


def unpack(archive: Path, target: Path) -> dict[str, int]:
    """Unpack into a new folder; give each file's modification time by its path.

    Raises LockError for all but a plain tree of files, folders and links.
    """
    target.mkdir(parents=True)
    work = _Unpacking(archive, target)
    damaged = (
        tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, gzip.BadGzipFile,
        EOFError, RuntimeError, ValueError,
    )  # fmt: skip
    try:
        for entry in _entries(archive):
            work.take(entry)
    except damaged as error:
        raise refuse(archive, f"it is damaged ({error})") from error
    if not work.dates:
        raise refuse(archive, "it contains no files")
    return work.dates


def _entries(archive: Path) -> Iterator[Entry]:
    with archive.open("rb") as file:
        head = file.read(6)
    if head.startswith(b"PK"):
        yield from _zip_entries(archive)
        return
    for magic, library in ((b"\x1f\x8b", gzip), (b"\xfd7zXZ", lzma), (b"BZh", bz2)):
        if head.startswith(magic):
            with library.open(archive) as stream:
                yield from _tar_entries(stream)
            return
    raise refuse(archive, "not a tar.gz, tar.xz, tar.bz2 or zip file")


def _tar_entries(stream: IO[bytes] | gzip.GzipFile) -> Iterator[Entry]:
    kinds = {
        tarfile.DIRTYPE: "folder", tarfile.SYMTYPE: "symlink", tarfile.LNKTYPE: "hardlink",
        tarfile.CHRTYPE: "a device", tarfile.BLKTYPE: "a device", tarfile.FIFOTYPE: "a pipe",
    }  # fmt: skip
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            kind = "file" if member.isreg() else kinds.get(member.type, "something special")
            content = tar.extractfile(member) if kind == "file" else None
            yield Entry(
                member.name, kind, bool(member.mode & 0o100), int(member.mtime), content,
                member.linkname,
            )  # fmt: skip
    left = MAX_BYTES
    while left > 0 and (chunk := stream.read(CHUNK)):  # to the checksum at the stream's end
        left -= len(chunk)


def _zip_entries(archive: Path) -> Iterator[Entry]:
    with zipfile.ZipFile(archive) as pack:
        for info in pack.infolist():
            mode = info.external_attr >> 16
            executable = bool(mode & 0o100)
            date = calendar.timegm((*info.date_time, 0, 0, 0))
            if info.flag_bits & 1:
                raise refuse(archive, f"'{info.filename}' is encrypted")
            if info.is_dir():
                yield Entry(info.filename, "folder", False, date)
            elif stat.S_ISLNK(mode):
                if info.file_size > MAX_LINK_BYTES:
                    raise refuse(archive, f"the link '{info.filename}' has no valid target")
                yield Entry(info.filename, "symlink", False, date, link=pack.read(info).decode())
            elif stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                yield Entry(info.filename, "something special", False, date)
            else:
                with pack.open(info) as content:
                    yield Entry(info.filename, "file", executable, date, content)


def choose_folder(archive: Path, root: Path, folder: str) -> Path:
    """Find the source folder; a single folder at the top is skipped. Raises LockError."""
    top = [*root.iterdir()]
    stripped = top[0] if len(top) == 1 and top[0].is_dir() and not top[0].is_symlink() else root
    wanted = [part for part in folder.split("/") if part not in ("", ".")]
    if ".." in wanted or folder.startswith("/"):
        raise refuse(archive, f"the folder '{folder}' leaves it")
    for start in (stripped, root):
        chosen = start.joinpath(*wanted)
        if chosen.is_dir() and chosen.resolve() == chosen.absolute():
            return chosen
    near = ", ".join(sorted(p.name for p in stripped.iterdir() if p.is_dir())[:12])
    raise refuse(archive, f"it has no folder '{folder}' (found: {near or 'none'})")


def check_links(archive: Path, folder: Path) -> None:
    """Refuse links that leave the folder, followed as the kernel would. Raises LockError."""
    home = os.path.realpath(folder)
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            if not path.is_symlink():
                continue
            where = os.path.realpath(path)
            if os.path.isabs(os.readlink(path)) or not f"{where}/".startswith(f"{home}/"):
                shown = path.relative_to(folder).as_posix()
                raise refuse(archive, f"the link '{shown}' leaves the folder")


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
        name = fetch_release_file(ctx, archive.pypi, archive.sha256).name
    elif archive.url:
        name = archive.url.partition("?")[0].rstrip("/").rpartition("/")[2] or "archive"
        target = ctx.places.downloads / archive.sha256 / name
        fetch_pinned(ctx, archive.url, target, sha256=archive.sha256, title=name)
    else:
        name = _from_disk(ctx, folder / Path(os.path.expanduser(str(archive.path))), archive.sha256)
    path = ctx.places.downloads / archive.sha256 / name
    return FilePin(path=name, size=path.stat().st_size, sha256=archive.sha256)


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
        fetch_release_file(ctx, pin.origin.removeprefix("pypi:"), pin.file.sha256)
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
