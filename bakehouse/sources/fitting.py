"""Try a patch on a git tree: in a scratch index, never in place, all or nothing.

Git applies a hunk where its header says, or elsewhere in the file where all its lines match (an
*offset*). It has no fuzz of its own; `-C1`, which needs one line of context on either side only, is
what is called *fuzz* here.
"""

from __future__ import annotations

import difflib
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from bakehouse.base import Frozen
from bakehouse.errors import PatchError
from bakehouse.patches.manifest import Fit as Allowed
from bakehouse.ports.git import COMMIT, Git, GitFailed
from bakehouse.redact import clean
from bakehouse.sources.diffs import FilePart, Hunk, read_diff

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


class Fit(Frozen):
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


def try_patch(git: Git, repository: Path, tree: str, data: bytes, name: str) -> Fit:
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
            return Fit(word="already upstream", notes=("all of it is already in the source",))
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

    def fit(self, word: Word, data: bytes, notes: tuple[str, ...] = (), *options: str) -> Fit:
        """Apply a diff that passed `check`, which overlooks a file in the place of a folder."""
        try:
            self.ask("apply", "--cached", "--whitespace=nowarn", *options, "-", stdin=data)
            tree = self.ask("write-tree").strip()
        except GitFailed as error:
            if "appears as both a file and as a directory" not in error.said:
                raise
            return Fit(word="conflicts", notes=(_whole_failure(error), *notes))
        if not COMMIT.fullmatch(tree):
            raise PatchError("git wrote no tree for the patched source", where=str(self.repository))
        self._refuse_special(tree)
        return Fit(word=word, tree=tree, notes=notes)

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


def _explain_conflicts(trial: _Trial, parts: Sequence[FilePart]) -> Fit:
    """Try each hunk alone: which are in the source already, which do not fit, and why."""
    conflicts: list[str] = []
    upstream: list[str] = []
    line, whole = 0, trial.failure
    for part in parts:
        for number, hunk in enumerate(part.hunks, 1):
            alone, name = part.alone(hunk), f"hunk {number} of {len(part.hunks)}"
            if trial.check(alone, "--reverse") is not None:
                upstream.append(f"{name} of {part.path} is already in the source")
            elif trial.check(alone) is None:
                line = line or hunk.line
                conflicts += (f"{name} {trial.reason(hunk, part.path)}", *_differences(trial, hunk))
    if upstream and not conflicts:
        total = sum(len(part.hunks) for part in parts)
        count = f"{len(upstream)} of its {total} hunks are already in the source"
        return Fit(word="partly upstream", notes=(count, *upstream))
    if not conflicts and whole:
        conflicts.append(_whole_failure(whole))
    return Fit(word="conflicts", notes=(*conflicts, *upstream), line=line)


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
