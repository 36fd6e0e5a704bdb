"""What travels to a machine without network, and what comes back as text."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from bakehouse.errors import Fault, RecipeError
from bakehouse.preflight import rules
from bakehouse.recipe.loader import load
from scripts.evidence import images_machine, images_recipes, images_report, report
from scripts.evidence.carry import pack, receive
from scripts.evidence.images_machine import StandIns

ROOT = Path(__file__).resolve().parents[2]


def test_files_are_split_for_calls_and_put_together(tmp_path: Path) -> None:
    sent = {
        "one.bin": b"a" * 10,
        "two.bin": bytes(range(256)),
        "empty.bin": b"",
        "three": b"x" * 41,
    }
    files = []
    for name, data in sent.items():
        files.append(tmp_path / name)
        files[-1].write_bytes(data)
    pack(files, tmp_path / "parts", limit=20)
    parts = sorted((tmp_path / "parts").iterdir(), key=lambda p: int(p.name))
    for part in parts:
        assert sum(f.stat().st_size for f in part.iterdir()) <= 20
    there = tmp_path / "there"
    for part in parts[:-1]:
        receive(part, there)
    assert not (there / "three").exists()
    receive(parts[-1], there)
    assert {f.name: f.read_bytes() for f in there.iterdir()} == sent


@pytest.mark.parametrize("gpu", [True, False])
def test_the_recipes_there_are_right_except_the_one_that_has_to_be_wrong(
    tmp_path: Path, gpu: bool
) -> None:
    for name in ("smollm2-cpu", "smollm2-cuda"):
        shutil.copyfile(ROOT / "recipes" / f"{name}.yaml", tmp_path / f"{name}.yaml")
    images_recipes.write(tmp_path, tmp_path / "model", StandIns(gpu=gpu))
    wrong: dict[str, tuple[Fault, ...]] = {}
    for path in tmp_path.glob("smollm2-*.yaml"):
        try:
            if faults := rules.faults(load(path)):
                wrong[path.stem] = faults
        except RecipeError as error:
            wrong[path.stem] = tuple(error.faults)
    assert set(wrong) == {"smollm2-vllm-budget"}
    assert "256 x (1 + 15) = 4096" in str(wrong["smollm2-vllm-budget"][0])


def test_a_builder_has_a_compiler_and_no_driver_and_a_runtime_has_neither(tmp_path: Path) -> None:
    builder = images_machine.cuda_root(StandIns(), tmp_path, builder=True)
    runtime = images_machine.cuda_root(StandIns(), tmp_path, builder=False)
    assert "--exclude=usr/local/nvidia" in set(builder) & set(runtime)
    assert "--exclude=usr/local/cuda-13.0/bin" in set(runtime) - set(builder)


@pytest.mark.parametrize("markdown", [report.markdown, images_report.markdown])
@pytest.mark.parametrize(
    "evidence",
    [
        {},
        {"engine failed": "RuntimeError('dockerd did not come up')"},
        {"vllm serve": {"exit": 124, "seconds": 1, "err": "cut off", "document": None}},
    ],
)
def test_evidence_that_is_not_whole_is_told_too(markdown: Any, evidence: dict[str, Any]) -> None:
    text = markdown({"recipe": "r", **evidence})
    assert "not run" in text
    for name, said in evidence.items():
        if name.endswith("failed"):
            assert said in text
