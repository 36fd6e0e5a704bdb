"""All suites, by name."""

from __future__ import annotations

from typing import Any

from bakehouse.probe.suite import Suite
from bakehouse.probe.suites import facts, fluency, likelihood, reference, speculation, vision
from bakehouse.recipe.gate import SuiteName

_ALL: tuple[Suite[Any], ...] = (
    facts.SUITE, fluency.SUITE, likelihood.SUITE, reference.SUITE, speculation.SUITE, vision.SUITE,
)  # fmt: skip
REGISTRY: dict[SuiteName, Suite[Any]] = {suite.name: suite for suite in _ALL}
