"""Reading diffs: what is accepted, what is refused and where, from the text alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bakehouse.errors import PatchError
from bakehouse.patches.diff import MAX_BYTES, MAX_NAME, MAX_PATH, counts, read_diff

GOOD = b"""From 0123 Mon Sep 17 00:00:00 2001
Subject: [PATCH] x

---
 src/a.c | 2 +-

diff --git a/src/a.c b/src/a.c
index 1111111..2222222 100644
--- a/src/a.c
+++ b/src/a.c
@@ -1,3 +1,3 @@
 one
-two
+TWO
 three
@@ -10 +10,2 @@ int f(void)
-ten
+TEN
+--- not a header
--\x20
2.39.5
"""


def test_diff_hunks_know_file_and_place() -> None:
    (part,) = read_diff(GOOD, "p")
    hunks = part.hunks
    assert [(h.file, h.begins, h.line) for h in hunks] == [("src/a.c", 1, 11), ("src/a.c", 10, 16)]


def test_diff_accepts_unusual_text() -> None:
    look_alike = b"--- a/x.sql\n+++ b/x.sql\n@@ -1,2 +1,1 @@\n--- ../../etc/passwd\n keep\n"
    assert [part.path for part in read_diff(look_alike, "p")] == ["x.sql"]
    crlf = b"--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-a\r\n+b\r\n c\r\n"
    assert len(read_diff(crlf, "p")) == 1
    message = b"Subject: x\n\n--- before\n@@ -1,3 +1,3 @@\n\n"
    assert read_diff(message + GOOD, "p") != ()


REFUSED = [
    (GOOD.replace(b"\n", b"\r\n"), "Windows line endings", "p:7"),
    (b"<html><body>You are being <a>redirected</a>", "HTML", "p:1"),
    (b"\n <!DOCTYPE html>\n", "HTML", "p:1"),
    (b"", "contains no diff", "p"),
    (b"just some text\nand more\n", "contains no diff", "p"),
    (b'{"message": "Not Found"}', "contains no diff", "p"),
    (b"diff --git a/x b/x\nGIT binary patch\nliteral 3\n", "binary file", "p:2"),
    (b"diff --git a/x b/x\nBinary files a/x and b/x differ\n", "binary file", "p:2"),
    (b"--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n", "leaves the source tree", "p:1"),
    (b"--- /dev/null\n+++ b/../../x\n@@ -0,0 +1 @@\n+b\n", "leaves the source tree", "p:2"),
    (b"--- /etc/passwd\n+++ /etc/passwd\n@@ -1 +1 @@\n-a\n+b\n", "leaves the source tree", "p:1"),
    (b'--- "a/\\056\\056/x"\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n', "leaves the source tree", "p:1"),
    (
        b"--- a/.git/config\n+++ b/.git/config\n@@ -1 +1 @@\n-a\n+b\n",
        "leaves the source tree",
        "p:1",
    ),
    (b"rename from a\nrename to ../b\n", "leaves the source tree", "p:2"),
    (b"diff --git a/l b/l\nnew file mode 120000\n", "symbolic link", "p:2"),
    (b"diff --git a/l b/l\nnew file mode 160000\n", "submodule", "p:2"),
    (b"diff --git a/l b/l\nold mode 120000\nnew mode 100644\n", "symbolic link", "p:2"),
    (b"diff --git a/l b/l\nindex 1..2 120000\n--- a/l\n", "symbolic link", "p:2"),
    (b"diff --git a/l b/l\nold mode 100644\nnew mode 104755\n", "mode 104755", "p:3"),
    (b"diff --git a/../x b/../x\nold mode 100644\n", "leaves the source tree", "p:1"),
    (b'diff --git "a/.git/x" "b/.git/x"\nold mode 100644\n', "leaves the source tree", "p:1"),
    (b"\xef\xbb\xbf<!DOCTYPE html>\n", "HTML", "p:1"),
    (b"<!-- x -->\n<html>\n", "HTML", "p:1"),
    (GOOD[: GOOD.index(b"not a header")], "in the middle of a hunk", "p:19"),
    (GOOD[: GOOD.index(b"+TEN")], "in the middle of a hunk", "p:17"),
    (GOOD[: GOOD.index(b"@@ -1,3")], "before its first hunk", "p:10"),
    (GOOD[: GOOD.index(b"--- a/src")], "before its first hunk", "p:8"),
    (GOOD[: GOOD.index(b"index 111") + 5], "in the middle", "p:8"),
    (GOOD.replace(b"-two\n", b""), "shorter or longer", "p:15"),
    (GOOD.replace(b" one\n", b" one\n more\n"), "longer than its header says", "p:16"),
    (b"--- a/\n+++ b/\n@@ -1 +1 @@\n-a\n+b\n", "invalid path ''", "p:1"),
    (b'--- "a/x\\000"\n+++ "b/x\\000"\n@@ -1 +1 @@\n-a\n+b\n', r"invalid path 'x\x00'", "p:1"),
    (b"x" * (MAX_BYTES + 1), "larger than 5 MiB", "p"),
]


def test_diff_refusals_name_reason_and_line() -> None:
    got = []
    for data, _, _ in REFUSED:
        with pytest.raises(PatchError) as caught:
            read_diff(data, "p")
        assert caught.value.exit_code == 5
        assert caught.value.hint
        got.append((caught.value.what, caught.value.where))
    wrong = [
        (data[:60], found)
        for (data, why, place), found in zip(REFUSED, got, strict=True)
        if why not in found[0] or place != found[1]
    ]
    assert not wrong


PLAIN = b"@@ -1 +1 @@\n-a\n+b\n"
RENAME = b"diff --git a/x b/y\nrename from x\nrename to y\n"


TWO_NAMES = [
    b"--- a/x\n+++ b/y\n" + PLAIN,
    b"--- a/x\n+++ b/x.orig\n" + PLAIN,
    b"diff --git a/x b/x\n--- a/x\n+++ b/y\n" + PLAIN,
    b"diff --git a/x b/x\n--- a/y\n+++ b/x\n" + PLAIN,
    b"diff --git a/x.orig b/x\n--- a/x.orig\n+++ b/x\n" + PLAIN,
    RENAME + b"--- a/z\n+++ b/y\n" + PLAIN,
    RENAME + b"--- a/x\n+++ b/z\n" + PLAIN,
    RENAME + b"copy from x\ncopy to y\n",
    b"diff --git a/x b/y\nrename from x\n",
    b"diff --git a/x b/y\ncopy from x\n--- a/x\n+++ b/y\n" + PLAIN,
    GOOD + b"--- a/x\n+++ b/y\n" + PLAIN,
]


def test_diff_refuses_two_names_for_one_file_without_a_rename() -> None:
    """Git would put the one file in the place of the other, and remove it."""
    for data in TWO_NAMES:
        with pytest.raises(PatchError, match="gives one file two names"):
            read_diff(data, "p")


def test_diff_takes_the_same_path_as_git() -> None:
    expected = [
        (RENAME, "y", "x"),
        (RENAME + b"--- a/x\n+++ b/y\n" + PLAIN, "y", "x"),
        (RENAME.replace(b"rename", b"copy") + b"--- a/x\n+++ b/y\n" + PLAIN, "y", None),
        (b"--- a/x.orig\n+++ b/x\n" + PLAIN, "x", None),
        (b"--- sub/x\n+++ sub/x\n" + PLAIN, "x", None),
        (b"--- a.b/sub/x\t2026\n+++ c.d/sub/x\t2026\n" + PLAIN, "sub/x", None),
        (b"--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+b\n", "x", None),
    ]
    for data, path, before in expected:
        assert [(p.path, p.moved_from) for p in read_diff(data, "p")] == [(path, before)], data


def test_diff_refuses_paths_that_no_folder_can_hold() -> None:
    """A tree with such a name cannot be written, and a deep one hardly be removed."""
    good = ("n" * MAX_NAME, "d/" * (MAX_PATH // 2 - 1) + "f")
    long = ("n" * (MAX_NAME + 1), "\u00fc" * (MAX_NAME // 2 + 1), "d/" * (MAX_PATH // 2) + "f")
    for name in (*good, *long, "a//b", "a/./b", "a/"):
        data = f"--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+b\n".encode()
        if name in good:
            assert [p.path for p in read_diff(data, "p")] == [name]
            continue
        with pytest.raises(PatchError, match=r"path of .* bytes|invalid path") as caught:
            read_diff(data, "p")
        assert len(str(caught.value)) < 400


def test_diff_lists_changed_files() -> None:
    data = (
        GOOD + b"diff --git a/old b/new\nsimilarity index 100%\nrename from old\nrename to new\n"
        b"diff --git a/e b/e\nnew file mode 100644\nindex 0000000..e69de29\n"
        b"diff --git a/run b/run\nold mode 100644\nnew mode 100755\n"
        b"diff --git a/gone b/gone\ndeleted file mode 100644\nindex 1111111..0000000\n"
        b"--- a/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n\\ No newline at end of file\n"
        b"--- a/plain\n+++ b/plain\n@@ -1 +1 @@\n-x\n+y\n"
    )
    parts = read_diff(data, "p")
    assert [(p.path, p.added, p.removed) for p in parts] == [
        ("src/a.c", 3, 2), ("new", 0, 0), ("e", 0, 0), ("run", 0, 0), ("gone", 0, 1),
        ("plain", 1, 1),
    ]  # fmt: skip
    assert counts(parts) == "6 files, +4 -4"
    first = parts[0]
    assert first.alone(first.hunks[1]) == (
        b"diff --git a/src/a.c b/src/a.c\nindex 1111111..2222222 100644\n"
        b"--- a/src/a.c\n+++ b/src/a.c\n"
        b"@@ -10 +10,2 @@ int f(void)\n-ten\n+TEN\n+--- not a header\n"
    )
    assert first.hunks[0].side(b"-") == (b"one", b"two", b"three")
    assert first.hunks[0].side(b"+") == (b"one", b"TWO", b"three")


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_diff_any_bytes_give_parts_or_a_patch_error(data: bytes) -> None:
    for whole in (data, b"--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n" + data, b'--- "' + data + b'"\n'):
        try:
            read_diff(whole, "p")
        except PatchError:
            continue
