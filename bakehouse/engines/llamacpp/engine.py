"""llama.cpp behind the seam that all engines share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bakehouse.checks import Check
from bakehouse.engines.engine import Answer, Asked
from bakehouse.engines.llamacpp import evidence, server
from bakehouse.engines.llamacpp.server import Features
from bakehouse.lock import Lock
from bakehouse.recipe.faults import Origin
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

    def served(self, weights: Paths) -> str:
        """Give the file that it names in /props."""
        return weights.first

    def refuse(
        self, command: Sequence[str], recipe: Recipe, origin: Origin, lock: Lock | None = None
    ) -> None:
        """Raise RecipeError for flags and variables that Bakehouse sets itself."""
        del lock  # what a command may hold does not depend on pins here
        server.refuse(command, recipe, origin)

    def additions(
        self, command: Sequence[str], recipe: Recipe, *, host: str, port: int, key_file: str | None
    ) -> tuple[tuple[str, ...], int]:
        """Give the arguments that readiness adds, and the index among them of the alias."""
        return server.additions(
            command, name=recipe.name, host=host, port=port, slots=recipe.serve.slots,
            key_file=key_file,
        )  # fmt: skip

    def features(
        self, recipe: Recipe, lock: Lock, command: Sequence[str], model_path: str
    ) -> Features:
        """Derive what the server has to show."""
        return server.features(recipe, lock, command, model_path)

    def expectations(self, asked: Asked) -> tuple[str, ...]:
        """Say the same in words."""
        return server.expectations(_own(asked))

    def healthy(self, answer: Answer) -> bool:
        """Whether it is 200 and `{"status": "ok"}`."""
        return evidence.health_ok(answer.status, answer.body)

    def model_names(self, body: Any) -> tuple[str, ...]:
        """Ids and aliases in an answer of `/v1/models`."""
        return evidence.model_names(body)

    def stage(self, line: str) -> str | None:
        """What a log line says about loading."""
        return evidence.stage(line)

    def judge(
        self, asked: Asked, answers: Mapping[str, Answer], log: Sequence[str]
    ) -> tuple[Check, ...]:
        """Judge `/v1/models`, `/props`, `/slots` and the log."""
        return evidence.judge(
            _own(asked), models=answers["/v1/models"].body, props=answers["/props"].body,
            slots=answers["/slots"].body, log=log,
        )  # fmt: skip

    def asked_for(self, asked: Asked) -> frozenset[str]:
        """Signatures of a model on the CPU, where the recipe wants it there."""
        return ON_THE_CPU if _own(asked).cpu else frozenset()


def _own(asked: Asked) -> Features:
    if not isinstance(asked, Features):
        raise TypeError(f"llama.cpp cannot judge {type(asked).__name__}")
    return asked
