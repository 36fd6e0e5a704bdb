"""The plan of a server in a container, for both engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bakehouse.context import Context
from bakehouse.lock import FilePin, Lock, WeightPin
from bakehouse.plan.serve import described, plan_serve
from bakehouse.plan.types import ServePlan
from bakehouse.recipe.models import Recipe, WeightPaths
from bakehouse.recipe.types import Origin

COMMANDS = {
    "vllm": "{{ server }} serve {{ weights.model.path }}",
    "llama.cpp": "{{ server }} -m {{ weights.model.first }}",
}


def plan(ctx: Context, engine: str, file: str, **over: Any) -> ServePlan:
    serve = {"command": COMMANDS[engine], "port": 8123, **over.pop("serve", {})}
    more = {"image": {"ref": {"x86_64": "a/b:1"}}, **over} if engine == "vllm" else {
        "source": {"archive": {"path": "a.tar", "sha256": "0" * 64}},
        "build": {"where": "docker", "bases": {"builder": {"x86_64": "a:1"},
                                               "runtime": {"x86_64": "b:1"}}},
    }  # fmt: skip
    recipe = Recipe.model_validate(
        {"schema": 1, "name": "r", "engine": engine, "weights": {"model": {"path": "m"}},
         "serve": serve, **more}
    )  # fmt: skip
    pin = WeightPin(origin="m/", files=(FilePin(path=file, size=1, sha256="0" * 64),))
    lock = Lock(recipe="r", engine=engine, wants="", weights={"model": pin})
    here = {"model": WeightPaths(f"/home/u/{file}", f"/home/u/{file}", (f"/home/u/{file}",))}
    binary = "vllm" if engine == "vllm" else "/opt/llama/bin/llama-server"
    made, _ = plan_serve(
        recipe, lock, binary, here, places=ctx.places, origin=Origin("x.yaml", 9, 5),
        image="a/b@sha256:0", folder="/r",
    )  # fmt: skip
    return made


@pytest.mark.parametrize(
    ("engine", "file", "port"), [("vllm", "m.safetensors", 8000), ("llama.cpp", "m.gguf", 8080)]
)
def test_container_listens_on_all_inside_and_one_address_outside(
    context: Context, engine: str, file: str, port: int
) -> None:
    made = plan(context, engine, file)
    box = made.container
    assert box
    assert made.argv[made.argv.index("--host") + 1] == "0.0.0.0"
    assert made.argv[made.argv.index("--port") + 1] == str(port)
    assert f"/weights/model/{file}" in made.argv
    (published,) = box.publish
    assert (published.host, published.port, published.host_port) == ("127.0.0.1", port, 8123)
    (mount,) = box.mounts
    assert (mount.source, mount.read_only) == (f"/home/u/{file}", True)
    said = described(box)
    assert said[-1] == "a/b@sha256:0"
    assert "--restart no" in said
    assert not [line for line in said if "privileged" in line or ".sock" in line]


def test_plan_has_no_api_key(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "tell-nobody")
    serve = {"api_key": {"env": "SOME_KEY"}}
    for engine, file in (("vllm", "m.safetensors"), ("llama.cpp", "m.gguf")):
        made = plan(context, engine, file, serve=serve)
        assert "tell-nobody" not in made.model_dump_json()
        assert not [word for word in made.argv if "key" in word]


def test_container_stays_offline_and_takes_the_recipes_variables(context: Context) -> None:
    made = plan(context, "vllm", "m.safetensors", container={"env": {"VLLM_X": "1"}})
    assert made.container
    assert made.container.env["HF_HUB_OFFLINE"] == "1"
    assert made.container.env["VLLM_X"] == "1"
    assert Path(made.container.mounts[0].target).parent == Path("/weights/model")
