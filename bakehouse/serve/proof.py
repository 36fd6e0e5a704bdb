"""The proof of a healthy server: is it ours, is it what was asked for, does it answer rightly.

Each thing that is judged is a check. A later stage is begun only when all before it passed: there
is no sense in asking questions of somebody else's server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bakehouse.checks import Check, check, not_passed
from bakehouse.context import Context
from bakehouse.engines.engine import NONCE_ALIAS, Answer, Asked, Engine, engine_of
from bakehouse.errors import BakehouseError, NotCorrect, NotHealthy
from bakehouse.plan.container import NONCE
from bakehouse.ports.http import Unreachable
from bakehouse.probe.prove import explain
from bakehouse.probe.types import Endpoint, Proof, SuiteProof
from bakehouse.records.model import Answer as Said
from bakehouse.redact import clean
from bakehouse.serve.containers import Box, engine_at
from bakehouse.serve.processes import Process, listeners, overlapping, sockets, tree
from bakehouse.serve.state import State
from bakehouse.signatures import Severity, scan

ASK_S = 2.0
FEATURE_S = 10.0
LOG_S = 1.0
"""The engine writes its log from a thread of its own; so long a line may be late, in seconds."""

LOG_BYTES = 32 << 20
"""So much of a log's beginning is read, in bytes: what went wrong first stands there."""
_ERROR = re.compile(
    r"^[\d.]+ E |\berror\b|\bfailed\b|\bfatal\b|\bcannot\b|GGML_ASSERT|\babort|terminate called",
    re.IGNORECASE,
)

_NO_ERROR = re.compile(r"\b(?:DEBUG|INFO|WARNING) +\d")
"""A line that its logger calls less than an error: vLLM warns of errors that may come."""

Prove = Callable[[Endpoint], Proof]


@dataclass(frozen=True)
class Running:
    """A server that says it is healthy."""

    folder: Path
    process: Process
    nonce: str
    host: str
    port: int
    engine: str
    key: str | None = None
    box: Box | None = None
    """Its container; `process` is then the one that follows it."""
    version: str | None = None
    """What the image says of itself of which it was started."""

    @property
    def url(self) -> str:
        """Where it is asked."""
        return url_of(self.host, self.port)

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def log(self) -> Path:
        """What it writes."""
        return self.folder / "server.log"


def running(folder: Path, state: State, engine: str, key: str | None) -> Running:
    """Give the server that a state speaks of. Raises NotHealthy where it has no process."""
    if state.server is None:
        raise NotHealthy(f"{folder.name} has no server process", where=str(folder))
    box = None
    if state.container:
        port = engine_of(engine).inside_port
        box = Box(engine_at(state.docker), state.container, port, state.image)
    return Running(
        folder, state.server, state.nonce, state.host, state.port, engine, key, box, state.version
    )  # fmt: skip


@dataclass
class Evidence:
    """What was judged so far, and what the server answered."""

    checks: list[Check] = field(default_factory=list)
    answers: tuple[Said, ...] = ()
    suites: tuple[SuiteProof, ...] = ()
    summary: str = ""


def prove(ctx: Context, server: Running, asked: Asked, questions: Prove, seen: Evidence) -> None:
    """Judge everything that ready means, in order, and put what was judged into `seen`.

    Raises NotHealthy (it is not ours, lacks a feature, died) or NotCorrect (answers or log show
    that it is wrong), with all checks up to there and the first cause in the log.
    """
    _stage(server, seen, identity(ctx, server))
    _stage(server, seen, features(ctx, server, asked))
    _stage(server, seen, [_signatures(server, asked)])
    endpoint = Endpoint(
        url=server.url, model=asked.name, headers=server.headers, engine=server.engine,
        context=asked.context,
    )  # fmt: skip
    proof = questions(endpoint)
    seen.answers, seen.suites, seen.summary = proof.answers, proof.suites, proof.summary
    after = identity(ctx, server, suffix="-after")
    log = _signatures(server, asked).model_copy(update={"id": "log-after"})
    seen.checks += proof.checks
    _stage(server, seen, after)
    _stage(server, seen, [log])
    if error := explain(proof, str(server.log)):
        error.checks = tuple(seen.checks)
        raise error


def identity(ctx: Context, server: Running, suffix: str = "") -> list[Check]:
    """Judge whether the child that we started lives, is healthy, and is who answers."""
    if server.box:
        return _identity_of_container(ctx, server, server.box, suffix)
    alive = server.process.alive
    found = overlapping(listeners(), server.host, server.port)
    family = 6 if ":" in server.host else 4
    near = [one for one in found if one.address.version == family] or list(found)
    mine = sockets(tree(server.process.pid)) if alive else {}
    strange = [one for one in near if one.inode not in mine]
    owner = "no socket" if not near else f"our process {server.process.pid}"
    if strange:
        owner = f"another process holds {', '.join(map(str, strange))}"
    return [
        check(
            f"alive{suffix}", f"process {server.process.pid} runs",
            "it runs" if alive else "it ended", "process table", ok=alive,
        ),
        check(
            f"socket-owner{suffix}", f"port {server.port} is our process's own", owner,
            "/proc/net/tcp", ok=bool(near) and not strange,
        ),
        *_answers(ctx, server, suffix, ours=alive and bool(near) and not strange),
    ]  # fmt: skip


def _identity_of_container(ctx: Context, server: Running, box: Box, suffix: str) -> list[Check]:
    """The same for a container: the engine says whose the published port is.

    Raises HostError where the engine does not answer: that says nothing of the server.
    """
    facts = box.asked()
    state = f"it is {facts.state}" if facts else "it is gone"
    following = server.process.alive
    if facts and facts.running and not following:
        state = "it runs, and the process that follows it ended"
    if facts and facts.state == "paused":
        state = f"it is paused; docker unpause {facts.name} lets it go on"
    ours = bool(facts and facts.labels.get(NONCE) == server.nonce and facts.state == "running")
    port = facts.ports.get(box.inside_port) if facts else None
    name = facts.name if facts else box.id[:12]
    owner = f"published by {name}, port {port}" if port else "nothing is published"
    mine = ours and port == server.port
    wanted = [] if box.image is None else [
        check(
            f"image{suffix}", f"the image that was proven able, {box.image}",
            facts.image if facts else None, f"docker inspect {box.id[:12]}",
            ok=facts is not None and facts.image == box.image,
        ),
    ]  # fmt: skip
    return [
        check(
            f"alive{suffix}", f"container {name} runs", state, f"docker inspect {box.id[:12]}",
            ok=ours and following,
        ),
        check(
            f"port-owner{suffix}", f"port {server.port} is our container's own", owner,
            f"docker inspect {box.id[:12]}", ok=mine,
        ),
        *wanted,
        *_answers(ctx, server, suffix, ours=mine),
    ]  # fmt: skip


def _answers(ctx: Context, server: Running, suffix: str, *, ours: bool) -> list[Check]:
    """Ask health and names, where it is our server that would answer."""
    engine = engine_of(server.engine)
    health = models = Answer(0, None, "not asked: it would not be our server that answers")
    if ours:
        health = get(ctx, f"{server.url}/health")
        models = get(ctx, f"{server.url}/v1/models", server.headers, FEATURE_S)
    wanted = f"{NONCE_ALIAS}{server.nonce}"
    return [
        check(
            f"health{suffix}", engine.health, health.says, "GET /health",
            ok=engine.healthy(health),
        ),
        check(
            f"nonce{suffix}", wanted, _named(engine, models), "GET /v1/models",
            ok=models.status == 200 and wanted in engine.model_names(models.body),
        ),
    ]  # fmt: skip


def _named(engine: Engine, models: Answer) -> str:
    names = engine.model_names(models.body)
    return ", ".join(names)[:300] if models.status == 200 and names else models.says


def features(ctx: Context, server: Running, asked: Asked) -> list[Check]:
    """Judge what the recipe asks for against the endpoints and the log."""
    engine = engine_of(server.engine)
    asked = asked.model_copy(update={"version": server.version})
    got = {path: get(ctx, server.url + path, server.headers, FEATURE_S) for path in engine.evidence}
    open_doors = [
        check(
            "key", "no answer without the API key", bare.says, f"GET {engine.guarded}",
            ok=bare.status == 401,
        )
        for bare in ([get(ctx, server.url + engine.guarded, None, FEATURE_S)] if asked.key else [])
    ]  # fmt: skip
    deadline = ctx.clock.monotonic() + LOG_S
    while True:
        checks = engine.judge(asked, got, read_log(server.log))
        late = [c for c in not_passed(checks) if c.where == "server.log"]
        if not late or ctx.clock.monotonic() > deadline:
            return [*open_doors, *checks]
        ctx.clock.sleep(0.05)


def _signatures(server: Running, asked: Asked) -> Check:
    asked_for = engine_of(server.engine).asked_for(asked) | asked.known_losses
    return signature_check(read_log(server.log), server.engine, asked_for)


def _stage(server: Running, seen: Evidence, checks: list[Check]) -> None:
    """Take the checks in; raise where one of them did not pass."""
    seen.checks += checks
    if missing := not_passed(checks):
        first = missing[0]
        silent = first.id.startswith("log") and first.observed.startswith("silent")
        what = f"{first.id}: expected {first.expected}; observed {first.observed}"
        raise _error(server, seen, correct=not silent, what=what)


def _error(server: Running, seen: Evidence, *, correct: bool, what: str) -> BakehouseError:
    cause: Cause | None = first_cause(read_log(server.log), server.engine)
    missing = not_passed(seen.checks)
    where = cause.where if cause else (missing[0].where if missing else str(server.log))
    hint = (cause.mend if cause else None) or f"the server's log is {server.log}"
    kind = NotHealthy if correct else NotCorrect
    return kind(what, where=where, hint=hint, checks=seen.checks)


def get(
    ctx: Context, url: str, headers: Mapping[str, str] | None = None, timeout: float = ASK_S
) -> Answer:
    """Ask once; what is no JSON has a body of None."""
    try:
        reply = ctx.http.ask("GET", url, headers=headers, timeout=timeout)
    except Unreachable as error:
        return Answer(0, None, error.why)
    try:
        return Answer(reply.status, reply.json(), reply.text)
    except ValueError:
        return Answer(reply.status, None, reply.text)


def url_of(host: str, port: int) -> str:
    """Where to ask a server that listens at host; an any-address is asked on loopback."""
    reach = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{reach}]:{port}" if ":" in reach else f"http://{reach}:{port}"


@dataclass(frozen=True)
class Cause:
    """A line of a log, numbered from 1, and what it means where that is known."""

    line_number: int
    line: str
    severity: str | None = None
    meaning: str | None = None
    mend: str | None = None

    @property
    def where(self) -> str:
        """For people."""
        return f"server.log:{self.line_number}: {clean(self.line, one_line=True)[:300]}"


def read_log(path: Path) -> list[str]:
    """Give the lines of a log; empty where there is none."""
    try:
        with path.open("rb") as file:
            text = file.read(LOG_BYTES).decode(errors="replace")
    except OSError:
        return []
    return text.splitlines()


def grave(
    lines: Sequence[str], engine: str, asked_for: frozenset[str] = frozenset()
) -> tuple[Cause, ...]:
    """Give the lines that show a fatal, silent or lost-feature signature, first cause first.

    `asked_for` are ids of signatures that say what the recipe itself asks for.
    """
    return tuple(
        Cause(f.line_number, f.line, str(f.severity), f.cause, f.mend)
        for f in scan(lines, engine=engine)
        if f.bad and f.id not in asked_for
    )


def first_cause(lines: Sequence[str], engine: str, *, died: bool = False) -> Cause | None:
    """Give the line that explains best: a grave signature, else the first that speaks of an error.

    A server that `died` is explained by a fatal line, not by one that it went on after.
    """
    known = [c for c in grave(lines, engine) if c.severity == Severity.FATAL or not died]
    if known:
        return known[0]
    for number, line in enumerate(lines, start=1):
        if _ERROR.search(line) and not _NO_ERROR.search(line):
            return Cause(number, line)
    return None


def last_words(lines: Sequence[str]) -> Cause | None:
    """Give the last line that says anything: what there is where nothing explains an end."""
    for number in range(len(lines), 0, -1):
        if lines[number - 1].strip():
            return Cause(number, lines[number - 1])
    return None


def signature_check(
    lines: Sequence[str], engine: str, asked_for: frozenset[str] = frozenset()
) -> Check:
    """Judge a log by its signatures; an empty log is no evidence."""
    first = next(iter(grave(lines, engine, asked_for)), None)
    seen = f"{first.severity}: {first.meaning}" if first else f"none in {len(lines)} lines"
    where = first.where if first else "server.log"
    ok = first is None if lines else None
    return check("log", "no fatal fault, no silent one, nothing lost", seen, where, ok=ok)
