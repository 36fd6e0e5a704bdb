"""Fixtures shared by all tests: a home of its own for each test, and the real engine once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bakehouse.context import Context
from bakehouse.places import Places

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(tmp_path / "home" / "cache", tmp_path / "home" / "state")


@pytest.fixture
def context(places: Places) -> Context:
    environment = {**os.environ, "BAKEHOUSE_HOME": str(places.cache.parent)}
    return Context(places=places, recipes=ROOT / "recipes", environment=environment)


def _engine_path(variable: str) -> Path:
    given = os.environ.get(variable)
    if not given:
        pytest.skip(f"{variable} is not set")
    return Path(given)


@pytest.fixture(scope="session")
def llama_server() -> Path:
    """The real llama-server binary, built once for all tests."""
    return _engine_path("BAKEHOUSE_TEST_LLAMA_SERVER")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real SmolLM2-135M-Instruct Q4_1 GGUF file (98,362,432 bytes)."""
    return _engine_path("BAKEHOUSE_TEST_MODEL")
