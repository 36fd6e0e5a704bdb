"""Once the source is here, a build reaches for nothing: proven where nothing can be reached."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
ALONE = ("unshare", "--map-root-user", "--net")


@pytest.fixture(scope="module")
def alone() -> tuple[str, ...]:
    """Starts a command in a network namespace of its own, without even loopback."""
    if not shutil.which("unshare") or subprocess.run([*ALONE, "true"], check=False).returncode:
        pytest.skip("no network namespace can be made here")
    return ALONE


def run(*argv: str) -> str:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_build_needs_no_network(tmp_path: Path, alone: tuple[str, ...]) -> None:
    out = run(
        *alone, sys.executable, "-m", "tests.support.build_driver", str(tmp_path), "nothing"
    )  # fmt: skip
    assert json.loads(out.splitlines()[-1])["reused"] is False


def test_configure_of_the_real_tree_needs_no_network(alone: tuple[str, ...]) -> None:
    home = os.environ.get("BAKEHOUSE_TEST_CACHE") or Path.home() / ".cache" / "bakehouse-tests"
    recipe = ROOT / "recipes" / "smollm2-cpu.yaml"
    command = (sys.executable, "-m", "tests.support.configure_only", str(home), str(recipe))
    run(*command, "online")
    said = json.loads(run(*alone, *command).splitlines()[-1])
    assert said["network"] is False
    assert set(said["checks"].values()) == {"passed"}
    log = "\n".join(said["log"])
    assert "-- ggml commit:  b0a2feb64" in log
    if os.uname().machine == "x86_64":
        assert "-mavx2" in log, "the instruction sets that llama.cpp drops without a word"
