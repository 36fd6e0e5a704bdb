"""What every engine provides.

Names as llama.cpp build 11434 (`tools/server/server-task.cpp`) and vLLM 0.32 give them, in the text
format of Prometheus. A counter that an engine does not publish is None.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar

from bakehouse.cuda.toolkit import Requested, Toolkit
from bakehouse.lock import Lock
from bakehouse.models import Check, Frozen, check
from bakehouse.recipe.models import Recipe
from bakehouse.recipe.template import Paths
from bakehouse.recipe.types import Origin


class Compiler(Frozen):
    """A compiler as CMake identified it, or as it was planned."""

    path: str
    version: str
    id: str = ""
    """CMake's name for its maker: GNU, Clang, NVIDIA."""


class CudaExpected(Frozen):
    """The toolkit of a CUDA build and what is requested of it."""

    toolkit: Toolkit
    requested: Requested
    links: dict[str, str] | None = None
    """For a toolkit inside a container: each path that CMake chose, with all links resolved."""

    def resolve(self, path: str) -> str:
        """Resolve a path's links, on the machine of the toolkit."""
        return os.path.realpath(path) if self.links is None else self.links.get(path, path)


class Expected(Frozen):
    """What the plan expects, in CMake's terms."""

    generator: str
    build_type: str
    compilers: dict[str, Compiler]
    """By CMake's name of the language: C, CXX, CUDA."""
    forced: dict[str, str]
    """Definitions that the engine needs exactly like this."""
    asked: dict[str, str]
    """The recipe's own definitions, as they were passed."""
    targets: tuple[str, ...]
    cuda: CudaExpected | None = None


@dataclass(frozen=True)
class CacheEntry:
    """A variable in CMake's cache. Type UNINITIALIZED: no project declared it."""

    value: str
    type: str


@dataclass(frozen=True)
class Target:
    """A target of the build. Artifacts are paths relative to the build folder, unless absolute."""

    name: str
    type: str
    """EXECUTABLE, SHARED_LIBRARY, MODULE_LIBRARY, STATIC_LIBRARY and so on."""
    artifacts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Configured:
    """A build folder after configure."""

    log: tuple[str, ...]
    log_path: str
    cache: Mapping[str, CacheEntry]
    cache_path: str
    generator: str
    compilers: Mapping[str, Compiler]
    targets: Mapping[str, Target] = field(default_factory=dict)
    named: frozenset[str] = frozenset()
    """Undeclared entries of the cache that a CMake file of the source mentions."""

    def line(self, number: int) -> str:
        """Format a line of the log (counting from 1) as editors do."""
        return f"{self.log_path}:{number}"


_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
MOST_POSITIONS = 1024
"""Maximum position of a draft; a higher label is invalid."""


@dataclass(frozen=True)
class Sample:
    """One line of a Prometheus text."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Counters:
    """What an engine has done since its start, in tokens unless stated otherwise."""

    generated: float | None = None
    prompted: float | None = None
    decodes: float | None = None
    """Passes through the model."""
    running: float | None = None
    """Requests in progress."""
    waiting: float | None = None
    """Requests in the queue."""
    drafts: float | None = None
    """Verified drafts."""
    draft_tokens: float | None = None
    accepted: float | None = None
    """Accepted draft tokens."""
    per_position: tuple[float, ...] = ()
    """Accepted tokens at each position of a draft, the first position first."""

    @property
    def busy(self) -> bool:
        """Whether there is work to do, as far as the counters show."""
        return bool((self.running or 0) + (self.waiting or 0))

    def moved(self, before: Counters) -> bool | None:
        """Whether there was progress since; None if no counter of progress is published.

        A counter that fell was reset, by another server on the same port.
        """
        pairs = [
            (getattr(before, name), getattr(self, name))
            for name in ("generated", "prompted", "decodes")
        ]
        known = [(old, new) for old, new in pairs if old is not None and new is not None]
        return any(old != new for old, new in known) if known else None

    def since(self, before: Counters) -> Counters:
        """Subtract an earlier reading; running and waiting requests stay as they are now."""
        changes: dict[str, float | None] = {}
        for one in fields(self):
            if one.name in ("running", "waiting", "per_position"):
                continue
            old, new = getattr(before, one.name), getattr(self, one.name)
            changes[one.name] = new - (old or 0) if new is not None else None
        old_positions = (*before.per_position, *(0.0,) * len(self.per_position))
        positions = (n - o for n, o in zip(self.per_position, old_positions, strict=False))
        return Counters(
            running=self.running, waiting=self.waiting, per_position=tuple(positions), **changes
        )


_LLAMACPP = {
    "generated": "tokens_predicted_total", "prompted": "prompt_tokens_total",
    "decodes": "n_decode_total", "running": "requests_processing", "waiting": "requests_deferred",
}  # fmt: skip
_VLLM = {
    "generated": "generation_tokens_total", "prompted": "prompt_tokens_total",
    "running": "num_requests_running", "waiting": "num_requests_waiting",
}  # fmt: skip
_DRAFTS = {
    "drafts": "spec_decode_num_drafts_total",
    "draft_tokens": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
    "per_position": "spec_decode_num_accepted_tokens_per_pos_total",
}
_FIELDS = {
    f"{prefix}:{name}": field
    for prefix, names in (("llamacpp", _LLAMACPP), ("vllm", _VLLM))
    for field, name in {**names, **_DRAFTS}.items()
}
"""Name in the text to the field of `Counters`."""


def samples(text: str) -> tuple[Sample, ...]:
    """Parse a Prometheus text; other lines are skipped."""
    found = []
    for line in text.splitlines():
        if line.startswith("#") or not (matched := _SAMPLE.fullmatch(line)):
            continue
        try:
            value = float(matched[3])
        except ValueError:
            continue
        found.append(Sample(matched[1], dict(_LABEL.findall(matched[2] or "")), value))
    return tuple(found)


def read_counters(text: str | None) -> Counters | None:
    """Read an engine's counters, summed over its workers; None if the text has none."""
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for sample in samples(text or ""):
        name, position = _FIELDS.get(sample.name), sample.labels.get("position", "")
        if name == "per_position":
            if position.isdecimal() and int(position) < MOST_POSITIONS:
                positions[int(position)] = positions.get(int(position), 0.0) + sample.value
        elif name:
            totals[name] = totals.get(name, 0.0) + sample.value
    if not totals:
        return None
    last = max(positions, default=-1)
    return Counters(per_position=tuple(positions.get(n, 0.0) for n in range(last + 1)), **totals)


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


class Requirements(Frozen):
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


FeaturesT = TypeVar("FeaturesT", bound=Requirements)


def as_features(requirements: Requirements, kind: type[FeaturesT]) -> FeaturesT:
    """Give requirements as those of one engine. Raises TypeError for those of another."""
    if not isinstance(requirements, kind):
        raise TypeError(f"{kind.__module__} cannot check {type(requirements).__name__}")
    return requirements


def first_match(pattern: re.Pattern[str], log: Sequence[str]) -> tuple[str, re.Match[str] | None]:
    """Find the first line of a server's log that matches: its place, and the match."""
    for number, line in enumerate(log, start=1):
        if found := pattern.search(line):
            return f"server.log:{number}", found
    return "server.log", None


def check_text(name: str, expected: str, observed: Any, where: str) -> Check:
    """Check that a response has this text; anything but text is nothing observed."""
    text = observed if isinstance(observed, str) and observed else None
    return check(name, expected, text, where, ok=text == expected)


class RequiredCapabilities(Frozen):
    """What a vLLM image must support, besides the architectures in the weights' config.json."""

    roles: tuple[str, ...] = ("model",)
    """Weights whose architectures the image must support."""
    overridden: dict[str, tuple[str, ...]] = {}
    """By role: architectures that the command names instead of those in config.json."""
    reasoning_parser: str | None = None
    tool_parser: str | None = None
    speculation: str | None = None
    """The speculative method."""
    compute_capability: str | None = None
    """Of the GPU that the recipe is for."""


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
    ) -> Requirements:
        """Derive what the server has to show."""

    def expectations(self, requirements: Requirements) -> tuple[str, ...]:
        """Describe the expectations as text."""

    def healthy(self, answer: Answer) -> bool:
        """Whether a response of `/health` is this engine's "ok"."""

    def model_names(self, body: Any) -> tuple[str, ...]:
        """Names in a response of `/v1/models`; empty if it has another shape."""

    def stage(self, line: str) -> str | None:
        """Describe the loading stage that a log line reports; None for every other line."""

    def check_features(
        self, requirements: Requirements, answers: Mapping[str, Answer], log: Sequence[str]
    ) -> tuple[Check, ...]:
        """Compare the requirements with the responses at `evidence` and the log."""

    def expected_signatures(self, requirements: Requirements) -> frozenset[str]:
        """Ids of log signatures for what the recipe itself asks for."""


def engine_of(name: str) -> Engine:
    """Give an engine by its name in recipes. Raises KeyError for another name."""
    if name == "vllm":
        from bakehouse.engines.vllm.engine import Vllm

        return Vllm()
    if name == "llama.cpp":
        from bakehouse.engines.llamacpp.engine import LlamaCpp

        return LlamaCpp()
    raise KeyError(name)
