"""The check before loading: architectures from a git repository, and the memory budget."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bakehouse.context import Context
from bakehouse.lock import ArchivePin, FilePin, Lock, WeightPin
from bakehouse.memory.fit import locked_weights, recipe_budget
from bakehouse.memory.machines import PROFILES
from bakehouse.patches.source_tree import repository_of
from bakehouse.preflight.weights import ARCHITECTURE_TABLE, source_architectures
from bakehouse.recipe.loader import find, load
from tests.support.checkpoints import write

pytestmark = pytest.mark.integration
TABLE = """static const std::map<llm_arch, const char *> LLM_ARCH_NAMES = {
    { LLM_ARCH_LLAMA, "llama" },
};
"""
PIN = ArchivePin(
    origin="x", file=FilePin(path="x", size=1, sha256="0" * 64), folder=".", tree="0" * 40, date=0
)


def git(folder: Path, *arguments: str) -> str:
    argv = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(argv, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_admit_reads_architectures_from_the_pinned_tree(tmp_path: Path, context: Context) -> None:
    work = tmp_path / "work"
    write(work / ARCHITECTURE_TABLE, TABLE.encode())
    git(work, "init", "-q")
    git(work, "add", ".")
    tree = git(work, "write-tree").strip()
    repository = repository_of(context.places, PIN)
    repository.parent.mkdir(parents=True)
    git(tmp_path, "clone", "-q", "--bare", str(work), str(repository))
    git(work, "commit", "-qm", "x")
    git(work, "push", "-q", str(repository), "HEAD:refs/heads/x")
    lock = Lock(recipe="r", engine="llama.cpp", wants="w", source=PIN, source_tree=tree, weights={})
    assert source_architectures(context, lock) == frozenset({"llama"})
    other = lock.model_copy(update={"source_tree": "1" * 40})
    assert source_architectures(context, other) is None


def test_admit_glm_fits_a_gb10(context: Context) -> None:
    recipe = load(find("glm-text", context.recipes)).recipe
    sizes = [27_180_017_856] * 3 + [108_720_071_427 - 3 * 27_180_017_856]
    files = tuple(
        FilePin(path=f"m-{i:05d}-of-00004.gguf", size=s, sha256="0" * 64)
        for i, s in enumerate(sizes, 1)
    )
    lock = Lock(recipe="r", engine="llama.cpp", wants="w",
                weights={"model": WeightPin(origin="hub:x/y", files=files)})  # fmt: skip
    budget = recipe_budget(PROFILES["gb10"], recipe, locked_weights(lock, {}))
    assert budget.fits
    assert not budget.unknown
    assert 12 * 2**30 <= budget.purses[0].left <= 14 * 2**30
