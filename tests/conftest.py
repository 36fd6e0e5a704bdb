"""Fixtures shared by all tests: a home of its own for each test, and the real engine once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from bakehouse.context import Context
from bakehouse.paths import Places
from bakehouse.recipe.loader import find, load
from bakehouse.resolver import ensure_lock
from bakehouse.sources.weights import ensure
from tests.support.docker_engine import docker_engine, docker_registry  # noqa: F401 - fixtures
from tests.support.house import house  # noqa: F401 - a fixture
from tests.support.vllm import fake_vllm, vllm_image, vllm_model  # noqa: F401 - fixtures

settings.register_profile(
    "bakehouse", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("bakehouse")
"""How long an example takes depends on what else the machine does, and is no property."""

# A shell's background job and nohup leave us with ignored signals, which children would inherit;
# what the tests start has to see signals as a user's own programs do.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ROOT = Path(__file__).resolve().parents[1]
INVOKE = Path(sys.executable).with_name("invoke")


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path / "home" / "cache", tmp_path / "home" / "state")


@pytest.fixture
def context(places: Places) -> Context:
    environment = {**os.environ, "BAKEHOUSE_HOME": str(places.cache.parent)}
    environment["HF_HOME"] = str(places.cache.parent / "hf")  # no login, no cache of this user
    return Context(places=places, recipes=ROOT / "recipes", environment=environment)


@pytest.fixture(scope="session")
def test_cache() -> Path:
    """A BAKEHOUSE_HOME that outlives a test run: downloads, toolkits, one build of the engine."""
    kept = os.environ.get("BAKEHOUSE_TEST_CACHE")
    return Path(kept) if kept else Path.home() / ".cache" / "bakehouse-tests"


@pytest.fixture(scope="session")
def engine(test_cache: Path) -> Path:
    """Build what `smollm2-cpu` asks for, as a user would; give the server's path."""
    environment = {**os.environ, "BAKEHOUSE_HOME": str(test_cache)}
    done = subprocess.run(
        [str(INVOKE), "build", "--recipe", "smollm2-cpu", "--locked", "--json"],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=False,
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert done.returncode == 0, document["error"]
    return Path(document["result"]["server"])


@pytest.fixture(scope="session")
def llama_server(request: pytest.FixtureRequest) -> Path:
    """The real llama-server binary, built once for all tests."""
    given = os.environ.get("BAKEHOUSE_TEST_LLAMA_SERVER")
    return Path(given) if given else Path(request.getfixturevalue("engine"))


@pytest.fixture(scope="session")
def smollm2(test_cache: Path) -> Path:
    """The real SmolLM2-135M-Instruct Q4_1 GGUF file (98,362,432 bytes)."""
    if given := os.environ.get("BAKEHOUSE_TEST_MODEL"):
        return Path(given)
    context = Context(
        places=Places(test_cache / "cache", test_cache / "state"), recipes=ROOT / "recipes"
    )
    loaded = load(find("smollm2-cpu", context.recipes))
    return Path(ensure(context, loaded, ensure_lock(context, loaded, locked=True))["model"].first)
