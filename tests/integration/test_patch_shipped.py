"""The manifest that ships, and its recipe, with a stand-in for upstream."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bakehouse import flags
from bakehouse.commands import patch, plan
from bakehouse.commands.recipes import run_check
from bakehouse.context import Context
from bakehouse.errors import LockError, RecipeError
from bakehouse.patches.manifest import manifest_path, read_manifest
from tests.support.clocks import ImpatientClock
from tests.support.pullhost import PullHost, serve_pulls

pytestmark = pytest.mark.integration

LLAMA, NUMBER = "ggml-org/llama.cpp", 25144
FILE = "common/speculative.cpp"
BEFORE = "".join(f"line {number}\n" for number in range(60))


def changed(added: int, removed: int) -> str:
    """A file in which so many lines are other ones."""
    rows = BEFORE.splitlines(keepends=True)
    rows[20 : 20 + removed] = [f"new {number}\n" for number in range(added)]
    return "".join(rows)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[PullHost]:
    with serve_pulls(tmp_path / "host") as served:
        repo = served.repo(f"{LLAMA}.git")
        base = repo.commit({FILE: BEFORE})
        repo.commit({FILE: changed(16, 6)}, ref=f"refs/pull/{NUMBER}/head", parents=(base,))
        yield served


@pytest.fixture
def ctx(context: Context, host: PullHost, tmp_path: Path) -> Context:
    """A checkout's recipes and patches, copied."""
    shutil.copytree(context.recipes, tmp_path / "recipes")
    shutil.copytree(context.recipes.parent / "patches", tmp_path / "patches")
    environment = {**context.environment, "BAKEHOUSE_GITHUB": host.url}
    return replace(
        context, recipes=tmp_path / "recipes", environment=environment, clock=ImpatientClock()
    )


def test_shipped_patch_is_not_pinned_yet(ctx: Context) -> None:
    path = manifest_path(ctx.recipes.parent / "patches", LLAMA, str(NUMBER))
    found = read_manifest(path)
    assert found.status == "not pinned yet"
    assert (found.sha256, found.head, found.files, found.verdicts) == (None, None, (), ())
    assert found.experimental
    checked = run_check(ctx, flags.Check("glm-vision-mtp"))
    assert checked.exit == 0
    assert "run 'invoke patch --pr 25144'" in checked.text
    with pytest.raises(LockError, match="not pinned yet"):
        plan.run(ctx, plan.Options("glm-vision-mtp"))


def test_shipped_patch_first_fetch_keeps_what_people_wrote(ctx: Context) -> None:
    path = manifest_path(ctx.recipes.parent / "patches", LLAMA, str(NUMBER))
    before = path.read_text()
    done = patch.run(ctx, patch.Options(pr=str(NUMBER)))
    assert done.result["how"] == "new"
    found, text = read_manifest(path), path.read_text()
    assert found.pinned
    assert [(f.path, f.added, f.removed) for f in found.files] == [(FILE, 16, 6)]
    assert found.experimental
    for line in before.splitlines():
        if line.startswith(("#", "  #", "notes", "  -", "  must", "known", "lifts")):
            assert line in text
    checked = run_check(ctx, flags.Check("glm-vision-mtp"))
    assert "not pinned" not in checked.text
    with pytest.raises(LockError) as caught:
        plan.run(ctx, plan.Options("glm-vision-mtp"))
    assert caught.value.id == "lock-missing"


def test_shipped_patch_first_fetch_refuses_another_size(ctx: Context, host: PullHost) -> None:
    repo = host.repos[f"{LLAMA}.git"]
    repo.commit({FILE: changed(40, 6)}, ref=f"refs/pull/{NUMBER}/head", parents=(
        repo.commit({FILE: BEFORE}, ref=None),))  # fmt: skip
    repo.point("refs/heads/main", repo.commit({FILE: BEFORE}, ref=None))
    with pytest.raises(LockError, match="moved") as caught:
        patch.run(ctx, patch.Options(pr=str(NUMBER)))
    assert "expected 1 file, +16 -6; it is now 1 file, +40 -6" in str(caught.value.where)
    patch.run(ctx, patch.Options(pr=str(NUMBER), update=True))


def test_shipped_recipe_vision_with_mtp_needs_the_patch(ctx: Context) -> None:
    rows: list[tuple[tuple[str, ...], str]] = [
        (("experimental=false",), "experimental: true"),
        (("source.patches=[]",), "draft-mtp"),
        (("source.patches=[{pr: 25144}]",), "lifts: [projector-with-draft-mtp]"),
        (("serve.speculation=draft-eagle3",), "lifts: [projector-with-draft-eagle3]"),
    ]
    for overrides, why in rows:
        checked = run_check(ctx, flags.Check("glm-vision-mtp", overrides))
        assert checked.exit == 2
        assert why in checked.text
        with pytest.raises((RecipeError, LockError)):
            plan.run(ctx, plan.Options("glm-vision-mtp", overrides))
    with pytest.raises(RecipeError, match="contradicts itself"):
        plan.run(ctx, plan.Options("glm-vision-mtp", no_patch=("25144",)))
