"""Starts a server under a supervisor, and keeps the connection until the verification."""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bakehouse.engines.base import Requirements, engine_of
from bakehouse.errors import BakehouseError, HostError
from bakehouse.plan.types import ServePlan
from bakehouse.redact import clean
from bakehouse.server import container_follower, containers, supervisor
from bakehouse.server import state as states
from bakehouse.server.memory_guard import Bounds
from bakehouse.server.processes import (
    MARK,
    all_pids,
    boot_id,
    command_of,
    listeners,
    overlapping,
    sockets,
)
from bakehouse.server.state import ServerState, SupervisorInput
from bakehouse.server.status import stop, wait_for_end
from bakehouse.system.docker.client import DockerClient
from bakehouse.system.process import environment

NONCE_BYTES = 8
START_S = 30.0
"""Seconds that a supervisor may take to start its server."""
OLD_LOGS = 3
"""Number of logs kept of earlier servers of the same name."""


@dataclass(frozen=True)
class ServerSpec:
    """A server to start. Seconds and bytes."""

    plan: ServePlan
    asked: Requirements
    """What its engine has to show."""
    folder: Path
    """Of its state and its log."""
    cwd: Path
    digest: str
    """Of its settings: shows whether a running server is the same one."""
    engine: str
    stop_timeout: float
    ready_timeout: float
    stall_timeout: float
    guard: Bounds | None = None
    """Limits of the memory guard; None switches it off."""
    key: str | None = None
    image: str | None = None
    """Id of the verified image, if the server runs in one."""
    version: str | None = None
    """Version that this image reports."""
    weights_size: int = 0
    """Of all weights, to show the progress of loading."""
    largest_file: int = 0
    """Of the largest weight file: an engine may hold it whole in memory beside the rest."""
    foreground: bool = False


class SupervisorConnection:
    """The connection to a supervisor. Closing it before the server is verified ends the server."""

    def __init__(self, folder: Path, nonce: str, line: socket.socket) -> None:
        self.folder = folder
        self.nonce = nonce
        self.server = 0
        self.box: containers.ContainerHandle | None = None
        """The server's container, if it has one."""
        self.ended: dict[str, Any] | None = None
        """The supervisor's message that the server ended; None while it runs."""
        self.alarms: list[dict[str, Any]] = []
        """Alarms of the memory guard."""
        self._line = line
        self._received = b""
        self._keeps_running = False

    def close(self) -> None:
        """Disconnect. A server not verified, or in the foreground, ends before this returns."""
        self._line.close()
        if self._keeps_running:
            return
        try:
            stop(self.folder)
        except HostError:
            # Its engine does not answer. The supervisor ends by itself, and records what is left.
            wait_for_end(self.folder)

    def send_port(self, port: int) -> None:
        """Let the supervisor record where the server listens."""
        self._send({"do": "port", "port": port})

    def send_proven(self, record: str | None, *, foreground: bool = False) -> bool:
        """Let the server run on, in the foreground as long as we are connected.

        Returns False if it has ended.
        """
        self._send({"do": "proven", "record": record, "foreground": foreground})
        self._keeps_running = self.wait_for("proven", 10.0) and not foreground
        return self.ended is None

    def send_refused(self, why: str) -> None:
        """Let the supervisor record why the server is stopped."""
        self._send({"do": "refuse", "says": why})

    def poll(self) -> dict[str, Any] | None:
        """Receive pending messages without waiting; return how the server ended, if it did."""
        while self.ended is None and select.select([self._line], [], [], 0)[0]:
            self._receive()
        return self.ended

    def wait_for(self, event: str, seconds: float) -> bool:
        """Wait for an event; False if the server or the time ended first."""
        deadline = time.monotonic() + seconds
        while self.ended is None and time.monotonic() < deadline:
            if select.select([self._line], [], [], 0.1)[0] and event in self._receive():
                return True
        return False

    def _receive(self) -> set[str]:
        """Read once from the socket; return the names of the events in it."""
        events = set()
        try:
            chunk = self._line.recv(65536)
        except OSError:
            chunk = b""
        if not chunk:
            says = "lost its supervisor, which was killed"
            self.ended = self.ended or {"says": says, "code": None, "why": "lost"}
        *lines, self._received = (self._received + chunk).split(b"\n")
        for message in map(json.loads, lines):
            event = message["event"]
            events.add(event)
            if event == "started":
                self.server = int(message["pid"])
            elif event == "alarm":
                self.alarms.append(message["alarm"])
            elif event == "ended":
                self.ended = message
        return events

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._line.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.poll()


def launch(
    spec: ServerSpec, base: Mapping[str, str], docker: DockerClient | None = None
) -> SupervisorConnection:
    """Start a server; variables of the environment `base` are inherited by an allow-list.

    Raises HostError if the port is taken, the server's folder cannot be used, or its container
    cannot be created on `docker`.
    """
    plan, folder = spec.plan, spec.folder
    refuse_taken(plan.host, plan.port)
    prepare(folder, spec.key)
    nonce = secrets.token_hex(NONCE_BYTES)
    first = ServerState(
        name=folder.name, nonce=nonce, phase="starting", boot=boot_id(), argv=plan.command(nonce),
        host=plan.host, port=plan.port, plan=spec.digest, started=states.now(),
        stop_timeout=spec.stop_timeout, image=spec.image, version=spec.version,
    )  # fmt: skip
    env = environment({**plan.env, MARK: str(folder)}, base)
    start = SupervisorInput(
        state=first, env=env, cwd=str(spec.cwd), guard=spec.guard, engine=spec.engine,
        known_losses=tuple(sorted(spec.asked.known_losses)),
    )  # fmt: skip
    connection = _start(spec, start, docker, base)
    if not connection.wait_for("started", START_S):
        says = (connection.ended or {}).get("says", "it sent nothing")
        connection.close()
        raise HostError(
            f"the server's supervisor did not start: {says}", where=str(folder / "keeper.log"),
            hint="read that log; it has Python's messages", id="keeper",
        )  # fmt: skip
    return connection


def _start(
    spec: ServerSpec, start: SupervisorInput, docker: DockerClient | None, base: Mapping[str, str]
) -> SupervisorConnection:
    """Create the container if the plan has one, and start the supervisor.

    No container is left if this fails or is interrupted.
    """
    folder, nonce, box = spec.folder, start.state.nonce, None
    if not spec.plan.container or not docker:
        states.write(folder, start.state)
        return SupervisorConnection(folder, nonce, start_supervisor(folder, start))
    try:
        box, start = _create_container(spec, start, docker, base)
        states.write(folder, start.state)
        connection = SupervisorConnection(folder, nonce, start_supervisor(folder, start))
    except BaseException as error:
        containers.remove_failed_launch(docker, folder, nonce)
        why = error.what if isinstance(error, BakehouseError) else "its start was interrupted"
        ended = states.Ended(states.now(), "exited", None, f"never started: {why}")
        with suppress(OSError):
            states.write(folder, replace(start.state, phase="ended", ended=ended))
            states.forget_key(folder)
        raise
    connection.box = box
    return connection


def _create_container(
    spec: ServerSpec, start: SupervisorInput, docker: DockerClient, base: Mapping[str, str]
) -> tuple[containers.ContainerHandle, SupervisorInput]:
    """Create the container, and let the supervisor run the follower."""
    engine = engine_of(spec.engine)
    where = containers.find_endpoint_host(base)
    containers.refuse_remote(where)
    secret = (engine.key_variable, spec.key) if spec.key else None
    try:
        (spec.folder / containers.MARKED).write_text(where)  # in case its state is lost
        # If we are killed while it is created, this says where to look for it.
        states.write(spec.folder, replace(start.state, docker=where or None))
    except OSError as error:
        raise _unusable(error) from error
    nonce = start.state.nonce
    made = containers.make(docker, spec.plan, spec.folder, nonce, secret)
    run = (sys.executable, "-m", container_follower.__name__, str(spec.folder), made,
           f"{spec.stop_timeout:g}", nonce)  # fmt: skip
    env = {
        **start.env,
        **{name: base[name] for name in containers.ENGINE_VARIABLES if name in base},
        **_python_environment(),
    }
    state = replace(start.state, container=made, docker=where or None)
    return (
        containers.ContainerHandle(docker, made, engine.inside_port, spec.image),
        replace(start, state=state, env=env, run=run),
    )


def _python_environment() -> dict[str, str]:
    """Return variables by which a child finds everything that we can import."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(dict.fromkeys([package, *filter(None, sys.path)]))
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def start_supervisor(folder: Path, start: SupervisorInput) -> socket.socket:
    """Start the detached supervisor and send its input; return our end of the connection."""
    ours, theirs = socket.socketpair()
    with theirs, (folder / "keeper.log").open("ab") as log:
        starter = subprocess.Popen(
            [sys.executable, "-m", supervisor.__name__, str(folder), str(theirs.fileno())],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/",
            env={**environment({MARK: str(folder)}), **_python_environment()},
            pass_fds=(theirs.fileno(),), start_new_session=True,
        )  # fmt: skip
        ours.sendall(start.to_json().encode() + b"\n")
    starter.wait()
    return ours


def prepare(folder: Path, key: str | None) -> None:
    """Create the server's folder, private to its owner; rotate old logs; write the key."""
    try:
        for each in (folder, folder / "config"):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        logs = [folder / "server.log", *(folder / f"server.log.{n + 1}" for n in range(OLD_LOGS))]
        for newer, older in reversed(list(pairwise(logs))):
            if newer.exists():
                os.replace(newer, older)
        logs[0].touch(mode=0o600)
        (folder / "keeper.log").write_bytes(b"")
        for left in (supervisor.CONTAINER_NOTE, containers.MARKED, states.KEY_FILE):
            (folder / left).unlink(missing_ok=True)
        if key is not None:
            handle = os.open(folder / states.KEY_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as file:
                # The engine logs the last letters of a single key; of two only how many there are.
                file.write(f"{key}\n{secrets.token_hex(16)}\n")
    except OSError as error:
        raise _unusable(error) from error


def _unusable(error: OSError) -> HostError:
    return HostError(
        f"cannot use the server's folder: {error.strerror}", where=str(error.filename),
        hint="free some disk space or fix the permissions there", id="state-not-writable",
    )  # fmt: skip


def kept_key(folder: Path) -> str | None:
    """Return the API key that a running server was started with."""
    try:
        return (folder / states.KEY_FILE).read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def refuse_taken(host: str, port: int) -> None:
    """Check that a server can listen at host and port; port 0 always can.

    Raises HostError, which names the process that holds the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise _refusal(host, port, error) from error


def _refusal(host: str, port: int, error: OSError) -> HostError:
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if error.errno == errno.EADDRNOTAVAIL:
        return HostError(
            f"this machine has no address {host}", where="serve.host", id="no-such-address",
            hint="give an address of this machine, 127.0.0.1 or 0.0.0.0",
        )  # fmt: skip
    if error.errno == errno.EACCES:
        return HostError(
            f"port {port} needs root", where="serve.port", id="port-forbidden",
            hint="choose a port from 1024 on",
        )  # fmt: skip
    if error.errno != errno.EADDRINUSE:
        return HostError(f"cannot listen at {place}: {error.strerror}", id="cannot-listen")
    met = overlapping(listeners(), host, port)
    holders = sockets(all_pids())
    pid = next((holders[one.inode] for one in met if one.inode in holders), None)
    who = "a process of another user"
    if pid is not None:
        who = f"process {pid}: {clean(' '.join(command_of(pid)), one_line=True)[:200]}"
    return HostError(
        f"port {port} is taken", where=f"{', '.join(map(str, met)) or place}, held by {who}",
        hint="stop that process, or use another port: --port N, or --port 0 for any free one",
        id="port-taken",
    )  # fmt: skip
