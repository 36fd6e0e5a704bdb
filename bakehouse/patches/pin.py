"""Pin a patch; add patches to one run or leave them out."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from bakehouse.context import Context
from bakehouse.errors import BakehouseError, Fault, LockError, NotFound, RecipeError
from bakehouse.lock import Lock, PatchPin
from bakehouse.logscan.catalogue import catalogue
from bakehouse.logscan.findings import Severity
from bakehouse.patches import fetch
from bakehouse.patches.apply import (
    keep,
    kept_diff,
    manifest_of,
    not_pinned,
    pin_command,
    read_patch,
)
from bakehouse.patches.diff import read_diff
from bakehouse.patches.fetch import CannotFetch, Fetched
from bakehouse.patches.manifest import (
    PINNED,
    Manifest,
    PatchVerdict,
    Shape,
    TouchedFile,
    find_manifest,
    manifest_path,
    patches_folder,
    write_manifest,
)
from bakehouse.recipe.loader import LoadedRecipe
from bakehouse.recipe.types import shown
from bakehouse.redact import without_credentials
from bakehouse.system.git import Git
from bakehouse.util.files import write_atomic

UNSOUND = ("experimental", "harmful")


@dataclass(frozen=True)
class PatchRisk:
    """One unsound patch, reported at every serve."""

    patch: str
    word: str
    why: str
    verdict: PatchVerdict | None
    losses: frozenset[str] = frozenset()
    """Ids of lost-feature signatures that the verdict found, if it is of this recipe and base."""

    def line(self) -> str:
        """One line for the console."""
        return f"{self.word.upper()} patch {self.patch}: {self.why}"


def known_risks(ctx: Context, lock: Lock, recipe: str) -> tuple[PatchRisk, ...]:
    """Return a lock's patches that are experimental or harmful, by a verdict or by their manifest.

    A verdict on this recipe at this base takes precedence over others; one on another diff does
    not count. Manifests that cannot be read are skipped: loading the recipe reported them.
    """
    found = []
    for pin in lock.patches:
        manifest = None
        with suppress(BakehouseError):
            folder = patches_folder(ctx.recipes)
            manifest = find_manifest(folder, pin.repo, pin.id) if pin.repo else None
        if manifest and (one := _standing(manifest, pin, recipe)):
            found.append(one)
    return tuple(found)


def _standing(manifest: Manifest, pin: PatchPin, recipe: str) -> PatchRisk | None:
    of_diff = [v for v in manifest.verdicts if v.sha256 == pin.file.sha256]
    own = [v for v in of_diff if (v.recipe, v.base) == (recipe, pin.base)]
    verdict = ([None] + (own or [v for v in of_diff if v.word in UNSOUND]))[-1]
    if verdict and verdict.word in UNSOUND:
        reasons = "; ".join(verdict.reasons[:2]) or "see its manifest"
        where = f"judged with {verdict.recipe} at {verdict.base[:12]}, {verdict.date}"
        losses = _losses(verdict) if own and verdict.word == "experimental" else frozenset()
        return PatchRisk(manifest.name, verdict.word, f"{reasons} ({where})", verdict, losses)
    if manifest.experimental and not own:
        known = " ".join(manifest.notes.split("\n\n")[0].split())
        why = f"{known or 'known to be unsound'} (no verdict with {recipe} yet)"
        return PatchRisk(manifest.name, "experimental", why, None)
    return None


def _losses(verdict: PatchVerdict) -> frozenset[str]:
    """The measured losses of a verdict; other ids in the file are ignored."""
    named = verdict.evidence.get("losses")
    ids = map(str, named) if isinstance(named, list | tuple) else ()
    rows = catalogue().rows
    return frozenset(one for one in ids if one in rows and rows[one].severity == Severity.LOST)


def faults(ctx: Context, loaded: LoadedRecipe) -> tuple[Fault, ...]:
    """Return missing or invalid manifests, and lifted rules that a manifest does not name."""
    return _read(ctx, loaded)[1]


def notes(ctx: Context, loaded: LoadedRecipe) -> tuple[str, ...]:
    """Return what to do before the recipe can be built: patches to pin."""
    return tuple(
        f"patch {manifest.name} is not pinned yet: run '{pin_command(manifest)}'"
        for manifest in _read(ctx, loaded)[0]
        if not manifest.pinned
    )


def require_manifests(ctx: Context, loaded: LoadedRecipe) -> None:
    """Raise RecipeError with every fault, or LockError for a patch that is not pinned yet."""
    manifests, found = _read(ctx, loaded)
    if found:
        raise RecipeError(f"the patches of recipe {loaded.recipe.name} are invalid", found)
    for manifest in manifests:
        if not manifest.pinned:
            raise not_pinned(manifest, _shown(ctx, manifest))


def _read(ctx: Context, loaded: LoadedRecipe) -> tuple[list[Manifest], tuple[Fault, ...]]:
    """Return the manifests of a recipe's patches, and what is wrong with them."""
    recipe, manifests, found = loaded.recipe, [], []
    for place, patch in enumerate(recipe.patches):
        if patch.file:
            continue
        name = f"{'.'.join(recipe.patches_key)}[{place}]"
        origin = loaded.origin(*recipe.patches_key, place)
        try:
            manifest = manifest_of(ctx, patch, recipe.engine)
        except NotFound:
            number = f"--pr {patch.pr}" if patch.pr else "--url, --commit or --file"
            hint = f"'invoke patch {number}' fetches it and writes one"
            what = f"{name}: manifest of patch {patch.key(recipe.engine)} not found"
            found.append(origin.fault(what, hint))
            continue
        except RecipeError as error:
            found += error.faults
            continue
        manifests.append(manifest)
        if extra := [rule for rule in patch.lifts if rule not in manifest.lifts]:
            message = f"{name}.lifts: its manifest does not lift {', '.join(extra)}"
            found.append(origin.fault(message, f"see {_shown(ctx, manifest)}"))
    return manifests, tuple(found)


def _shown(ctx: Context, manifest: Manifest) -> str:
    return shown(manifest_path(patches_folder(ctx.recipes), manifest.repo, manifest.id))


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
            return fetch.pull_address(ctx.environment, self.repo, int(self.what))
        if self.kind == "commit":
            return fetch.commit_address(ctx.environment, self.repo, self.what)
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
        return fetch.fetch_pull(ctx, git, ref.repo, int(ref.what), known)
    if ref.kind == "commit":
        return fetch.fetch_commit(ctx, git, ref.repo, ref.what)
    if ref.kind == "url":
        return fetch.fetch_address(ctx, ref.what)
    data = read_patch(Path(os.path.expanduser(ref.what)))
    return Fetched(data, read_diff(data, shown(Path(ref.what))), fetch.title_of(data))


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
