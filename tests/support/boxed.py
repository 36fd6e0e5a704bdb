"""A home of its own whose recipes serve a stand-in for vLLM in containers of a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bakehouse import cli
from bakehouse.paths import Places
from bakehouse.plan.serve import SERVER
from bakehouse.server.status import folders, stop
from tests.support.docker_engine import Engine
from tests.support.recipes import write_recipe
from tests.support.vllm import fake_model, recipe_data

Answer = tuple[int, dict[str, Any], str]


class House:
    """A home of its own, and the tasks as a user calls them."""

    def __init__(self, folder: Path, engine: Engine, image: str, capsys: Any) -> None:
        self.folder = folder
        self.engine = engine
        self.docker = engine.port()
        self.image = image
        self.model = fake_model(folder / "model")
        self.capsys = capsys

    def write(self, name: str = "boxed", **over: Any) -> None:
        write_recipe(self.folder, recipe_data(name, self.image, self.model, **over), name)

    def call(self, task: str, name: str = "boxed", **options: Any) -> Answer:
        code = cli.main(task, {"recipe": name, **options}, json=True, recipes=self.folder)
        out = self.capsys.readouterr()
        return code, json.loads(out.out), out.err

    def serve(self, name: str = "boxed", **over: Any) -> Answer:
        self.write(name, **over)
        return self.call("serve", name)

    def server(self, name: str = "boxed") -> Path:
        return Places.from_environment().servers / name

    def boxes(self) -> list[str]:
        found = self.docker.containers({SERVER: ""})
        return [c.id for c in found if c.labels[SERVER].startswith(str(self.folder))]


@contextmanager
def opened(
    folder: Path, engine: Engine, image: str, patch: pytest.MonkeyPatch, capsys: Any
) -> Iterator[House]:
    """Open a house for the length of a `with` block; at its end no container may be left."""
    patch.setenv("BAKEHOUSE_HOME", str(folder / "home"))
    for name, value in engine.environment.items():
        if name.startswith("DOCKER_"):
            patch.setenv(name, value)
    made = House(folder, engine, image, capsys)
    yield made
    for one in folders(Places.from_environment(), boxed=True):
        stop(one)
    assert made.boxes() == []
