"""Start a server or reuse one, wait until it is healthy, then verify it."""

from __future__ import annotations

import ipaddress
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bakehouse.context import Context
from bakehouse.cuda.elf import read_cuda_file
from bakehouse.cuda.verify import accept_devices, find_cuda_file, parse_devices
from bakehouse.engines.base import engine_of
from bakehouse.engines.llamacpp.command import Help, judge_flags, parse_help
from bakehouse.errors import BakehouseError, HostError, Interrupted, NotHealthy, RecipeError
from bakehouse.host import read_host
from bakehouse.logscan.catalogue import catalogue
from bakehouse.models import Check, Verdict, check, digest
from bakehouse.plan.types import BuildPlan, ServePlan
from bakehouse.progress import Bar
from bakehouse.recipe.types import Origin
from bakehouse.runs.store import Run
from bakehouse.server.launcher import ServerSpec, SupervisorConnection, kept_key, launch
from bakehouse.server.processes import Listener, Process, Reading, owned, read_activity, tree
from bakehouse.server.state import ServerState
from bakehouse.server.status import engine_error, get_status, stop
from bakehouse.server.supervisor import Tail, read_container_note
from bakehouse.server.verification import (
    Prove,
    ServerHandle,
    VerificationResult,
    first_cause,
    get,
    last_line,
    read_log,
    url_of,
    verify,
)
from bakehouse.system.process import environment
from bakehouse.util import files
from bakehouse.util.files import file_lock
from bakehouse.util.text import size_text as gib

ASK_S = 60.0
"""Seconds for a server to print its flags or its devices."""
NO_GPU = "-1"
"""Hides all devices: on a busy GPU the text of --help can stop partway."""

POLL_S = 0.02
"""Seconds between two polls, so that READY lags the engine by well under 0.1 s."""
CONTAINER_POLL_S = 0.1
"""The same for a container: for each poll the engine's proxy opens a connection inside."""
LOOK_S = 0.25
"""Seconds between two looks at the log and at what was read."""
POLL_BYTES = 4096
"""Maximum bytes that a server reads because of one poll of ours."""


def ask_help(ctx: Context, server: str, kept: Path | None = None) -> Help:
    """Return a server's `--help`; a complete one is cached at `kept`."""
    with suppress(OSError):
        if kept and (found := parse_help(kept.read_text())).complete:
            return found
    env = environment({"CUDA_VISIBLE_DEVICES": NO_GPU}, ctx.environment)
    done = ctx.processes.capture((server, "--help"), env=env, timeout=ASK_S)
    found = parse_help(done.out)
    if not done.ok:
        return Help(found.entries, complete=False)
    if found.complete and kept:
        with suppress(OSError):  # without a cache it is asked again
            kept.parent.mkdir(parents=True, exist_ok=True)
            files.write(kept, done.out.encode(), sync=False)
    return found


def check_flags_supported(
    ctx: Context, build: BuildPlan, plan: ServePlan, origin: Origin
) -> tuple[Check, ...]:
    """Check a command against the built server's own `--help`.

    Raises RecipeError, at the command, for a flag that this server does not support. Flags are
    unknown if the text stops early; the server itself exits on a flag that it does not support.
    """
    kept = Path(build.artifact).parent / ".help" / f"{build.digest}.txt"
    # The server may be started by another program, such as numactl.
    begin = plan.argv.index(build.server) if build.server in plan.argv else 0
    known = ask_help(ctx, build.server, kept)
    checks = judge_flags(plan.argv[begin:], known, f"{build.server} --help")
    if wrong := [one for one in checks if one.verdict is Verdict.FAILED]:
        error = RecipeError(
            f"the built server does not support the command of {plan.name}",
            [origin.fault(f"serve.command: {one.observed}", f"see {one.where}") for one in wrong],
        )
        error.id, error.checks = "flag-unknown", checks
        raise error
    return checks


def check_gpu_visible(
    ctx: Context, build: BuildPlan, plan: ServePlan, layers: int | None
) -> tuple[Check, ...]:
    """Check the devices that a CUDA build lists, if layers are to run on a GPU.

    Raises HostError if it lists none, or others than the driver, or one it has no code for.
    """
    if build.expected.cuda is None or not layers:
        return ()
    argv = (build.server, "--list-devices")
    env = environment(plan.env, ctx.environment)
    done = ctx.processes.capture(argv, env=env, timeout=ASK_S)
    listed = done.out if done.ok else ""
    if names := [name for _, name in parse_devices(listed)]:
        gpus = ctx.gpus  # only those count that the recipe makes visible
        if "CUDA_VISIBLE_DEVICES" in plan.env:
            gpus = tuple(gpu for gpu in gpus if gpu.name in names)[: len(names)]
        file = find_cuda_file(Path(build.artifact))
        embedded = read_cuda_file(file).embedded if file else frozenset()
        checks = accept_devices(listed, gpus, embedded)
    else:
        expected = "a CUDA device, since layers are to run on it"
        source = "llama-server --list-devices"
        checks = (check("cuda.devices", expected, "(none)", source, ok=False),)
    if wrong := next((one for one in checks if one.verdict is Verdict.FAILED), None):
        stderr = "" if done.ok else done.err.strip().partition("\n")[0]
        raise HostError(
            f"the server cannot use this machine's GPU: expected {wrong.expected}; observed "
            f"{wrong.observed}",
            where=stderr or wrong.where, id="no-gpu", checks=checks,
            hint="`invoke doctor` shows what the driver reports; build for this GPU with "
            "--set build.cmake.CMAKE_CUDA_ARCHITECTURES=native",
        )  # fmt: skip
    return checks


@dataclass
class IdleTimer:
    """Seconds since a loading server last showed activity, on a monotonic clock.

    Activity is a new log line, or bytes that its processes read: through system calls, from disk,
    or as pages of mapped files. What our own polls cause does not count.
    """

    since: float
    last: Reading = field(default_factory=Reading)

    def update(self, now: float, reading: Reading, lines: Iterable[str], polls: int) -> float:
        """Take in what was seen since the last update; return the idle seconds so far."""
        grown = (
            reading.calls - self.last.calls > polls * POLL_BYTES
            or reading.disk > self.last.disk
            or reading.mapped > self.last.mapped
        )
        # A log line is the server's own if it is not the echo of our polling.
        if grown or any(line.strip() and "/health" not in line for line in lines):
            self.since = now
        self.last = reading
        return now - self.since


class Waiting:
    """Waits until one server is healthy."""

    def __init__(self, ctx: Context, connection: SupervisorConnection, spec: ServerSpec) -> None:
        self.ctx = ctx
        self.connection = connection
        self.spec = spec
        self.engine = engine_of(spec.engine)
        self.log = Tail(connection.folder / "server.log")
        self.stage = "starting"
        self.listener: Listener | None = None
        self.last = "it never listened"
        self.began = ctx.clock.monotonic()
        self.looked = self.began - LOOK_S
        self.idle = IdleTimer(since=self.began)
        self.polls = 0
        self.shown = 0
        """Number of the guard's alarms that were shown."""

    def until_healthy(self, name: str) -> int:
        """Return the port once the server is healthy.

        Raises NotHealthy with the check that failed, or HostError if the container or its engine
        failed.
        """
        with self.ctx.progress.bar(f"loading {name}", "B") as bar:
            while True:
                if self.connection.poll():
                    raise self.died()
                if self.listener is None:
                    self._find_socket()
                if self.listener is not None and self._healthy(self.listener):
                    return self.listener.port
                self._check_activity(bar)
                self.ctx.clock.sleep(CONTAINER_POLL_S if self.connection.box else POLL_S)

    def _find_socket(self) -> None:
        if box := self.connection.box:
            if port := box.port():
                self.listener = Listener(ipaddress.ip_address(self.spec.plan.host), port, 0)
        elif mine := owned(tree(self.connection.server)):
            self.listener = min(mine, key=lambda one: one.port)
        if self.listener:
            self.connection.send_port(self.listener.port)

    def _healthy(self, listener: Listener) -> bool:
        answer = get(self.ctx, f"{url_of(self.spec.plan.host, listener.port)}/health")
        self.polls += 1
        if self.engine.healthy(answer):
            return True
        if not self.connection.poll() and (200 <= answer.status < 500):
            seen = check("health", self.engine.health, answer.says, "GET /health", ok=False)
            raise self._failed(f"/health responded, but not like {self.engine.server}", seen)
        self.last = answer.says
        return False

    def _check_activity(self, bar: Bar) -> None:
        """Every LOOK_S seconds, check the time and the activity, and show the progress."""
        now = self.ctx.clock.monotonic()
        if now - self.looked < LOOK_S:
            return
        self.looked = now
        for alarm in self.connection.alarms[self.shown :]:
            self.ctx.progress.say(f"memory: {alarm['reason']}")
        self.shown = len(self.connection.alarms)
        lines = self.log.lines()
        self.stage = next(filter(None, map(self.engine.stage, reversed(lines))), self.stage)
        box = self.connection.box
        reading = read_activity((*tree(self.connection.server), *(box.pids() if box else ())))
        idle = self.idle.update(now, reading, lines, self.polls)
        self.polls = 0
        total, spec = self.spec.weights_size, self.spec
        bar.update(min(reading.loaded, total), total, self.stage)
        if idle > spec.stall_timeout:
            seen = f"no log output and no file reads for {idle:.0f} s ({self.stage})"
            expected = f"activity at least every {spec.stall_timeout:g} s"
            raise self._stalled(check("loading", expected, seen, "server.log, /proc", ok=False))
        if now - self.began > spec.ready_timeout:
            seen = f"not healthy after {now - self.began:.0f} s; last {self.last}"
            expected = f"healthy within {spec.ready_timeout:g} s"
            failed = check("health", expected, seen, "GET /health", ok=False)
            raise self._failed(f"not {expected}", failed)

    def died(self) -> BakehouseError:
        """Return the error for a server that ended, or a container that never started."""
        connection = self.connection
        if connection.box and (failed := read_container_note(connection.folder).get("failed")):
            return HostError(
                str(failed["what"]), where=failed["where"], hint=failed["hint"], id=failed["id"]
            )
        says = str((connection.ended or {}).get("says"))
        seen = check("alive", "the server runs until it is ready", says, "process table", ok=False)
        return self._failed(f"the server ended before it was ready: it {says}", seen)

    def _stalled(self, seen: Check) -> BakehouseError:
        """Return the error for a stall; a shard larger than the free memory makes vLLM hang."""
        free, largest = read_host().memory_available, self.spec.largest_file
        error = self._failed("loading stalled", seen)
        if largest and "shards" in self.stage:
            error.what += (
                f" at {self.stage}: the largest shard is {gib(largest)}, and {gib(free)} of "
                "memory are available"
            )
            if largest > free:
                error.hint = "split it into small shards with 'invoke reshard', or free memory"
        return error

    def _failed(self, what: str, seen: Check) -> BakehouseError:
        """Return the error, with the first cause in the log."""
        connection = self.connection
        try:
            box = connection.box.inspect() if connection.box else None
        except HostError as error:
            return HostError(
                f"{what}; and {error.what}", where=error.where, hint=error.hint, id=error.id,
                checks=(seen,),
            )  # fmt: skip
        if box and box.state == "paused":
            what += f"; somebody paused its container; resume it with: docker unpause {box.name}"
        log = connection.folder / "server.log"
        lines = read_log(log)
        cause = first_cause(lines, self.engine.name, died=connection.ended is not None)
        hint = (cause.fix if cause else None) or f"read {log}" + " (it is empty)" * (not lines)
        line = cause or last_line(lines)
        return NotHealthy(what, where=line.where if line else str(log), hint=hint, checks=(seen,))


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


def start_or_reuse(ctx: Context, spec: ServerSpec, questions: Prove, notes: Run) -> VerifiedServer:
    """Start a server, or reuse the running one, and verify it.

    Raises HostError (port taken, or it runs with other settings), NotHealthy or NotCorrect; then
    only its log is left.
    """
    folder = spec.folder
    lock = folder.parent / f".{folder.name}.lock"
    with file_lock(lock, f"server {folder.name}", ctx.progress.say):
        seen = get_status(folder)
        if seen.error:
            raise engine_error(seen, seen.error, "nothing was started")
        if seen.word == "paused":
            raise NotHealthy(
                f"{seen.name} is paused: {seen.trouble}", where=str(folder), id="paused",
                hint=f"resume it, or stop it first: invoke stop --recipe {seen.name}",
            )  # fmt: skip
        if seen.word == "running" and seen.state:
            if seen.state.plan != spec.digest or kept_key(folder) != spec.key:
                started = f"process {seen.processes[-1].pid}, started {seen.state.started}"
                raise HostError(
                    f"{seen.name} already runs with other settings", where=started,
                    hint=f"stop it first: invoke stop --recipe {seen.name}", id="already-running",
                )  # fmt: skip
            return _reverify(ctx, seen.state, spec, questions, notes)
        if seen.alive:
            ctx.progress.say(f"stopping leftovers of an earlier {folder.name} server")
            stop(folder)
        return _start(ctx, spec, questions, notes)


def _reverify(
    ctx: Context, state: ServerState, spec: ServerSpec, questions: Prove, notes: Run
) -> VerifiedServer:
    """Verify a running server again; stop it if it fails, since it answers, and is wrong."""
    server = ServerHandle.of(spec.folder, state, spec.engine, spec.key)
    if server.box:  # compare with the image that is verified now: a new build may have changed it
        server = replace(server, box=replace(server.box, image=spec.image))
    evidence = VerificationResult()
    began = ctx.clock.monotonic()
    try:
        evidence.add(server, [log_since_proof(spec.folder, state.findings)])
        verify(ctx, server, spec.asked, questions, evidence)
    except BakehouseError as error:
        if not isinstance(error, Interrupted):
            stop(spec.folder)
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


def _start(ctx: Context, spec: ServerSpec, questions: Prove, notes: Run) -> VerifiedServer:
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
        verify(ctx, server, spec.asked, questions, evidence)
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
        connection.poll()  # an alarm may be waiting, if the guard stopped the server
        if connection.alarms:
            notes.fact("memory_guard", connection.alarms)
        if not (keep and spec.foreground):
            connection.close()
        with suppress(OSError):  # the next launch rotates the log
            shutil.copyfile(spec.folder / "server.log", notes.folder / "server.log")


def _record(notes: Run, server: ServerHandle | None, evidence: VerificationResult) -> None:
    notes.checks(tuple(evidence.checks))
    notes.answers(evidence.answers)
    notes.suites(suite.record() for suite in evidence.suites)
    if server:
        notes.fact("url", server.url)
        notes.fact("pid", server.process.pid)
