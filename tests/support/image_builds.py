"""A user's home with one recipe of an image that is built, driven through the command line."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import INVOKE, ROOT
from tests.support.checkpoints import gguf_bytes, llama_metadata
from tests.support.docker_engine import Engine
from tests.support.recipes import recipe_data, write_recipe
from tests.support.small_engine import FILES

BUILDER = "build-test/builder:1"


@dataclass
class ImageHome:
    """A user's home with one recipe."""

    folder: Path
    engine: Engine

    def run(self, task: str, *flags: str, exits: int = 0, **env: str) -> dict[str, Any]:
        environment = {
            **self.engine.environment,
            "BAKEHOUSE_HOME": str(self.folder / "home"),
            **env,
        }
        argv = [str(INVOKE), task, "--recipe", str(self.folder / "test.yaml"), "--json", *flags]
        done = subprocess.run(
            argv, cwd=ROOT, env=environment, capture_output=True, check=False, timeout=200
        )
        assert done.returncode == exits, done.stdout.decode() + done.stderr.decode()
        assert b"Traceback" not in done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def forget(self, image: str) -> None:
        """Remove an image and the builder's cache."""
        self.engine.cli("rmi", "--force", image)
        self.engine.cli("builder", "prune", "--all", "--force")


def archive(folder: Path, files: Mapping[str, str]) -> dict[str, Any]:
    """Pack a source; return the recipe's `source`."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(f"small/{name}")
            info.size, info.mtime = len(text.encode()), 1_700_000_000
            tar.addfile(info, io.BytesIO(text.encode()))
    data = gzip.compress(plain.getvalue(), mtime=0)
    (folder / "small.tar.gz").write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    return {"archive": {"path": "small.tar.gz", "sha256": sha256, "number": 77}}


def write_small_recipe(home: ImageHome, files: Mapping[str, str] = FILES, **build: Any) -> None:
    """Write the recipe of the small engine, built in a container."""
    (home.folder / "model.gguf").write_bytes(gguf_bytes(llama_metadata()))
    bases = {role: {"x86_64": BUILDER} for role in ("builder", "runtime")}
    data = recipe_data(
        source=archive(home.folder, files), build={"where": "docker", "bases": bases, **build}
    )
    write_recipe(home.folder, data)
