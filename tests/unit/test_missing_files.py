"""What is named and is not there: one wording and one exit code, whatever takes it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from bakehouse.context import Context
from bakehouse.errors import BakehouseError, NotFound
from bakehouse.flags import TASKS
from bakehouse.patches.apply import read_patch
from bakehouse.recipe.loader import find

RECIPES = ("show", "check", "lock", "plan", "fetch", "build", "serve", "status", "logs", "stop",
           "probe", "watch", "fit")  # fmt: skip


def _error(ctx: Context, task: str, **given: Any) -> BakehouseError:
    kind = TASKS[task]
    command = importlib.import_module(f"bakehouse.commands.{kind.module}")
    with pytest.raises(BakehouseError) as caught:
        getattr(command, kind.function)(ctx, kind(**given))
    return caught.value


@pytest.fixture(params=["nothing.x", "no/folder/nothing.x", "file.txt/nothing.x", "dangling"])
def gone(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "file.txt").write_text("text\n")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "checkpoint").mkdir()
    path: Path = tmp_path / request.param
    return path


@pytest.mark.parametrize(
    ("task", "given", "kind"),
    [
        ("diagnose", {"file": "GONE"}, "log"),
        ("patch", {"file": "GONE"}, "patch"),
        ("reshard", {"checkpoint": "GONE", "out": "OUT"}, "folder"),
        ("reshard", {"checkpoint": "HERE", "out": "GONE/out"}, "folder"),
        *[(task, {"recipe": "GONE"}, "recipe") for task in RECIPES],
    ],
)
def test_a_file_or_folder_that_is_not_there(
    task: str, given: dict[str, str], kind: str, gone: Path, context: Context
) -> None:
    folder = gone if not given.get("recipe") else gone.with_name(gone.name + ".yaml")
    places = {"GONE": str(folder), "HERE": str(context.recipes), "GONE/out": f"{gone}/out"}
    places["OUT"] = f"{context.recipes}-out"

    error = _error(context, task, **{name: places[value] for name, value in given.items()})

    assert isinstance(error, NotFound), error
    assert error.exit_code == 3
    assert error.what.startswith(f"{kind} '")
    assert error.what.endswith("' not found")
    assert folder.name in f"{error.what} {error.where}"
    assert error.hint


def test_a_recipe_that_is_a_link_to_nothing_says_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").symlink_to("gone/far.yaml")

    with pytest.raises(NotFound, match="recipe 'r' not found") as caught:
        find("r", tmp_path)
    assert str(caught.value.where).endswith("r.yaml, a link to gone/far.yaml")


def test_a_recipe_that_may_not_be_looked_at_is_left_to_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)
    assert find("r", tmp_path) == tmp_path / "r.yaml"


def test_a_patch_that_a_recipe_names_is_not_found_either(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"patch 'x\.patch' not found"):
        read_patch(tmp_path / "x.patch")


def test_a_patch_for_one_run_is_named(context: Context) -> None:
    from bakehouse.patches.manifest import manifest_path, patches_folder, read_manifest

    path = manifest_path(patches_folder(context.recipes), "ggml-org/llama.cpp", "4711")
    with pytest.raises(NotFound, match="patch '4711' not found"):
        read_manifest(path)
