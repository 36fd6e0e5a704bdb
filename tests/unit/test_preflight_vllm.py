"""vLLM's rules across settings, and the refused recipes, each with its own reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bakehouse import cli
from bakehouse.checkpoints.checkpoint import Checkpoint, CheckpointFile
from bakehouse.checkpoints.gguf import Tensor
from bakehouse.checkpoints.model_shape import ModelShape
from bakehouse.engines.vllm import command as vllm_command
from bakehouse.engines.vllm import engine
from bakehouse.preflight.known_bad import judge, situation_of
from bakehouse.preflight.rules import types_in
from bakehouse.recipe.loader import load, names
from bakehouse.recipe.template import render, trial_variables
from bakehouse.recipe.types import Origin
from tests.support.vllm_commands import vllm_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def said(*argv: str, **over: Any) -> str:
    command = vllm_command.parse(("vllm", "serve", "/weights/model", *argv))
    return "\n".join(c.message for c in engine.conflicts(vllm_recipe(**over), command))


def drafts(tokens: int, method: str = "dflash") -> tuple[str, str]:
    config = {"method": method, "model": "/weights/drafter", "num_speculative_tokens": tokens}
    return "--speculative-config", json.dumps(config)


def test_dflash_needs_room_for_all_drafts() -> None:
    rows = ((256, 4096, 15, True), (256, 4095, 15, False), (256, 2048, 7, True),
            (256, 2048, 8, False), (1024, 8192, 15, False), (1024, 16384, 15, True),
            (1, 16, 15, True))  # fmt: skip
    for sequences, budget, tokens, fits in rows:
        sizes = ("--max-num-seqs", str(sequences), "--max-num-batched-tokens", str(budget))
        found = said(*drafts(tokens), *sizes)
        sum_ = f"{sequences} x (1 + {tokens}) = {sequences * (1 + tokens)}"
        assert found == "" if fits else sum_ in found
    for given in ((), ("--max-num-seqs", "256"), ("--max-num-batched-tokens", "8192")):
        assert "does not set" in said(*drafts(15), *given)


def test_other_draft_methods_need_no_room() -> None:
    assert said(*drafts(4, "eagle3")) == ""
    assert said("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}') == ""


def test_command_and_keys_must_agree() -> None:
    serve = {"command": "x", "context": 4096, "kv_cache": "fp8"}
    found = said("--max-model-len", "8192", serve=serve)
    assert "--max-model-len is 8192, but serve.context is 4096" in found
    assert "--kv-cache-dtype is auto, but serve.kv_cache is fp8" in found


def test_several_workers_need_shared_memory() -> None:
    rows: list[tuple[dict[str, Any], bool]] = [
        ({}, False), ({"shm_size": "64MiB"}, False), ({"shm_size": "16GiB"}, True),
        ({"ipc": "host"}, True),
    ]  # fmt: skip
    for container, fits in rows:
        assert (said("-tp", "2", container=container) == "") is fits, container
        assert said("-tp", "1", container=container) == ""


REFUSED = {
    "muse-glimmer-transformers": (
        "known to be bad, vllm-transformers-impl:", "--model-impl transformers", "command: |",
    ),
    "muse-glimmer-fp8": (
        "known to be bad, vllm-deep-gemm-fp8-gb10:", "the weights are FP8",
        "RedHatAI/Muse-Glimmer-30B-FP8-block",
    ),
    "muse-glimmer-fp8-no-deep-gemm": (
        "known to be bad, vllm-no-deep-gemm-gb10:", "VLLM_USE_DEEP_GEMM=0", "VLLM_USE_DEEP_GEMM",
    ),
    "muse-glimmer-dflash-no-budget": (
        "dflash needs max_num_seqs x (1 + num_speculative_tokens)",
        "--max-num-seqs and --max-num-batched-tokens", "command: |",
    ),
}  # fmt: skip
"""Of each refused recipe: how the message begins, what it names, and the line it points at."""


@pytest.mark.parametrize("name", names(RECIPES / "refused"))
def test_refused_recipe_names_its_own_reason_and_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = RECIPES / "refused" / f"{name}.yaml"
    code = cli.main("check", {"recipe": str(path)}, json=True, recipes=RECIPES)
    (fault,) = json.loads(capsys.readouterr().out)["result"]["recipes"][0]["faults"]
    begin, named, line = REFUSED[name]
    assert code == 2
    assert fault["message"].startswith(begin)
    assert named in fault["message"]
    assert fault["file"].endswith(f"refused/{name}.yaml"), fault
    assert line in path.read_text().splitlines()[fault["line"] - 1]


def test_refused_recipes_are_all_listed() -> None:
    assert set(names(RECIPES / "refused")) == set(REFUSED)


def test_shipped_dflash_recipes_draft_as_measured() -> None:
    for name, depth in (("", 15), ("-4", 4)):
        made = load(RECIPES / f"muse-glimmer-dflash{name}.yaml").recipe
        assert made.serve.vars == {"sequences": 256, "batch": 8192, "depth": depth}
        assert made.asked.suites == ("facts", "fluency", "likelihood", "speculation")
        assert made.container
        assert (made.container.ipc, made.container.shm_size) == ("host", 16 * 2**30)


def test_bad_flag_is_found_in_any_spelling() -> None:
    for written in (
        "--model-impl transformers", "--model_impl=transformers", "--model-impl 'transformers'",
        '"--model-impl" transformers', "--model-impl {{ vars.impl }}",
        "--model-impl=trans''formers",
    ):  # fmt: skip
        command = f"vllm serve /weights/model {written}"
        made = vllm_recipe(serve={"command": command, "vars": {"impl": "transformers"}})
        argv = render(made.serve.command, trial_variables(made), origin=Origin("r.yaml"))
        ids = [one.id for one in judge(made, situation_of(made, argv), "r.yaml")]
        assert ids == ["known-bad.vllm-transformers-impl"], written


GB10 = {"compute_capability": "12.1"}


@pytest.mark.parametrize(
    ("types", "quantised", "bad"),
    [
        (("F8_E4M3", "F32"), None, "vllm-deep-gemm-fp8-gb10"),
        (("BF16",), {"quant_method": "fp8"}, "vllm-deep-gemm-fp8-gb10"),
        (("U8", "BF16"), {"quant_method": "mxfp4"}, "vllm-mxfp4-gb10"),
        (("U8", "BF16"), {"format": "nvfp4-pack-quantized"}, "vllm-nvfp4-moe-gb10"),
        (("U8", "F8_E4M3 scale"), {"quant_algo": "NVFP4"}, "vllm-nvfp4-moe-gb10"),
        (("BF16",), None, ""),
        (("BF16",), {"quant_method": "awq"}, ""),
        (("I32", "F16"), {"quant_method": 8}, ""),
    ],
)
def test_weight_format_comes_from_the_headers(
    types: tuple[str, ...], quantised: Any, bad: str
) -> None:
    tensors = tuple(
        Tensor(f"layers.0.w{'_scale' if 'scale' in one else ''}", (4,), one.split()[0], 0, 4)
        for one in types
    )
    files = (CheckpointFile("m.safetensors", 9, tensors),)
    config = {"quantization_config": quantised} if quantised else {}
    known = types_in([Checkpoint("safetensors", files, ModelShape("", ()), config)])
    made = vllm_recipe(host=GB10, container={"gpus": "all"})
    found = judge(made, situation_of(made, tensor_types=known), "r.yaml")
    assert [one.id for one in found] == ([f"known-bad.{bad}"] if bad else [])
