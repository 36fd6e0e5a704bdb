"""`lock`, `plan`, `fetch` and `build` of recipes with images, as a user runs them.

The images are small ones whose `python3` gives a prepared answer, so that every answer can be had;
a real vLLM image is asked in the tests of serving.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bakehouse.system.docker.models import OURS
from tests.conftest import INVOKE, ROOT
from tests.support.checkpoints import safetensors_bytes
from tests.support.docker_engine import Engine, LocalRegistry, make_image, push
from tests.support.recipes import recipe_data, write_recipe

pytestmark = [pytest.mark.integration, pytest.mark.docker]

ABLE = json.loads((ROOT / "tests/data/images/vllm-0.32-able.json").read_text())
GLIMMER = "MuseGlimmerForConditionalGeneration"


def python3(answer: Mapping[str, Any]) -> bytes:
    """A stand-in for an image's Python: noise, and the answer between sentinels."""
    text = json.dumps(answer).replace("'", "")
    return f'#!/bin/sh\necho INFO noise\necho "$3"\'{text}\'"$3"\necho bye\n'.encode()


@dataclass
class Home:
    """A user's home, with a recipe for an image at a registry."""

    folder: Path
    engine: Engine
    registry: LocalRegistry

    @property
    def reference(self) -> str:
        return f"{self.registry.host}/vllm/engine:glimmer"

    def publish(self, script: bytes, *changes: str) -> str:
        """Put an image with this python3 under the recipe's tag."""
        user = "USER 1000:1000"
        make_image(self.engine, "commands/work:1", user, *changes, extra={"bin/python3": script})
        digest = push(self.engine, "commands/work:1", self.reference)
        for name in (self.reference, "commands/work:1"):
            self.engine.port().remove_image(name)
        return digest

    def recipe(self, **over: Any) -> Path:
        data = recipe_data(
            name="glimmer", engine="vllm", source=None, image={"ref": {"x86_64": self.reference}},
            weights={"model": {"path": "model"}},
            serve={"command": "vllm serve {{ weights.model.path }}"},
        )  # fmt: skip
        return write_recipe(self.folder, data | over, "glimmer")

    def run(self, task: str, *flags: str, exits: int = 0) -> dict[str, Any]:
        env = {**self.engine.environment, "BAKEHOUSE_HOME": str(self.folder / "home")}
        argv = [str(INVOKE), task, "--recipe", str(self.folder / "glimmer.yaml"), "--json", *flags]
        done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, check=False, timeout=90)
        assert done.returncode == exits, done.stdout.decode() + done.stderr.decode()
        assert b"Traceback" not in done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document


@pytest.fixture
def home(tmp_path: Path, docker_engine: Engine, docker_registry: LocalRegistry) -> Iterator[Home]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": [GLIMMER]}))
    tensors = {"w": ("F32", (2,), b"\0" * 8)}
    (model / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    made = Home(tmp_path, docker_engine, docker_registry)
    made.recipe()
    yield made
    for mine in ("commands/work", f"{docker_registry.host}/vllm/engine"):
        for one in docker_engine.cli("images", "--no-trunc", "-q", mine).split():
            docker_engine.cli("rmi", "--force", one)


def test_build_pulls_a_tag_and_checks_the_image(home: Home) -> None:
    digest = home.publish(python3(ABLE))
    pin = home.run("lock")["result"]["lock"]["images"]["image"]["x86_64"]
    assert (pin["digest"], pin["reference"], pin["user"]) == (digest, home.reference, "1000:1000")
    ref = f"{home.registry.host}/vllm/engine@{digest}"
    home.run("show")
    home.run("check")
    dry = home.run("build", "--dry-run")["result"]
    assert [step["id"] for step in dry["steps"]] == ["pull", "able"]
    assert dry["image"] == ref
    assert home.engine.port().image(ref) is None, "a plan pulls nothing"
    built = home.run("build", "--locked")
    assert built["result"]["image"] == ref
    assert built["result"]["says"].startswith("vLLM 0.32.0, ")
    assert [(c["id"], c["verdict"]) for c in built["checks"]] == [("image.model", "passed")]
    assert home.engine.port().containers({OURS: ""}) == ()
    record = json.loads(Path(built["result"]["record"]).read_text())
    assert record["versions"]["vllm"] == "0.32.0"
    assert [step["id"] for step in record["steps"]] == ["pull", "able"]
    again = home.run("build")["result"]
    assert (built["result"]["reused"], again["reused"]) == (False, True)
    assert home.run("fetch")["result"]["images"] == {"image": ref}


def test_lock_reports_a_moved_tag_and_updates_on_request(home: Home) -> None:
    first = home.publish(python3(ABLE))
    assert home.run("lock")["result"]["drift"] == []
    second = home.publish(python3(ABLE), "LABEL new=one")
    (drift,) = home.run("lock")["result"]["drift"]
    assert (drift["reason"], drift["locked"], drift["now"]) == ("tag-moved", first, second)
    assert home.run("build")["result"]["image"].endswith(first)
    (moved,) = home.run("lock", "--update")["result"]["moved"]
    assert moved["now"].endswith(second)
    assert home.run("build")["result"]["image"].endswith(second)


def test_lock_drift_of_an_image_reference(home: Home) -> None:
    home.publish(python3(ABLE))
    home.run("lock")
    home.recipe(image={"ref": {"x86_64": f"{home.registry.host}/vllm/engine:other"}})
    error = home.run("build", exits=4)["error"]
    assert error["id"] == "lock-drift"
    assert "image-changed: image.ref.x86_64" in error["what"]
    assert home.run("build", "--locked", exits=4)["error"]["id"] == "lock-drift"


def test_build_of_an_image_without_the_architecture(home: Home) -> None:
    known = {n: c for n, c in ABLE["architectures"].items() if n != GLIMMER}
    newer = {**ABLE, "architectures": known, "versions": {**ABLE["versions"], "vllm": "0.99.0"}}
    home.publish(python3(newer))
    failed = home.run("build", exits=6)
    assert failed["error"]["id"] == "image-unable"
    assert "MuseGlimmerForCausalLM" in failed["error"]["where"]
    assert "0.99.0" in failed["error"]["hint"]
    (one,) = failed["checks"]
    assert (one["id"], one["verdict"]) == ("image.model", "failed")


def test_build_of_an_image_with_only_the_fallback(home: Home) -> None:
    (home.folder / "model/config.json").write_text('{"architectures": ["SmolLM3ForCausalLM"]}')
    home.publish(python3(ABLE))
    error = home.run("build", exits=6)["error"]
    assert "Transformers fallback" in error["where"]


def test_build_of_an_image_that_does_not_answer(home: Home) -> None:
    scripts = {
        "ended with 1": b"#!/bin/sh\necho no; exit 1\n",
        "printed no answer": b"#!/bin/sh\nexit 0\n",
        "cannot be read": b'#!/bin/sh\necho "$3{$3"\n',
    }
    for why, script in scripts.items():
        home.publish(script)
        home.run("lock", "--update")
        error = home.run("build", exits=6)["error"]
        assert error["id"] == "image-silent"
        assert why in error["what"]


def test_build_of_an_image_without_python(home: Home) -> None:
    make_image(home.engine, "commands/work:1")
    push(home.engine, "commands/work:1", home.reference)
    assert home.run("build", exits=6)["error"]["id"] == "image-silent"


def test_build_of_a_manifest_that_vanished(home: Home) -> None:
    digest = home.publish(python3(ABLE))
    home.run("lock")
    home.registry.forget("vllm/engine", digest)
    error = home.run("build", exits=4)["error"]
    assert error["id"] == "manifest-unknown"
    assert home.reference in error["where"]


def test_build_of_a_recipe_for_another_machine(home: Home) -> None:
    home.publish(python3(ABLE))
    home.registry.for_arm("vllm/engine", "glimmer", "arm")
    home.recipe(image={"ref": {"aarch64": f"{home.registry.host}/vllm/engine:arm"}})
    home.run("lock")
    error = home.run("build", exits=9)["error"]
    assert error["id"] == "image-platform"
    assert "x86_64" in error["what"]


def test_build_of_weights_without_a_config(home: Home) -> None:
    home.publish(python3(ABLE))
    (home.folder / "model/config.json").unlink()
    assert home.run("build", exits=4)["error"]["id"] == "weights-config"


def test_lock_and_plan_need_no_engine(home: Home) -> None:
    home.publish(python3(ABLE))
    lost = Home(home.folder, Engine("unix:///nowhere.sock", home.engine.root), home.registry)
    lost.run("lock")
    lost.run("build", "--dry-run")
    error = lost.run("build", exits=9)["error"]
    assert error["id"] == "docker-daemon"
