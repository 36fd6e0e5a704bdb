"""Verdicts by measurement: real patches of the real llama.cpp, built, served and compared.

Each patch touches one small source file, so that with a compiler cache its build takes half a
minute.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bakehouse import cli
from bakehouse.patches.manifest import manifest_path, patches_folder, read_manifest
from bakehouse.paths import Places
from bakehouse.server.status import folders, get_status

pytestmark = [pytest.mark.integration, pytest.mark.engine, pytest.mark.timeout(1500)]

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "tests" / "data" / "patches"
RECIPE = """\
include: smollm2-cpu-base.yaml
name: smollm2-cpu
serve:
  command: |
    {{ server }} -m {{ weights.model.first }} -c {{ serve.context }} --jinja -t 2
probe:
  fluency: {max_tokens: 32}
"""

Judge = Callable[[str], tuple[int, dict[str, Any]]]


@pytest.fixture
def judge(
    engine: Path, test_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Judge]:  # fmt: skip
    """Call `patch --file … --judge` on a copy of the small recipe, in the home of the engine."""
    assert engine.is_file()
    monkeypatch.setenv("BAKEHOUSE_HOME", str(test_cache))
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    base = (ROOT / "recipes" / "smollm2-cpu.yaml").read_text()
    (recipes / "smollm2-cpu-base.yaml").write_text(base)
    (recipes / "smollm2-cpu.yaml").write_text(RECIPE)
    shutil.copy(ROOT / "recipes" / "smollm2-cpu.lock.json", recipes)

    def call(name: str) -> tuple[int, dict[str, Any]]:
        options = {"file": str(PATCHES / f"{name}.patch"), "recipe": "smollm2-cpu", "judge": True}
        code = cli.main("patch", options, json=True, recipes=recipes)
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        path = manifest_path(patches_folder(recipes), "ggml-org/llama.cpp", name)
        (kept,) = read_manifest(path).verdicts
        assert kept.word == document["result"]["verdict"]
        assert kept.recipe == "smollm2-cpu"
        assert list(kept.reasons) == document["result"]["reasons"]
        return code, document

    yield call
    places = Places(test_cache / "cache", test_cache / "state")
    assert not [f.name for f in folders(places) if "@judge-" in f.name and get_status(f).alive]


def by_id(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["id"]: check for check in document["checks"]}


def test_a_comment_has_no_effect(judge: Judge) -> None:
    code, document = judge("comment")
    assert (code, document["result"]["verdict"]) == (0, "no effect")
    assert document["result"]["changes"] == []
    assert all(check["verdict"] == "passed" for check in document["checks"])
    builds = document["result"]["evidence"]["builds"]
    assert builds["with"] != builds["without"]


def test_an_error_at_each_decode_is_experimental(judge: Judge) -> None:
    """All suites pass, all answers are the same, and the log holds what no unpatched log has."""
    code, document = judge("error-a-decode")
    assert (code, document["result"]["verdict"]) == (0, "experimental")
    (change,) = document["result"]["changes"]
    assert (change["how"], change["level"], change["without"]) == ("new", "error", 0)
    assert change["patched"] > 200
    assert change["text"] == "que start_loop: llama_decode[1] gave up, rc = <n>"
    wrong = [name for name, check in by_id(document).items() if check["verdict"] != "passed"]
    assert wrong == ["patch.log.new"]


def test_keys_at_half_the_pace_harm(judge: Judge) -> None:
    """One factor in the positions of the keys: it builds, serves, is healthy, and talks rubbish."""
    code, document = judge("keys-at-half-pace")
    assert (code, document["result"]["verdict"]) == (5, "harmful")
    assert document["error"]["id"] == "patch-harmful"
    checks = by_id(document)
    assert checks["patch.serves"]["verdict"] == "passed"
    assert checks["patch.log.new"]["verdict"] == "passed"
    assert checks["patch.suite.facts"]["verdict"] == "failed"
    assert checks["patch.suite.likelihood"]["verdict"] == "failed"
    assert checks["patch.answers.prose"]["verdict"] == "failed"
