"""Start a server or reuse one, then verify it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from bakehouse.context import Context
from bakehouse.cuda.elf import read_cuda_file
from bakehouse.cuda.verify import accept_devices, find_cuda_file, parse_devices
from bakehouse.engines.llamacpp.command import Help, check_flags, parse_help
from bakehouse.errors import BakehouseError, HostError, Interrupted, NotHealthy, RecipeError
from bakehouse.host import read_gpus
from bakehouse.logscan.catalogue import catalogue
from bakehouse.models import Check, Verdict, check, digest, not_passed
from bakehouse.plan.types import BuildPlan, ServePlan
from bakehouse.recipe.types import Origin
from bakehouse.runs.store import Answer, SuiteRecord
from bakehouse.server.launcher import ServerSpec, SupervisorConnection, kept_key, launch
from bakehouse.server.processes import Process
from bakehouse.server.readiness import Waiting
from bakehouse.server.status import ServerStatus, engine_error, get_status, stop
from bakehouse.server.verification import Prove, ServerHandle, VerificationResult, verify
from bakehouse.system.process import environment
from bakehouse.util import files
from bakehouse.util.files import file_lock

ASK_S = 60.0
"""Seconds for a server to print its flags or its devices."""
NO_GPU = "-1"
"""Hides all devices: on a busy GPU the text of --help can stop partway."""


def ask_help(ctx: Context, server: str, kept: Path | None = None) -> Help:
    """Return a server's `--help`; a complete one is cached at `kept`."""
    if kept is not None:
        with suppress(OSError):
            found = parse_help(kept.read_text())
            if found.complete:
                return found
    env = environment({"CUDA_VISIBLE_DEVICES": NO_GPU}, ctx.environment)
    done = ctx.processes.capture((server, "--help"), env=env, timeout=ASK_S)
    found = parse_help(done.out)
    if not done.ok:
        return Help(found.entries, complete=False)
    if found.complete and kept is not None:
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
    checks = check_flags(plan.argv[begin:], known, f"{build.server} --help")
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
    checks = judge_devices(ctx, Path(build.artifact), done.out if done.ok else "", plan.env)
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


def judge_devices(
    ctx: Context, artifact: Path, listed: str, env: Mapping[str, str]
) -> tuple[Check, ...]:
    """Judge a list of devices, by those GPUs that the recipe makes visible."""
    names = [name for _, name in parse_devices(listed)]
    if not names:
        expected = "a CUDA device, since layers are to run on it"
        return (check("cuda.devices", expected, "(none)", "llama-server --list-devices", ok=False),)
    gpus = read_gpus(ctx.processes)
    if "CUDA_VISIBLE_DEVICES" in env:
        gpus = tuple(gpu for gpu in gpus if gpu.name in names)[: len(names)]
    file = find_cuda_file(artifact)
    return accept_devices(listed, gpus, read_cuda_file(file).embedded if file else frozenset())


def unknown_lines(checks: Sequence[Check]) -> list[str]:
    """Describe the checks without a result."""
    return [f"not known before launch: {one.id}: {one.observed}" for one in not_passed(checks)]


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


def start_or_reuse(
    ctx: Context, spec: ServerSpec, questions: Prove, notes: Notes
) -> VerifiedServer:
    """Start a server, or reuse the running one, and verify it.

    Raises HostError (port taken, or it runs with other settings), NotHealthy or NotCorrect; then
    only its log is left.
    """
    folder = spec.folder
    with server_lock(ctx, folder):
        seen = get_status(folder)
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
        verify(ctx, server, spec.asked, questions, evidence)
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
