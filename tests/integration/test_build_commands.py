"""The tasks `build` and `plan` on a recipe, a source archive and weights of their own."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bakehouse import cli
from bakehouse.commands import build as build_task
from bakehouse.commands import plan
from bakehouse.context import Context, Outcome
from bakehouse.errors import BuildFailed, LockError, RecipeError, UsageError
from bakehouse.models import Verdict
from bakehouse.paths import Places
from tests.support.checkpoints import f32, gguf_bytes, llama_metadata
from tests.support.small_engine import RECIPE, pack

pytestmark = pytest.mark.integration


@pytest.fixture
def ctx(context: Context, tmp_path: Path) -> Context:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(gguf_bytes(llama_metadata(), [f32("x", 4)]))
    (folder / "small.yaml").write_text(RECIPE.format(sha256=pack(folder / "small.tar.gz")))
    return replace(context, recipes=folder)


def build(ctx: Context, *overrides: str, **options: object) -> Outcome:
    return build_task.run(ctx, build_task.Options("small", overrides, **options))  # type: ignore[arg-type]


def test_build_from_a_recipe_to_a_server(ctx: Context) -> None:
    done = build(ctx)
    assert (ctx.recipes / "small.lock.json").exists()
    assert done.exit == 0
    assert {c.verdict for c in done.checks} == {Verdict.PASSED}
    assert done.result["reused"] is False
    server = done.result["server"]
    said = subprocess.run([server], capture_output=True, text=True, check=True, env={})
    assert said.stdout.splitlines()[-1] == "good morning"
    record = json.loads(Path(done.result["record"]).read_text())
    assert record["ok"] is True
    assert record["build"] == done.result["digest"]
    assert [s["id"] for s in record["steps"]] == [
        "source", "configure", "accept", "compile", "install", "verify",
    ]  # fmt: skip
    assert record["versions"].keys() == {"cmake", "C compiler", "C++ compiler"}

    again = build(ctx, locked=True)
    assert again.result["reused"] is True
    assert again.result["content"] == done.result["content"]
    assert "reused, verified in" in again.text
    assert again.checks == done.checks


def test_plan_prints_and_runs_nothing(ctx: Context) -> None:
    with pytest.raises(LockError) as caught:
        plan.run(ctx, plan.Options("small"))
    assert caught.value.id == "lock-missing"
    build(ctx)
    planned = plan.run(ctx, plan.Options("small"))
    dry = build(ctx, dry_run=True)
    assert planned.result["built"] is True
    assert planned.result["build"]["digest"] == dry.result["digest"]
    other = plan.run(ctx, plan.Options("small", ("build.cmake.SMALL_GREETING=x",)))
    assert other.result["built"] is False
    assert "not built yet" in other.text
    assert "-DSMALL_GREETING=x" in other.text
    assert not Path(other.result["build"]["artifact"]).exists()
    assert planned.result["serve"]["argv"][0] == planned.result["build"]["server"]
    assert [s["id"] for s in planned.result["fetch"]] == ["fetch-source", "fetch-model"]


def test_build_dry_run_leaves_nothing(ctx: Context) -> None:
    with pytest.raises(LockError):
        build(ctx, dry_run=True)
    assert not (ctx.recipes / "small.lock.json").exists()
    assert not ctx.places.builds.exists()
    assert not ctx.places.runs.exists()


def test_build_records_a_typo_in_a_definition(ctx: Context) -> None:
    with pytest.raises(BuildFailed) as caught:
        build(ctx, "build.cmake.SMAL_GREETING=x")
    assert "did you mean SMALL_GREETING?" in caught.value.what
    (record,) = ctx.places.runs.glob("*/record.json")
    assert json.loads(record.read_text())["error"]["id"] == "not-accepted"


def test_plan_refuses_a_forced_definition_at_its_place(ctx: Context) -> None:
    build(ctx)
    recipe = ctx.recipes / "small.yaml"
    recipe.write_text(recipe.read_text().replace("cmake:\n", "cmake:\n    GIT_EXE: /bin/git\n"))
    with pytest.raises(RecipeError) as caught:
        plan.run(ctx, plan.Options("small"))
    assert "small.yaml:9:14: build.cmake.GIT_EXE: " in (caught.value.where or "")


def test_build_jobs_are_checked_and_reach_ninja(ctx: Context) -> None:
    for jobs in ("0", "-1", "many", "1.5", "9999", "\u0663"):
        with pytest.raises(UsageError):
            build(ctx, jobs=jobs)
    build(ctx)
    argv = build(ctx, dry_run=True, jobs="3").result["steps"][3]["argv"]
    assert argv[argv.index("-j") + 1] == "3"


def test_build_refuses_a_source_that_is_not_pinned(ctx: Context) -> None:
    build(ctx)
    pack(ctx.recipes / "small.tar.gz", {"ggml.c": "int other;\n"})
    kept = build(ctx, "build.cmake.SMALL_GREETING=x")
    assert kept.result["reused"] is False, "what was pinned is still in the cache"
    empty = Places(ctx.places.cache / "other", ctx.places.state)
    with pytest.raises(LockError):
        build(replace(ctx, places=empty))


def test_build_prints_one_json_document(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BAKEHOUSE_HOME", str(ctx.places.cache.parent))
    options: dict[str, Any] = {
        "recipe": "small",
        "set_": None,
        "locked": False,
        "jobs": None,
        "dry_run": False,
    }
    assert cli.main("build", options, json=True, recipes=ctx.recipes) == 0
    out, err = capfd.readouterr()
    document = json.loads(out)
    assert document["ok"] is True
    assert document["result"]["reused"] is False
    assert "compile" in err
    options["set_"] = ["build.cmake.NO_SUCH=1"]
    assert cli.main("build", options, json=True, recipes=ctx.recipes) == 6
    document = json.loads(capfd.readouterr().out)
    assert document["error"]["id"] == "not-accepted"
    assert [c["id"] for c in document["checks"] if c["verdict"] == "failed"] == ["configure.used"]
