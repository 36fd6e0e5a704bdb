"""Real patches on the real tree of llama.cpp, as the package index ships it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bakehouse.commands import patch
from bakehouse.context import Context
from bakehouse.lock import ArchivePin, Lock
from bakehouse.patches.apply import ApplyResult, try_apply
from bakehouse.patches.source_tree import ensure_source, repository_of
from bakehouse.paths import Places
from bakehouse.recipe.loader import find, load
from bakehouse.resolver import ensure_lock
from bakehouse.system.git import Git

pytestmark = pytest.mark.integration

PATCHES = Path(__file__).resolve().parents[1] / "data" / "patches"
QUEUE = (PATCHES / "error-a-decode.patch").read_bytes()

Try = Callable[[bytes], ApplyResult]


@pytest.fixture
def kept(context: Context, test_cache: Path) -> Context:
    """A context whose cache outlives the test run: the source is unpacked once."""
    places = Places(test_cache / "cache", test_cache / "state")
    return replace(context, places=places)


@pytest.fixture
def lock(kept: Context) -> Lock:
    loaded = load(find("smollm2-cpu", kept.recipes))
    return ensure_lock(kept, loaded, locked=True)


@pytest.fixture
def on_llama(kept: Context, lock: Lock) -> Try:
    source = lock.source
    assert isinstance(source, ArchivePin)
    git = Git(kept.processes, kept.environment)
    ensure_source(kept, git, source)
    repository = repository_of(kept.places, source)
    return lambda data: try_apply(git, repository, source.tree, data, "p")


def test_apply_our_patches_to_llama(on_llama: Try) -> None:
    for path in sorted(PATCHES.glob("*.patch")):
        fit = on_llama(path.read_bytes())
        assert (fit.word, fit.notes) == ("applies", ()), path
        assert fit.tree


def test_apply_with_offset(on_llama: Try) -> None:
    fit = on_llama(QUEUE.replace(b"@@ -308,6 +308,7 @@", b"@@ -300,6 +300,7 @@"))
    assert fit.word == "applies with offset"
    assert fit.notes == ("hunk 1 of tools/server/server-queue.cpp: at line 308, offset +8",)
    assert fit.tree == on_llama(QUEUE).tree


def test_apply_with_fuzz(on_llama: Try) -> None:
    fit = on_llama(QUEUE.replace(b"// this will run the main", b"// this runs the main"))
    assert fit.word == "applies with fuzz"
    assert fit.notes == (
        "tools/server/server-queue.cpp:309: only 2 context lines before and 2 after fit",
    )
    assert fit.tree == on_llama(QUEUE).tree


def test_apply_conflict_shows_the_lines(on_llama: Try) -> None:
    fit = on_llama(
        QUEUE.replace(b"        callback_update_slots();", b"        update_all_slots();")
    )
    assert fit.word == "conflicts"
    assert fit.tree is None
    assert fit.notes == (
        "hunk 1 of 1 does not fit tools/server/server-queue.cpp:308",
        "    tools/server/server-queue.cpp:310: the patch has          update_all_slots();",
        "    tools/server/server-queue.cpp:310: the source has         callback_update_slots();",
    )


def test_apply_already_upstream(on_llama: Try) -> None:
    text = QUEUE.decode().split("\n")
    swapped = [
        "-" + row[1:] if row.startswith("+        QUE") else row.replace("6 +308,7", "7 +308,6")
        for row in text
    ]
    backwards = "\n".join(swapped).encode()
    fit = on_llama(backwards)
    assert (fit.word, fit.tree) == ("already upstream", None), "the line to take away is gone"


def test_apply_to_a_missing_file(on_llama: Try) -> None:
    fit = on_llama(QUEUE.replace(b"server-queue.cpp", b"server-line.cpp"))
    assert fit.word == "conflicts"
    assert "    tools/server/server-line.cpp is not in the source" in fit.notes


def test_patch_is_tried_on_every_llama_recipe(kept: Context, on_llama: Try, tmp_path: Path) -> None:
    """Recipes whose source is not here are unknown, never passed."""
    folder = tmp_path / "recipes"
    folder.mkdir()
    for path in kept.recipes.glob("*"):
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    ctx = replace(kept, recipes=folder)
    done = patch.run(ctx, patch.Options(file=str(PATCHES / "error-a-decode.patch"), dry_run=True))
    words = {row["recipe"]: row["result"] for row in done.result["tried"]}
    assert {words[name] for name in words if name.startswith("smollm2")} == {"applies"}
    assert words["glm-vision-mtp"] == words["glm-text"] == "unknown"
    assert not (tmp_path / "patches").exists()
