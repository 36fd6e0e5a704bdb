"""Apply a patch, or try it and explain the conflicts.

Git applies a hunk where its header says, or elsewhere in the file where all its lines match (an
*offset*). It has no fuzz of its own; `-C1`, which needs one line of context on either side only, is
what is called *fuzz* here.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from bakehouse.context import Context
from bakehouse.errors import HostError, LockError, NotFound, PatchError
from bakehouse.lock import FilePin, PatchPin
from bakehouse.models import Frozen
from bakehouse.patches.diff import LARGE_HINT, MAX_BYTES, FilePart, Hunk, read_diff
from bakehouse.patches.manifest import Fit as Allowed
from bakehouse.patches.manifest import (
    Manifest,
    find_manifest,
    manifest_path,
    patches_folder,
    read_manifest,
)
from bakehouse.paths import Places
from bakehouse.recipe.models import UPSTREAM, Patch
from bakehouse.recipe.types import shown
from bakehouse.redact import clean
from bakehouse.system.git import COMMIT, Git, GitFailed
from bakehouse.util.files import write_atomic

Word = Literal[
    "applies",
    "applies with offset",
    "applies with fuzz",
    "already upstream",
    "partly upstream",
    "conflicts",
]
_ALLOWED_BY: Mapping[str, tuple[str, ...]] = {
    "applies": ("exact", "offset", "fuzz"),
    "applies with offset": ("offset", "fuzz"),
    "applies with fuzz": ("fuzz",),
}
_FUZZ = "-C1"
_REDUCED = re.compile(r"Context reduced to \((\d+)/(\d+)\) to apply fragment at (\d+)")
MAX_DIFFERENCES = 6
"""Most lines that differ to show for a hunk."""
MAX_LINE = 90
"""Most characters of such a line."""


class ApplyResult(Frozen):
    """The result of trying a patch on one tree."""

    word: Word
    tree: str | None = None
    """Git tree id of the result; None if it does not apply."""
    notes: tuple[str, ...] = ()
    """Offsets, reduced context, hunks in conflict, lines that differ."""
    line: int = 0
    """Line of the patch with the first hunk in conflict; 0 without one."""

    def good(self, allow: Allowed = "exact") -> bool:
        """Whether it applies as loosely as `allow` permits."""
        return allow in _ALLOWED_BY.get(self.word, ())


def try_apply(git: Git, repository: Path, tree: str, data: bytes, name: str) -> ApplyResult:
    """Try a patch on a tree of a bare repository, to which at most the resulting tree is added.

    Raises PatchError for an invalid patch, or one that changes a link or a submodule.
    """
    parts = read_diff(data, name)
    with tempfile.TemporaryDirectory(prefix="bakehouse-index-") as scratch:
        index = {"GIT_INDEX_FILE": str(Path(scratch, "index"))}
        trial = _Trial(git, repository, tree, index, parts)
        exact = trial.check(data)
        back = trial.check(data, "--reverse")
        if exact is not None and not exact:
            return trial.fit("applies", data)
        if back is not None and (not back or exact is None):
            return ApplyResult(
                word="already upstream", notes=("all of it is already in the source",)
            )
        if exact is not None:
            return trial.fit("applies with offset", data, exact)
        loose = trial.check(data, _FUZZ)
        if loose is not None:
            return trial.fit("applies with fuzz", data, loose, _FUZZ)
        return _explain_conflicts(trial, parts)


class _Trial:
    """A scratch index that holds one tree, on which diffs are tried."""

    def __init__(
        self, git: Git, repository: Path, tree: str, index: Mapping[str, str],
        parts: Sequence[FilePart],
    ) -> None:  # fmt: skip
        self.parts = parts
        self.git = git
        self.repository = repository
        self.tree = tree
        self.index = index
        self.failure: GitFailed | None = None
        """Of the last diff that did not apply."""
        self.ask("read-tree", tree)

    def ask(self, *arguments: str, stdin: bytes | None = None) -> str:
        return self.git.ask(self.repository, *arguments, stdin=stdin, extra=self.index)

    def check(self, data: bytes, *options: str) -> tuple[str, ...] | None:
        """Return git's notes on how a diff applies, empty for exactly; None if it does not."""
        command = ("apply", "--cached", "--whitespace=nowarn", "--check", "--verbose", *options)
        try:
            _, messages = self.git.ask_both(
                self.repository, *command, "-", stdin=data, extra=self.index
            )
        except GitFailed as error:
            self.failure = error
            return None
        return _notes(messages, self.parts)

    def fit(
        self, word: Word, data: bytes, notes: tuple[str, ...] = (), *options: str
    ) -> ApplyResult:
        """Apply a diff that passed `check`, which overlooks a file in the place of a folder."""
        try:
            self.ask("apply", "--cached", "--whitespace=nowarn", *options, "-", stdin=data)
            tree = self.ask("write-tree").strip()
        except GitFailed as error:
            if "appears as both a file and as a directory" not in error.said:
                raise
            return ApplyResult(word="conflicts", notes=(_whole_failure(error), *notes))
        if not COMMIT.fullmatch(tree):
            raise PatchError("git wrote no tree for the patched source", where=str(self.repository))
        self._refuse_special(tree)
        return ApplyResult(word=word, tree=tree, notes=notes)

    def _refuse_special(self, made: str) -> None:
        """Refuse a changed link or submodule, also where the diff itself does not say so.

        A plain diff of a path that is a link in the tree changes its target. Submodules are pinned
        from the tree without patches.
        """
        rows = self.ask("diff-tree", "-r", "--raw", "--no-renames", self.tree, made).splitlines()
        special = [
            clean(row) for row in rows
            if {"120000", "160000"} & set(row[1:].split(" ")[:2]) or row.endswith("\t.gitmodules")
        ]  # fmt: skip
        if special:
            raise PatchError(
                "the patch changes a symbolic link or a submodule", where="\n".join(special),
                hint="patches may change plain files only", id="patch-special",
            )  # fmt: skip

    def reason(self, hunk: Hunk, path: str) -> str:
        """Why the last diff, of one hunk, did not apply."""
        message = self.failure.first().removeprefix("error: ") if self.failure else ""
        if message.startswith(("patch failed", "while searching")):
            return f"does not fit {path}:{hunk.begins}"
        return f"does not fit: {clean(message, one_line=True)}"


def _notes(messages: str, parts: Sequence[FilePart]) -> tuple[str, ...]:
    """Collect offsets and reduced contexts from git's messages, each with its file.

    The offset is computed from where the hunk landed: with reduced context git's own is wrong.
    """
    found: list[str] = []
    queue, part, last = list(parts), None, (0, 0)
    file = ""
    for line in clean(messages).splitlines():
        if checking := re.match(r"Checking patch (.+)\.\.\.$", line):
            file, last = checking[1].partition(" => ")[2] or checking[1], (0, 0)
            part = queue.pop(0) if queue else None
        elif at := re.match(r"Hunk #(\d+) succeeded at (\d+) ", line):
            last = (int(at[1]), int(at[2]))
            found.append(_landed(file, part, *last))
        elif less := _REDUCED.match(line):
            before, after, place = map(int, less.groups())
            if last[1] == place:  # git's message before this one counts the lines left out as well
                found.pop()
                found += filter(None, [_landed(file, part, *last, kept=before)])
            found.append(
                f"{file}:{place}: only {before} context lines before and {after} after fit"
            )
    return tuple(found)


def _landed(
    file: str, part: FilePart | None, number: int, place: int, kept: int | None = None
) -> str:
    """Where a hunk landed, with `kept` lines of context before it; empty for where it should."""
    if part is None or number > len(part.hunks):
        return f"hunk {number} of {file}: at line {place}"
    hunk = part.hunks[number - 1]
    begin = place - (0 if kept is None else hunk.leading - kept)
    offset = begin - hunk.lands
    return f"hunk {number} of {file}: at line {begin}, offset {offset:+}" if offset else ""


def _explain_conflicts(trial: _Trial, parts: Sequence[FilePart]) -> ApplyResult:
    """Try each hunk alone: which are in the source already, which do not fit, and why."""
    conflicts: list[str] = []
    fetch: list[str] = []
    line, whole = 0, trial.failure
    for part in parts:
        for number, hunk in enumerate(part.hunks, 1):
            alone, name = part.alone(hunk), f"hunk {number} of {len(part.hunks)}"
            if trial.check(alone, "--reverse") is not None:
                fetch.append(f"{name} of {part.path} is already in the source")
            elif trial.check(alone) is None:
                line = line or hunk.line
                conflicts += (f"{name} {trial.reason(hunk, part.path)}", *_differences(trial, hunk))
    if fetch and not conflicts:
        total = sum(len(part.hunks) for part in parts)
        count = f"{len(fetch)} of its {total} hunks are already in the source"
        return ApplyResult(word="partly upstream", notes=(count, *fetch))
    if not conflicts and whole:
        conflicts.append(_whole_failure(whole))
    return ApplyResult(word="conflicts", notes=(*conflicts, *fetch), line=line)


def _whole_failure(error: GitFailed) -> str:
    """Git's message on a whole patch each of whose hunks fits alone, in one line."""
    if failed := re.search(r"^error: patch failed: (.+)$", error.said, re.MULTILINE):
        return f"does not fit {clean(failed[1], one_line=True)} after the patch's earlier parts"
    return clean(error.first().removeprefix("error: "), one_line=True)


def _differences(trial: _Trial, hunk: Hunk) -> list[str]:
    """The lines that differ between a hunk and the source, at the place where most agrees."""
    try:
        source = trial.ask("cat-file", "blob", f"{trial.tree}:{hunk.file}").splitlines()
    except GitFailed:
        return [f"    {hunk.file} is not in the source"]
    wanted = [row.decode(errors="replace").rstrip("\r") for row in hunk.side(b"-")]
    match = difflib.SequenceMatcher(None, wanted, source, autojunk=False).find_longest_match()
    begin = match.b - match.a if match.size else hunk.begins - 1
    begin = max(0, min(begin, len(source)))
    window = source[begin : begin + len(wanted)]
    rows = []
    matcher = difflib.SequenceMatcher(None, wanted, window, autojunk=False)
    for kind, a, a_end, b, b_end in matcher.get_opcodes():
        if kind != "equal":
            rows += [(b + 1, "the patch has ", text) for text in wanted[a:a_end]]
            rows += [(n, "the source has", text) for n, text in enumerate(window[b:b_end], b + 1)]
    shown = [f"    {hunk.file}:{begin + n}: {who} {_cut(text)}" for n, who, text in rows]
    more = len(shown) - MAX_DIFFERENCES
    return shown if more <= 0 else [*shown[:MAX_DIFFERENCES], f"    and {more} more lines"]


def _cut(text: str) -> str:
    safe = clean(text, one_line=True)
    return safe if len(safe) <= MAX_LINE else safe[: MAX_LINE - 1] + "…"


def stored(places: Places, sha256: str) -> Path:
    """Path of a pinned diff in the cache; with it a build needs no recipe folder."""
    return places.cache / "patches" / f"{sha256}.patch"


def pin_patches(
    ctx: Context, folder: Path, patches: Sequence[Patch], engine: str = "llama.cpp"
) -> tuple[PatchPin, ...]:
    """Pin a recipe's patches by content, in order, and copy those that are files to the cache.

    Raises PatchError, LockError, RecipeError (an invalid manifest), NotFound (no manifest).
    """
    return tuple(
        _pin_file(ctx, folder, patch) if patch.file else _pin_manifest(ctx, patch, engine)
        for patch in patches
    )


def _pin_file(ctx: Context, folder: Path, patch: Patch) -> PatchPin:
    name = str(patch.file)
    path = folder / Path(os.path.expanduser(name))
    data = read_patch(path)
    sha256 = hashlib.sha256(data).hexdigest()
    if patch.sha256 and patch.sha256 != sha256:
        raise _other_sha256("the patch", patch.sha256, f"{sha256} found", str(path))
    read_diff(data, str(path))
    keep(ctx.places, sha256, data)
    pin = FilePin(path=name, size=len(data), sha256=sha256)
    return PatchPin(id=Path(name).stem, file=pin, allow=patch.allow)


def _pin_manifest(ctx: Context, patch: Patch, engine: str) -> PatchPin:
    manifest = manifest_of(ctx, patch, engine)
    key = patch.key(engine)
    path = shown(manifest_path(patches_folder(ctx.recipes), manifest.repo, manifest.id))
    if manifest.sha256 is None or manifest.size is None:
        raise not_pinned(manifest, path)
    if patch.sha256 and patch.sha256 != manifest.sha256:
        raise _other_sha256(f"patch {key}", patch.sha256, f"{manifest.sha256} pinned", path)
    return PatchPin(
        id=manifest.id,
        file=FilePin(path=key, size=manifest.size, sha256=manifest.sha256),
        repo=manifest.repo, source=manifest.source, head=manifest.head, allow=patch.allow,
    )  # fmt: skip


def _other_sha256(what: str, expected: str, found: str, where: str) -> LockError:
    return LockError(
        f"{what} is not the one in the recipe: expected sha256 {expected}, {found}", where=where,
        hint="review the change; then restore the patch, or put its new sha256 into the recipe",
        id="patch-changed",
    )  # fmt: skip


def not_pinned(manifest: Manifest, path: str) -> LockError:
    """The error for a patch that has a manifest but no sha256 yet."""
    return LockError(
        f"patch {manifest.name} is not pinned yet", where=path, id="patch-unpinned",
        hint=f"run '{pin_command(manifest)}', which fetches it and writes its sha256 there",
    )  # fmt: skip


def pin_command(manifest: Manifest) -> str:
    """The shell command that pins a patch."""
    usual = "" if manifest.repo == UPSTREAM["llama.cpp"] else f" --repo {manifest.repo}"
    if manifest.pr is not None:
        return f"invoke patch --pr {manifest.pr}{usual}"
    if manifest.source.rpartition("/")[0].endswith("/commit"):
        return f"invoke patch --commit {manifest.source.rpartition('/')[2]}{usual}"
    flag = "--url" if "://" in manifest.source else "--file"
    return f"invoke patch {flag} {manifest.source}{usual}"


def manifest_of(ctx: Context, patch: Patch, engine: str) -> Manifest:
    """The manifest of a patch that a recipe names. Raises NotFound, RecipeError."""
    repo, _, name = patch.key(engine).rpartition("#")
    return read_manifest(manifest_path(patches_folder(ctx.recipes), repo, name))


def keep(places: Places, sha256: str, data: bytes) -> None:
    """Store a diff in the cache unless it is there already."""
    path = stored(places, sha256)
    if not path.is_file() or path.read_bytes() != data:
        write_atomic(path, data)


def bring_patches(ctx: Context, folder: Path, pins: Sequence[PatchPin]) -> None:
    """Check that pinned patches are unchanged, and copy those that are files to the cache.

    Fetches nothing. Raises LockError `patch-changed` for a file, `patch-moved` if a manifest now
    pins another diff.
    """
    for pin in pins:
        if pin.repo is not None:
            _check_manifest(ctx, pin)
            continue
        path = folder / Path(os.path.expanduser(pin.file.path))
        data = read_patch(path)
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 != pin.file.sha256:
            raise LockError(
                f"the patch changed since it was pinned: expected sha256 {pin.file.sha256}, found "
                f"{sha256}", where=str(path), id="patch-changed",
                hint="restore it, or accept it with 'invoke lock --update'",
            )  # fmt: skip
        keep(ctx.places, sha256, data)


def _check_manifest(ctx: Context, pin: PatchPin) -> None:
    path = manifest_path(patches_folder(ctx.recipes), str(pin.repo), pin.id)
    manifest = read_manifest(path)
    if manifest.sha256 != pin.file.sha256:
        raise LockError(
            f"the recipe and its lock differ: patch-moved: {pin.file.path} is now pinned as sha256 "
            f"{manifest.sha256 or 'nothing yet'}, the lock has {pin.file.sha256}",
            where=shown(path), id="patch-moved",
            hint="restore the manifest, or accept it with 'invoke lock --update'",
        )  # fmt: skip


def read_patch(path: Path) -> bytes:
    """Read a patch file of at most MAX_BYTES; anything but a regular file could block for ever.

    Raises NotFound, PatchError.
    """
    hint = "check the path; paths in a recipe are relative to the recipe"
    where = clean(str(path), one_line=True)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise PatchError("the patch is not a regular file", where=where, hint=hint)
        if status.st_size > MAX_BYTES:
            what = f"the patch is larger than {MAX_BYTES // 2**20} MiB"
            raise PatchError(what, where=where, hint=LARGE_HINT, id="patch-large")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound.named("patch", path.name, where=where, hint=hint) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise PatchError(f"cannot read the patch: {why}", where=where, hint=hint) from error


def kept_diff(ctx: Context, sha256: str, vendored: Path | None = None) -> bytes | None:
    """Return a pinned diff from the cache or from beside its manifest; None if in neither.

    A corrupt copy in the cache is deleted. Raises HostError if there was no other.
    """
    path, corrupt = stored(ctx.places, sha256), False
    for place in filter(None, (path, vendored)):
        try:
            data = place.read_bytes()
        except OSError:
            continue
        if hashlib.sha256(data).hexdigest() == sha256:
            keep(ctx.places, sha256, data)
            return data
        if place == path:
            path.unlink(missing_ok=True)
            corrupt = True
    if corrupt:
        raise HostError(
            "the cached copy of a patch was corrupt and has been deleted", where=str(path),
            hint="run it again; if it happens again, check the disk",
        )  # fmt: skip
    return None


def diff_of(ctx: Context, pin: PatchPin) -> bytes:
    """Return a pinned diff: cached, vendored, or fetched and verified.

    Raises LockError if it is nowhere, or if the fetched one differs; PatchError.
    """
    vendored = None
    if pin.repo is not None:
        path = manifest_path(patches_folder(ctx.recipes), pin.repo, pin.id)
        vendored = path.with_suffix(".diff")
    if (data := kept_diff(ctx, pin.file.sha256, vendored)) is not None:
        return data
    if pin.repo is None or pin.source is None:
        raise LockError(
            f"the pinned patch {pin.id} is not in the cache", id="patch-missing",
            where=f"{pin.file.path}, sha256 {pin.file.sha256}",
            hint="run 'invoke fetch' for the recipe, which copies its patches there",
        )  # fmt: skip
    data = _fetch_again(ctx, pin)
    found = hashlib.sha256(data).hexdigest()
    if found != pin.file.sha256 and (old := _fetch_old_head(ctx, pin)) is not None:
        data, found = old, pin.file.sha256
    if found != pin.file.sha256:
        raise LockError(
            f"patch {pin.file.path} moved: sha256 {pin.file.sha256} is pinned, the host now has "
            f"{found}", where=pin.source, id="patch-moved",
            hint="the pinned diff is no longer available: review the new one with 'invoke patch', "
            "accept it with its --update, then 'invoke lock --update'",
        )  # fmt: skip
    keep(ctx.places, found, data)
    return data


def _fetch_again(ctx: Context, pin: PatchPin) -> bytes:
    """Fetch a diff from its source. Raises PatchError, LockError."""
    from bakehouse.patches import fetch

    source, repo = str(pin.source), str(pin.repo)
    *_, kind, name = ("", *source.rstrip("/").split("/"))
    if kind == "pull" and name == pin.id:
        return fetch.get_diff(ctx, fetch.pull_address(ctx.environment, repo, int(pin.id)))
    if kind == "commit":
        return fetch.get_diff(ctx, fetch.commit_address(ctx.environment, repo, name))
    if "://" in source:
        return fetch.fetch_address(ctx, source).data
    raise LockError(
        f"the pinned patch {pin.file.path} is not in the cache, and came from a file",
        where=f"{source}, sha256 {pin.file.sha256}", id="patch-missing",
        hint=f"'invoke patch --file {source} --vendor' stores it beside its manifest",
    )  # fmt: skip


def _fetch_old_head(ctx: Context, pin: PatchPin) -> bytes | None:
    """The pinned diff of a pull request that was pushed to since, if its old head still exists."""
    from bakehouse.patches import fetch

    manifest = find_manifest(patches_folder(ctx.recipes), str(pin.repo), pin.id)
    if manifest is None or None in (manifest.pr, manifest.base, manifest.head):
        return None
    host = f"{fetch.host_of(ctx.environment)}/{manifest.repo}"
    try:
        data = fetch.get_diff(ctx, f"{host}/compare/{manifest.base}...{manifest.head}")
    except PatchError:
        return None
    return data if hashlib.sha256(data).hexdigest() == pin.file.sha256 else None


def apply_patches(
    ctx: Context, git: Git, repository: Path, tree: str, pins: Sequence[PatchPin]
) -> str:
    """Apply pinned patches in order to a tree; return the id of the resulting tree.

    Works in scratch indexes: if any hunk of any patch fails, nothing has changed.
    Raises PatchError with patch, file and hunk; LockError.
    """
    for pin in pins:
        fit = try_apply(git, repository, tree, diff_of(ctx, pin), pin.file.path)
        if not fit.good(pin.allow) or fit.tree is None:
            raise does_not_apply(pin, fit)
        tree = fit.tree
    return tree


def does_not_apply(pin: PatchPin, fit: ApplyResult) -> PatchError:
    """The error for a pinned patch that does not apply: first hunk, then all notes."""
    where = f"{pin.file.path}:{fit.line}" if fit.line else pin.file.path
    first, *rest = fit.notes or (fit.word,)
    what = f"patch {pin.id} does not apply: {first}"
    if fit.word == "partly upstream":
        what = f"patch {pin.id} does not apply: it is partly upstream, {first}"
    elif fit.word.startswith("applies with"):
        need = loose_fit(fit.word)
        what = f"patch {pin.id} applies only with {need}, which is not allowed: {first}"
    return PatchError(what, where="\n".join((where, *rest)), hint=fit_hint(fit), id=fit_id(fit))


def loose_fit(word: str) -> str:
    """`offset` or `fuzz` for a patch that applies with one of them, else empty."""
    return word.removeprefix("applies with ") if word.startswith("applies with ") else ""


def fit_hint(fit: ApplyResult) -> str:
    """What to do about a patch that does not apply as it is."""
    if need := loose_fit(fit.word):
        return f"check where it lands; then allow it: allow: {need} beside the patch, or --allow"
    hints = {
        "already upstream": "remove it from the recipe's patches, then 'invoke lock --update'",
        "partly upstream": "recreate it without what the source already has",
    }
    return hints.get(fit.word, "recreate it for the pinned commit, or pin a commit that it fits")


def fit_id(fit: ApplyResult) -> str:
    """The id of its error."""
    return f"patch-{(loose_fit(fit.word) or fit.word).replace(' ', '-')}"
