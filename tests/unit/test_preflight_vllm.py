"""vLLM's rules across settings, and the recipes that are refused, each for its own reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bakehouse import cli
from bakehouse.checkpoints.shape import ModelShape
from bakehouse.checkpoints.tensors import Tensor
from bakehouse.checkpoints.whole import Checkpoint, CheckpointFile
from bakehouse.engines.vllm import flags
from bakehouse.preflight import vllm
from bakehouse.preflight.combinations import types_in
from bakehouse.preflight.known_bad import judge, situation_of
from bakehouse.recipe.faults import Origin
from bakehouse.recipe.load import load, names
from bakehouse.recipe.template import render, trial_variables
from tests.unit.test_vllm_server import recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def said(*argv: str, **over: Any) -> str:
    command = flags.read(("vllm", "serve", "/weights/model", *argv))
    return "\n".join(c.message for c in vllm.conflicts(recipe(**over), command))


def drafts(tokens: int, method: str = "dflash") -> tuple[str, str]:
    config = {"method": method, "model": "/weights/drafter", "num_speculative_tokens": tokens}
    return "--speculative-config", json.dumps(config)


@pytest.mark.parametrize(
    ("sequences", "budget", "tokens", "fits"),
    [(256, 4096, 15, True), (256, 4095, 15, False), (256, 2048, 7, True), (256, 2048, 8, False),
     (1024, 8192, 15, False), (1024, 16384, 15, True), (1, 16, 15, True)],
)  # fmt: skip
def test_drafts_of_all_sequences_need_room(
    sequences: int, budget: int, tokens: int, fits: bool
) -> None:
    sizes = ("--max-num-seqs", str(sequences), "--max-num-batched-tokens", str(budget))
    found = said(*drafts(tokens), *sizes)
    assert (found == "") is fits
    if not fits:
        assert f"{sequences} x (1 + {tokens}) = {sequences * (1 + tokens)}" in found


@pytest.mark.parametrize(
    "sizes", [(), ("--max-num-seqs", "256"), ("--max-num-batched-tokens", "8192")]
)
def test_sizes_that_are_left_to_the_engine_are_refused(sizes: tuple[str, ...]) -> None:
    assert "left to the engine" in said(*drafts(15), *sizes)


def test_other_methods_stage_nothing() -> None:
    assert said(*drafts(4, "eagle3")) == ""
    assert said("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}') == ""


def test_what_stands_in_two_places_is_the_same() -> None:
    serve = {"command": "x", "context": 4096, "kv_cache": "fp8"}
    found = said("--max-model-len", "8192", serve=serve)
    assert "--max-model-len is 8192, and serve.context is 4096" in found
    assert "--kv-cache-dtype is auto, and serve.kv_cache is fp8" in found


@pytest.mark.parametrize(
    ("container", "fits"),
    [({}, False), ({"shm_size": "64MiB"}, False), ({"shm_size": "16GiB"}, True),
     ({"ipc": "host"}, True)],
)  # fmt: skip
def test_several_workers_need_shared_memory(container: dict[str, Any], fits: bool) -> None:
    assert (said("-tp", "2", container=container) == "") is fits
    assert said("-tp", "1", container=container) == ""


REFUSED = {
    "muse-glimmer-transformers": "known to be bad, vllm-transformers-impl:",
    "muse-glimmer-fp8": "known to be bad, vllm-deep-gemm-fp8-gb10:",
    "muse-glimmer-fp8-no-deep-gemm": "known to be bad, vllm-no-deep-gemm-gb10:",
    "muse-glimmer-dflash-no-budget": "dflash needs max_num_seqs x (1 + num_speculative_tokens)",
}


@pytest.mark.parametrize("name", names(RECIPES / "refused"))
def test_each_refused_recipe_has_its_own_reason(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = RECIPES / "refused" / f"{name}.yaml"
    code = cli.main("check", {"recipe": str(path)}, json=True, recipes=RECIPES)
    found = json.loads(capsys.readouterr().out)["result"]["recipes"][0]["faults"]
    assert code == 2
    assert [fault["message"].startswith(REFUSED[name]) for fault in found] == [True]


def test_no_refused_recipe_is_forgotten() -> None:
    assert set(names(RECIPES / "refused")) == set(REFUSED)


@pytest.mark.parametrize(("name", "depth"), [("", 15), ("-4", 4)])
def test_the_depths_of_the_recipes(name: str, depth: int) -> None:
    made = load(RECIPES / f"muse-glimmer-dflash{name}.yaml").recipe
    assert made.serve.vars == {"sequences": 256, "batch": 8192, "depth": depth}
    assert made.asked.suites == ("facts", "fluency", "likelihood", "speculation")
    assert made.container
    assert (made.container.ipc, made.container.shm_size) == ("host", 16 * 2**30)


PLACES = {
    "muse-glimmer-transformers": ("refused/muse-glimmer-transformers.yaml", "command: |"),
    "muse-glimmer-fp8": ("refused/muse-glimmer-fp8.yaml", "RedHatAI/Muse-Glimmer-30B-FP8-block"),
    "muse-glimmer-fp8-no-deep-gemm": (
        "refused/muse-glimmer-fp8-no-deep-gemm.yaml", "VLLM_USE_DEEP_GEMM",
    ),
    "muse-glimmer-dflash-no-budget": ("refused/muse-glimmer-dflash-no-budget.yaml", "command: |"),
}  # fmt: skip
NAMES_IT = {
    "muse-glimmer-transformers": "--model-impl transformers",
    "muse-glimmer-fp8": "the weights are FP8",
    "muse-glimmer-fp8-no-deep-gemm": "VLLM_USE_DEEP_GEMM=0",
    "muse-glimmer-dflash-no-budget": "--max-num-seqs and --max-num-batched-tokens",
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refusal_names_what_the_recipe_wrote_and_stands_there(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = RECIPES / "refused" / f"{name}.yaml"
    cli.main("check", {"recipe": str(path)}, json=True, recipes=RECIPES)
    (fault,) = json.loads(capsys.readouterr().out)["result"]["recipes"][0]["faults"]
    file, text = PLACES[name]
    assert fault["file"].endswith(file), fault
    assert text in (RECIPES / file).read_text().splitlines()[fault["line"] - 1]
    assert NAMES_IT[name] in fault["message"]


@pytest.mark.parametrize(
    "written",
    ["--model-impl transformers", "--model_impl=transformers", "--model-impl 'transformers'",
     '"--model-impl" transformers', "--model-impl {{ vars.impl }}", "--model-impl=trans''formers"],
)  # fmt: skip
def test_a_bad_flag_is_seen_however_it_is_written(written: str) -> None:
    serve = {"command": f"vllm serve /weights/model {written}", "vars": {"impl": "transformers"}}
    made = recipe(serve=serve)
    command = render(made.serve.command, trial_variables(made), origin=Origin("r.yaml"))
    ids = [one.id for one in judge(made, situation_of(made, command), "r.yaml")]
    assert ids == ["known-bad.vllm-transformers-impl"]


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
def test_headers_tell_the_format_whatever_the_folder_is_called(
    types: tuple[str, ...], quantised: Any, bad: str
) -> None:
    tensors = tuple(
        Tensor(f"layers.0.w{'_scale' if 'scale' in one else ''}", (4,), one.split()[0], 0, 4)
        for one in types
    )
    files = (CheckpointFile("m.safetensors", 9, tensors),)
    config = {"quantization_config": quantised} if quantised else {}
    known = types_in([Checkpoint("safetensors", files, ModelShape("", ()), config)])
    made = recipe(host=GB10, container={"gpus": "all"})
    found = judge(made, situation_of(made, tensor_types=known), "r.yaml")
    assert [one.id for one in found] == ([f"known-bad.{bad}"] if bad else [])
