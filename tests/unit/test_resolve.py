"""The lock beside a recipe: read, compared and described without touching anything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bakehouse.errors import LockError
from bakehouse.lock import Lock, changes, describe, moved_line
from bakehouse.models import to_json
from bakehouse.recipe.loader import load
from bakehouse.recipe.models import Recipe
from bakehouse.resolver import drift, lock_path, read_lock, wants
from tests.support.recipes import make_loaded, recipe_data

C1, C2, SHA1, SHA2 = "1" * 40, "2" * 40, "a" * 64, "b" * 64
FILE = {"path": "m.gguf", "size": 10, "sha256": SHA1}
GIT = {"git": "https://example.org/x.git", "commit": C1, "ref": "main"}
ARCHIVE = {"pypi": "some-engine==1.0", "sha256": SHA1, "folder": "src", "number": 7}


def recipe(**over: Any) -> Recipe:
    return Recipe.model_validate(recipe_data(**over))


def lock(of: Recipe, **over: Any) -> Lock:
    """A lock that agrees with the recipe that `over` starts from."""
    data: dict[str, Any] = {
        "schema": 1, "recipe": "test", "engine": "llama.cpp", "wants": wants(of),
        "source": {"kind": "git", "url": GIT["git"], "ref": "main", "ref_commit": C2,
                   "commit": C1, "tree": C1, "date": 1},
        "source_tree": C1,
        "weights": {"model": {"origin": "hub:o/m", "revision": C1, "files": [FILE]}},
    }  # fmt: skip
    return Lock.model_validate(data | over)


BASE: dict[str, Any] = {"source": GIT, "weights": {"model": {"hub": "o/m", "files": "*.gguf"}}}
ARCHIVE_PIN = {
    "kind": "archive", "origin": "pypi:some-engine==1.0", "folder": "src", "number": 7,
    "tree": C1, "date": 1, "file": {"path": "x.tar.gz", "size": 1, "sha256": SHA1},
}  # fmt: skip


def test_drift_none() -> None:
    one = recipe(**BASE)
    assert drift(one, lock(one)) == ()
    two = recipe(**BASE | {"source": {"archive": ARCHIVE}})
    assert drift(two, lock(two, source=ARCHIVE_PIN)) == ()
    short = recipe(**BASE | {"source": {**GIT, "commit": C1[:9]}})
    assert drift(short, lock(short)) == ()


def test_drift_ignores_unlocked_keys() -> None:
    one = recipe(**BASE)
    other = recipe(
        **BASE, description="x", probe={"facts": {"must_pass": 1}}, build={"jobs": 2},
        serve={"command": "{{ server }}", "context": 9},
    )  # fmt: skip
    assert drift(other, lock(one)) == ()


DRIFT: list[tuple[dict[str, Any], str, str]] = [
        ({"source": {**GIT, "git": "https://example.org/y.git"}}, "source-changed", "source.git"),
        ({"source": {**GIT, "commit": C2}}, "commit-changed", "source.commit"),
        ({"source": {**GIT, "commit": C2[:8]}}, "commit-changed", "source.commit"),
        ({"source": {**GIT, "ref": "dev"}}, "ref-changed", "source.ref"),
        ({"source": {"archive": ARCHIVE}}, "source-changed", "source"),
        ({"source": {**GIT, "patches": [{"file": "p"}]}}, "patch-changed", "source.patches"),
        (
            {"weights": {"model": {"hub": "o/n", "files": "*.gguf"}}},
            "weights-changed", "weights.model",
        ),
        (
            {"weights": {"model": {"hub": "o/m", "files": "q8/*.gguf"}}},
            "weights-changed", "weights.model.files",
        ),
        (
            {"weights": {"model": {"hub": "o/m", "files": "*.gguf", "revision": C2}}},
            "weights-changed", "weights.model.revision",
        ),
        (
            {"weights": {"model": {"hub": "o/m", "files": "*.gguf", "sha256": SHA2}}},
            "weights-changed", "weights.model.sha256",
        ),
        (
            {"weights": {**BASE["weights"], "drafter": {"path": "d.gguf"}}},
            "weights-changed", "weights.drafter",
        ),
        (
            {"build": {"cuda": {"version": "13.0", "provide": "pypi"}}},
            "toolkit-changed", "build.cuda",
        ),
        (
            {"weights": {"model": {"hub": "o/m", "files": "m.*"}}},
            "recipe-changed", "the digest of what is resolved",
        ),
    ]  # fmt: skip


def test_drift_names_its_reason() -> None:
    locked = lock(recipe(**BASE))
    found = [[(d.reason, d.where) for d in drift(recipe(**BASE | c), locked)] for c, _, _ in DRIFT]
    assert found == [[(reason, where)] for _, reason, where in DRIFT]


def test_drift_of_an_archive() -> None:
    one = recipe(**BASE | {"source": {"archive": ARCHIVE}})
    changed = {"pypi": "some-engine==2.0", "sha256": SHA2, "folder": "other", "number": 8}
    for key, value in changed.items():
        other = recipe(**BASE | {"source": {"archive": {**ARCHIVE, key: value}}})
        (found,) = drift(other, lock(one, source=ARCHIVE_PIN))
        assert found.reason == "archive-changed"
        assert found.now == str(value).replace("some", "pypi:some")


def test_drift_of_patches() -> None:
    then = [{"file": "a.patch"}, {"file": "b.patch"}]
    one = recipe(**BASE | {"source": {**GIT, "patches": then}})
    pins = [{"id": "p", "file": {**FILE, "path": patch["file"]}} for patch in then]
    locked = lock(one, patches=pins)
    assert drift(one, locked) == ()
    others: list[list[dict[str, str]]] = [
        [{"file": "b.patch"}, {"file": "a.patch"}],
        [{"file": "a.patch"}],
        [{"file": "a.patch", "sha256": SHA2}, {"file": "b.patch"}],
        [],
    ]
    for now in others:
        (found,) = drift(recipe(**BASE | {"source": {**GIT, "patches": now}}), locked)
        assert found.reason == "patch-changed"


def test_drift_reports_all_differences() -> None:
    other = recipe(
        source={**GIT, "commit": C2, "ref": "dev"}, weights={"model": {"path": "m.gguf"}}
    )
    found = {d.reason for d in drift(other, lock(recipe(**BASE)))}
    assert found == {"commit-changed", "ref-changed", "weights-changed"}


def test_drift_of_an_override(tmp_path: Path) -> None:
    loaded = make_loaded(tmp_path, **BASE)
    locked = lock(loaded.recipe)
    over = load(loaded.path, (f"source.commit='{C2}'",))
    assert [d.reason for d in drift(over.recipe, locked)] == ["commit-changed"]
    assert drift(load(loaded.path, ("serve.context=99",)).recipe, locked) == ()


def test_lock_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "x.lock.json"
    assert read_lock(path) is None
    locked = lock(recipe(**BASE))
    path.write_text(to_json(locked))
    assert read_lock(path) == locked
    assert lock_path(tmp_path / "x.yaml") == path
    assert lock_path(tmp_path / "a.b.yaml").name == "a.b.lock.json"


GOOD = to_json(lock(recipe(**BASE)))


UNUSABLE = [
    ("", "lock-damaged", "not JSON"),
    (GOOD[:-20], "lock-damaged", "not JSON"),
    ("[]", "lock-damaged", "not a JSON object"),
    (f"<<<<<<< HEAD\n{GOOD}=======\n>>>>>>> x\n", "lock-damaged", "merge conflict"),
    (json.dumps({**json.loads(GOOD), "schema": 2}), "lock-newer", "newer Bakehouse"),
    (json.dumps({**json.loads(GOOD), "schema": 0}), "lock-damaged", "schema"),
    (json.dumps({**json.loads(GOOD), "extra": 1}), "lock-damaged", "extra"),
    (json.dumps({**json.loads(GOOD), "weights": 5}), "lock-damaged", "weights"),
]


def test_lock_unusable_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.lock.json"
    for text, id_, why in UNUSABLE:
        path.write_text(text)
        with pytest.raises(LockError, match=why) as caught:
            read_lock(path)
        assert (caught.value.id, caught.value.exit_code) == (id_, 4)
        assert str(path) in str(caught.value.where)
        assert "lock --update" in str(caught.value.hint)


def test_lock_changes() -> None:
    old = lock(recipe(**BASE))
    new = old.model_copy(update={"source": old.source.model_copy(update={"commit": C2})})  # type: ignore[union-attr]
    (change,) = changes(old, new)
    assert moved_line(change).startswith("moved source: https://example.org/x.git commit 111")
    assert changes(old, old) == ()
    assert any(SHA1 in line for line in describe(old))


PINNED = {
    "id": "7", "file": {"path": "ggml-org/llama.cpp#7", "size": 1, "sha256": SHA1},
    "repo": "ggml-org/llama.cpp", "base": C1,
}  # fmt: skip


PATCHED: list[tuple[dict[str, Any], list[str]]] = [
    ({**GIT, "patches": [{"pr": 7}]}, []),
    ({**GIT, "patches": [{"id": "7", "repo": "ggml-org/llama.cpp"}]}, ["recipe-changed"]),
    ({**GIT, "patches": []}, ["patch-changed"]),
    ({**GIT, "patches": [{"pr": 8}]}, ["patch-changed"]),
    ({**GIT, "patches": [{"pr": 7, "repo": "o/fork"}]}, ["patch-changed"]),
    ({**GIT, "patches": [{"pr": 7}, {"pr": 8}]}, ["patch-changed"]),
    ({**GIT, "patches": [{"pr": 7, "sha256": SHA2}]}, ["patch-changed"]),
    ({**GIT, "patches": [{"pr": 7, "allow": "fuzz"}]}, ["patch-allowed-changed"]),
    ({**GIT, "commit": C2, "patches": [{"pr": 7}]}, ["commit-changed", "patch-base-changed"]),
]


def test_drift_of_pinned_patches() -> None:
    locked = lock(recipe(**BASE | {"source": {**GIT, "patches": [{"pr": 7}]}}), patches=[PINNED])
    found = [
        [d.reason for d in drift(recipe(**BASE | {"source": source}), locked)]
        for source, _ in PATCHED
    ]
    assert found == [reasons for _, reasons in PATCHED]


def test_drift_of_a_patch_pinned_on_another_base() -> None:
    sources: list[dict[str, Any]] = [{}, {"source": ARCHIVE_PIN}]
    for source in sources:
        wanted = {"archive": ARCHIVE} if source else GIT
        one = recipe(**BASE | {"source": {**wanted, "patches": [{"pr": 7}]}})
        elsewhere = lock(one, patches=[{**PINNED, "base": C2}], **source)
        assert [d.reason for d in drift(one, elsewhere)] == ["patch-base-changed"]
        assert drift(one, lock(one, patches=[PINNED], **source)) == ()


def test_lock_patch_base() -> None:
    one = recipe(**BASE)
    assert lock(one).base == C1
    assert lock(one, source=ARCHIVE_PIN).base == C1
    pin = {"reference": "x/y:1", "name": "docker.io/x/y", "id": f"sha256:{SHA1}", "size": 1}
    both = {
        "x86_64": {**pin, "index": f"sha256:{SHA2}"},
        "aarch64": {**pin, "index": f"sha256:{SHA2}"},
    }
    assert lock(one, source=None, images={"image": both}).base == f"sha256:{SHA2}"
    alone = {"x86_64": {**pin, "digest": f"sha256:{SHA1}"}}
    other = {"x86_64": {**pin, "digest": f"sha256:{SHA2}"}}
    bases = {lock(one, source=None, images={"image": i}).base for i in (alone, other)}
    assert len(bases) == 2
    assert None not in bases
    assert lock(one, source=None).base is None
