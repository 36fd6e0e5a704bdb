"""Patch manifests: faults with their position; comments and order kept on writing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bakehouse.errors import NotFound, RecipeError
from bakehouse.patches.manifest import (
    Manifest,
    PatchVerdict,
    TouchedFile,
    find_manifest,
    manifest_path,
    patches_folder,
    read_manifest,
    write_manifest,
)

SHA = "a" * 64
TEXT = """\
# What we know, by hand.
schema: 1
id: 7   # a number
pr: 7
repo: org/project
title: "fix: it"
source: https://example.org/org/project/pull/7
notes: |
  first line
  second line
# At the end, on purpose:
status: not pinned yet
known: {files: 1, added: 16, removed: 6}
lifts: [some-rule]
"""


def put(folder: Path, text: str = TEXT, id: str = "7") -> Path:  # noqa: A002
    path = manifest_path(folder, "org/project", id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_manifest_is_read(tmp_path: Path) -> None:
    found = read_manifest(put(tmp_path))
    assert (found.id, found.pr, found.name) == ("7", 7, "org/project#7")
    assert not found.pinned
    assert found.known is not None
    assert found.known.added == 16
    assert find_manifest(tmp_path, "org/project", "8") is None
    assert patches_folder(Path("/x/recipes")) == Path("/x/patches")
    with pytest.raises(NotFound, match="patch '8' not found"):
        read_manifest(manifest_path(tmp_path, "org/project", "8"))


FAULTS = [
    (("repo:", "repos:"), ":5:1: unknown key repos (did you mean repo?)"),
    (("pr: 7\n", "pr: x\n"), ":4:5: pr: expected a number, got the text 'x'"),
    (("added: 16", "added: -1"), ":13:26: known.added: the number -1 is too small"),
    (("not pinned yet", "pinned"), ":12:9: status: a pinned patch needs sha256, size, date"),
    (("known:", "sha256: " + SHA + "\nknown:"), ":12:9: status: sha256 belong to a pinned"),
    (("id: 7 ", "id: 8 "), ":3:5: id: the id of a pull request is its number"),
    (("source: https://example.org/org/project/pull/7\n", ""), "source is missing"),
    (("repo: org/project", "repo: project"), ":5:7: repo: write owner/name"),
    (("lifts:", "expect: {must_appear: [{patern: x}]}\nlifts:"), "unknown key"),
    (("schema: 1", "schema: 2"), ":2:9: schema: the number 2 is not 1"),
    (("known: {", "known: {{"), ":14:1: expected"),
    (("title:", "repo: a/b\ntitle:"), "duplicate key"),
]


def test_manifest_faults_have_their_place(tmp_path: Path) -> None:
    wrong = []
    for change, fault in FAULTS:
        assert change[0] in TEXT
        with pytest.raises(RecipeError) as caught:
            read_manifest(put(tmp_path, TEXT.replace(*change)))
        assert caught.value.exit_code == 2
        where = str(caught.value.where)
        if fault not in where or "7.yaml" not in where:
            wrong.append((change, where))
    assert not wrong


def test_manifest_refuses_other_files(tmp_path: Path) -> None:
    path = put(tmp_path)
    for data in (b"", b"- a\n", b"\xff\xfe", b"a: \x00\n", b"x" * 2**21):
        path.write_bytes(data)
        with pytest.raises(RecipeError):
            read_manifest(path)
    path.unlink()
    for make, remove in ((os.mkfifo, os.unlink), (os.mkdir, os.rmdir)):
        make(path)  # a pipe would block for ever
        with pytest.raises(RecipeError, match="cannot read"):
            read_manifest(path)
        remove(path)


def test_manifest_in_the_wrong_place(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="wrong place"):
        read_manifest(put(tmp_path, id="8"))


def test_manifest_writing_keeps_comments_and_order(tmp_path: Path) -> None:
    path = put(tmp_path)
    before = read_manifest(path)
    write_manifest(path, before)
    assert path.read_text() == TEXT.replace("id: 7   # a", "id: 7   # a")
    pinned = before.changed(
        status="pinned", sha256=SHA, size=100, date="2026-11-30T00:00:00Z", head="b" * 40,
        files=(TouchedFile(path="src/a.c", added=1, removed=0),),
    )  # fmt: skip
    write_manifest(path, pinned)
    text = path.read_text()
    assert read_manifest(path) == pinned
    for kept in ("# What we know, by hand.", "# a number", "# At the end, on purpose:"):
        assert kept in text
    assert "notes: |\n  first line\n  second line\n" in text
    assert text.index("title:") < text.index("notes:") < text.index("status:")
    assert text.index("status:") < text.index("head:") < text.index("sha256:") < text.index("size:")
    write_manifest(path, pinned)
    assert path.read_text() == text


def test_manifest_verdicts_are_added_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "org" / "project" / "7.yaml"
    made = Manifest(id="7", pr=7, repo="org/project", source="x", status="pinned", sha256=SHA,
                    size=1, date="2026-11-30")  # fmt: skip
    write_manifest(path, made)
    verdict = PatchVerdict(
        recipe="r", base="b" * 40, sha256=SHA, word="experimental", date="2026-11-30",
        reasons=("2,661 lines of one kind",),
        evidence={"kinds": [{"line": "llama_decode[1] returned -1", "count": 2661}], "runs": 6},
    )  # fmt: skip
    write_manifest(path, made.with_verdict(verdict))
    again = read_manifest(path)
    assert again.verdict("r", "b" * 40) == verdict
    assert again.verdict("r", "c" * 40) is None
    other = verdict.model_copy(update={"recipe": "s"})
    better = verdict.model_copy(update={"word": "clean", "evidence": {}})
    both = again.with_verdict(other).with_verdict(better)
    write_manifest(path, both)
    assert read_manifest(path).verdicts == (other, better)
    assert both.changed(sha256="c" * 64).verdict("r", "b" * 40) is None, "of another diff"
