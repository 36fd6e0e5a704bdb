"""The shipped recipe of a model with its own DFlash drafter, end to end.

The real vLLM for the CPU stands in for the image, under the recipe's own name; the drafter comes
from a Hub on loopback, under its own name; the weights are tiny and random. What differs from the
recipe is that there is no GPU: its compute capability, and `container.gpus`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bakehouse import cli
from bakehouse.lock import Lock
from bakehouse.paths import Places
from bakehouse.server.status import folders, stop
from tests.support import tiny_glimmer
from tests.support.docker_engine import Engine, LocalRegistry, make_image, push
from tests.support.hubhost import serve_hub
from tests.support.recipes import write_recipe
from tests.support.vllm_image import SITE

pytestmark = [pytest.mark.integration, pytest.mark.docker, pytest.mark.timeout(600)]

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
NAME = "muse-glimmer-dflash"
IMAGE = "vllm/vllm-openai:muse-glimmer-x86_64-cu130"
ARM = "vllm/vllm-openai", "muse-glimmer-arm64-cu130"
DRAFTER = "meta-models/Muse-Glimmer-30B-assistant"
WEIGHTS = "Muse-Glimmer-30B-BF16-resharded"
ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
STAND_IN = {
    "torchvision/__init__.py": "__version__ = '0.0.0'\n",
    "torchvision/io/__init__.py": "ImageReadMode = decode_image = None\n",
    "torchvision/transforms/__init__.py": (
        "import enum\nfrom . import functional\n"
        "names = 'NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS'\n"
        "InterpolationMode = enum.Enum('InterpolationMode', names)\n"
    ),
    "torchvision/transforms/functional.py": (
        "def __getattr__(name):\n"
        "    if name.startswith('__'):\n        raise AttributeError(name)\n"
    ),
    "torchvision/transforms/v2/__init__.py": "from . import functional\n",
    "torchvision/transforms/v2/functional.py": "from torchvision.transforms.functional import *\n",
}
"""Replaces torchvision, which has no CPU build on the package index."""


class RecipeCopy:
    """A copy of the shipped recipes, and all that they name."""

    def __init__(self, folder: Path, engine: Engine, arm: str, capsys: Any) -> None:
        self.folder, self.engine, self.arm, self.capsys = folder, engine, arm, capsys
        self.recipes = folder / "recipes"
        shutil.copytree(RECIPES, self.recipes)
        over = (
            f"include: {NAME}.yaml\nimage: {{ref: {{aarch64: '{arm}'}}}}\n"
            "host: {compute_capability: null, memory: null, memory_size: null}\n"
            f"container: {{gpus: null, ipc: null, env: {json.dumps(ENV)}}}\n"
            "serve: {port: 0, ready_timeout: 6m}\n"
        )
        (self.recipes / "here.yaml").write_text(over)

    def call(self, task: str, name: str = "here", **options: Any) -> tuple[int, dict[str, Any]]:
        self.capsys.readouterr()
        code = cli.main(task, {"recipe": name, **options}, json=True, recipes=self.recipes)
        return code, json.loads(self.capsys.readouterr().out)


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with serve_hub() as made:
        files = tiny_glimmer.drafter("MuseGlimmerAssistantModel", "muse_glimmer_assistant")
        made.repo(DRAFTER).commit(files, lfs=(".safetensors",))
        yield made.url


@pytest.fixture
def shipped(
    tmp_path: Path, docker_engine: Engine, docker_registry: LocalRegistry, hub: str,
    vllm_image: str, vllm_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any,
) -> Iterator[RecipeCopy]:  # fmt: skip
    monkeypatch.setenv("BAKEHOUSE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", hub)
    for name, value in docker_engine.environment.items():
        if name.startswith("DOCKER_"):
            monkeypatch.setenv(name, value)
    repository, tag = ARM
    make_image(docker_engine, "glimmer/arm:1", "LABEL a=arm")
    push(docker_engine, "glimmer/arm:1", f"{docker_registry.host}/{repository}:x86")
    docker_registry.for_arm(repository, "x86", tag)
    docker_engine.cli("tag", vllm_image, IMAGE)
    tiny_glimmer.glimmer(tmp_path / "weights" / WEIGHTS, vllm_model)
    yield RecipeCopy(tmp_path, docker_engine, f"{docker_registry.host}/{repository}:{tag}", capsys)
    for one in folders(Places.from_environment(), boxed=True):
        stop(one)
    docker_engine.port().remove_image(IMAGE)


def with_stand_in(engine: Engine, folder: Path, image: str) -> None:
    """Give the recipe's image a stand-in for torchvision, which the model's code imports."""
    for name, text in STAND_IN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    box = engine.cli("create", image)
    engine.cli("cp", str(folder / "torchvision"), f"{box}:/{SITE}/torchvision")
    engine.cli("commit", box, IMAGE)
    engine.cli("rm", box)


def seen(document: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {one["id"]: (one["verdict"], one["observed"]) for one in document["checks"]}


def test_dflash_recipe_from_check_to_serve(shipped: RecipeCopy, vllm_image: str) -> None:
    for task in ("check", "lock", "plan", "fetch"):
        code, document = shipped.call(task)
        assert code == 0, (task, document["error"])
    lock = Lock.model_validate_json((shipped.recipes / "here.lock.json").read_bytes())
    assert lock.weights["drafter"].origin == f"hub:{DRAFTER}"
    assert {arch: pin.reference for arch, pin in lock.images["image"].items()} == {
        "x86_64": IMAGE, "aarch64": shipped.arm,
    }  # fmt: skip

    # As it is the image has the architecture registered, and cannot import it.
    code, document = shipped.call("build")
    assert code == 6
    assert "No module named 'torchvision'" in document["error"]["where"]

    with_stand_in(shipped.engine, shipped.folder / "over", vllm_image)
    assert shipped.call("build")[0] == 6  # the tag means another image, and the pin the same one
    assert shipped.call("lock", update=True)[0] == 0
    code, document = shipped.call("build")
    assert code == 0, document["error"]
    told = seen(document)
    assert told["image.model"][1].startswith("MuseGlimmerForConditionalGeneration (vllm.")
    assert told["image.drafter"][1].startswith("DFlashMuseGlimmerAssistantModel (vllm.")
    assert told["image.speculation"] == ("passed", "dflash")

    code, document = shipped.call("serve", dry_run=True)
    assert code == 0, document["error"]
    argv = document["result"]["serve"]["argv"]
    assert argv[:3] == ["vllm", "serve", "/weights/model"]
    assert json.loads(argv[argv.index("--speculative-config") + 1]) == {
        "method": "dflash", "model": "/weights/drafter", "num_speculative_tokens": 15,
    }  # fmt: skip
    mounted = {m["target"] for m in document["result"]["serve"]["container"]["mounts"]}
    assert {"/weights/drafter/model.safetensors", "/weights/model/config.json"} <= mounted

    # Its drafter takes the newer model runner, which takes Triton, which a CPU does not have.
    code, document = shipped.call("serve", accept_memory_risk="measured with the real weights")
    assert code == 7
    assert "Target model does not have 'model' attribute" in document["error"]["where"]


def test_dflash_drafter_runs_and_random_weights_are_refused(
    shipped: RecipeCopy, vllm_image: str, vllm_model: Path
) -> None:
    """On the CPU vLLM drafts by DFlash for a Qwen3; what it says is noise, at HTTP 200."""
    model = tiny_glimmer.qwen(shipped.folder / "qwen", vllm_model)
    folder = shipped.folder / "drafter"
    folder.mkdir()
    for name, data in tiny_glimmer.drafter("DFlashDraftModel", "qwen3").items():
        (folder / name).write_bytes(data)
    config = '{"method": "dflash", "model": "/weights/drafter", "num_speculative_tokens": 4}'
    write_recipe(shipped.recipes, {
        "schema": 1, "name": "qwen", "engine": "vllm", "image": {"ref": {"x86_64": vllm_image}},
        "container": {"shm_size": "1GiB", "env": ENV},
        "weights": {"model": {"path": str(model)}, "drafter": {"path": str(folder)}},
        "serve": {
            "port": 0, "context": 2048, "speculation": "dflash", "ready_timeout": "6m",
            "command": "{{ server }} serve {{ weights.model.path }} --enforce-eager "
            "--max-model-len 2048 --max-num-seqs 4 --max-num-batched-tokens 2048 "
            f"--speculative-config '{config}'",
        },
        "probe": {"suites": ["facts", "speculation"]},
    }, "qwen")  # fmt: skip
    code, document = shipped.call("serve", "qwen")
    told = seen(document)
    assert code == 8, document["error"]
    assert told["speculation"] == ("passed", "dflash, 4 tokens")
    assert told["version"] == ("passed", "0.32.0")
    assert told["probe.facts"][0] == "failed"
    assert told["probe.speculation.acceptance"][0] == "failed"
