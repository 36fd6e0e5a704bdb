"""llama.cpp as an `Engine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bakehouse.checks import Check
from bakehouse.engines.engine import Answer, Asked
from bakehouse.engines.llamacpp import evidence as checks
from bakehouse.engines.llamacpp import server as rules
from bakehouse.engines.llamacpp.server import Features
from bakehouse.recipe.model import Recipe
from bakehouse.recipe.template import Paths

ON_THE_CPU = frozenset({"no-layers-offloaded", "cuda-disabled"})
"""Signatures of a model that runs on the CPU, which a recipe may ask for."""


class LlamaCpp:
    """See `engines.engine.Engine`."""

    name = "llama.cpp"
    server = "llama-server"
    health = 'HTTP 200: {"status": "ok"}'
    evidence: tuple[str, ...] = ("/v1/models", "/props", "/slots")
    guarded = "/props"
    inside_port = 8080
    key_variable = "LLAMA_API_KEY"
    environment: Mapping[str, str] = {}
    forced_environment: Mapping[str, str] = {}

    arguments = staticmethod(rules.flags)
    refuse = staticmethod(rules.refuse)
    features = staticmethod(rules.features)
    model_names = staticmethod(checks.model_names)
    stage = staticmethod(checks.stage)

    def served(self, weights: Paths) -> str:
        """Give the file that it names in /props."""
        return weights.first

    def additions(
        self, command: Sequence[str], recipe: Recipe, *, host: str, port: int, key_file: str | None
    ) -> tuple[tuple[str, ...], int]:
        """Give the arguments that readiness needs, and the index of the alias among them."""
        return rules.additions(
            command, name=recipe.name, host=host, port=port, slots=recipe.serve.slots,
            key_file=key_file,
        )  # fmt: skip

    def expectations(self, asked: Asked) -> tuple[str, ...]:
        """Describe the checks of readiness."""
        return rules.expectations(_own(asked))

    def healthy(self, answer: Answer) -> bool:
        """Whether it is 200 and `{"status": "ok"}`."""
        return checks.health_ok(answer.status, answer.body)

    def judge(
        self, asked: Asked, answers: Mapping[str, Answer], log: Sequence[str]
    ) -> tuple[Check, ...]:
        """Check `/v1/models`, `/props`, `/slots` and the log."""
        return checks.judge(
            _own(asked), models=answers["/v1/models"].body, props=answers["/props"].body,
            slots=answers["/slots"].body, log=log,
        )  # fmt: skip

    def asked_for(self, asked: Asked) -> frozenset[str]:
        """Signatures of a model on the CPU, if the recipe asks for that."""
        return ON_THE_CPU if _own(asked).cpu else frozenset()


def _own(asked: Asked) -> Features:
    if not isinstance(asked, Features):
        raise TypeError(f"llama.cpp cannot check {type(asked).__name__}")
    return asked
