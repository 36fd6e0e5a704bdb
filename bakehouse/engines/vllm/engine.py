"""vLLM behind the seam that all engines share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bakehouse.checks import Check
from bakehouse.engines.engine import Answer, Asked
from bakehouse.engines.vllm import evidence
from bakehouse.engines.vllm import server as server_
from bakehouse.engines.vllm.environment import ENVIRONMENT, OFFLINE
from bakehouse.engines.vllm.server import Features
from bakehouse.lock import Lock
from bakehouse.recipe.faults import Origin
from bakehouse.recipe.model import Recipe
from bakehouse.recipe.template import Paths


class Vllm:
    """See `engines.engine.Engine`."""

    name = "vllm"
    server = "vLLM"
    health = "HTTP 200"
    evidence: tuple[str, ...] = ("/v1/models", "/metrics", "/version")
    guarded = "/v1/models"
    inside_port = server_.PORT
    key_variable = "VLLM_API_KEY"
    environment: Mapping[str, str] = ENVIRONMENT
    forced_environment: Mapping[str, str] = OFFLINE

    def served(self, weights: Paths) -> str:
        """Give the folder that it names as the model's root."""
        return weights.path

    def refuse(
        self, command: Sequence[str], recipe: Recipe, origin: Origin, lock: Lock | None = None
    ) -> None:
        """Raise RecipeError for what Bakehouse sets itself and for what nothing pins."""
        server_.refuse(command, recipe, origin, lock)

    def additions(
        self, command: Sequence[str], recipe: Recipe, *, host: str, port: int, key_file: str | None
    ) -> tuple[tuple[str, ...], int]:
        """Give the arguments that readiness adds, and the index among them of the second name.

        Address and port are the container's own, and the key comes through its environment.
        """
        del command, host, port, key_file
        return server_.additions(recipe)

    def features(
        self, recipe: Recipe, lock: Lock, command: Sequence[str], model_path: str
    ) -> Features:
        """Derive what the server has to show."""
        del lock
        return server_.features(recipe, command, model_path)

    def expectations(self, asked: Asked) -> tuple[str, ...]:
        """Say the same in words."""
        return server_.expectations(_own(asked))

    def healthy(self, answer: Answer) -> bool:
        """Whether it is 200: the body is empty, and a server that loads does not answer at all."""
        return answer.status == 200

    def model_names(self, body: Any) -> tuple[str, ...]:
        """Ids in an answer of `/v1/models`: each served name is one of them."""
        return evidence.model_names(body)

    def stage(self, line: str) -> str | None:
        """What a log line says about loading."""
        return evidence.stage(line)

    def judge(
        self, asked: Asked, answers: Mapping[str, Answer], log: Sequence[str]
    ) -> tuple[Check, ...]:
        """Judge `/v1/models`, `/metrics`, `/version` and the log."""
        metrics = answers["/metrics"]
        return evidence.judge(
            _own(asked), models=answers["/v1/models"].body,
            metrics=metrics.text if metrics.status == 200 else "", log=log,
            version=answers["/version"].body,
        )  # fmt: skip

    def asked_for(self, asked: Asked) -> frozenset[str]:
        """No signature is what a recipe asks for, save the fallback that it names."""
        return frozenset({"transformers-fallback"} if _own(asked).fallback else ())


def _own(asked: Asked) -> Features:
    if not isinstance(asked, Features):
        raise TypeError(f"vLLM cannot judge {type(asked).__name__}")
    return asked
