"""The gate on the real model: a few mutants are refused, a few harmless variants are not.

The whole table, with what is not detected, comes from scripts/bench/gate.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from scripts.bench.gate_run import Bench
from scripts.bench.gate_variants import ALL, REFERENCE, Variant
from scripts.bench.gate_weights import Weights, rewrite

pytestmark = [pytest.mark.integration, pytest.mark.engine, pytest.mark.timeout(300)]

BY_NAME = {variant.name: variant for variant in ALL}


@pytest.fixture(scope="module")
def bench(llama_server: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    made = Bench(llama_server, smollm2, tmp_path_factory.mktemp("gate"), None)
    for reference in REFERENCE:
        if reference.kv in ("f16", "f32"):
            made.take_golden(reference)
    return made


@pytest.mark.parametrize("name", ["norm-plus-one", "zero-quarter-10", "nan-down-10"])
def test_a_mutant_is_refused(bench: Bench, name: str) -> None:
    row = bench.measure(BY_NAME[name])
    assert row.not_served is None
    assert row.detected, row


@pytest.mark.parametrize("name", ["batch-32", "flash-off-f32"])
def test_a_harmless_variant_is_not_refused(bench: Bench, name: str) -> None:
    row = bench.measure(BY_NAME[name])
    assert row.golden
    assert row.not_served is None
    assert not row.detected, row


def test_the_recipe_s_suites_are_cheap(bench: Bench) -> None:
    row = bench.measure(BY_NAME["again"])
    assert 0 < row.decoded <= 350


@pytest.fixture
def copy(smollm2: Path, tmp_path: Path) -> Path:
    return Path(shutil.copyfile(smollm2, tmp_path / "copy.gguf"))


@pytest.mark.parametrize("variant", [v for v in ALL if v.edit], ids=lambda v: v.name)
def test_every_edit_changes_the_file(variant: Variant, smollm2: Path, copy: Path) -> None:
    """An edit that changes nothing would count as a mutant that nobody can find."""
    assert variant.edit
    weights, untouched = Weights(copy), Weights(smollm2, writable=False)
    variant.edit(weights)
    assert (weights.bytes != untouched.bytes).any()
    start = weights.header.data_start
    names = [t.name for t in weights.header.tensors]
    changed = [n for n in names if (weights.raw(n) != untouched.raw(n)).any()]
    header = bool((weights.bytes[:start] != untouched.bytes[:start]).any())
    assert bool(changed) != header


def test_a_model_rewritten_in_its_own_precision_says_the_same(smollm2: Path, copy: Path) -> None:
    rewrite(smollm2, copy, "F32")
    was, now = Weights(smollm2, writable=False), Weights(copy, writable=False)
    assert now.header.metadata == was.header.metadata
    for name in ("blk.0.attn_k.weight", "token_embd.weight", "output_norm.weight"):
        assert (now.values(name) == was.values(name)).all()
