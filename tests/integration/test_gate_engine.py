"""The gate on the real model: a few mutants are refused, a few harmless variants are not.

The whole table, with what is not detected, comes from scripts/bench/gate.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scripts.bench.gate_run import Bench
from scripts.bench.gate_variants import ALL
from scripts.bench.gate_weights import Weights, rewrite

pytestmark = [pytest.mark.integration, pytest.mark.engine, pytest.mark.timeout(300)]

BY_NAME = {variant.name: variant for variant in ALL}


@pytest.fixture(scope="module")
def bench(llama_server: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(llama_server, smollm2, tmp_path_factory.mktemp("gate"), None)


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


def test_gate_edits_change_weights_or_metadata(smollm2: Path) -> None:
    """An edit that changes nothing would count as a mutant that nobody can find."""
    untouched = Weights(smollm2)
    idle = []
    for variant in ALL:
        if variant.edit:
            weights = Weights(smollm2, "c")
            variant.edit(weights)
            start = weights.header.data_start
            header = bool((weights.bytes[:start] != untouched.bytes[:start]).any())
            if bool((weights.data() != untouched.data()).any()) == header:
                idle.append(variant.name)
    assert idle == []


def test_a_model_in_another_type_holds_the_same_values(smollm2: Path, tmp_path: Path) -> None:
    rewrite(smollm2, tmp_path / "copy.gguf", "F16")
    was, now = Weights(smollm2), Weights(tmp_path / "copy.gguf")
    assert now.header.metadata == was.header.metadata
    for name in ("blk.0.attn_k.weight", "token_embd.weight", "output_norm.weight"):
        assert np.allclose(now.values(name), was.values(name), rtol=1e-3, atol=1e-6)
