"""Verification of a healthy server: is it ours, has it what was asked for, are its answers right?

Every judgement is a check. A stage begins only if all checks before it passed: it makes no sense
to ask questions of somebody else's server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bakehouse.context import Context
from bakehouse.engines.base import NONCE_ALIAS, Answer, Requirements, engine_of
from bakehouse.errors import NotCorrect, NotHealthy
from bakehouse.logscan.findings import Severity
from bakehouse.logscan.scanner import scan
from bakehouse.models import Check, check, not_passed
from bakehouse.plan.serve import NONCE
from bakehouse.probe.models import Endpoint, Proof, SuiteProof
from bakehouse.probe.runner import explain
from bakehouse.redact import clean
from bakehouse.runs.store import Answer as ProbeAnswer
from bakehouse.server.containers import ContainerHandle, engine_at
from bakehouse.server.processes import Process, listeners, overlapping, sockets, tree
from bakehouse.server.state import ServerState
from bakehouse.system.http import Unreachable

ASK_S = 2.0
"""Seconds that `/health` may take."""
FEATURE_S = 10.0
"""Seconds that other endpoints may take."""
LOG_S = 1.0
"""Seconds that a log line may be late: the engine writes its log in a thread."""
LOG_BYTES = 32 << 20
"""Bytes read from the start of a log."""
_ERROR = re.compile(
    r"^[\d.]+ E |\berror\b|\bfailed\b|\bfatal\b|\bcannot\b|GGML_ASSERT|\babort|terminate called",
    re.IGNORECASE,
)
_NO_ERROR = re.compile(r"\b(?:DEBUG|INFO|WARNING) +\d")
"""A line that its logger calls less than an error: vLLM warns of errors that may come."""

Prove = Callable[[Endpoint], Proof]
"""Asks a server everything that its recipe's `probe` asks."""


@dataclass(frozen=True)
class ServerHandle:
    """A server of ours, verified or not."""

    folder: Path
    process: Process
    nonce: str
    host: str
    port: int
    engine: str
    key: str | None = None
    box: ContainerHandle | None = None
    """Its container; `process` is then the follower."""
    version: str | None = None
    """Version that its image reports."""

    @classmethod
    def of(cls, folder: Path, state: ServerState, engine: str, key: str | None) -> ServerHandle:
        """Return the server that a state describes. Raises NotHealthy if it has no process."""
        if state.server is None:
            raise NotHealthy(f"{folder.name} has no server process", where=str(folder))
        box = None
        if state.container:
            port = engine_of(engine).inside_port
            box = ContainerHandle(engine_at(state.docker), state.container, port, state.image)
        return cls(
            folder, state.server, state.nonce, state.host, state.port, engine, key, box,
            state.version,
        )  # fmt: skip

    @property
    def url(self) -> str:
        """Its base URL."""
        return url_of(self.host, self.port)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    @property
    def log(self) -> Path:
        """Its log file."""
        return self.folder / "server.log"


@dataclass
class VerificationResult:
    """What was judged so far, and what the server answered."""

    checks: list[Check] = field(default_factory=list)
    answers: tuple[ProbeAnswer, ...] = ()
    suites: tuple[SuiteProof, ...] = ()
    summary: str = ""

    def add(self, server: ServerHandle, checks: Sequence[Check]) -> None:
        """Add the checks of one stage.

        Raises NotHealthy or NotCorrect if one of them did not pass, with all checks so far and the
        first cause in the log.
        """
        self.checks += checks
        missing = not_passed(checks)
        if not missing:
            return
        first = missing[0]
        silent = first.id.startswith("log") and first.observed.startswith("silent")
        cause = first_cause(read_log(server.log), server.engine)
        raise (NotCorrect if silent else NotHealthy)(
            describe_failure(first),
            where=cause.where if cause else first.where,
            hint=(cause.fix if cause else None) or f"the server's log is {server.log}",
            checks=self.checks,
        )


def describe_failure(one: Check) -> str:
    """Describe a check that did not pass."""
    return f"{one.id}: expected {one.expected}; observed {one.observed}"


def verify(
    ctx: Context,
    server: ServerHandle,
    asked: Requirements,
    questions: Prove,
    seen: VerificationResult,
) -> None:
    """Verify a server, stage by stage, and put everything that was judged into `seen`.

    Raises NotHealthy (it is not ours, lacks a feature, or died) or NotCorrect (its answers or its
    log show that it is wrong).
    """
    seen.add(server, identity(ctx, server))
    seen.add(server, features(ctx, server, asked))
    seen.add(server, [_log_check(server, asked)])
    proof = questions(
        Endpoint(server.url, asked.name, server.headers, server.engine, asked.context)
    )
    seen.answers, seen.suites, seen.summary = proof.answers, proof.suites, proof.summary
    after = identity(ctx, server, suffix="-after")
    log = _log_check(server, asked).model_copy(update={"id": "log-after"})
    seen.checks += proof.checks
    seen.add(server, after)
    seen.add(server, [log])
    if error := explain(proof, str(server.log)):
        error.checks = tuple(seen.checks)
        raise error


def identity(ctx: Context, server: ServerHandle, suffix: str = "") -> list[Check]:
    """Judge whether the process that we started runs, is healthy, and is the one that answers.

    Raises HostError if its Docker Engine does not answer: that says nothing about the server.
    """
    if server.box:
        return _container_identity(ctx, server, server.box, suffix)
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
            f"socket-owner{suffix}", f"port {server.port} belongs to our process", owner,
            "/proc/net/tcp", ok=bool(near) and not strange,
        ),
        *_health_and_nonce(ctx, server, suffix, ours=alive and bool(near) and not strange),
    ]  # fmt: skip


def _container_identity(
    ctx: Context, server: ServerHandle, box: ContainerHandle, suffix: str
) -> list[Check]:
    """Judge the same for a container: the engine says who publishes the port."""
    facts = box.inspect()
    followed = server.process.alive
    state = f"it is {facts.state}" if facts else "it is gone"
    if facts and facts.running and not followed:
        state = "it runs, but its follower ended"
    if facts and facts.state == "paused":
        state = f"it is paused; resume it with: docker unpause {facts.name}"
    ours = bool(facts and facts.labels.get(NONCE) == server.nonce and facts.state == "running")
    port = facts.ports.get(box.inside_port) if facts else None
    name = facts.name if facts else box.id[:12]
    owner = f"published by {name}, port {port}" if port else "no port is published"
    mine = ours and port == server.port
    where = f"docker inspect {box.id[:12]}"
    checks = [
        check(f"alive{suffix}", f"container {name} runs", state, where, ok=ours and followed),
        check(
            f"port-owner{suffix}", f"port {server.port} belongs to our container", owner, where,
            ok=mine,
        ),
    ]  # fmt: skip
    if box.image is not None:
        image = facts.image if facts else None
        wanted = f"the verified image, {box.image}"
        checks.append(check(f"image{suffix}", wanted, image, where, ok=image == box.image))
    return [*checks, *_health_and_nonce(ctx, server, suffix, ours=mine)]


def _health_and_nonce(
    ctx: Context, server: ServerHandle, suffix: str, *, ours: bool
) -> list[Check]:
    """Ask for health and model names if it is our server that would answer."""
    engine = engine_of(server.engine)
    health = models = Answer(0, None, "not asked: our server would not be the one to answer")
    if ours:
        health = get(ctx, f"{server.url}/health")
        models = get(ctx, f"{server.url}/v1/models", server.headers, FEATURE_S)
    nonce = f"{NONCE_ALIAS}{server.nonce}"
    names = engine.model_names(models.body) if models.status == 200 else ()
    return [
        check(
            f"health{suffix}", engine.health, health.says, "GET /health",
            ok=engine.healthy(health),
        ),
        check(
            f"nonce{suffix}", nonce, ", ".join(names)[:300] or models.says, "GET /v1/models",
            ok=nonce in names,
        ),
    ]  # fmt: skip


def features(ctx: Context, server: ServerHandle, asked: Requirements) -> list[Check]:
    """Judge what the recipe asks for by the engine's endpoints and log."""
    engine = engine_of(server.engine)
    asked = asked.model_copy(update={"version": server.version})
    answers = {
        path: get(ctx, server.url + path, server.headers, FEATURE_S) for path in engine.evidence
    }
    keyless = []
    if asked.key:
        bare = get(ctx, server.url + engine.guarded, None, FEATURE_S)
        keyless = [check("key", "no answer without the API key", bare.says,
                         f"GET {engine.guarded}", ok=bare.status == 401)]  # fmt: skip
    deadline = ctx.clock.monotonic() + LOG_S
    while True:
        checks = engine.check_features(asked, answers, read_log(server.log))
        late = [c for c in not_passed(checks) if c.where == "server.log"]
        if not late or ctx.clock.monotonic() > deadline:
            return [*keyless, *checks]
        ctx.clock.sleep(0.05)


def get(
    ctx: Context, url: str, headers: Mapping[str, str] | None = None, timeout: float = ASK_S
) -> Answer:
    """Send one GET request; the body is None if it is not JSON, the status 0 without an answer."""
    try:
        reply = ctx.http.ask("GET", url, headers=headers, timeout=timeout)
    except Unreachable as error:
        return Answer(0, None, error.why)
    try:
        return Answer(reply.status, reply.json(), reply.text)
    except ValueError:
        return Answer(reply.status, None, reply.text)


def url_of(host: str, port: int) -> str:
    """Return the URL of a server that listens at host; an any-address is reached on loopback."""
    reach = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{reach}]:{port}" if ":" in reach else f"http://{reach}:{port}"


@dataclass(frozen=True)
class Cause:
    """A line of a log, numbered from 1, and what it means if that is known."""

    line_number: int
    line: str
    severity: str | None = None
    meaning: str | None = None
    fix: str | None = None

    @property
    def where(self) -> str:
        """File, line number and line."""
        return f"server.log:{self.line_number}: {clean(self.line, one_line=True)[:300]}"


def read_log(path: Path) -> list[str]:
    """Return the lines of a log; empty if there is none."""
    try:
        with path.open("rb") as file:
            return file.read(LOG_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []


def severe_findings(
    lines: Sequence[str], engine: str, expected: frozenset[str] = frozenset()
) -> tuple[Cause, ...]:
    """Return lines with a fatal, silent or lost-feature signature, first cause first.

    `expected` are ids of signatures that the recipe itself asks for.
    """
    return tuple(
        Cause(f.line_number, f.line, str(f.severity), f.cause, f.mend)
        for f in scan(lines, engine=engine)
        if f.bad and f.id not in expected
    )


def first_cause(lines: Sequence[str], engine: str, *, died: bool = False) -> Cause | None:
    """Return the line that explains most: a known signature, else the first one about an error.

    A server that `died` is explained by a fatal line only, not by one that it survived.
    """
    known = [c for c in severe_findings(lines, engine) if c.severity == Severity.FATAL or not died]
    if known:
        return known[0]
    for number, line in enumerate(lines, start=1):
        if _ERROR.search(line) and not _NO_ERROR.search(line):
            return Cause(number, line)
    return None


def last_line(lines: Sequence[str]) -> Cause | None:
    """Return the last line that is not empty: the best there is if nothing explains an end."""
    for number in range(len(lines), 0, -1):
        if lines[number - 1].strip():
            return Cause(number, lines[number - 1])
    return None


def signature_check(
    lines: Sequence[str], engine: str, asked_for: frozenset[str] = frozenset()
) -> Check:
    """Judge a log by its signatures; an empty log is no evidence."""
    first = next(iter(severe_findings(lines, engine, asked_for)), None)
    seen = f"{first.severity}: {first.meaning}" if first else f"none in {len(lines)} lines"
    where = first.where if first else "server.log"
    ok = first is None if lines else None
    return check("log", "no fatal fault, no silent fault, no lost feature", seen, where, ok=ok)


def _log_check(server: ServerHandle, asked: Requirements) -> Check:
    expected = engine_of(server.engine).expected_signatures(asked) | asked.known_losses
    return signature_check(read_log(server.log), server.engine, expected)
