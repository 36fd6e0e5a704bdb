"""A session of `serve`: start a planned server or reuse a running one, then verify it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from bakehouse.base import digest
from bakehouse.checks import Check, check
from bakehouse.context import Context
from bakehouse.errors import BakehouseError, HostError, Interrupted, NotHealthy
from bakehouse.plan.types import ServePlan
from bakehouse.records.model import Answer, SuiteRecord
from bakehouse.serve.control import ServerStatus, engine_error, look, stop
from bakehouse.serve.launch import ServerSpec, SupervisorConnection, kept_key, launch
from bakehouse.serve.processes import Process
from bakehouse.serve.proof import Prove, ServerHandle, VerificationResult, prove
from bakehouse.serve.ready import Waiting
from bakehouse.signatures.catalogue import catalogue
from bakehouse.util.files import file_lock


class Notes(Protocol):
    """What a run's record takes in while a server starts."""

    @property
    def folder(self) -> Path:
        """The run's own folder; the server's log is copied there."""

    def checks(self, checks: tuple[Check, ...]) -> None:
        """Record checks."""

    def answers(self, answers: tuple[Answer, ...]) -> None:
        """Record answers."""

    def suites(self, suites: Iterable[SuiteRecord]) -> None:
        """Record results of suites."""

    def fact(self, name: str, value: object) -> None:
        """Record one fact."""


@dataclass(frozen=True)
class VerifiedServer:
    """A server that passed its verification. Seconds of wall time."""

    server: ServerHandle
    evidence: VerificationResult
    again: bool
    """Whether it ran already and was only verified again."""
    loading: float
    proving: float
    connection: SupervisorConnection | None = None
    """Keeps a server in the foreground alive; None in the background."""


def identity_digest(plan: ServePlan, *parts: str) -> str:
    """Digest of what makes two servers the same: command, environment, address, artifacts."""
    box = [plan.container.to_data()] if plan.container else []
    return digest([plan.argv, plan.env, plan.host, plan.port, *box, *parts])


@contextmanager
def server_lock(ctx: Context, folder: Path) -> Iterator[None]:
    """Lock the right to start or verify the server of this name; wait while another has it."""
    lock = folder.parent / f".{folder.name}.lock"
    with file_lock(lock, f"server {folder.name}", ctx.progress.say):
        yield


def bring_up(ctx: Context, spec: ServerSpec, questions: Prove, notes: Notes) -> VerifiedServer:
    """Start a server, or reuse the running one, and verify it.

    Raises HostError (port taken, or it runs with other settings), NotHealthy or NotCorrect; then
    only its log is left.
    """
    folder = spec.folder
    with server_lock(ctx, folder):
        seen = look(folder)
        if seen.error:
            raise engine_error(seen, seen.error, "nothing was started")
        if seen.word == "paused":
            raise NotHealthy(
                f"{seen.name} is paused: {seen.trouble}", where=str(folder), id="paused",
                hint=f"resume it, or stop it first: invoke stop --recipe {seen.name}",
            )  # fmt: skip
        if seen.word == "running" and seen.state:
            _check_same(seen, spec)
            return _reverify(ctx, seen, spec, questions, notes)
        if seen.alive:
            ctx.progress.say(f"stopping leftovers of an earlier {folder.name} server")
            stop(folder)
        return _start(ctx, spec, questions, notes)


def _check_same(seen: ServerStatus, spec: ServerSpec) -> None:
    """Raise HostError if the running server has other settings."""
    same = seen.state and seen.state.plan == spec.digest
    if not same or kept_key(seen.folder) != spec.key:
        raise HostError(
            f"{seen.name} already runs with other settings",
            where=f"process {seen.processes[-1].pid}, started {seen.state and seen.state.started}",
            hint=f"stop it first: invoke stop --recipe {seen.name}", id="already-running",
        )  # fmt: skip


def _reverify(
    ctx: Context, seen: ServerStatus, spec: ServerSpec, questions: Prove, notes: Notes
) -> VerifiedServer:
    """Verify a running server again; stop it if it fails, since it answers, and is wrong."""
    state = seen.state
    if state is None:
        raise NotHealthy(f"{seen.name} has no server process", where=str(seen.folder))
    server = ServerHandle.of(seen.folder, state, spec.engine, spec.key)
    if server.box:  # compare with the image that is verified now: a new build may have changed it
        server = replace(server, box=replace(server.box, image=spec.image))
    evidence = VerificationResult()
    began = ctx.clock.monotonic()
    try:
        evidence.add(server, [log_since_proof(seen.folder, state.findings)])
        prove(ctx, server, spec.asked, questions, evidence)
    except BakehouseError as error:
        if not isinstance(error, Interrupted):
            stop(seen.folder)
        raise
    finally:
        _record(notes, server, evidence)
    return VerifiedServer(server, evidence, True, 0.0, ctx.clock.monotonic() - began)


def log_since_proof(folder: Path, findings: tuple[dict[str, Any], ...]) -> Check:
    """Judge what the supervisor found in the log since the verification."""
    first = findings[0] if findings else None
    return check(
        "log-since-proof", "no fatal and no silent fault in the log since its verification",
        f"{first['severity']}: {first['line']}" if first else "none",
        f"server.log:{first['line_number']}" if first else str(folder / "server.log"),
        ok=first is None,
    )  # fmt: skip


def _start(ctx: Context, spec: ServerSpec, questions: Prove, notes: Notes) -> VerifiedServer:
    catalogue(spec.engine)  # load it now, not between the engine's first 200 and READY
    began = ctx.clock.monotonic()
    connection = launch(spec, ctx.environment, ctx.docker)
    evidence = VerificationResult()
    keep = False
    try:
        process = Process.of(connection.server)
        waiting = Waiting(ctx, connection, spec)
        port = waiting.until_healthy(spec.plan.name)
        loaded = ctx.clock.monotonic()
        if process is None:
            raise NotHealthy("the server ended at once", where=str(spec.folder / "server.log"))
        server = ServerHandle(
            spec.folder, process, connection.nonce, spec.plan.host, port, spec.engine, spec.key,
            connection.box, spec.version,
        )  # fmt: skip
        prove(ctx, server, spec.asked, questions, evidence)
        if not connection.send_proven(str(notes.folder), foreground=spec.foreground):
            raise waiting.died()
        keep = True
        _record(notes, server, evidence)
        return VerifiedServer(
            server, evidence, False, loaded - began, ctx.clock.monotonic() - loaded,
            connection if spec.foreground else None,
        )  # fmt: skip
    except BakehouseError as error:
        connection.send_refused(error.what)
        evidence.checks += [c for c in error.checks if c not in evidence.checks]
        raise
    finally:
        if not keep:
            _record(notes, None, evidence)
        if connection.alarms:
            notes.fact("memory_guard", connection.alarms)
        if not (keep and spec.foreground):
            connection.close()
        with suppress(OSError):  # the next launch rotates the log
            shutil.copyfile(spec.folder / "server.log", notes.folder / "server.log")


def _record(notes: Notes, server: ServerHandle | None, evidence: VerificationResult) -> None:
    notes.checks(tuple(evidence.checks))
    notes.answers(evidence.answers)
    notes.suites(suite.record() for suite in evidence.suites)
    if server:
        notes.fact("url", server.url)
        notes.fact("pid", server.process.pid)
