"""What Bakehouse needs of an engine to plan, launch and prove its server: one seam for all engines.

An implementation is a thin object over its own modules; `engine_of` gives it by the recipe's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bakehouse.base import Frozen
from bakehouse.checks import Check
from bakehouse.lock import Lock
from bakehouse.recipe.faults import Origin
from bakehouse.recipe.model import Recipe
from bakehouse.recipe.template import Paths

NONCE_ALIAS = "~bakehouse-"
"""What the nonce of a run follows, in the second name of a server."""


@dataclass(frozen=True)
class Answer:
    """What one question brought: status 0 where there was no answer at all."""

    status: int
    body: Any
    """What the JSON says; None where it is none."""
    text: str

    @property
    def says(self) -> str:
        """For people: one short line."""
        first = " ".join(self.text.split())[:120]
        return f"HTTP {self.status}: {first}".rstrip(": ") if self.status else f"no answer: {first}"


class Asked(Frozen):
    """What every server has to be, whatever its engine; each engine adds to it.

    None, or False, means that nothing is asked and nothing is judged. Context in tokens.
    """

    name: str
    model_path: str
    """As the engine sees it."""
    context: int | None = None
    key: bool = False
    speculation: str | None = None
    version: str | None = None
    """What the image that serves it says that it is, where it was asked."""
    known_losses: frozenset[str] = frozenset()
    """Signatures of lost features that a patch was judged to bring, and is used all the same."""


class Engine(Protocol):
    """One engine's own ways."""

    name: str
    """As recipes name it."""
    server: str
    """What people call its server."""
    health: str
    """What `/health` answers when all is well, in words."""
    evidence: tuple[str, ...]
    """Paths that are asked for evidence once it is healthy."""
    guarded: str
    """A path that must not be answered without the API key, where there is one."""
    inside_port: int
    """What it listens at inside a container."""
    key_variable: str
    """The environment variable from which it takes an API key, in a container."""
    environment: Mapping[str, str]
    """What its container gets, unless the recipe says otherwise."""
    forced_environment: Mapping[str, str]
    """What its container gets whatever the recipe says."""

    def served(self, weights: Paths) -> str:
        """Give the path by which the server will say which model it serves."""

    def refuse(
        self, command: Sequence[str], recipe: Recipe, origin: Origin, lock: Lock | None = None
    ) -> None:
        """Raise RecipeError for what a command must not hold, or lacks."""

    def additions(
        self, command: Sequence[str], recipe: Recipe, *, host: str, port: int, key_file: str | None
    ) -> tuple[tuple[str, ...], int]:
        """Give the arguments that readiness adds, and the index among them of the nonce's."""

    def features(
        self, recipe: Recipe, lock: Lock, command: Sequence[str], model_path: str
    ) -> Asked:
        """Derive what the server has to show."""

    def expectations(self, asked: Asked) -> tuple[str, ...]:
        """Say the same in words."""

    def healthy(self, answer: Answer) -> bool:
        """Whether an answer of `/health` is this engine's own yes."""

    def model_names(self, body: Any) -> tuple[str, ...]:
        """Names in an answer of `/v1/models`; empty where it has another shape."""

    def stage(self, line: str) -> str | None:
        """What a log line says about loading, in words; None for every other line."""

    def judge(
        self, asked: Asked, answers: Mapping[str, Answer], log: Sequence[str]
    ) -> tuple[Check, ...]:
        """Judge what was asked for against the answers at `evidence` and the log."""

    def asked_for(self, asked: Asked) -> frozenset[str]:
        """Ids of log signatures that say what the recipe itself asks for."""


def engine_of(name: str) -> Engine:
    """Give an engine by its name in recipes; KeyError for another one."""
    if name == "vllm":
        from bakehouse.engines.vllm.engine import Vllm  # only the engine in question is loaded

        return Vllm()
    if name == "llama.cpp":
        from bakehouse.engines.llamacpp.engine import LlamaCpp

        return LlamaCpp()
    raise KeyError(name)
