"""Real vLLM on the CPU with a real small model, through the tasks as a user calls them.

One server at a time: each takes 3 to 4 GB, and half a minute to a minute until it is ready.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from bakehouse import cli
from bakehouse.paths import Places
from bakehouse.server.status import folders, stop
from tests.support.docker_engine import Engine
from tests.support.recipes import write_recipe

pytestmark = [pytest.mark.integration, pytest.mark.docker, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
TOOLS = "--enable-auto-tool-choice --tool-call-parser hermes"
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}'
COMMAND = (
    "{{ server }} serve {{ weights.model.path }} --dtype {{ vars.dtype }} --enforce-eager "
    "--max-model-len {{ serve.context }} --max-num-seqs 4 --max-num-batched-tokens 2048"
)
ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The image has no C++ compiler; torch.compile is used for prompt_logprobs even in eager mode.
    "TORCHDYNAMO_DISABLE": "1",
}


class House:
    """A home of its own; recipes lie together, so that they share golden values."""

    def __init__(self, folder: Path, image: str, model: Path) -> None:
        self.folder = folder
        self.image = image
        self.model = model

    def write(
        self, name: str, *, model: Path | None = None, more: str = "", serve: Any = (),
        container: Any = (), dtype: str = "float32", suites: Iterable[str] = (),
    ) -> None:  # fmt: skip
        questions = YAML(typ="safe").load(ROOT / "recipes" / "smollm2-cpu.yaml")["probe"]
        asked = [*(suites or ("facts", "fluency", "likelihood"))]
        data = {
            "schema": 1, "name": name, "engine": "vllm", "image": {"ref": {"x86_64": self.image}},
            "container": {"shm_size": "1GiB", "env": ENV, **dict(container)},
            "weights": {"model": {"path": str(model or self.model)}},
            "serve": {
                "port": 0, "context": 2048, "ready_timeout": "5m", "vars": {"dtype": dtype},
                "command": f"{COMMAND} {more}", **dict(serve),
            },
            "probe": {**questions, "suites": asked + ["speculation"] * ("ngram" in more)},
        }  # fmt: skip
        write_recipe(self.folder, data, name)

    def call(self, capsys: Any, task: str, name: str, **options: Any) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = cli.main(task, {"recipe": name, **options}, json=True, recipes=self.folder)
        return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def house(
    tmp_path_factory: pytest.TempPathFactory, docker_engine: Engine, vllm_image: str,
    vllm_model: Path,
) -> Iterator[House]:  # fmt: skip
    folder = tmp_path_factory.mktemp("vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAKEHOUSE_HOME", str(folder / "home"))
        for name, value in docker_engine.environment.items():
            if name.startswith("DOCKER_"):
                patch.setenv(name, value)
        yield House(folder / "recipes", vllm_image, vllm_model)
        for one in folders(Places.from_environment(), boxed=True):
            stop(one)


def verdicts(document: dict[str, Any]) -> dict[str, str]:
    return {one["id"]: one["verdict"] for one in document["checks"]}


def seen(document: dict[str, Any], id_: str) -> str:
    return str(next(c["observed"] for c in document["checks"] if c["id"] == id_))


def test_vllm_serves_with_speculation_and_stops(house: House, capsys: Any) -> None:
    more = f"{TOOLS} --speculative-config '{NGRAM}'"
    every = ("facts", "fluency", "likelihood", "json", "tools", "determinism", "concurrency")
    house.write("spec", more=more, serve={"speculation": "ngram"}, suites=every)
    code, document = house.call(capsys, "serve", "spec")

    assert code == 0, document["error"]
    assert set(verdicts(document).values()) == {"passed"}
    assert seen(document, "implementation") == "LlamaForCausalLM"
    assert seen(document, "speculation") == "ngram, 4 tokens"
    assert "96 of 96 tokens the same" in seen(document, "probe.speculation.same")
    measured = {suite["suite"]: suite for suite in document["result"]["suites"]}
    assert measured["speculation"]["figures"]["acceptance"] > 0.5
    assert 2.0 < measured["likelihood"]["figures"]["nats_per_token"] < 3.2
    code, _ = house.call(capsys, "probe", "spec", accept_golden=True)
    assert code == 0
    house.write("spec", more=more, serve={"speculation": "ngram"}, suites=("facts", "reference"))
    code, document = house.call(capsys, "probe", "spec")
    assert code == 0, document["error"]
    assert seen(document, "probe.reference.tokens") == "100%"
    code, document = house.call(capsys, "stop", "spec")
    assert (code, document["result"]["servers"][0]["killed"]) == (0, False)


def test_vllm_with_a_wrong_rotary_base_is_refused_by_the_gate(house: House, capsys: Any) -> None:
    """Rotary positions of another base: HTTP 200, the usual speed, fluent text, a wrong model."""
    if not (house.folder / "golden").is_dir():
        pytest.skip("the golden values are made by the test before this one")
    rope = '{"rope_parameters": {"rope_theta": 20000.0, "rope_type": "default"}}'
    house.write("rope", more=f"--hf-overrides '{rope}'")
    code, document = house.call(capsys, "serve", "rope")
    assert code == 8, document["checks"]
    wrong = {id_ for id_, verdict in verdicts(document).items() if verdict != "passed"}
    assert "probe.likelihood.golden" in wrong
    assert all(id_.startswith("probe.") for id_ in wrong), wrong


def changed_model(house: House, name: str, **config: Any) -> Path:
    folder = house.folder / name
    shutil.copytree(house.model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


@pytest.mark.parametrize(
    ("name", "over", "says"),
    [
        ("longer", {"serve": {"context": 16384}}, "greater than the derived max_model_len"),
        ("shm", {"container": {"shm_size": "64MiB"}}, "/dev/shm"),
        ("limit", {"container": {"memory": "600MiB"}}, "it reached its memory limit"),
    ],
    ids=["context", "shared-memory", "memory-limit"],
)
def test_vllm_failure_is_named(
    house: House, capsys: Any, name: str, over: dict[str, Any], says: str
) -> None:
    house.write(name, **over)
    code, document = house.call(capsys, "serve", name)
    error = document["error"]
    assert code == 7, error
    assert says.lower() in f"{error['what']} {error['where']}".lower(), error


@pytest.mark.parametrize(
    ("name", "over", "config"),
    [
        ("method", {"more": """--speculative-config '{"method": "nonsense"}'""",
                    "serve": {"speculation": "nonsense"}}, {}),
        ("type", {}, {"model_type": "nonsense", "architectures": ["NonsenseForCausalLM"]}),
    ],
    ids=["method", "model-type"],
)  # fmt: skip
def test_vllm_feature_missing_in_the_image_is_refused_before_launch(
    house: House, capsys: Any, name: str, over: dict[str, Any], config: dict[str, Any]
) -> None:
    model = changed_model(house, f"model-{name}", **config) if config else None
    house.write(name, model=model, **over)
    code, document = house.call(capsys, "serve", name)
    error = document["error"]
    assert code == 6, error
    assert "nonsense" in f"{error['what']} {error['where']}".lower(), error


def test_vllm_with_damaged_shards_is_refused_before_launch(house: House, capsys: Any) -> None:
    folder = changed_model(house, "model-cut")
    house.write("cut", model=folder)
    assert house.call(capsys, "lock", "cut")[0] == 0
    last = folder / "model-00003-of-00003.safetensors"
    last.write_bytes(last.read_bytes()[:-1000])
    code, document = house.call(capsys, "serve", "cut")
    assert code == 4
    assert "truncated" in document["error"]["what"]
    last.unlink()
    code, document = house.call(capsys, "serve", "cut")
    assert code == 4
    assert "model-00003" in document["error"]["where"]
