"""Unified diffs: read with care, whatever sent them; what they touch, file by file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bakehouse.errors import PatchError
from bakehouse.redact import clean

MAX_BYTES = 5 * 2**20
MAX_NAME = 255
"""Bytes of one name that a file system takes."""
MAX_PATH = 512
"""Bytes of a path inside the tree: a build folder comes before it, and deep folders in it."""
_HEADER = re.compile(rb"^(?:diff --git |--- |\+\+\+ |@@ |index [0-9a-f]+\.\.|rename |copy )")
_PATH = re.compile(
    r'^(?:--- |\+\+\+ |rename from |rename to |copy from |copy to )("(?:[^"\\]|\\.)*"|[^\t]+)'
)
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_BARE = re.compile(r"(?:rename from |copy from |new file mode |deleted file mode |old mode )")
"""What a file's part may consist of where it has no hunk."""
_MODE = re.compile(
    r"(?:old mode |new mode |new file mode |deleted file mode |index \w+\.\.\w+ )(\d+)\s*$"
)
_CHANGED = re.compile(r"(old mode|new mode|new file mode|deleted file mode) (\d+)\s*$")
_INDEX = re.compile(r"index (\w+)\.\.(\w+)")
_EMPTY = re.compile(r"0+|e69de29[0-9a-f]*")
"""Git's ids of no file, and of an empty one."""
_SIGNATURE = re.compile(rb"--(?: ?$|- )")
"""What may follow a hunk and begins like a line of one: a mail's signature, the next file."""
_WEB = re.compile(rb"\s*(?:\xef\xbb\xbf)?\s*(?:<!doctype|<html|<head|<body|<\?xml|<!--)", re.I)


@dataclass(frozen=True)
class Hunk:
    """One hunk: its file in the tree, its first line there, and its line in the patch."""

    file: str
    begins: int
    line: int
    body: tuple[bytes, ...] = field(default=(), repr=False)
    """Its own header first, without line ends."""

    def side(self, mark: bytes) -> tuple[bytes, ...]:
        """The lines that it wants to find (`mark` is `-`) or to leave behind (`+`)."""
        return tuple(row[1:] for row in self.body[1:] if row[:1] in (b" ", b"", mark))

    @property
    def lands(self) -> int:
        """The line of the new file at which it says that it begins."""
        found = _HUNK.match(self.body[0].decode(errors="replace")) if self.body else None
        return int(found[3]) if found else 0

    @property
    def leading(self) -> int:
        """Lines of context before its first change."""
        rows = [row[:1] in (b" ", b"", b"\r") for row in self.body[1:]]
        return rows.index(False) if False in rows else len(rows)

    def count(self, mark: bytes) -> int:
        """How many lines it adds (`+`) or removes (`-`)."""
        return sum(row[:1] == mark for row in self.body[1:])


@dataclass(frozen=True)
class FilePart:
    """The part of a diff that is about one file. `path` is where the file is afterwards."""

    path: str
    header: tuple[bytes, ...] = field(repr=False)
    hunks: tuple[Hunk, ...]
    moved_from: str | None = None
    """Where a renamed file was before."""

    @property
    def added(self) -> int:
        """Lines that come."""
        return sum(hunk.count(b"+") for hunk in self.hunks)

    @property
    def removed(self) -> int:
        """Lines that go."""
        return sum(hunk.count(b"-") for hunk in self.hunks)

    @property
    def mode(self) -> str:
        """What happens to its mode, or to it as a whole, in words; empty where nothing does."""
        modes = {
            found[1]: found[2]
            for row in self.header
            if (found := _CHANGED.match(row.decode(errors="replace")))
        }
        if "old mode" in modes and "new mode" in modes:
            return f"mode {modes['old mode']} -> {modes['new mode']}"
        if "deleted file mode" in modes:
            return "deleted"
        made = modes.get("new file mode")
        return f"new, mode {made}" if made else ""

    def alone(self, hunk: Hunk) -> bytes:
        """A diff of one hunk of this part, to be tried by itself."""
        return b"\n".join((*self.header, *hunk.body)) + b"\n"


def check_patch(data: bytes, name: str) -> tuple[Hunk, ...]:
    """Refuse what is no clean text diff of files inside the tree; give its hunks.

    Raises PatchError naming the line.
    """
    return tuple(hunk for part in read_diff(data, name) for hunk in part.hunks)


def read_diff(data: bytes, name: str) -> tuple[FilePart, ...]:
    """Read a diff into its parts. Raises PatchError, as `check_patch` does.

    Text around the diffs (of a mail, as `git format-patch` writes them) is passed over.
    """
    if len(data) > MAX_BYTES:
        raise PatchError(
            f"the patch is larger than {MAX_BYTES // 2**20} MiB ({len(data):,} bytes)",
            where=name,
            hint="so large a change is a branch: make its commit the recipe's source",
            id="patch-large",
        )
    if _WEB.match(data):
        raise PatchError(
            "the patch is an HTML page, not a diff",
            where=f"{name}:1",
            hint="the host answered with a web page (a redirect, a login, a rate limit): fetch it "
            "again later",
            id="patch-html",
        )
    parts = _Reader(name).read(data)
    if not parts:
        raise PatchError(
            "the patch holds no diff",
            where=name,
            hint="a patch is a unified diff, as 'git diff' and 'git format-patch' write it",
            id="patch-empty",
        )
    return parts


class _Reader:
    """Goes through the lines once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.parts: list[FilePart] = []
        self.header: list[bytes] = []
        self.begins = 0
        """Line of the patch on which the open part begins."""
        self.paths: list[str] = []
        self.names: dict[str, str | None] = {}
        """What the open part's header lines name, by their first words."""
        self.hunks: list[Hunk] = []
        self.body: list[bytes] = []
        self.place = (0, 0)
        self.left = [0, 0]
        """Old and new lines that the open hunk still has to bring."""

    def read(self, data: bytes) -> tuple[FilePart, ...]:
        """Give all parts."""
        rows = data.split(b"\n")
        last = rows.pop()
        for number, raw in enumerate(rows, 1):
            after = rows[number] if number < len(rows) else b""
            self._row(raw, number, alone=after.startswith(b"+++ "))
        open_part = self.body or (self.header and not self.hunks)
        if max(self.left) > 0 or (last and open_part):
            raise self._short(len(rows) + bool(last), "it ends in the middle of a hunk")
        self._end_part(len(rows))
        return tuple(self.parts)

    def _short(self, number: int, why: str) -> PatchError:
        return PatchError(
            f"the patch is malformed: {why}",
            where=f"{self.name}:{number}",
            hint="what was fetched or saved may be cut off: fetch it again",
            id="patch-truncated",
        )

    def _row(self, raw: bytes, number: int, *, alone: bool) -> None:
        """Take one line; `alone` says that a `---` line here may open a part by itself."""
        where = f"{self.name}:{number}"
        if max(self.left) > 0:
            if not _consume(raw, self.left):
                raise self._short(number, "a hunk is shorter or longer than it says")
            self.body.append(raw)
            return
        if self.body and raw.startswith(b"\\"):
            self.body.append(raw)
            return
        if self.body and raw[:1] in (b" ", b"+", b"-") and not _SIGNATURE.match(raw):
            raise self._short(number, "a hunk is longer than it says")
        _check_line(raw, where)
        line = raw.decode(errors="replace")
        git = line.startswith("diff --git ")
        if git or (alone and line.startswith("--- ") and self._may_begin()):
            self._end_part(number - 1)
            self.begins = number
            if git:
                _check_words(line, where)
        if found := _PATH.match(line):
            path = _check_path(found[1], line, where)
            self.paths += [path] if path else []
            self.names[line[: found.start(1)].strip()] = path
        elif self.begins and (hunk := _HUNK.match(line)):
            self._end_hunk()
            self.body, self.place = [raw], (int(hunk[1]), number)
            self.left = [int(count) if count else 1 for count in (hunk[2], hunk[4])]
            return
        self._end_hunk()  # what follows the last one is a mail's signature, or the next part
        if self.begins and not self.hunks:
            self.header.append(raw)

    def _may_begin(self) -> bool:
        """Whether a `---` line opens a part itself, and does not belong to a `diff --git`."""
        git = any(row.startswith(b"diff --git ") for row in self.header)
        return not git or bool(self.hunks or self.body)

    def _end_hunk(self) -> None:
        if self.body:
            path = self.paths[-1] if self.paths else ""
            self.hunks.append(Hunk(path, *self.place, tuple(self.body)))
        self.body = []

    def _end_part(self, number: int) -> None:
        self._end_hunk()
        header, hunks = self.header, tuple(self.hunks)
        self.header, self.hunks, paths, self.paths = [], [], self.paths, []
        if not self.begins:
            return
        self.begins = 0
        lines = [row.decode(errors="replace") for row in header]
        bare = any(_BARE.match(line) for line in lines)
        if not hunks and (not bare or any(map(_has_content, lines))):
            raise self._short(number, "a file's part ends before its first hunk")
        path = paths[-1] if paths else _named(lines[0])
        names, self.names = self.names, {}
        if not _agree(names, git=lines[0].startswith("diff --git ")):
            raise PatchError(
                "the patch names one file in two ways: "
                + ", ".join(f"'{clean(str(name), one_line=True)}'" for name in names.values()),
                where=f"{self.name}:{number}",
                hint="make it with 'git diff', which says 'rename from' and 'rename to' where a "
                "file gets another name",
                id="patch-path",
            )
        self.parts.append(FilePart(path, tuple(header), hunks, names.get("rename from")))


def _agree(names: Mapping[str, str | None], *, git: bool) -> bool:
    """Whether a part's header lines mean one file before and one after.

    Git takes differing names for a renamed file, also where no line says so: it would put one file
    in the place of another, and remove the first. In a plain diff `x.orig` may stand before `x`.
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
    """Whether an `index` line speaks of content, for which there has to be a hunk."""
    found = _INDEX.match(line)
    return found is not None and not all(map(_EMPTY.fullmatch, found.groups()))


def _named(line: str) -> str:
    """The path in `diff --git a/PATH b/PATH`, for a part that names it nowhere else."""
    rest = line.removeprefix("diff --git ").strip()
    half = rest[: len(rest) // 2].strip()
    return _check_path(half, "+++ ", line) or half


def _consume(raw: bytes, left: list[int]) -> bool:
    """Count a line of the open hunk; False where it cannot belong to one."""
    mark = raw[:1]
    if mark == b"\\":
        return True
    old, new = mark in (b" ", b"", b"\r", b"-"), mark in (b" ", b"", b"\r", b"+")
    left[0] -= old
    left[1] -= new
    return (old or new) and min(left) >= 0


def _check_line(raw: bytes, where: str) -> None:
    if raw.endswith(b"\r") and _HEADER.match(raw):
        raise PatchError(
            "the patch has Windows line endings (CRLF), also where git needs none",
            where=where,
            hint="store it with LF: dos2unix, and '*.patch -text' in .gitattributes",
            id="patch-crlf",
        )
    line = raw.decode(errors="replace")
    if line.startswith("GIT binary patch") or re.match(r"Binary files .* differ$", line):
        raise PatchError(
            "the patch changes a binary file",
            where=where,
            hint="only text can be reviewed in a patch: leave that file out of it",
            id="patch-binary",
        )
    mode = _MODE.match(line)
    if mode and mode[1] not in ("100644", "100755"):
        kinds = {"120000": "a symbolic link", "160000": "a submodule"}
        raise PatchError(
            f"the patch changes {kinds.get(mode[1], f'a file of mode {mode[1][:12]}')}",
            where=where,
            hint="patches may change plain files only",
            id="patch-special",
        )


def _check_words(line: str, where: str) -> None:
    """Refuse a `diff --git` line with a path that leads out, however its two paths divide."""
    words = re.split(r'[\s"]+', line.removeprefix("diff --git "))
    for word in filter(None, words):
        _check_path(word, "+++ ", where)


def _check_path(written: str, line: str, where: str) -> str | None:
    """The path in the tree that a header line names; None for /dev/null."""
    path = written.strip()
    if path.startswith('"'):
        raw = _QUOTED.sub(_unquote, path[1:-1])
        path = raw.encode("latin-1", "replace").decode(errors="replace")
    if path == "/dev/null":
        return None
    if line.startswith(("--- ", "+++ ")):
        first, slash, rest = path.partition("/")  # the first part goes, whatever it is, as with git
        path = rest if slash and first.casefold() not in ("", "..", ".git") else path
    if not path or not path.isprintable():
        raise PatchError(
            f"the patch names a file by '{clean(path, one_line=True)}'",
            where=where,
            hint="file names without control characters are wanted",
            id="patch-path",
        )
    _inside(path, where)
    return path


def _inside(path: str, where: str) -> None:
    """Refuse a path that leads out of the tree, or that no file system takes."""
    parts = path.split("/")
    if path.startswith("/") or ".." in parts or any(p.casefold() == ".git" for p in parts):
        raise PatchError(
            f"the patch leads out of the source tree: '{clean(path, one_line=True)}'",
            where=where,
            hint="paths in a patch are relative to the top of the tree",
            id="patch-path",
        )
    if any(p in ("", ".") for p in parts):
        raise PatchError(
            f"the patch names a file by '{clean(path, one_line=True)}'",
            where=where,
            hint="file names as git writes them are wanted",
            id="patch-path",
        )
    if len(path.encode()) > MAX_PATH or any(len(p.encode()) > MAX_NAME for p in parts):
        raise PatchError(
            f"the patch names a file by {len(path.encode()):,} bytes: "
            f"'{clean(path[:60], one_line=True)}…'",
            where=where,
            hint=f"names up to {MAX_NAME} bytes in paths up to {MAX_PATH} can be built with",
            id="patch-path",
        )


_QUOTED = re.compile(r"\\([0-7]{1,3}|.)")
_LETTERS = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def _unquote(found: re.Match[str]) -> str:
    """One escape of git's quoted paths: an octal byte, or a letter as in C."""
    escape = found[1]
    if escape[0] in "01234567":
        return chr(int(escape, 8) & 0xFF)
    return _LETTERS.get(escape, escape)


def counts(parts: Sequence[FilePart]) -> str:
    """What a diff amounts to, for people: `2 files, +16 -6`."""
    files = len({part.path for part in parts})
    added, removed = sum(p.added for p in parts), sum(p.removed for p in parts)
    return f"{files} file{'s' * (files != 1)}, +{added} -{removed}"
