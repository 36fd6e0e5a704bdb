"""Unified diffs of untrusted origin: parse, validate, list what they change in each file.

The parser is our own: unidiff 1.0.1 accepts 30 of the 33 diffs that the tests want refused, takes
another path than git for renames, and stops at commit messages that quote a diff. Whether and where
a diff applies is for git to say (`apply.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bakehouse.errors import PatchError
from bakehouse.redact import clean

MAX_BYTES = 5 * 2**20
MAX_NAME = 255
"""Longest file name that file systems accept, in bytes."""
MAX_PATH = 512
"""Longest path inside the tree, in bytes; a build folder comes before it."""
_GIT_HEADER = re.compile(rb"^(?:diff --git |--- |\+\+\+ |@@ |index [0-9a-f]+\.\.|rename |copy )")
_PATH = re.compile(
    r'^(?:--- |\+\+\+ |rename from |rename to |copy from |copy to )("(?:[^"\\]|\\.)*"|[^\t]+)'
)
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_HUNK = re.compile(r"(?:rename from |copy from |new file mode |deleted file mode |old mode )")
"""Header lines of a file that may change without a hunk."""
_MODE = re.compile(
    r"(?:old mode |new mode |new file mode |deleted file mode |index \w+\.\.\w+ )(\d+)\s*$"
)
_MODE_CHANGE = re.compile(r"(old mode|new mode|new file mode|deleted file mode) (\d+)\s*$")
_INDEX = re.compile(r"index (\w+)\.\.(\w+)")
_EMPTY_BLOB = re.compile(r"0+|e69de29[0-9a-f]*")
"""Git's ids of a missing and of an empty file."""
_SIGNATURE = re.compile(rb"--(?: ?$|- )")
"""A mail's signature or the next file's header after a hunk: not a removed line."""
_WEB = re.compile(rb"\s*(?:\xef\xbb\xbf)?\s*(?:<!doctype|<html|<head|<body|<\?xml|<!--)", re.I)
_CONTEXT = (b" ", b"", b"\r")
"""First bytes of a context line; mailers strip the space of an empty one."""
LARGE_HINT = "for a change this large, set the recipe's source to the branch's commit"


@dataclass(frozen=True)
class Hunk:
    """One hunk: its file in the tree, its first line there, and its line in the patch."""

    file: str
    begins: int
    line: int
    body: tuple[bytes, ...] = field(default=(), repr=False)
    """The hunk header, then its lines, without line ends."""
    lands: int = 0
    """First line in the new file, by its header."""

    def side(self, mark: bytes) -> tuple[bytes, ...]:
        """Return the old lines (`mark` is `-`) or the new ones (`+`)."""
        return tuple(row[1:] for row in self.body[1:] if row[:1] in (b" ", b"", mark))

    @property
    def leading(self) -> int:
        """Lines of context before its first change."""
        rows = [row[:1] in _CONTEXT for row in self.body[1:]]
        return rows.index(False) if False in rows else len(rows)

    def count(self, mark: bytes) -> int:
        """Count the lines that it adds (`+`) or removes (`-`)."""
        return sum(row[:1] == mark for row in self.body[1:])


@dataclass(frozen=True)
class FilePart:
    """The part of a diff about one file. `path` is its path afterwards."""

    path: str
    header: tuple[bytes, ...] = field(repr=False)
    hunks: tuple[Hunk, ...]
    moved_from: str | None = None
    """The old path of a renamed file."""

    @property
    def added(self) -> int:
        """Lines added."""
        return sum(hunk.count(b"+") for hunk in self.hunks)

    @property
    def removed(self) -> int:
        """Lines removed."""
        return sum(hunk.count(b"-") for hunk in self.hunks)

    @property
    def mode(self) -> str:
        """Describe a change of mode, a new or a deleted file; empty for none of these."""
        rows = [_MODE_CHANGE.match(row.decode(errors="replace")) for row in self.header]
        modes = {row[1]: row[2] for row in rows if row}
        if "old mode" in modes and "new mode" in modes:
            return f"mode {modes['old mode']} -> {modes['new mode']}"
        if "deleted file mode" in modes:
            return "deleted"
        made = modes.get("new file mode")
        return f"new, mode {made}" if made else ""

    def alone(self, hunk: Hunk) -> bytes:
        """Return a diff with only one of its hunks."""
        return b"\n".join((*self.header, *hunk.body)) + b"\n"


def read_diff(data: bytes, name: str) -> tuple[FilePart, ...]:
    """Parse a diff into one part for each file; text around the diffs (of a mail) is skipped.

    Refuses diffs that are not plain text changes of plain files inside the tree.
    Raises PatchError with the line at fault.
    """
    if len(data) > MAX_BYTES:
        what = f"the patch is larger than {MAX_BYTES // 2**20} MiB ({len(data):,} bytes)"
        raise PatchError(what, where=name, hint=LARGE_HINT, id="patch-large")
    if _WEB.match(data):
        raise PatchError(
            "the patch is an HTML page, not a diff", where=f"{name}:1", id="patch-html",
            hint="the host returned a web page (a redirect, a login, a rate limit): fetch it again "
            "later",
        )  # fmt: skip
    parts = tuple(_parts(data, name))
    if not parts:
        raise PatchError(
            "the patch contains no diff", where=name, id="patch-empty",
            hint="use a unified diff, as 'git diff' and 'git format-patch' write it",
        )  # fmt: skip
    return parts


@dataclass
class _OpenPart:
    """A file's part while it is read."""

    git: bool
    """Whether it begins with `diff --git`."""
    header: list[bytes] = field(default_factory=list)
    names: dict[str, str | None] = field(default_factory=dict)
    """Paths in the header lines, by the words before them; None for /dev/null."""
    hunks: list[Hunk] = field(default_factory=list)

    @property
    def path(self) -> str:
        return next((path for path in reversed(self.names.values()) if path), "")

    def close(self, where: str) -> FilePart:
        """Check it as a whole."""
        lines = [row.decode(errors="replace") for row in self.header]
        bare = any(map(_NO_HUNK.match, lines)) and not any(map(_has_content, lines))
        if not self.hunks and not bare:
            raise _truncated(where, "a file's part ends before its first hunk")
        if not _consistent(self.names, git=self.git):
            quoted = (f"'{clean(str(path), one_line=True)}'" for path in self.names.values())
            raise PatchError(
                "the patch gives one file two names: " + ", ".join(quoted), where=where,
                hint="create it with 'git diff', which writes 'rename from' and 'rename to' for "
                "renamed files", id="patch-path",
            )  # fmt: skip
        path = self.path or _git_header_path(lines[0])
        return FilePart(path, tuple(self.header), tuple(self.hunks), self.names.get("rename from"))


def _parts(data: bytes, name: str) -> list[FilePart]:
    rows = data.split(b"\n")
    last = rows.pop()
    done: list[FilePart] = []
    part: _OpenPart | None = None
    at, after_hunk = 0, False
    while at < len(rows):
        raw, at, after_hunk = rows[at], at + 1, False
        where = f"{name}:{at}"
        _check_line(raw, where)
        line = raw.decode(errors="replace")
        git = line.startswith("diff --git ")
        plain = line.startswith("--- ") and at < len(rows) and rows[at].startswith(b"+++ ")
        if git or (plain and (part is None or not part.git or part.hunks)):
            if part:
                done.append(part.close(f"{name}:{at - 1}"))
            part = _OpenPart(git)
            for word in re.split(r'[\s"]+', line.removeprefix("diff --git ")) if git else ():
                if word:  # however its two paths divide, none may leave the tree
                    _check_path(word, "+++ ", where)
        if found := _PATH.match(line):
            path = _check_path(found[1], line, where)
            if part:
                words = line[: found.start(1)].strip()
                part.names.pop(words, None)
                part.names[words] = path
        elif part and (hunk := _HUNK.match(line)):
            end = _end_of_hunk(rows, at, hunk, name, cut=bool(last))
            body = tuple(rows[at - 1 : end])
            part.hunks.append(Hunk(part.path, int(hunk[1]), at, body, int(hunk[3])))
            at, after_hunk = end, True
            continue
        if part and not part.hunks:
            part.header.append(raw)
    if last and (after_hunk or (part and not part.hunks)):
        raise _truncated(f"{name}:{at + 1}", "it ends in the middle of a hunk")
    return [*done, part.close(f"{name}:{len(rows)}")] if part else done


def _end_of_hunk(
    rows: Sequence[bytes], begin: int, header: re.Match[str], name: str, *, cut: bool
) -> int:
    """Return the index after a hunk's last row. `cut`: the last line of all has no line end."""
    old, new = (int(count) if count else 1 for count in (header[2], header[4]))
    at = begin
    while old > 0 or new > 0:
        if at == len(rows):
            raise _truncated(f"{name}:{at + cut}", "it ends in the middle of a hunk")
        mark = rows[at][:1]
        context = mark in _CONTEXT
        old -= context or mark == b"-"
        new -= context or mark == b"+"
        at += 1
        if not (context or mark in (b"-", b"+", b"\\")) or min(old, new) < 0:
            raise _truncated(f"{name}:{at}", "a hunk is shorter or longer than its header says")
    while at < len(rows) and rows[at].startswith(b"\\"):
        at += 1
    if at < len(rows) and rows[at][:1] in (b" ", b"+", b"-") and not _SIGNATURE.match(rows[at]):
        raise _truncated(f"{name}:{at + 1}", "a hunk is longer than its header says")
    return at


def _truncated(where: str, why: str) -> PatchError:
    hint = "the download or the file may be incomplete: fetch it again"
    return PatchError(
        f"the patch is malformed: {why}", where=where, hint=hint, id="patch-truncated"
    )


def _consistent(names: Mapping[str, str | None], *, git: bool) -> bool:
    """Whether a part's header lines name one file before and one after.

    Git treats differing names as a rename even without a line that says so: it would replace one
    file by another, and remove the first. In a plain diff `x.orig` may stand before `x`.
    """
    old, new = names.get("---"), names.get("+++")
    moved = [way for way in ("rename", "copy") if {f"{way} from", f"{way} to"} & names.keys()]
    for way in moved:
        begin, end = names.get(f"{way} from"), names.get(f"{way} to")
        if not (begin and end) or old not in (None, begin) or new not in (None, end):
            return False
    if moved:
        return len(moved) == 1
    return old is None or new is None or old == new or (not git and old.startswith(new))


def _has_content(line: str) -> bool:
    """Whether an `index` line names content, which needs a hunk."""
    found = _INDEX.match(line)
    return found is not None and not all(map(_EMPTY_BLOB.fullmatch, found.groups()))


def _git_header_path(line: str) -> str:
    """The path in `diff --git a/PATH b/PATH`, for a part without any other line that names it."""
    rest = line.removeprefix("diff --git ").strip()
    half = rest[: len(rest) // 2].strip()
    return _check_path(half, "+++ ", line) or half


def _check_line(raw: bytes, where: str) -> None:
    if raw.endswith(b"\r") and _GIT_HEADER.match(raw):
        raise PatchError(
            "the patch has Windows line endings (CRLF) in its headers", where=where,
            hint="store it with LF: dos2unix, and '*.patch -text' in .gitattributes",
            id="patch-crlf",
        )  # fmt: skip
    line = raw.decode(errors="replace")
    if line.startswith("GIT binary patch") or re.match(r"Binary files .* differ$", line):
        raise PatchError(
            "the patch changes a binary file", where=where, id="patch-binary",
            hint="remove that file from the patch: only text can be reviewed",
        )  # fmt: skip
    mode = _MODE.match(line)
    if mode and mode[1] not in ("100644", "100755"):
        kinds = {"120000": "a symbolic link", "160000": "a submodule"}
        what = kinds.get(mode[1], f"a file of mode {mode[1][:12]}")
        hint = "patches may change plain files only"
        raise PatchError(f"the patch changes {what}", where=where, hint=hint, id="patch-special")


def _check_path(written: str, line: str, where: str) -> str | None:
    """Return the path in the tree that a header line names; None for /dev/null.

    Raises PatchError for one that leaves the tree, or that no file system takes.
    """
    path = written.strip()
    if path.startswith('"'):
        raw = _QUOTED.sub(_unquote, path[1:-1])
        path = raw.encode("latin-1", "replace").decode(errors="replace")
    if path == "/dev/null":
        return None
    if line.startswith(("--- ", "+++ ")):
        # Like git, drop the first folder, whatever its name.
        first, slash, rest = path.partition("/")
        path = rest if slash and first.casefold() not in ("", "..", ".git") else path
    parts, size = path.split("/"), len(path.encode(errors="replace"))
    shown = clean(path, one_line=True)
    if path.startswith("/") or ".." in parts or any(p.casefold() == ".git" for p in parts):
        what = f"the patch leaves the source tree: '{shown}'"
        hint = "paths in a patch are relative to the top of the tree"
    elif not path.isprintable() or any(p in ("", ".") for p in parts):
        what = f"the patch has the invalid path '{shown}'"
        hint = "use paths as git writes them, without control characters"
    elif size > MAX_PATH or any(len(p.encode()) > MAX_NAME for p in parts):
        what = f"the patch has a path of {size:,} bytes: '{clean(path[:60], one_line=True)}…'"
        hint = f"the limits are {MAX_NAME} bytes a name and {MAX_PATH} bytes a path"
    else:
        return path
    raise PatchError(what, where=where, hint=hint, id="patch-path")


_QUOTED = re.compile(r"\\([0-7]{1,3}|.)")
_LETTERS = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def _unquote(found: re.Match[str]) -> str:
    """Replace one escape of git's quoted paths: an octal byte, or a letter as in C."""
    escape = found[1]
    if escape[0] in "01234567":
        return chr(int(escape, 8) & 0xFF)
    return _LETTERS.get(escape, escape)


def counts(parts: Sequence[FilePart]) -> str:
    """Summarise a diff: `2 files, +16 -6`."""
    files = len({part.path for part in parts})
    added, removed = sum(p.added for p in parts), sum(p.removed for p in parts)
    return f"{files} file{'s' * (files != 1)}, +{added} -{removed}"
