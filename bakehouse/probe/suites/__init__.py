"""All suites, by name."""

from __future__ import annotations

from typing import Any

from bakehouse.probe.suite import Suite
from bakehouse.probe.suites import facts
from bakehouse.recipe.gate import SuiteName

REGISTRY: dict[SuiteName, Suite[Any]] = {suite.name: suite for suite in (facts.SUITE,)}
