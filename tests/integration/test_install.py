"""Bakehouse installed by pip, away from any checkout."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import gguf_bytes, llama_metadata
from tests.support.recipes import recipe_data, write_recipe

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("bakehouse", "recipes", "patches", "docker", "setup.py", "MANIFEST.in",
           "pyproject.toml", "README.md")  # fmt: skip


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")
            if p.is_file() and p.suffix != ".pyc"}  # fmt: skip


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install a copy of the sources into a fresh environment; return its `bakehouse`."""
    folder = tmp_path_factory.mktemp("installed")
    for name in SOURCES:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, folder / name)
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--quiet",
         "--disable-pip-version-check", "."],
        cwd=folder, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    packages = sysconfig.get_path("purelib", vars={"base": str(folder / "venv")})
    dependencies = [p for p in sys.path if p.endswith("site-packages")]
    Path(packages, "dependencies.pth").write_text("\n".join(dependencies))
    for name in SOURCES:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
    return python.with_name("bakehouse")


def test_install_ships_recipes_and_writes_locks_and_golden_values_to_the_users_folder(
    program: Path, tmp_path: Path
) -> None:
    env = {"HOME": str(tmp_path), "PATH": "/usr/local/bin:/usr/bin:/bin"}

    def run(*argv: str) -> tuple[dict[str, Any], str]:
        done = subprocess.run(
            [str(program), *argv, "--json"],
            cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        document: dict[str, Any] = json.loads(done.stdout)
        return document, done.stderr

    [shipped] = program.parents[1].rglob("shipped")
    for name in ("recipes", "patches", "docker"):
        assert files(shipped / name) == files(ROOT / name)
    document, printed = run("plan", "--recipe", "smollm2-cpu")
    assert document["ok"], document["error"]
    assert f"recipes folder: {shipped / 'recipes'}" in printed
    assert run("check")[0]["ok"]
    lock = tmp_path / ".config/bakehouse/shipped/recipes/test.lock.json"
    archive = shipped / "recipes" / "p.tar.gz"
    with tarfile.open(archive, "w:gz") as made:
        made.add(program, "p/main.c")
    (shipped / "recipes" / "model.gguf").write_bytes(gguf_bytes(llama_metadata()))
    source = {"path": archive.name, "sha256": hashlib.sha256(archive.read_bytes()).hexdigest()}
    write_recipe(shipped / "recipes", recipe_data(source={"archive": source}))
    before = files(shipped)
    for created in (True, False):
        document, _ = run("lock", "--recipe", "test")
        assert (document["result"]["path"], document["result"]["created"]) == (str(lock), created)
    script = (
        "from bakehouse.paths import shipped\n"
        "from bakehouse.probe.golden import golden_path, write_golden\n"
        "from bakehouse.probe.models import Golden, ServedModel\n"
        "known = ServedModel('26fcd31c7399c1d6', 'f16', 'cpu', '', shipped('recipes') / 'golden')\n"
        "golden = Golden.model_validate_json(golden_path(known).read_bytes())\n"
        "print(write_golden(known, golden) == golden_path(known), golden_path(known))\n"
    )
    python = program.with_name("python")
    done = subprocess.run(
        [str(python), "-c", script],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    golden = lock.parent / "golden" / "26fcd31c7399c1d6-f16.json"
    assert done.stdout.splitlines() == [f"True {golden}"], done.stderr
    assert files(shipped) == before
