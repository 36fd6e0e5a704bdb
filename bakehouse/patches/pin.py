"""Fetch a patch and pin it: write its manifest, cache its diff, compare later fetches."""

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
from bakehouse.patches.manifest import PINNED, Manifest, Shape, TouchedFile
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
class PatchRef:
    """Which patch is meant. `what` is a number, a commit, a URL or a path."""

    kind: Kind
    what: str
    repo: str

    @property
    def id(self) -> str:
        """Its id among the patches of its repository."""
        if self.kind == "pr":
            return self.what
        if self.kind == "commit":
            return self.what[:12]
        last = re.split(r"[/\\]", self.what.partition("?")[0].rstrip("/"))[-1]
        stem = re.sub(r"\.(?:diff|patch|txt)$", "", last)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:90] or "patch"
        return f"{self.kind}-{name}" if name.isdigit() else name  # a number is a pull request's

    def resolved(self, host: str) -> PatchRef:
        """Turn the URL of a pull request or a commit on the host into a reference to that."""
        kinds: tuple[tuple[Kind, re.Pattern[str]], ...] = (("pr", _PULL), ("commit", _COMMIT))
        for kind, pattern in kinds:
            if self.kind == "url" and (found := pattern.fullmatch(self.what)) and found[1] == host:
                return PatchRef(kind, found[3], found[2])
        return self

    def source(self, ctx: Context) -> str:
        """Its source, as written into the manifest."""
        if self.kind == "pr":
            return upstream.pull_address(ctx.environment, self.repo, int(self.what))
        if self.kind == "commit":
            return upstream.commit_address(ctx.environment, self.repo, self.what)
        return without_credentials(self.what)


@dataclass(frozen=True)
class Pinned:
    """The result of pinning a patch."""

    manifest: Manifest
    path: Path
    data: bytes = field(repr=False)
    """The diff."""
    how: Literal["new", "same", "moved", "offline"]
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def pin(
    ctx: Context, ref: PatchRef, *, update: bool = False, vendor: bool = False, write: bool = True
) -> Pinned:
    """Fetch a patch; pin it if it is new, else compare it with its pin.

    If the host cannot be reached, or no longer has it, the cached diff is used. Without `write`
    nothing is written. Raises PatchError (exit 5), and LockError `patch-moved` (exit 4) if it
    differs from its pin and `update` does not accept that.
    """
    folder = patches_folder(ctx.recipes)
    path = manifest_path(folder, ref.repo, ref.id)
    old = find_manifest(folder, ref.repo, ref.id)
    try:
        fetched = _fetch(ctx, ref, old)
    except CannotFetch as error:
        made = None if update else _cached(ctx, old, path, error)
        if made is None:
            raise
    else:
        made = _compared(ctx, ref, fetched, old, path, update=update)
    if write:
        keep(ctx.places, str(made.manifest.sha256), made.data)
        if made.how in ("new", "moved"):
            write_manifest(path, made.manifest)
        made = _vendored(made, vendor=vendor)
    return made


def _cached(ctx: Context, old: Manifest | None, path: Path, error: CannotFetch) -> Pinned | None:
    """What is pinned already, if its diff is on this machine."""
    if old is None or old.sha256 is None:
        return None
    data = kept_diff(ctx, old.sha256, path.with_suffix(".diff"))
    note = f"not compared with upstream: {error.what}; using the pinned diff from the cache"
    return Pinned(old, path, data, "offline", notes=(note,)) if data is not None else None


def _compared(
    ctx: Context, ref: PatchRef, fetched: Fetched, old: Manifest | None, path: Path, *, update: bool
) -> Pinned:
    new = _manifest(ctx, ref, fetched, old)
    changes = tuple(_changes(old, new)) if old is not None else ()
    if changes and not update:
        what = "pull request" if new.pr is not None else "patch"
        raise LockError(
            f"the {what} moved: {new.name} differs from its pin",
            where="\n".join((shown(path), *changes)), id="patch-moved",
            hint="review the changes; then accept them with --update (verdicts on the old diff "
            "stay, but do not count for the new one)",
        )  # fmt: skip
    if old is not None and old.pinned and not changes:
        notes = fetched.notes
        if fetched.head not in (None, old.head):
            notes = (*notes, f"its head is now {fetched.head}; the diff is the same")
        return Pinned(old, path, fetched.data, "same", (), notes)
    return Pinned(new, path, fetched.data, "moved" if changes else "new", changes, fetched.notes)


def _fetch(ctx: Context, ref: PatchRef, old: Manifest | None) -> Fetched:
    git = Git(ctx.processes, ctx.environment)
    if ref.kind == "pr":
        known = (old.head, old.base) if old else (None, None)
        return upstream.fetch_pull(ctx, git, ref.repo, int(ref.what), known)
    if ref.kind == "commit":
        return upstream.fetch_commit(ctx, git, ref.repo, ref.what)
    if ref.kind == "url":
        return upstream.fetch_address(ctx, ref.what)
    data = read_patch(Path(os.path.expanduser(ref.what)))
    return Fetched(data, read_diff(data, shown(Path(ref.what))), upstream.title_of(data))


def _manifest(ctx: Context, ref: PatchRef, fetched: Fetched, old: Manifest | None) -> Manifest:
    """The new manifest: what was fetched, and what people wrote into the old one."""
    files: dict[str, TouchedFile] = {}
    for part in fetched.parts:
        had = files.get(part.path, TouchedFile(path=part.path))
        files[part.path] = TouchedFile(
            path=part.path, added=had.added + part.added, removed=had.removed + part.removed
        )
    start = old or Manifest(id=ref.id, repo=ref.repo, source=ref.source(ctx))
    return start.changed(
        pr=int(ref.what) if ref.kind == "pr" else None,
        title=fetched.title or start.title,
        source=ref.source(ctx),
        status=PINNED,
        head=fetched.head,
        base=fetched.base,
        sha256=hashlib.sha256(fetched.data).hexdigest(),
        size=len(fetched.data),
        files=tuple(files.values()),
        date=ctx.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def _changes(old: Manifest, new: Manifest) -> Iterator[str]:
    """List how a patch differs from its pin, or from the size that was noted before it had one."""
    if not old.pinned:
        size = Shape(files=len(new.files), added=sum(f.added for f in new.files),
                     removed=sum(f.removed for f in new.files))  # fmt: skip
        if old.known not in (None, size):
            yield f"expected {old.known}; it is now {size}"
        return
    if old.sha256 == new.sha256:
        return
    yield f"sha256 {old.sha256} -> {new.sha256}"
    if old.source != new.source:
        yield f"source {old.source} -> {new.source}"
    if old.head != new.head:
        yield f"head {old.head or 'unknown'} -> {new.head or 'unknown'}"
    before, after = ({f.path: f"+{f.added} -{f.removed}" for f in m.files} for m in (old, new))
    for path in dict.fromkeys((*before, *after)):
        if before.get(path) != after.get(path):
            was, now = before.get(path, "not changed"), after.get(path, "not changed")
            yield f"{path}: {was} -> {now}"
    if before == after:
        yield "the same files and line counts: compare the lines themselves"


def _vendored(made: Pinned, *, vendor: bool) -> Pinned:
    """Store the diff beside the manifest if asked to, or update the one there."""
    copy = made.path.with_suffix(".diff")
    if not vendor and made.manifest.vendored is None:
        return made
    if not copy.is_file() or copy.read_bytes() != made.data:
        write_atomic(copy, made.data)
    manifest = made.manifest.changed(vendored=copy.name)
    if manifest != made.manifest:
        write_manifest(made.path, manifest)
    return replace(made, manifest=manifest)
