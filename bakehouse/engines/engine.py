"""The protocol of an engine: what Bakehouse needs to plan, launch and verify its server."""

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
"""Prefix of the nonce of a run, in the second name of a server."""


@dataclass(frozen=True)
class Answer:
    """The response to one request; status 0 if there was none."""

    status: int
    body: Any
    """The parsed JSON; None for any other text."""
    text: str

    @property
    def says(self) -> str:
        """One short line for the console."""
        first = " ".join(self.text.split())[:120]
        return f"HTTP {self.status}: {first}".rstrip(": ") if self.status else f"no answer: {first}"


class Asked(Frozen):
    """What a server of any engine has to show; each engine adds to it.

    None or False means that nothing is asked for and nothing is checked. Context in tokens.
    """

    name: str
    model_path: str
    """As seen by the engine."""
    context: int | None = None
    key: bool = False
    speculation: str | None = None
    version: str | None = None
    """The version that the image reports, if it was queried."""
    known_losses: frozenset[str] = frozenset()
    """Signatures of lost features that a patch is known to cause and that are accepted."""


class Engine(Protocol):
    """One engine. `engine_of` gives it by name."""

    name: str
    """As recipes name it."""
    server: str
    """Name of its server in messages."""
    health: str
    """Expected response of `/health`, as text."""
    evidence: tuple[str, ...]
    """Paths that are requested as evidence once it is healthy."""
    guarded: str
    """A path that must refuse requests without the API key, if there is one."""
    inside_port: int
    """Port inside a container."""
    key_variable: str
    """Environment variable with the API key, in a container."""
    environment: Mapping[str, str]
    """Variables of its container that a recipe may change."""
    forced_environment: Mapping[str, str]
    """Variables of its container that a recipe cannot change."""

    def served(self, weights: Paths) -> str:
        """Give the path by which the server reports its model."""

    def arguments(self, command: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
        """Parse a command: each flag in its normal spelling, with its value, in order.

        `command[0]` is the program. Never raises: a recipe's template is parsed as well.
        """

    def refuse(
        self, command: Sequence[str], recipe: Recipe, origin: Origin, lock: Lock | None = None
    ) -> None:
        """Raise RecipeError for flags that a command must not contain, or has to."""

    def additions(
        self, command: Sequence[str], recipe: Recipe, *, host: str, port: int, key_file: str | None
    ) -> tuple[tuple[str, ...], int]:
        """Give the arguments that readiness needs, and the index of the nonce's among them."""

    def features(
        self, recipe: Recipe, lock: Lock, command: Sequence[str], model_path: str
    ) -> Asked:
        """Derive what the server has to show."""

    def expectations(self, asked: Asked) -> tuple[str, ...]:
        """Describe the expectations as text."""

    def healthy(self, answer: Answer) -> bool:
        """Whether a response of `/health` is this engine's "ok"."""

    def model_names(self, body: Any) -> tuple[str, ...]:
        """Names in a response of `/v1/models`; empty if it has another shape."""

    def stage(self, line: str) -> str | None:
        """Describe the loading stage that a log line reports; None for every other line."""

    def judge(
        self, asked: Asked, answers: Mapping[str, Answer], log: Sequence[str]
    ) -> tuple[Check, ...]:
        """Compare what was asked for with the responses at `evidence` and the log."""

    def asked_for(self, asked: Asked) -> frozenset[str]:
        """Ids of log signatures for what the recipe itself asks for."""


def engine_of(name: str) -> Engine:
    """Give an engine by its name in recipes. Raises KeyError for another name."""
    if name == "vllm":
        from bakehouse.engines.vllm.engine import Vllm  # only the engine in question is loaded

        return Vllm()
    if name == "llama.cpp":
        from bakehouse.engines.llamacpp.engine import LlamaCpp

        return LlamaCpp()
    raise KeyError(name)
