"""The same requests to two servers: what each answered, and what its log shows.

Greedy, from a fixed seed, in several rounds and without the engine's prompt cache, so that a
request means the same work each time. Nothing here raises for what a server does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bakehouse.context import Context
from bakehouse.engines.base import Counters, read_counters
from bakehouse.logscan.scanner import Scanner
from bakehouse.models import check
from bakehouse.patch_review.log_diff import Kinds
from bakehouse.patch_review.verdict import GeneratedAnswer, LogReport, SevereFinding, Side
from bakehouse.patches.manifest import Expect
from bakehouse.probe.client import Client, JsonResponse, said_of
from bakehouse.probe.models import Endpoint, Proof, ServedModel, SuiteProof
from bakehouse.probe.runner import conclude, run_probe
from bakehouse.probe.suites import vision as images
from bakehouse.probe.suites.speculation import TEXTS
from bakehouse.recipe.models import Probe, Recipe, Request

ROUNDS = 3
"""Rounds of the benchmark: enough to see how much one server varies."""
SEED = 1
PICTURE = 7
"""Seed of the picture that both are shown."""


@dataclass(frozen=True)
class Item:
    """One request of the benchmark."""

    name: str
    mode: Literal["chat", "completion"]
    prompt: Mapping[str, Any] = field(default_factory=dict)
    """Its part of the request body."""


def items(*, vision: bool = False) -> tuple[Item, ...]:
    """Return the requests: prose, code, a text that repeats, and a picture for vision models."""
    texts = {
        "prose": "Write three paragraphs about the harbour of a small town in winter.",
        "code": "Write a Python function that merges two sorted lists, and explain it.",
    }
    chats: dict[str, Any] = dict(texts)
    if vision:
        text = {"type": "text", "text": "Describe this picture, then write a story about it."}
        chats["image"] = [images.make(PICTURE).printed.part, text]
    found = [
        Item(name, "chat", {"messages": [{"role": "user", "content": content}]})
        for name, content in chats.items()
    ]
    repetition = Item("repetition", "completion", {"prompt": TEXTS["a text begun again"]})
    return (*found[:2], repetition, *found[2:])


def generate(
    talk: Client, request: Request, work: tuple[Item, ...], tokens: int, rounds: int = ROUNDS
) -> tuple[tuple[GeneratedAnswer, ...], ...]:
    """Send all requests, `rounds` times, with at most `tokens` tokens an answer.

    Ends early if the server is gone.
    """
    done: list[tuple[GeneratedAnswer, ...]] = []
    with talk.progress.bar("generation", "answers") as bar:
        for _ in range(rounds):
            answers: list[GeneratedAnswer] = []
            for item in work:
                answer, lost = _request(talk, request, item, tokens)
                answers.append(answer)
                bar.update(len(done) * len(work) + len(answers), rounds * len(work), item.name)
                if lost:
                    return (*done, tuple(answers))
            done.append(tuple(answers))
    return tuple(done)


_PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


def _request(
    talk: Client, request: Request, item: Item, tokens: int
) -> tuple[GeneratedAnswer, bool]:
    """Send one request; also return whether the server is gone."""
    body: dict[str, Any] = {
        "model": talk.endpoint.model or "default", **item.prompt, "max_tokens": tokens,
        "temperature": 0, "seed": SEED, "stream": False,
    }  # fmt: skip
    if request.reasoning_effort and item.mode == "chat":
        body["reasoning_effort"] = request.reasoning_effort
    if talk.endpoint.engine == "llama.cpp":
        body["cache_prompt"] = False
    told = talk.post(_PATHS[item.mode], body, tokens=tokens)
    return read_answer(item, told), told.lost


def read_answer(item: Item, told: JsonResponse) -> GeneratedAnswer:
    """Read an answer: its text, and token counts and times if the engine reports them."""
    said = said_of(told, item.mode)
    if said.problem:
        return GeneratedAnswer(item=item.name, problem=said.problem)
    text = f"{said.reasoning}\n\n{said.content}" if said.reasoning else said.content
    timings = told.data.get("timings") if isinstance(told.data, dict) else None
    if not isinstance(timings, dict):
        return GeneratedAnswer(item=item.name, text=text, tokens=said.tokens, seconds=said.seconds)
    drafted = _count(timings.get("draft_n")) or 0
    spent = timings.get("predicted_ms")
    timed = isinstance(spent, int | float) and not isinstance(spent, bool) and 0 < spent < 1e12
    return GeneratedAnswer(
        item=item.name, text=text, tokens=_count(timings.get("predicted_n")),
        seconds=float(spent or 0) / 1000 if timed else None, drafted=drafted,
        accepted=_count(timings.get("draft_n_accepted")) or 0,
    )  # fmt: skip


def _count(value: Any) -> int | None:
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return value if good else None


_BLOCK = 1 << 18
_LINE = 1 << 12
TOKENS = 96
"""Tokens of an answer of the benchmark, unless the suite `fluency` sets another number."""


@dataclass(frozen=True)
class Workload:
    """What is sent to both servers."""

    probe: Probe
    items: tuple[Item, ...]
    tokens: int
    """Most tokens of an answer of the benchmark."""
    patterns: tuple[str, ...] = ()
    """Regular expressions whose matching log lines are counted."""
    rounds: int = ROUNDS


def workload_of(recipe: Recipe, expect: Expect) -> Workload:
    """Return what both servers get: the recipe's suites, the patch's, and the benchmark."""
    probe = recipe.effective_probe
    suites = tuple(dict.fromkeys((*(probe.suites or ()), *expect.suites)))
    patterns = dict.fromkeys(p.pattern for p in (*expect.must_appear, *expect.must_not_appear))
    tokens = probe.fluency.max_tokens if "max_tokens" in probe.fluency.model_fields_set else TOKENS
    work = items(vision=recipe.weights.projector is not None)
    return Workload(probe.model_copy(update={"suites": suites}), work, tokens, tuple(patterns))


@dataclass
class Measure:
    """Measures one server while it runs; called as its proof."""

    ctx: Context
    workload: Workload
    speed_only: bool = False
    """Whether to run the benchmark only, as in a second run."""
    asked: bool = False
    proof: Proof | None = None
    rounds: tuple[tuple[GeneratedAnswer, ...], ...] = ()
    counted: tuple[int, int] | None = None
    requests: int = 0

    def __call__(self, endpoint: Endpoint, known: ServedModel) -> Proof:
        """Run suites and benchmark."""
        self.asked = True
        if not self.speed_only:
            self.proof = run_probe(self.ctx, endpoint, self.workload.probe, known=known)
            self.requests = sum(s.cost.requests for s in self.proof.suites)
        talk = Client(self.ctx, endpoint)
        before = read_counters(talk.text("/metrics"))
        work = self.workload
        self.rounds = generate(talk, work.probe.request, work.items, work.tokens, work.rounds)
        self.counted = _drafts(before, read_counters(talk.text("/metrics")))
        self.requests += talk.cost.requests
        if self.proof:
            return self.proof
        answers = [s for each in self.rounds for s in each]
        bad = next((s for s in answers if s.problem), None)
        found = f"{bad.item}: {bad.problem}" if bad else f"{len(answers)} answers"
        one = check("patch.generation", "every request answered", found, "generation", ok=not bad)
        return conclude([SuiteProof("generation", "unstable" if bad else "true", found, (one,))])

    def side(
        self, name: str, build: str, log: Path, report: LogReport, problem: str | None
    ) -> Side:
        """Combine what was measured with the server's log."""
        return Side(
            name=name, build=build, problem=problem, asked=self.asked,
            suites=tuple(s.record() for s in self.proof.suites) if self.proof else (),
            rounds=self.rounds, counted=self.counted, log=str(log), requests=self.requests,
            **dict(report),
        )  # fmt: skip


def _drafts(before: Counters | None, after: Counters | None) -> tuple[int, int] | None:
    if before is None or after is None or after.draft_tokens is None:
        return None
    since = after.since(before)
    return int(since.draft_tokens or 0), int(since.accepted or 0)


def read_log(
    path: Path, engine: str, patterns: Sequence[str], own: Sequence[str], provoked: frozenset[str]
) -> LogReport:
    """Read a log once: kinds of lines, known faults, lines that match patterns.

    `own` are names of this run alone; `provoked` are ids of signatures that
    the recipe provokes.
    """
    kinds, scanner, matches = Kinds(own), Scanner(engine=engine), _Matches(patterns)
    try:
        with path.open("rb") as log:
            while data := log.read(_BLOCK):
                kinds.feed(data)
                scanner.feed_bytes(data)
                matches.feed(data)
    except OSError:
        return LogReport(matches=dict.fromkeys(patterns, 0))
    graves = tuple(
        SevereFinding(id=f.id, severity=str(f.severity), count=f.count, line_number=f.line_number,
              line=f.line)
        for f in scanner.finish()
        if f.bad and f.id not in provoked
    )  # fmt: skip
    return LogReport(
        kinds=kinds.finish(), lines=kinds.lines, beyond=kinds.beyond, graves=graves,
        matches=matches.finish(),
    )  # fmt: skip


class _Matches:
    """Counts the lines that match each of some regular expressions."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = {p: re.compile(p) for p in patterns}
        self._counts = dict.fromkeys(patterns, 0)
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Read a piece of any size."""
        if not self._patterns:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[: 2 * _LINE]
        for line in lines:
            self._line(line)

    def _line(self, line: bytes) -> None:
        text = line[:_LINE].decode(errors="replace")
        for pattern, compiled in self._patterns.items():
            self._counts[pattern] += compiled.search(text) is not None

    def finish(self) -> dict[str, int]:
        """Take the log as complete; return the counts."""
        if self._rest:
            self._line(self._rest)
        return self._counts
