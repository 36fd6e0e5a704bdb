"""Brings a planned server up, or finds it running, and proves it: all of `serve` but words."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from bakehouse.base import digest
from bakehouse.checks import Check, check, not_passed
from bakehouse.context import Context
from bakehouse.engines.engine import Asked
from bakehouse.errors import BakehouseError, HostError, Interrupted, NotCorrect, NotHealthy
from bakehouse.plan.types import ServePlan
from bakehouse.records.model import Answer, SuiteRecord
from bakehouse.serve.control import Seen, look, stop, unasked
from bakehouse.serve.launch import Link, Settings, kept_key, launch
from bakehouse.serve.processes import Process
from bakehouse.serve.proof import Evidence, Prove, Running, prove, running
from bakehouse.serve.ready import Limits, Waiting
from bakehouse.signatures.catalogue import catalogue
from bakehouse.util.files import file_lock


class Notes(Protocol):
    """What a record takes in while a server comes up."""

    @property
    def folder(self) -> Path:
        """The run's own folder; the server's log is copied there."""

    def checks(self, checks: tuple[Check, ...]) -> None:
        """Record judgements."""

    def answers(self, answers: tuple[Answer, ...]) -> None:
        """Record answers."""

    def suites(self, suites: Iterable[SuiteRecord]) -> None:
        """Record what suites came to."""

    def fact(self, name: str, value: object) -> None:
        """Record something seen."""


@dataclass(frozen=True)
class Order:
    """A server that is wanted."""

    plan: ServePlan
    asked: Asked
    settings: Settings
    limits: Limits
    weights_size: int = 0
    """Bytes, for the progress of loading."""
    largest: int = 0
    """Bytes of the largest single file: an engine may hold it whole beside all else."""
    foreground: bool = False


@dataclass(frozen=True)
class Ready:
    """A server that proved itself. Seconds of wall time."""

    server: Running
    evidence: Evidence
    again: bool
    """Whether it ran already and was only proven again."""
    loading: float
    proving: float
    link: Link | None = None
    """In the foreground, the line that keeps it alive."""


def identity_digest(plan: ServePlan, *parts: str) -> str:
    """Digest of what makes two servers the same one: command, environment, address, artifacts."""
    box = [plan.container.to_data()] if plan.container else []
    return digest([plan.argv, plan.env, plan.host, plan.port, *box, *parts])


@contextmanager
def turn(ctx: Context, folder: Path) -> Iterator[None]:
    """Hold the right to start or prove the server of this name; wait while another has it."""
    lock = folder.parent / f".{folder.name}.lock"
    with file_lock(lock, f"server {folder.name}", ctx.progress.say):
        yield


def bring_up(ctx: Context, order: Order, questions: Prove, notes: Notes) -> Ready:
    """Give the proven server that was ordered.

    Raises HostError (port taken, or the name runs with other settings), NotHealthy or NotCorrect;
    then nothing of the server is left but its log.
    """
    folder = order.settings.folder
    with turn(ctx, folder):
        seen = look(folder)
        if seen.error:
            raise unasked(seen, seen.error, "nothing was started")
        if seen.word == "paused":
            raise NotHealthy(
                f"{seen.name} is paused: {seen.trouble}", where=str(folder), id="paused",
                hint=f"let it go on, or stop it first: invoke stop --recipe {seen.name}",
            )  # fmt: skip
        if seen.word == "running" and seen.state:
            _same(seen, order)
            return _again(ctx, seen, order, questions, notes)
        if seen.alive:
            ctx.progress.say(f"what was left of an earlier {folder.name} is being stopped")
            stop(folder)
        return _fresh(ctx, order, questions, notes)


def _same(seen: Seen, order: Order) -> None:
    """Raise HostError where what runs is not what is wanted."""
    same = seen.state and seen.state.plan == order.settings.plan
    if not same or kept_key(seen.folder) != order.settings.key:
        raise HostError(
            f"{seen.name} already runs with other settings",
            where=f"process {seen.processes[-1].pid}, started {seen.state and seen.state.started}",
            hint=f"stop it first: invoke stop --recipe {seen.name}", id="already-running",
        )  # fmt: skip


def _again(ctx: Context, seen: Seen, order: Order, questions: Prove, notes: Notes) -> Ready:
    """Prove a running server once more; one that fails is stopped: it is wrong, and it answers."""
    state = seen.state
    if state is None or state.server is None:
        raise NotHealthy(f"{seen.name} has no server process", where=str(seen.folder))
    server = running(seen.folder, state, order.settings.engine, order.settings.key)
    if server.box:  # of what is proven able now, which a new build may have changed
        server = replace(server, box=replace(server.box, image=order.settings.image))
    evidence = Evidence([watched(seen.folder, state.findings)])
    began = ctx.clock.monotonic()
    try:
        if missing := not_passed(evidence.checks):
            silent = state.findings[0]["severity"] == "silent"
            raise (NotCorrect if silent else NotHealthy)(
                f"since it was proven its log shows: {missing[0].observed}", checks=missing,
                where=missing[0].where, hint="it was stopped; serve it again, and read its log",
            )  # fmt: skip
        prove(ctx, server, order.asked, questions, evidence)
    except BakehouseError as error:
        if not isinstance(error, Interrupted):
            stop(seen.folder)
        raise
    finally:
        _note(notes, server, evidence)
    return Ready(server, evidence, True, 0.0, ctx.clock.monotonic() - began)


def watched(folder: Path, findings: tuple[dict[str, Any], ...]) -> Check:
    """What the keeper read in the log since the proof, however long the log has become."""
    first = findings[0] if findings else None
    return check(
        "log-since-proof", "no fatal and no silent fault in the log since it was proven",
        f"{first['severity']}: {first['line']}" if first else "none",
        f"server.log:{first['line_number']}" if first else str(folder / "server.log"),
        ok=first is None,
    )  # fmt: skip


def _fresh(ctx: Context, order: Order, questions: Prove, notes: Notes) -> Ready:
    settings, plan = order.settings, order.plan
    catalogue(settings.engine)  # read now, not between the engine's first 200 and READY
    began = ctx.clock.monotonic()
    link = launch(plan, settings, ctx.environment, ctx.docker)
    evidence = Evidence()
    keep = False
    try:
        process = Process.of(link.server)
        waiting = Waiting(
            ctx, link, plan.host, order.limits, order.weights_size, settings.engine, order.largest
        )
        port = waiting.until_healthy(plan.name)
        loaded = ctx.clock.monotonic()
        if process is None:
            raise NotHealthy("the server ended at once", where=str(settings.folder / "server.log"))
        server = Running(
            settings.folder, process, link.nonce, plan.host, port, settings.engine, settings.key,
            link.box, settings.version,
        )  # fmt: skip
        prove(ctx, server, order.asked, questions, evidence)
        if not link.tell_proven(str(notes.folder), foreground=order.foreground):
            raise waiting.died()
        keep = True
        _note(notes, server, evidence)
        done = ctx.clock.monotonic()
        held = link if order.foreground else None
        return Ready(server, evidence, False, loaded - began, done - loaded, held)
    except BakehouseError as error:
        link.tell_refused(error.what)
        evidence.checks += [c for c in error.checks if c not in evidence.checks]
        raise
    finally:
        if not keep:
            _note(notes, None, evidence)
        if link.alarms:
            notes.fact("memory_guard", link.alarms)
        if not (keep and order.foreground):
            link.close()
        _copy_log(settings.folder, notes.folder)


def _note(notes: Notes, server: Running | None, evidence: Evidence) -> None:
    notes.checks(tuple(evidence.checks))
    notes.answers(evidence.answers)
    notes.suites(suite.record() for suite in evidence.suites)
    if server:
        notes.fact("url", server.url)
        notes.fact("pid", server.process.pid)


def _copy_log(folder: Path, target: Path) -> None:
    """Keep the log as it is now with the record: the next launch moves it on."""
    with suppress(OSError):
        shutil.copyfile(folder / "server.log", target / "server.log")
