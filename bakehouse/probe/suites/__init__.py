"""All suites, by name."""

from __future__ import annotations

from typing import Any

from bakehouse.probe.suite import Suite
from bakehouse.probe.suites import facts, fluency, likelihood, reference
from bakehouse.recipe.gate import SuiteName

_ALL: tuple[Suite[Any], ...] = (facts.SUITE, fluency.SUITE, likelihood.SUITE, reference.SUITE)
REGISTRY: dict[SuiteName, Suite[Any]] = {suite.name: suite for suite in _ALL}
