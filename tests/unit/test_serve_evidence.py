"""Evidence of llama-server: its endpoints and log; any field may be missing or of another type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bakehouse.engines.base import Answer
from bakehouse.engines.llamacpp.command import Features
from bakehouse.engines.llamacpp.engine import LlamaCpp
from bakehouse.errors import BakehouseError
from bakehouse.logscan.findings import exit_code
from bakehouse.logscan.scanner import scan
from bakehouse.models import Verdict
from bakehouse.server.processes import Process
from bakehouse.server.verification import ServerHandle, VerificationResult, signature_check

ENGINE = LlamaCpp()
MODELS = {
    "models": [{"name": "n", "capabilities": ["completion", "multimodal"]}],
    "data": [{"id": "n", "aliases": ["n", "~bakehouse-1"]}],
}
PROPS = {"model_path": "/w/x.gguf", "build_info": "b1-abc", "chat_template": "x", "total_slots": 2}
SLOTS = [{"n_ctx": 512, "speculative": True}, {"n_ctx": 512, "speculative": True}]
LOG = [
    "load_tensors: offloaded 31/31 layers to GPU",
    "llama_context: flash_attn            = auto",
    "resolve_fused_ops: Flash Attention enabled",
]
ALL = Features(
    name="n", model_path="/w/x.gguf", build_info="b1-abc", slots=2, context=1024, chat=True,
    multimodal=True, speculation="draft-mtp", gpu_layers=99, flash_attn="on",
)  # fmt: skip

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def judged(asked: Features = ALL, **changed: Any) -> dict[str, Verdict]:
    given_ = {"models": MODELS, "props": PROPS, "slots": SLOTS, "log": LOG, **changed}
    bodies = zip(ENGINE.evidence, ("models", "props", "slots"), strict=True)
    answers = {path: Answer(200, given_[name], "") for path, name in bodies}
    return {c.id: c.verdict for c in ENGINE.check_features(asked, answers, given_["log"])}


def test_evidence_of_a_complete_server_passes() -> None:
    seen = judged()
    assert set(seen) == {
        "model-name", "model-loaded", "model-path", "slots", "no-config-file", "build", "context",
        "chat-template", "multimodal", "speculation", "gpu-layers", "flash-attention",
    }  # fmt: skip
    assert set(seen.values()) == {Verdict.PASSED}


DIFFERENT: list[tuple[dict[str, Any], str, str]] = [
    ({"models": {"data": [{"id": "other"}]}}, "model-name", "failed"),
    ({"models": {}}, "model-name", "unknown"),
    ({"models": {"data": []}}, "model-loaded", "failed"),
    ({"props": {**PROPS, "role": "router"}}, "model-loaded", "failed"),
    ({"props": {**PROPS, "model_path": "/w/y.gguf"}}, "model-path", "failed"),
    ({"props": {}}, "model-path", "unknown"),
    ({"props": {**PROPS, "build_info": "b1-abd"}}, "build", "failed"),
    ({"props": {**PROPS, "build_info": 7}}, "build", "unknown"),
    ({"props": {**PROPS, "chat_template": ""}}, "chat-template", "unknown"),
    ({"slots": SLOTS[:1]}, "slots", "failed"),
    ({"slots": SLOTS[:1]}, "context", "failed"),
    ({"slots": None}, "slots", "unknown"),
    ({"slots": [{"n_ctx": 512}, {}]}, "context", "unknown"),
    ({"slots": [{"speculative": True}, {"speculative": False}]}, "speculation", "failed"),
    ({"slots": [{}, {}]}, "speculation", "unknown"),
    ({"models": {**MODELS, "models": [{"capabilities": ["completion"]}]}}, "multimodal",
     "failed"),
    ({"models": {"data": MODELS["data"]}}, "multimodal", "unknown"),
    ({"log": ["load_tensors: offloaded 12/31 layers to GPU"]}, "gpu-layers", "failed"),
    ({"log": []}, "gpu-layers", "unknown"),
    ({"log": ["llama_context: flash_attn = disabled"]}, "flash-attention", "failed"),
    ({"log": ["llama_context: flash_attn = auto"]}, "flash-attention", "unknown"),
    ({"log": []}, "no-config-file", "unknown"),
    ({"log": ["using config file: /etc/llama.cpp/config.ini"]}, "no-config-file", "failed"),
]  # fmt: skip


def test_evidence_that_is_missing_or_different_does_not_pass() -> None:
    got = [judged(**changed)[id_] for changed, id_, _ in DIFFERENT]
    assert got == [verdict for _, _, verdict in DIFFERENT]


@given(models=json_values, props=json_values, slots=json_values)
def test_evidence_of_any_shape_breaks_nothing_and_passes_nothing(
    models: Any, props: Any, slots: Any
) -> None:
    seen = judged(models=models, props=props, slots=slots, log=[])
    passed = {id_ for id_, verdict in seen.items() if verdict is Verdict.PASSED}
    assert passed <= {"slots"}


def test_evidence_of_flash_attention_off() -> None:
    off = ALL.model_copy(update={"flash_attn": "off"})
    assert judged(off)["flash-attention"] == "failed"
    assert judged(off, log=["llama_context: flash_attn = disabled"])["flash-attention"] == "passed"


def test_evidence_of_a_unified_cache() -> None:
    whole = [{"n_ctx": 1024, "speculative": True}] * 2
    assert judged(slots=whole)["context"] == "passed"


def test_health_needs_status_200_and_ok() -> None:
    answers: list[tuple[int, Any]] = [
        (200, {"status": "ok"}), (200, {"status": "no slot available"}), (200, None), (200, []),
        (503, {"status": "ok"}),
    ]  # fmt: skip
    assert [ENGINE.healthy(Answer(*one, "")) for one in answers] == [
        True,
        False,
        False,
        False,
        False,
    ]


def test_stage_of_a_log_line() -> None:
    assert ENGINE.stage("srv    load_model: loading model '/w'") == "opening the model"
    assert ENGINE.stage("cmn  common_init_: warming up the model") == "warming up"
    assert ENGINE.stage("anything else") is None


def test_log_findings_give_the_exit_code(tmp_path: Path) -> None:
    """A log alone cannot say whether a lost feature is missed: `diagnose` counts it as wrong.

    `serve` knows that the recipe wants the feature: the server lacks it, so it is not healthy.
    """
    lines = {
        "ggml_cuda_init: failed to initialize CUDA: no CUDA-capable device is detected": (8, 7),
        "CUDA error: an illegal memory access was encountered": (7, 7),
        "llama_model_load: vocab type is missing, GENERATION QUALITY WILL BE DEGRADED!": (8, 8),
    }
    server = ServerHandle(tmp_path, Process(1, 1), "n", "127.0.0.1", 1, "llama.cpp")
    got = {}
    for line in lines:
        (tmp_path / "server.log").write_text(f"{line}\n")
        with pytest.raises(BakehouseError) as error:
            VerificationResult().add(server, [signature_check([line], "llama.cpp")])
        got[line] = (exit_code(scan([line], engine="llama.cpp")), error.value.exit_code)
    assert got == lines
