"""Whether a patch fits a source: tried in a scratch index, never in place, all or nothing.

Git applies a hunk where it says, or elsewhere in the file where all its lines stand (an *offset*).
It has no fuzz of its own; `-C1` makes it content with one line of context on either side, which is
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

APPLIES: Literal["applies"] = "applies"
Word = Literal[
    "applies",
    "applies with offset",
    "applies with fuzz",
    "already upstream",
    "partly upstream",
    "conflicts",
]
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "applies": ("exact", "offset", "fuzz"),
    "applies with offset": ("offset", "fuzz"),
    "applies with fuzz": ("fuzz",),
}
"""By what may be allowed, which words count as applying."""
LOOSE = ("-C1",)
_REDUCED = re.compile(r"Context reduced to \((\d+)/(\d+)\) to apply fragment at (\d+)")
_CLASH = "appears as both a file and as a directory"
SHOWN = 3
"""Lines that differ, shown for a hunk."""
MAX_LINE = 90


class Fit(Frozen):
    """How a patch fits one tree."""

    word: Word
    tree: str | None = None
    """Git tree id of the result; None where it does not apply."""
    notes: tuple[str, ...] = ()
    """What to show of it: offsets, reduced context, hunks that conflict, lines that differ."""
    line: int = 0
    """Line of the patch where the first hunk stands that does not fit; 0 where all do."""

    def good(self, allow: Allowed = "exact") -> bool:
        """Whether it applies, as loosely as is allowed."""
        return allow in _NEEDS.get(self.word, ())


def try_patch(git: Git, repository: Path, tree: str, data: bytes, name: str) -> Fit:
    """Try a patch on a tree of a bare repository. Nothing changes but that a tree may be added.

    Raises PatchError for what is no patch at all, or changes a submodule.
    """
    parts = read_diff(data, name)
    with tempfile.TemporaryDirectory(prefix="bakehouse-index-") as scratch:
        trial = _Trial(
            git, repository, tree, {"GIT_INDEX_FILE": str(Path(scratch, "index"))}, parts
        )
        exact = trial.apply(data)
        back = trial.apply(data, "--reverse")
        if exact is not None and not exact:
            return trial.fit(APPLIES, data)
        if back is not None and (not back or exact is None):
            return Fit(word="already upstream", notes=("all of it is in the source already",))
        if exact is not None:
            return trial.fit("applies with offset", data, exact)
        loose = trial.apply(data, *LOOSE)
        if loose is not None:
            return trial.fit("applies with fuzz", data, loose, *LOOSE)
        return _part_by_part(trial, parts)


class _Trial:
    """A scratch index with one tree in it, on which diffs are tried."""

    def __init__(
        self,
        git: Git,
        repository: Path,
        tree: str,
        extra: Mapping[str, str],
        parts: Sequence[FilePart],
    ) -> None:
        self.parts = parts
        self.git = git
        self.repository = repository
        self.tree = tree
        self.extra = extra
        self.why: GitFailed | None = None
        """Why the last diff did not apply."""
        self._ask("read-tree", tree)

    def _ask(self, *arguments: str, stdin: bytes | None = None) -> str:
        return self.git.ask(self.repository, *arguments, stdin=stdin, extra=self.extra)

    def apply(self, data: bytes, *how: str) -> tuple[str, ...] | None:
        """What git notes when the diff is applied; empty where all is as it says, None if not."""
        command = ("apply", "--cached", "--whitespace=nowarn", "--check", "--verbose", *how, "-")
        try:
            _, said = self.git.ask_both(self.repository, *command, stdin=data, extra=self.extra)
        except GitFailed as error:
            self.why = error
            return None
        return _notes(said, self.parts)

    def fit(self, word: Word, data: bytes, notes: tuple[str, ...] = (), how: str = "") -> Fit:
        """Apply what `--check` found to fit, which does not see all: a file where a folder is."""
        try:
            return Fit(word=word, tree=self.result(data, *filter(None, [how])), notes=notes)
        except GitFailed as error:
            if _CLASH not in error.said:
                raise
            return Fit(word="conflicts", notes=(_told(error), *notes))

    def result(self, data: bytes, *how: str) -> str:
        """Apply it to the index and give the tree that results."""
        self._ask("apply", "--cached", "--whitespace=nowarn", *how, "-", stdin=data)
        made = self._ask("write-tree").strip()
        if not COMMIT.fullmatch(made):
            raise PatchError("git gave no tree for the patched source", where=str(self.repository))
        _same_special(self.git, self.repository, (self.tree, made))
        return made

    def reason(self, path: str, hunk: Hunk) -> str:
        """Why the last diff, of one hunk, did not apply."""
        said = self.why.first().removeprefix("error: ") if self.why else ""
        if said.startswith(("patch failed", "while searching")):
            return f"does not fit {path}:{hunk.begins}"
        return f"does not fit: {clean(said, one_line=True)}"

    def text(self, path: str) -> list[str] | None:
        """A file's lines; None where it is not there."""
        try:
            return self._ask("cat-file", "blob", f"{self.tree}:{path}").splitlines()
        except GitFailed:
            return None


def _notes(said: str, parts: Sequence[FilePart]) -> tuple[str, ...]:
    """Offsets and reduced contexts in what git says, each with its file.

    The offset is computed from where the hunk landed: with reduced context git's own is wrong.
    """
    found: list[str] = []
    queue, part, last = list(parts), None, (0, 0)
    file = ""
    for line in clean(said).splitlines():
        if checking := re.match(r"Checking patch (.+)\.\.\.$", line):
            file, last = checking[1].partition(" => ")[2] or checking[1], (0, 0)
            part = queue.pop(0) if queue else None
        elif at := re.match(r"Hunk #(\d+) succeeded at (\d+) ", line):
            last = (int(at[1]), int(at[2]))
            found.append(_landed(file, part, *last))
        elif less := _REDUCED.match(line):
            before, after, place = map(int, less.groups())
            if last[1] == place:  # what git said of this hunk just now counts what is left out
                found.pop()
                found += filter(None, [_landed(file, part, *last, kept=before)])
            found.append(
                f"{file}:{place}: of its context {before} lines before and {after} after fit"
            )
    return tuple(found)


def _landed(
    file: str, part: FilePart | None, number: int, place: int, kept: int | None = None
) -> str:
    """Where a hunk landed, `kept` lines of context before it; empty where it says so itself."""
    if part is None or number > len(part.hunks):
        return f"hunk {number} of {file}: at line {place}"
    hunk = part.hunks[number - 1]
    begin = place - (0 if kept is None else hunk.leading - kept)
    offset = begin - hunk.lands
    return f"hunk {number} of {file}: at line {begin}, offset {offset:+}" if offset else ""


def _part_by_part(trial: _Trial, parts: Sequence[FilePart]) -> Fit:
    """Judge each hunk by itself: which are in the source already, which do not fit it."""
    conflicts: list[str] = []
    upstream: list[str] = []
    total, line, whole = 0, 0, trial.why
    for part in parts:
        for number, hunk in enumerate(part.hunks, 1):
            total += 1
            alone = part.alone(hunk)
            name = f"hunk {number} of {len(part.hunks)}"
            if trial.apply(alone, "--reverse") is not None:
                upstream.append(f"{name} of {part.path} is in the source already")
            elif trial.apply(alone) is None:
                line = line or hunk.line
                conflicts.append(f"{name} {trial.reason(part.path, hunk)}")
                conflicts += _differing(trial, hunk)
    if upstream and not conflicts:
        count = f"{len(upstream)} of its {total} hunks are in the source already"
        return Fit(word="partly upstream", notes=(count, *upstream))
    if not conflicts and whole:
        conflicts.append(_told(whole))
    return Fit(word="conflicts", notes=(*conflicts, *upstream), line=line)


def _told(error: GitFailed) -> str:
    """What git says against a whole patch each of whose hunks fits by itself, in a line."""
    if failed := re.search(r"^error: patch failed: (.+)$", error.said, re.MULTILINE):
        return f"does not fit {clean(failed[1], one_line=True)} once what comes before it is in"
    return clean(error.first().removeprefix("error: "), one_line=True)


def _differing(trial: _Trial, hunk: Hunk) -> list[str]:
    """The lines of a hunk that the source has otherwise, where the hunk fits best."""
    there = trial.text(hunk.file)
    if there is None:
        return [f"    {hunk.file} is not in the source"]
    wanted = [row.decode(errors="replace").rstrip("\r") for row in hunk.side(b"-")]
    match = difflib.SequenceMatcher(None, wanted, there, autojunk=False).find_longest_match()
    begin = match.b - match.a if match.size else hunk.begins - 1
    begin = max(0, min(begin, len(there)))
    window = there[begin : begin + len(wanted)]
    shown = []
    for op, a, a_end, b, b_end in difflib.SequenceMatcher(
        None, wanted, window, autojunk=False
    ).get_opcodes():
        if op == "equal":
            continue
        shown += [
            f"    {hunk.file}:{begin + b + 1}: the patch has  {_cut(x)}" for x in wanted[a:a_end]
        ]
        shown += [
            f"    {hunk.file}:{begin + b + n + 1}: the source has {_cut(x)}"
            for n, x in enumerate(window[b:b_end])
        ]
    more = len(shown) - 2 * SHOWN
    return shown if more <= 0 else [*shown[: 2 * SHOWN], f"    and {more} lines more"]


def _cut(text: str) -> str:
    safe = clean(text, one_line=True)
    return safe if len(safe) <= MAX_LINE else safe[: MAX_LINE - 1] + "…"


def _same_special(git: Git, repository: Path, trees: tuple[str, str]) -> None:
    """Refuse patches that change a link or a submodule, also where the diff does not say so.

    A plain diff of a path that is a link in the tree changes where it leads. Submodules are pinned
    from the tree without patches.
    """
    before, after = (
        {line for line in git.ask(repository, "ls-tree", "-r", tree).splitlines()
         if line.startswith(("160000", "120000")) or line.endswith("\t.gitmodules")}
        for tree in trees
    )  # fmt: skip
    if before != after:
        raise PatchError(
            "the patches change a symbolic link or a submodule",
            where="\n".join(sorted(clean(line) for line in before ^ after)),
            hint="patches may change plain files only",
            id="patch-special",
        )
