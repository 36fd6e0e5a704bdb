"""All suites, by name."""

from __future__ import annotations

from typing import Any

from bakehouse.probe.suites import (
    consistency,
    context,
    facts,
    fluency,
    likelihood,
    reference,
    speculation,
    structured,
    vision,
)
from bakehouse.probe.suites.base import Suite
from bakehouse.recipe.models import SuiteName

_ALL: tuple[Suite[Any], ...] = (
    facts.SUITE, fluency.SUITE, likelihood.SUITE, reference.SUITE, speculation.SUITE, vision.SUITE,
    context.SUITE, structured.JSON, structured.TOOLS, consistency.DETERMINISM,
    consistency.CONCURRENCY,
)  # fmt: skip
REGISTRY: dict[SuiteName, Suite[Any]] = {suite.name: suite for suite in _ALL}
