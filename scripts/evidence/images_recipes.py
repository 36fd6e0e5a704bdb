"""The recipes that are built and served there, written beside those of the repository."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from scripts.evidence.images_machine import StandIns

CUDA = "smollm2-cuda-image"
VLLM = "smollm2-vllm"
BUILDER, RUNTIME = "bakehouse-evidence/cuda-devel:13.0", "bakehouse-evidence/cuda-runtime:13.0"
IMAGE = "bakehouse-evidence/vllm:0.26.0"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
ROPE = {"rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"}}
ENV = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
"""FlashInfer is not among what was carried."""
SUITES = ["facts", "fluency", "likelihood", "json", "determinism", "concurrency"]
COMMAND = (
    "{{ server }} serve {{ weights.model.path }} --dtype {{ vars.dtype }} "
    "--max-model-len {{ serve.context }} --max-num-seqs 8 --max-num-batched-tokens 2048 "
)
DFLASH = (
    "{{ server }} serve {{ weights.model.path }} --max-model-len {{ serve.context }} "
    "--max-num-seqs 256 --max-num-batched-tokens 2048 --speculative-config {{ "
    '{"method": "dflash", "model": weights.drafter.path, "num_speculative_tokens": 15} '
    "| tojson }}"
)
EAGER = {"TORCHDYNAMO_DISABLE": "1"}
"""Without it `prompt_logprobs` are compiled even in eager mode."""


def write(folder: Path, model: Path, stands: StandIns) -> None:
    """Write all of them; `model` is the folder with the safetensors."""
    made = {CUDA: cuda(stands), **vllm(folder, model, stands)}
    for name, data in made.items():
        (folder / f"{name}.yaml").write_text(json.dumps({**data, "name": name}, indent=1))


def cuda(stands: StandIns) -> dict[str, Any]:
    """llama.cpp with CUDA in an image, for the H100 and the H200."""
    data: dict[str, Any] = {
        "include": "smollm2-cuda.yaml",
        "description": "SmolLM2 135M Instruct, Q4_1, llama.cpp with CUDA built in a container",
        "build": {
            "where": "docker",
            "bases": {"builder": {"x86_64": BUILDER}, "runtime": {"x86_64": RUNTIME}},
            "cuda": {"version": "13.0", "provide": "host"},
            "cmake": {"CMAKE_CUDA_ARCHITECTURES": "90-real"},
        },
        "serve": {"port": 0},
    }
    return data | ({"container": {"gpus": "all"}} if stands.gpu else {})


def vllm(folder: Path, model: Path, stands: StandIns) -> dict[str, dict[str, Any]]:
    """VLLM: eager in bfloat16, the same in float32, wrong ones, and compiled with CUDA graphs."""
    questions = YAML(typ="safe").load(folder / "smollm2-cpu.yaml")["probe"]

    def recipe(more: str, **over: Any) -> dict[str, Any]:
        return _vllm(more, model, questions, stands, **over)

    eager = "--enforce-eager "
    ngram = f"--speculative-config '{json.dumps(NGRAM)}' "
    rope = f"{eager}--hf-overrides '{json.dumps(ROPE)}'"
    method = f"{eager}--speculative-config '{json.dumps({'method': 'nonsense'})}'"
    budget = recipe("", speculation="dflash")
    budget["weights"]["drafter"] = {"path": str(model)}
    budget["serve"]["command"] = DFLASH
    return {
        VLLM: recipe(eager + ngram),
        f"{VLLM}-f32": recipe(eager + ngram, dtype="float32"),
        f"{VLLM}-compiled": recipe(ngram, env=ENV),
        f"{VLLM}-rope": recipe(rope, speculation="none"),
        f"{VLLM}-rope-f32": recipe(rope, speculation="none", dtype="float32"),
        f"{VLLM}-budget": budget,
        f"{VLLM}-method": recipe(method, speculation="nonsense"),
    }


def _vllm(
    more: str,
    model: Path,
    questions: Mapping[str, Any],
    stands: StandIns,
    *,
    dtype: str = "bfloat16",
    speculation: str = "ngram",
    env: Mapping[str, str] = {**ENV, **EAGER},
) -> dict[str, Any]:
    container: dict[str, Any] = {"shm_size": "1GiB", "env": dict(env)}
    if stands.gpu:
        container["gpus"] = "all"
        more = f"--gpu-memory-utilization 0.3 {more}"
    else:
        container["env"]["VLLM_CPU_KVCACHE_SPACE"] = "1"
    suites = [*SUITES, "speculation"] if speculation == "ngram" else SUITES[:3]
    return {
        "schema": 1,
        "description": "SmolLM2 135M Instruct in vLLM 0.26.0",
        "engine": "vllm",
        "image": {"ref": {"x86_64": IMAGE}},
        "container": container,
        "weights": {"model": {"path": str(model)}},
        "serve": {
            "port": 0, "context": 2048, "ready_timeout": "4m", "stop_timeout": "20s",
            "vars": {"dtype": dtype}, "command": COMMAND + more, "speculation": speculation,
        },
        "probe": {**questions, "suites": suites},
    }  # fmt: skip
