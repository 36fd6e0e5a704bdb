"""What counts as a patch, told from its text alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bakehouse.errors import PatchError
from bakehouse.sources.patches import check_patch

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


def test_hunks_have_their_file_and_place() -> None:
    hunks = check_patch(GOOD, "p")
    assert [(h.file, h.begins, h.line) for h in hunks] == [("src/a.c", 1, 11), ("src/a.c", 10, 16)]


def test_a_removed_line_that_looks_like_a_header_is_content() -> None:
    data = b"--- a/x.sql\n+++ b/x.sql\n@@ -1,2 +1,1 @@\n--- ../../etc/passwd\n keep\n"
    assert [h.file for h in check_patch(data, "p")] == ["x.sql"]


def test_content_with_crlf_in_a_file_of_lf_headers_is_fine() -> None:
    data = b"--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-a\r\n+b\r\n c\r\n"
    assert len(check_patch(data, "p")) == 1


@pytest.mark.parametrize(
    ("data", "why", "place"),
    [
        (GOOD.replace(b"\n", b"\r\n"), "Windows line endings", "p:7"),
        (b"<html><body>You are being <a>redirected</a>", "HTML", "p:1"),
        (b"\n <!DOCTYPE html>\n", "HTML", "p:1"),
        (b"", "holds no diff", "p"),
        (b"just some text\nand more\n", "holds no diff", "p"),
        (b'{"message": "Not Found"}', "holds no diff", "p"),
        (b"diff --git a/x b/x\nGIT binary patch\nliteral 3\n", "binary file", "p:2"),
        (b"diff --git a/x b/x\nBinary files a/x and b/x differ\n", "binary file", "p:2"),
        (b"--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n", "leads out", "p:1"),
        (b"--- /dev/null\n+++ b/../../x\n@@ -0,0 +1 @@\n+b\n", "leads out", "p:2"),
        (b"--- /etc/passwd\n+++ /etc/passwd\n@@ -1 +1 @@\n-a\n+b\n", "leads out", "p:1"),
        (b'--- "a/\\056\\056/x"\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n', "leads out", "p:1"),
        (b"--- a/.git/config\n+++ b/.git/config\n@@ -1 +1 @@\n-a\n+b\n", "leads out", "p:1"),
        (b"rename from a\nrename to ../b\n", "leads out", "p:2"),
        (b"diff --git a/l b/l\nnew file mode 120000\n", "symbolic link", "p:2"),
        (b"diff --git a/l b/l\nnew file mode 160000\n", "submodule", "p:2"),
    ],
)
def test_what_is_refused_and_where(data: bytes, why: str, place: str) -> None:
    with pytest.raises(PatchError, match=why) as caught:
        check_patch(data, "p")
    assert caught.value.where == place
    assert caught.value.exit_code == 5
    assert caught.value.hint


@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_any_bytes_are_judged_without_another_error(data: bytes) -> None:
    for whole in (data, b"--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n" + data, b'--- "' + data + b'"\n'):
        try:
            check_patch(whole, "p")
        except PatchError:
            continue
