from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bakehouse.build import ensure as building
from bakehouse.build.artifact import Artifact
from bakehouse.context import Context
from bakehouse.lock import Lock
from bakehouse.plan.types import BuildPlan
from bakehouse.records.store import Run
from tests.small_engine import small_lock, small_plan, write_small

pytestmark = pytest.mark.integration


def build(ctx: Context, plan: BuildPlan, lock: Lock | None = None) -> Artifact:
    with Run.start(ctx, "build", "small") as run:
        return building.ensure(ctx, lock or small_lock(), plan, run)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The source is the small project; a test may change its files."""
    changes: dict[str, str] = {}

    def write(_ctx: Context, _lock: Lock, target: Path) -> None:
        write_small(target, changes)

    monkeypatch.setattr(building, "write_source", write)
    return changes


def test_build_and_reuse(context: Context, small: dict[str, str]) -> None:
    plan = small_plan(context)
    first = build(context, plan)
    assert not first.reused
    said = subprocess.run([first.server], capture_output=True, text=True, check=True, env={})
    assert said.stdout.splitlines() == [
        "/build/src/ggml.c",
        "/build/src/llama.cpp",
        "Nov 14 2023 22:13:20",
        "/build/build/build-info.cpp",
        "hello",
    ]
    assert sorted(f.path for f in first.files) == [
        "bin/libggml.so.0",
        "bin/libllama.so.0",
        "bin/llama-server",
    ]
    again = build(context, plan)
    assert again.reused
    assert again.files == first.files
    assert not [p for p in (context.places.builds / ".work").iterdir() if p.is_dir()]
