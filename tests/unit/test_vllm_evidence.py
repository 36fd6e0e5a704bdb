"""Checks of vLLM's endpoints and log, with the answers of a real server and changed ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bakehouse.engines.base import Answer, engine_of
from bakehouse.engines.vllm.engine import Features, engine_settings
from bakehouse.logscan.scanner import scan
from bakehouse.models import Verdict

DATA = Path(__file__).resolve().parents[1] / "data" / "vllm"
LOG = (DATA / "cpu-ngram-ready.log").read_text().splitlines()
METRICS = (DATA / "metrics.txt").read_text()
ENGINE = engine_of("vllm")
MODELS = {
    "data": [
        {"id": "small", "root": "/weights/model", "max_model_len": 2048},
        {"id": "~bakehouse-abcd", "root": "/weights/model", "max_model_len": 2048},
    ]
}
ALL = Features(
    name="small", model_path="/weights/model", context=2048, speculation="ngram", draft_tokens=4,
    dtype="float32",
)  # fmt: skip

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def judged(asked: Features = ALL, **changed: Any) -> dict[str, Verdict]:
    seen = {"models": MODELS, "metrics": METRICS, "log": LOG, "version": None, **changed}
    answers = {
        "/v1/models": Answer(200, seen["models"], ""),
        "/metrics": Answer(200, None, seen["metrics"]),
        "/version": Answer(200, seen["version"], ""),
    }
    return {c.id: c.verdict for c in ENGINE.check_features(asked, answers, seen["log"])}


def test_evidence_of_a_real_server_passes() -> None:
    seen = judged()
    assert set(seen) == {
        "model-name", "model-path", "implementation", "context", "cache-size", "dtype",
        "speculation",
    }  # fmt: skip
    assert set(seen.values()) == {Verdict.PASSED}


def changed_log(old: str, new: str) -> list[str]:
    assert any(old in line for line in LOG)
    return [line.replace(old, new) for line in LOG]


def test_evidence_that_is_missing_or_different_does_not_pass() -> None:
    off = "SpeculativeConfig(method='ngram', model=None, num_spec_tokens=4)"
    rows: list[tuple[dict[str, Any], str, str]] = [
        ({"models": {"data": [{"id": "other"}]}}, "model-name", "failed"),
        ({"models": {}}, "model-name", "unknown"),
        ({"models": {"data": [{"id": "small", "root": "/else"}]}}, "model-path", "failed"),
        ({"models": {"data": [{"id": "small", "max_model_len": 1024}]}}, "context", "failed"),
        ({"models": {"data": [{"id": "small", "max_model_len": True}]}}, "context", "unknown"),
        ({"metrics": ""}, "speculation", "failed"),
        ({"log": []}, "implementation", "unknown"),
        ({"log": []}, "dtype", "unknown"),
        ({"log": []}, "speculation", "unknown"),
        ({"log": changed_log("size: 23,296", "size: 1,024")}, "cache-size", "failed"),
        ({"log": changed_log("LlamaForCausalLM", "TransformersForCausalLM")}, "implementation",
         "failed"),
        ({"log": changed_log("dtype=torch.float32", "dtype=torch.bfloat16")}, "dtype", "failed"),
        ({"log": changed_log("method='ngram'", "method='eagle3'")}, "speculation", "failed"),
        ({"log": changed_log("num_spec_tokens=4", "num_spec_tokens=40")}, "speculation", "failed"),
        ({"log": changed_log(off, "None")}, "speculation", "failed"),
    ]  # fmt: skip
    wrong = [(id_, judged(**changed)[id_]) for changed, id_, verdict in rows
             if judged(**changed)[id_] != verdict]  # fmt: skip
    assert wrong == []


def test_evidence_of_the_version_is_compared_with_the_images() -> None:
    asked = ALL.model_copy(update={"version": "0.32.0"})
    rows: list[tuple[Any, str]] = [
        ({"version": "0.32.0"}, "passed"), ({"version": "0.31.0"}, "failed"), ({}, "unknown"),
        ({"version": 32}, "unknown"), (None, "unknown"), ("0.32.0", "unknown"),
    ]  # fmt: skip
    assert [judged(asked, version=told)["version"] for told, _ in rows] == [v for _, v in rows]
    assert "version" not in judged(version={"version": "0.32.0"})


def test_evidence_of_unwanted_speculation_fails() -> None:
    none = ALL.model_copy(update={"speculation": None, "draft_tokens": None})
    assert judged(none)["speculation"] == "failed"


@given(models=json_values, metrics=st.text(max_size=40))
def test_evidence_of_any_shape_never_passes(models: Any, metrics: str) -> None:
    seen = judged(models=models, metrics=metrics, log=[])
    assert Verdict.PASSED not in seen.values()


def test_engine_settings_are_read_at_the_top_level_only() -> None:
    where, found = engine_settings(LOG)
    assert re.fullmatch(r"server\.log:\d+", where)
    assert found["version"] == "0.32.0"
    assert found["max_seq_len"] == "2048"
    assert found["kv_cache_dtype"] == "auto"
    assert "reasoning_parser" not in found


def test_loading_stages_and_health() -> None:
    said = [s for line in LOG if (s := ENGINE.stage(line))]
    assert "loading shards, 2 of 3" in said
    assert said[-1] == "started"
    assert ENGINE.healthy(Answer(200, None, ""))
    assert not ENGINE.healthy(Answer(503, None, ""))
    assert not ENGINE.healthy(Answer(0, None, "connection refused"))


def test_log_of_a_real_server_has_no_bad_findings() -> None:
    assert not [finding for finding in scan(LOG, engine="vllm") if finding.bad]
