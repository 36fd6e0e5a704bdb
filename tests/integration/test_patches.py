"""Patches applied to real git trees: all or none, and the hunk that fails is named."""

from __future__ import annotations

import difflib
import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bakehouse.context import Context
from bakehouse.errors import LockError, NotFound, PatchError
from bakehouse.lock import GitPin, Lock, PatchPin
from bakehouse.models import digest
from bakehouse.patches.apply import bring_patches, pin_patches, stored, try_apply
from bakehouse.patches.diff import read_diff
from bakehouse.patches.source_tree import materialise, patched_tree
from bakehouse.recipe.models import Patch, Source
from bakehouse.resolver import pin_git
from bakehouse.sources.git_mirror import mirror_folder
from bakehouse.system.git import Git
from bakehouse.system.process import Processes
from tests.support.githost import IDENTITY, Repo, git, serve_git

pytestmark = pytest.mark.integration

A = "".join(f"line {number}\n" for number in range(1, 41))
B = "alpha\nbeta\ngamma\n"


def diff(name: str, before: str, after: str) -> str:
    """A unified diff of one file."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    return "".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"))


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repo]:
    with serve_git(tmp_path / "host") as host:
        made = host.repo()
        made.commit({"a.txt": A, "b.txt": B, "crlf.txt": b"one\r\ntwo\r\n"})
        yield made


@pytest.fixture
def source(context: Context, repo: Repo) -> GitPin:
    commit = git(repo.folder, "rev-parse", "main")
    return pin_git(context, Git(context.processes), Source(git=repo.url, commit=commit))


def pinned(ctx: Context, folder: Path, *texts: str | bytes) -> tuple[PatchPin, ...]:
    patches = []
    for number, text in enumerate(texts, 1):
        data = text if isinstance(text, bytes) else text.encode()
        (folder / f"p{number}.patch").write_bytes(data)
        patches.append(Patch(file=f"p{number}.patch"))
    return pin_patches(ctx, folder, patches)


def apply(ctx: Context, source: GitPin, pins: tuple[PatchPin, ...]) -> str:
    return patched_tree(ctx, Git(ctx.processes), source, pins)


def test_apply_in_order(context: Context, source: GitPin, tmp_path: Path, repo: Repo) -> None:
    between, after = B.replace("alpha", "ALPHA"), B.replace("alpha", "omega")
    pins = pinned(context, tmp_path, diff("b.txt", B, between), diff("b.txt", between, after))
    tree = apply(context, source, pins)
    assert tree == repo.tree(
        {"a.txt": A, "b.txt": "omega\nbeta\ngamma\n", "crlf.txt": b"one\r\ntwo\r\n"}
    )
    lock = Lock(
        recipe="t", engine="llama.cpp", wants="", source=source, patches=pins, source_tree=tree,
        weights={},
    )  # fmt: skip
    materialise(context, lock, tmp_path / "out")
    assert (tmp_path / "out" / "b.txt").read_text() == "omega\nbeta\ngamma\n"
    both = digest([pin.file.sha256 for pin in pins])
    assert lock.stamp == f"{source.commit[:9]}-p{both[:7]}"
    one = lock.model_copy(update={"patches": pins[:1]})
    assert one.stamp == f"{source.commit[:9]}-p{pins[0].file.sha256[:7]}"
    with pytest.raises(PatchError):
        apply(context, source, pins[::-1])


def test_apply_names_the_failed_hunk_and_changes_nothing(
    context: Context, source: GitPin, tmp_path: Path
) -> None:
    good = diff("b.txt", B, B.replace("alpha", "omega"))
    other = A.replace("line 30\n", "LINE 30\n")
    bad = diff("a.txt", other, other.replace("line 3\n", "x\n").replace("line 29\n", "y\n"))
    mirror = mirror_folder(context.places, source.url)
    before = git(mirror, "for-each-ref")
    with pytest.raises(PatchError, match=r"p2 does not apply: hunk 2 of 2 .*a\.txt:26") as caught:
        apply(context, source, pinned(context, tmp_path, good, bad))
    assert str(caught.value.where).splitlines() == [
        "p2.patch:11",
        "    a.txt:30: the patch has  LINE 30",
        "    a.txt:30: the source has line 30",
    ]
    assert caught.value.exit_code == 5
    assert git(mirror, "for-each-ref") == before


def test_apply_refuses_a_patch_that_the_source_has(
    context: Context, source: GitPin, tmp_path: Path
) -> None:
    pins = pinned(context, tmp_path, diff("b.txt", B.replace("alpha", "omega"), B))
    with pytest.raises(PatchError, match="already in the source") as caught:
        apply(context, source, pins)
    assert "remove it" in str(caught.value.hint)


def test_apply_names_what_does_not_fit(context: Context, source: GitPin, tmp_path: Path) -> None:
    rows = [
        (diff("gone.txt", "a\n", "b\n"), "gone.txt"),
        ("--- /dev/null\n+++ b/b.txt\n@@ -0,0 +1 @@\n+x\n", "already exists"),
        ("--- a/b.txt\n+++ b/b.txt\n@@ -1,3 +1,3 @@\n-alpha\n", "malformed"),
        ("--- a/b.txt\n+++ b/b.txt\n@@ -1 +1 @@\n-ALPHA\n+x\n", "hunk 1 of 1"),
    ]
    for text, why in rows:
        with pytest.raises(PatchError, match=why) as caught:
            apply(context, source, pinned(context, tmp_path, text))
        assert "p1" in str(caught.value.where)


def test_apply_new_renamed_deleted_and_executable_files(
    context: Context, source: GitPin, tmp_path: Path, repo: Repo
) -> None:
    text = (
        "diff --git a/a.txt b/moved.txt\nsimilarity index 100%\n"
        "rename from a.txt\nrename to moved.txt\n"
        "diff --git a/b.txt b/b.txt\ndeleted file mode 100644\n--- a/b.txt\n+++ /dev/null\n"
        "@@ -1,3 +0,0 @@\n-alpha\n-beta\n-gamma\n"
        "diff --git a/new.sh b/new.sh\nnew file mode 100755\n--- /dev/null\n+++ b/new.sh\n"
        "@@ -0,0 +1 @@\n+#!/bin/sh\n"
    )
    wanted = {"moved.txt": A, "new.sh": ("100755", "#!/bin/sh\n"), "crlf.txt": b"one\r\ntwo\r\n"}
    assert apply(context, source, pinned(context, tmp_path, text)) == repo.tree(wanted)  # type: ignore[arg-type]


def test_apply_conflicts_with_a_folder_or_file_in_the_place(context: Context, repo: Repo) -> None:
    tree = repo.tree({"a.txt": A, "dir/file": "x\n"})
    for clash in ("dir", "a.txt/x", "dir/file/x/y"):
        text = f"--- /dev/null\n+++ b/{clash}\n@@ -0,0 +1 @@\n+x\n".encode()
        fit = try_apply(Git(context.processes), repo.folder, tree, text, "p")
        assert (fit.word, fit.tree) == ("conflicts", None)
        assert "both a file and as a directory" in fit.notes[0]


def test_apply_names_parts_that_fit_only_alone(
    context: Context, source: GitPin, tmp_path: Path
) -> None:
    first = diff("b.txt", B, B.replace("beta", "BETA"))
    why = r"does not fit b\.txt:1 after the patch's earlier parts"
    for again in (diff("b.txt", B, B.replace("beta", "x")), diff("b.txt", B, "")):
        with pytest.raises(PatchError, match=why) as caught:
            apply(context, source, pinned(context, tmp_path, first + again))
        assert caught.value.id == "patch-conflicts"


def test_apply_changes_the_path_that_is_shown(context: Context, repo: Repo) -> None:
    """Git drops the first folder of a name, whatever it is, and so do we."""
    there = {"f.c": "one\n", "sub/f.c": "one\n", "sub/sub/f.c": "one\n"}
    tree, port = repo.tree(there), Git(context.processes)
    for prefix in ("a/", "x/", "sub/", "a.b-1/", ""):
        plain = "--- {a}\n+++ {a}\n"
        for header in (plain, "diff --git {a} {a}\nindex 1..2 100644\n" + plain):
            text = (header.format(a=f"{prefix}sub/f.c") + "@@ -1 +1 @@\n-one\n+two\n").encode()
            made = try_apply(port, repo.folder, tree, text, "p").tree
            assert made == repo.tree({**there, read_diff(text, "p")[0].path: "two\n"}), text


def test_apply_to_a_file_with_crlf_content(
    context: Context, source: GitPin, tmp_path: Path, repo: Repo
) -> None:
    text = b"--- a/crlf.txt\n+++ b/crlf.txt\n@@ -1,2 +1,2 @@\n one\r\n-two\r\n+TWO\r\n"
    tree = apply(context, source, pinned(context, tmp_path, text))
    assert tree == repo.tree({"a.txt": A, "b.txt": B, "crlf.txt": b"one\r\nTWO\r\n"})


def test_pin_compares_the_recipes_sha256(context: Context, tmp_path: Path) -> None:
    text = diff("b.txt", B, B.replace("alpha", "x")).encode()
    (tmp_path / "p.patch").write_bytes(text)
    right = hashlib.sha256(text).hexdigest()
    (pin,) = pin_patches(context, tmp_path, [Patch(file="p.patch", sha256=right)])
    assert pin.file.sha256 == right
    with pytest.raises(NotFound, match=r"'nope\.patch'"):
        pin_patches(context, tmp_path, [Patch(file="nope.patch")])
    with pytest.raises(LockError, match="not the one in the recipe"):
        pin_patches(context, tmp_path, [Patch(file="p.patch", sha256="0" * 64)])


def test_pin_refuses_a_patch_that_changed_on_disk(context: Context, tmp_path: Path) -> None:
    pins = pinned(context, tmp_path, diff("b.txt", B, B.replace("alpha", "x")))
    bring_patches(context, tmp_path, pins)
    (tmp_path / "p1.patch").write_text(diff("b.txt", B, B.replace("alpha", "y")))
    with pytest.raises(LockError, match="changed since it was pinned") as caught:
        bring_patches(context, tmp_path, pins)
    assert caught.value.id == "patch-changed"


def test_apply_verifies_the_cached_copy(context: Context, source: GitPin, tmp_path: Path) -> None:
    pins = pinned(context, tmp_path, diff("b.txt", B, B.replace("alpha", "x")))
    copy = stored(context.places, pins[0].file.sha256)
    copy.write_text(diff("b.txt", B, B.replace("alpha", "evil")))
    with pytest.raises(Exception, match="was corrupt"):
        apply(context, source, pins)
    bring_patches(context, tmp_path, pins)
    apply(context, source, pins)
    copy.unlink()
    with pytest.raises(LockError, match="not in the cache"):
        apply(context, source, pins)


def test_apply_refuses_changes_of_submodules(context: Context, repo: Repo, tmp_path: Path) -> None:
    modules = f'[submodule "x"]\n\tpath = x\n\turl = {repo.url}\n'
    inner = git(repo.folder, "rev-parse", "main")
    commit = repo.commit({".gitmodules": modules, "x": ("160000", inner), "f": "f\n"})
    source = pin_git(context, Git(context.processes), Source(git=repo.url, commit=commit))
    text = (
        f"diff --git a/x b/x\nindex {inner[:7]}..{'2' * 7} 160000\n--- a/x\n+++ b/x\n"
        f"@@ -1 +1 @@\n-Subproject commit {inner}\n+Subproject commit {'2' * 40}\n"
    )
    with pytest.raises(PatchError, match="submodule"):
        apply(context, source, pinned(context, tmp_path, text))
    with pytest.raises(PatchError, match="submodule"):
        apply(context, source, pinned(context, tmp_path, diff(".gitmodules", modules, "\n")))


def test_apply_refuses_changes_of_links(context: Context, repo: Repo, tmp_path: Path) -> None:
    commit = repo.commit({"link": ("120000", "f"), "f": "f\n"})
    source = pin_git(context, Git(context.processes), Source(git=repo.url, commit=commit))
    texts = [
        # A plain diff of a path that is a link in the tree: no line of it speaks of a link.
        (
            "--- a/link\n+++ b/link\n@@ -1 +1 @@\n-f\n\\ No newline at end of file\n"
            "+../../etc/passwd\n\\ No newline at end of file\n"
        ),
        "diff --git a/link b/other\nsimilarity index 100%\nrename from link\nrename to other\n",
        (
            "diff --git a/link b/link\ndeleted file mode 120000\n--- a/link\n+++ /dev/null\n"
            "@@ -1 +0,0 @@\n-f\n\\ No newline at end of file\n"
        ),
    ]
    for text in texts:
        with pytest.raises(PatchError, match="symbolic link") as caught:
            apply(context, source, pinned(context, tmp_path, text))
        assert caught.value.id == "patch-special"


def test_apply_refuses_to_write_through_a_link(
    context: Context, repo: Repo, tmp_path: Path
) -> None:
    commit = repo.commit({"link": ("120000", "/tmp"), "f": "f\n"})
    source = pin_git(context, Git(context.processes), Source(git=repo.url, commit=commit))
    text = "--- /dev/null\n+++ b/link/x\n@@ -0,0 +1 @@\n+x\n"
    with pytest.raises(PatchError, match="does not apply"):
        apply(context, source, pinned(context, tmp_path, text))


NAMES = ("a b.txt", "\u00fcn\u00ef.c", 'q"uote', "~x", "dir/sub dir/f", "null", "a..b", "-dash")
LINES = st.lists(
    st.sampled_from(["x", "y", "", "  z", "--- a", "+++ b", "@@ -1 +1 @@", "\r"]), max_size=14
)


@settings(max_examples=25)
@given(
    before=st.dictionaries(st.sampled_from(NAMES), LINES, min_size=1, max_size=4),
    after=st.dictionaries(st.sampled_from(NAMES), LINES, max_size=4),
    ends=st.sampled_from(["\n", ""]),
)
def test_diff_of_git_is_read_as_git_means_it(
    tmp_path_factory: pytest.TempPathFactory,
    before: dict[str, list[str]],
    after: dict[str, list[str]],
    ends: str,
) -> None:
    """Counts equal `git diff --numstat`, the result is the other tree; reversed it is upstream."""
    folder = tmp_path_factory.mktemp("repo")
    repo = Repo("file://", folder, "r.git")

    def tree(files: dict[str, list[str]]) -> str:
        return repo.tree({name: "\n".join(rows) + ends for name, rows in files.items()})

    old, new = tree(before), tree(after)
    data = raw_git(repo, "diff", "--full-index", "-M", old, new)
    if not data:
        return
    stat = raw_git(repo, "diff", "--numstat", "-z", "--no-renames", old, new).decode()
    parts = read_diff(raw_git(repo, "diff", "--full-index", "--no-renames", old, new), "p")
    counted = {p.path: (p.added, p.removed) for p in parts}
    rows = [row.split("\t") for row in stat.split("\0") if row]
    assert counted == {name: (int(added), int(removed)) for added, removed, name in rows}
    git_port = Git(Processes())
    fit = try_apply(git_port, repo.folder, old, data, "p")
    assert (fit.word, fit.tree) == ("applies", new)
    assert try_apply(git_port, repo.folder, new, data, "p").word in ("already upstream", "applies")


def raw_git(repo: Repo, *arguments: str) -> bytes:
    done = subprocess.run(
        ["git", f"--git-dir={repo.folder}", *arguments],
        env={"PATH": os.environ["PATH"], **IDENTITY}, capture_output=True, check=True,
    )  # fmt: skip
    return done.stdout
