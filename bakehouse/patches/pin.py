"""Fetch a patch and pin it: its manifest written, its diff kept by hash; later fetches compared."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from bakehouse.context import Context
from bakehouse.errors import LockError
from bakehouse.patches.manifest import PINNED, Manifest, TouchedFile
from bakehouse.ports.git import Git
from bakehouse.recipe.faults import shown
from bakehouse.redact import without_credentials
from bakehouse.sources import upstream
from bakehouse.sources.diffs import read_diff
from bakehouse.sources.manifests import (
    find_manifest,
    manifest_path,
    patches_folder,
    write_manifest,
)
from bakehouse.sources.patches import keep, kept_diff, read_patch
from bakehouse.sources.upstream import CannotFetch, Fetched
from bakehouse.util.files import write_atomic

Kind = Literal["pr", "commit", "url", "file"]
_PULL = re.compile(r"(https?://[^/]+)/([\w.-]+/[\w.-]+)/pull/(\d+)(?:\.diff|\.patch|/files|/)?")
_COMMIT = re.compile(r"(https?://[^/]+)/([\w.-]+/[\w.-]+)/commit/([0-9a-f]{40})(?:\.diff|\.patch)?")


@dataclass(frozen=True)
class Wish:
    """Which patch is meant. `what` is a number, a commit, an address or a path."""

    kind: Kind
    what: str
    repo: str

    @property
    def id(self) -> str:
        """Its name among the patches of its repository."""
        if self.kind == "pr":
            return self.what
        if self.kind == "commit":
            return self.what[:12]
        last = re.split(r"[/\\]", self.what.partition("?")[0].rstrip("/"))[-1]
        stem = re.sub(r"\.(?:diff|patch|txt)$", "", last)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:90] or "patch"
        return f"{self.kind}-{name}" if name.isdigit() else name  # a number is a pull request's

    def known(self, host: str) -> Wish:
        """Take the address of a pull request or a commit on the host for that one itself."""
        if self.kind == "url" and (found := _PULL.fullmatch(self.what)) and found[1] == host:
            return Wish("pr", found[3], found[2])
        if self.kind == "url" and (found := _COMMIT.fullmatch(self.what)) and found[1] == host:
            return Wish("commit", found[3], found[2])
        return self

    def source(self, ctx: Context) -> str:
        """Where it comes from, as its manifest says it."""
        if self.kind == "pr":
            return upstream.pull_address(ctx.environment, self.repo, int(self.what))
        if self.kind == "commit":
            return upstream.commit_address(ctx.environment, self.repo, self.what)
        return without_credentials(self.what)


@dataclass(frozen=True)
class Pinned:
    """What came of it."""

    manifest: Manifest
    path: Path
    data: bytes = field(repr=False)
    """The diff."""
    how: Literal["new", "same", "moved", "offline"]
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def pin(
    ctx: Context, wish: Wish, *, update: bool = False, vendor: bool = False, write: bool = True
) -> Pinned:
    """Fetch a patch; pin it where it is new, and hold it against its pin where it is not.

    Where the host cannot be reached, or has it no more, what is pinned and kept stands in for it.
    Without `write` nothing is written. Raises PatchError (exit 5), and LockError `patch-moved`
    (exit 4) where it is not what was pinned and `update` does not say that this is right.
    """
    folder = patches_folder(ctx.recipes)
    path = manifest_path(folder, wish.repo, wish.id)
    old = find_manifest(folder, wish.repo, wish.id)
    try:
        fetched = _fetch(ctx, wish, old)
    except CannotFetch as error:
        made = None if update else _kept(ctx, old, path, error)
        if made is None:
            raise
    else:
        made = _compared(ctx, wish, fetched, old, path, update=update)
    if write:
        keep(ctx.places, str(made.manifest.sha256), made.data)
        if made.how in ("new", "moved"):
            write_manifest(path, made.manifest)
        made = _copied(made, vendor=vendor)
    return made


def _kept(ctx: Context, old: Manifest | None, path: Path, error: CannotFetch) -> Pinned | None:
    """What is pinned already, where it is at hand."""
    if old is None or old.sha256 is None:
        return None
    data = kept_diff(ctx, old.sha256, path.with_suffix(".diff"))
    note = f"not compared with upstream: {error.what}; what is pinned and kept is used"
    return Pinned(old, path, data, "offline", notes=(note,)) if data is not None else None


def _compared(
    ctx: Context, wish: Wish, fetched: Fetched, old: Manifest | None, path: Path, *, update: bool
) -> Pinned:
    new = _manifest(ctx, wish, fetched, old)
    changes = tuple(_changes(old, new)) if old is not None else ()
    if changes and not update:
        raise _moved(new, path, changes)
    if old is not None and old.pinned and not changes:
        notes = fetched.notes
        if fetched.head not in (None, old.head):
            notes = (*notes, f"its head is {fetched.head} by now; the diff is the same")
        return Pinned(old, path, fetched.data, "same", (), notes)
    return Pinned(new, path, fetched.data, "moved" if changes else "new", changes, fetched.notes)


def _fetch(ctx: Context, wish: Wish, old: Manifest | None) -> Fetched:
    git = Git(ctx.processes, ctx.environment)
    if wish.kind == "pr":
        known = (old.head, old.base) if old else (None, None)
        return upstream.fetch_pull(ctx, git, wish.repo, int(wish.what), known)
    if wish.kind == "commit":
        return upstream.fetch_commit(ctx, git, wish.repo, wish.what)
    if wish.kind == "url":
        return upstream.fetch_address(ctx, wish.what)
    data = read_patch(Path(os.path.expanduser(wish.what)))
    return Fetched(data, read_diff(data, shown(Path(wish.what))), upstream.title_of(data))


def _manifest(ctx: Context, wish: Wish, fetched: Fetched, old: Manifest | None) -> Manifest:
    """The manifest as it is to be: what was fetched, and what people wrote about it."""
    files: dict[str, TouchedFile] = {}
    for part in fetched.parts:
        had = files.get(part.path, TouchedFile(path=part.path))
        files[part.path] = TouchedFile(
            path=part.path, added=had.added + part.added, removed=had.removed + part.removed
        )
    start = old or Manifest(id=wish.id, repo=wish.repo, source=wish.source(ctx))
    return start.changed(
        pr=int(wish.what) if wish.kind == "pr" else None,
        title=fetched.title or start.title,
        source=wish.source(ctx),
        status=PINNED,
        head=fetched.head,
        base=fetched.base,
        sha256=hashlib.sha256(fetched.data).hexdigest(),
        size=len(fetched.data),
        files=tuple(files.values()),
        date=ctx.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def _changes(old: Manifest, new: Manifest) -> Iterator[str]:
    """In which ways a patch is not what was pinned, or known of it before it was; none if it is."""
    if not old.pinned:
        if old.known is not None:
            shape = (len(new.files), sum(f.added for f in new.files),
                     sum(f.removed for f in new.files))  # fmt: skip
            known = (old.known.files, old.known.added, old.known.removed)
            if shape != known:
                yield (f"known of it: {_shape(known)}; it is now: {_shape(shape)}")
        return
    if old.sha256 == new.sha256:
        return
    yield f"sha256 {old.sha256} -> {new.sha256}"
    if old.source != new.source:
        yield f"source {old.source} -> {new.source}"
    if old.head != new.head:
        yield f"head {old.head or 'not known'} -> {new.head or 'not known'}"
    before, after = ({f.path: f for f in m.files} for m in (old, new))
    for path in dict.fromkeys((*before, *after)):
        was, now = before.get(path), after.get(path)
        if was != now:
            yield f"{path}: {_counts(was)} -> {_counts(now)}"
    if before == after:
        yield "the same files with the same counts: look at the lines themselves"


def _shape(shape: tuple[int, int, int]) -> str:
    files, added, removed = shape
    return f"{files} file{'s' * (files != 1)}, +{added} -{removed}"


def _counts(file: TouchedFile | None) -> str:
    return f"+{file.added} -{file.removed}" if file else "not touched"


def _moved(new: Manifest, path: Path, changes: tuple[str, ...]) -> LockError:
    what = "pull request" if new.pr is not None else "patch"
    return LockError(
        f"the {what} moved: {new.name} is not what was pinned",
        where="\n".join((shown(path), *changes)),
        hint="look at what it is now; then accept it with --update (verdicts on the old one stay, "
        "and say nothing of the new one)",
        id="patch-moved",
    )


def _copied(made: Pinned, *, vendor: bool) -> Pinned:
    """Keep a copy of the diff beside the manifest where that is wanted, or renew the one there."""
    copy = made.path.with_suffix(".diff")
    if not vendor and made.manifest.vendored is None:
        return made
    if not copy.is_file() or copy.read_bytes() != made.data:
        write_atomic(copy, made.data)
    manifest = made.manifest.changed(vendored=copy.name)
    if manifest != made.manifest:
        write_manifest(made.path, manifest)
    return replace(made, manifest=manifest)
