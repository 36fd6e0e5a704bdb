"""All suites, by name."""

from __future__ import annotations

from typing import Any

from bakehouse.probe.suite import Suite
from bakehouse.probe.suites import (
    concurrency,
    context,
    determinism,
    facts,
    fluency,
    likelihood,
    reference,
    speculation,
    structured,
    vision,
)
from bakehouse.recipe.gate import SuiteName

_ALL: tuple[Suite[Any], ...] = (
    facts.SUITE, fluency.SUITE, likelihood.SUITE, reference.SUITE, speculation.SUITE, vision.SUITE,
    context.SUITE, structured.JSON, structured.TOOLS, determinism.SUITE, concurrency.SUITE,
)  # fmt: skip
REGISTRY: dict[SuiteName, Suite[Any]] = {suite.name: suite for suite in _ALL}
