"""Starts a server below a keeper of its own, and holds the line to that keeper until the proof."""

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
from pathlib import Path
from typing import Any

from bakehouse.engines.engine import engine_of
from bakehouse.errors import BakehouseError, HostError
from bakehouse.plan.types import ServePlan
from bakehouse.ports.docker import Docker
from bakehouse.ports.process import environment
from bakehouse.redact import clean
from bakehouse.serve import container, containers, keeper
from bakehouse.serve import state as states
from bakehouse.serve.control import stop, wait_for_end
from bakehouse.serve.guard import Bounds
from bakehouse.serve.processes import (
    MARK,
    all_pids,
    boot_id,
    command_of,
    listeners,
    overlapping,
    sockets,
)
from bakehouse.serve.state import Spec, State

NONCE_BYTES = 8
KEEPER_START_S = 30.0
OLD_LOGS = 3
"""So many logs of earlier servers of the same name are kept."""


@dataclass(frozen=True)
class Settings:
    """What a launch needs beside the plan. Seconds and bytes."""

    folder: Path
    cwd: Path
    plan: str
    """Digest that tells whether a running server is the one that is wanted."""
    engine: str
    stop_timeout: float
    guard: Bounds | None = None
    """Of the memory guard; None for no guard."""
    key: str | None = None
    known_losses: frozenset[str] = frozenset()
    """Ids of log signatures that are expected of this server."""
    image: str | None = None
    """Id of the image that was proven able, where the server is one."""
    version: str | None = None
    """What that image says of itself."""


class Link:
    """The line to a keeper. Closing it before `proven` ends the server."""

    def __init__(self, folder: Path, nonce: str, line: socket.socket) -> None:
        self.folder = folder
        self.nonce = nonce
        self.server = 0
        self.box: containers.Box | None = None
        """The server's container, where it has one."""
        self.ended: dict[str, Any] | None = None
        """What the keeper said of the server's end; None while it runs."""
        self.alarms: list[dict[str, Any]] = []
        """What the memory guard said."""
        self._line = line
        self._heard = b""
        self._proven = False

    def close(self) -> None:
        """Let go; what is not proven, or runs in the foreground, is gone before this returns."""
        self._line.close()
        if self._proven:
            return
        try:
            stop(self.folder)
        except HostError:
            # Its engine does not answer. The keeper ends by itself, and leaves word of what it had
            # to leave behind.
            wait_for_end(self.folder)

    def tell_port(self, port: int) -> None:
        """Let the keeper write down where the server listens."""
        self._send({"do": "port", "port": port})

    def tell_proven(self, record: str | None, *, foreground: bool = False) -> bool:
        """Let the server live on, or, in the foreground, as long as we hold the line."""
        self._send({"do": "proven", "record": record, "foreground": foreground})
        self._proven = self.wait_for("proven", 10.0) and not foreground
        return self.ended is None

    def tell_refused(self, why: str) -> None:
        """Let the keeper write down why the server is stopped."""
        self._send({"do": "refuse", "says": why})

    def poll(self) -> dict[str, Any] | None:
        """Hear what the keeper has to say, without waiting; give how the server ended, if so."""
        while self.ended is None and select.select([self._line], [], [], 0)[0]:
            self._hear()
        return self.ended

    def wait_for(self, event: str, seconds: float) -> bool:
        """Wait for the keeper to say something; False where the server or the time ended first."""
        deadline = time.monotonic() + seconds
        while self.ended is None and time.monotonic() < deadline:
            if select.select([self._line], [], [], 0.1)[0] and event in self._hear():
                return True
        return False

    def _hear(self) -> set[str]:
        """Take one piece; give the events in it."""
        events = set()
        try:
            chunk = self._line.recv(65536)
        except OSError:
            chunk = b""
        if not chunk:
            self.ended = self.ended or {
                "says": "lost its keeper, which was killed",
                "code": None,
                "why": "lost",
            }
        self._heard += chunk
        while b"\n" in self._heard:
            line, _, self._heard = self._heard.partition(b"\n")
            message = json.loads(line)
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
    plan: ServePlan, settings: Settings, base: Mapping[str, str], docker: Docker | None = None
) -> Link:
    """Start the server of a plan; `base` is the environment to choose from.

    Raises HostError where the port is taken, the server's folder cannot be used, or the container
    that the plan wants cannot be made on `docker`.
    """
    refuse_taken(plan.host, plan.port)
    folder = settings.folder
    prepare(folder, settings.key)
    nonce = secrets.token_hex(NONCE_BYTES)
    first = State(
        name=folder.name, nonce=nonce, phase="starting", boot=boot_id(), argv=plan.command(nonce),
        host=plan.host, port=plan.port, plan=settings.plan, started=states.now(),
        stop_timeout=settings.stop_timeout, image=settings.image, version=settings.version,
    )  # fmt: skip
    env = environment({**plan.env, MARK: str(folder)}, base)
    spec = Spec(
        state=first, env=env, cwd=str(settings.cwd), guard=settings.guard,
        engine=settings.engine, known_losses=tuple(sorted(settings.known_losses)),
    )  # fmt: skip
    link = _started(plan, settings, spec, docker, base)
    if not link.wait_for("started", KEEPER_START_S):
        says = (link.ended or {}).get("says", "it said nothing")
        link.close()
        raise HostError(
            f"the server's keeper did not start: {says}", where=str(folder / "keeper.log"),
            hint="read that log; it holds what Python said", id="keeper",
        )  # fmt: skip
    return link


def _started(
    plan: ServePlan, settings: Settings, spec: Spec, docker: Docker | None, base: Mapping[str, str]
) -> Link:
    """Start the keeper, once the container is made where the plan wants one.

    Whatever comes between, an interrupt included, leaves no container.
    """
    folder, nonce, box = settings.folder, spec.state.nonce, None
    if not plan.container or not docker:
        states.write(folder, spec.state)
        return Link(folder, nonce, start_keeper(folder, spec))
    try:
        box, spec = _in_container(plan, settings, spec, docker, base)
        states.write(folder, spec.state)
        link = Link(folder, nonce, start_keeper(folder, spec))
    except BaseException as error:
        containers.withdraw(docker, folder, nonce)
        said = error.what if isinstance(error, BakehouseError) else "its start was interrupted"
        ended = states.Ended(
            at=states.now(), why="exited", code=None, says=f"never started: {said}"
        )
        with suppress(OSError):
            states.write(folder, replace(spec.state, phase="ended", ended=ended))
            states.forget_key(folder)
        raise
    link.box = box
    return link


def _in_container(
    plan: ServePlan, settings: Settings, spec: Spec, docker: Docker, base: Mapping[str, str]
) -> tuple[containers.Box, Spec]:
    """Make the container, and have the keeper run what starts and follows it."""
    engine = engine_of(settings.engine)
    where = containers.find_endpoint_host(base)
    containers.refuse_remote(where)
    secret = (engine.key_variable, settings.key) if settings.key else None
    try:
        containers.mark_engine(settings.folder, where)
        # Should we be killed while it is made, this tells where to look for it.
        states.write(settings.folder, replace(spec.state, docker=where or None))
    except OSError as error:
        raise _unusable(error) from error
    made = containers.make(docker, plan, settings.folder, spec.state.nonce, secret)
    follow = (
        sys.executable, "-m", container.__name__, str(settings.folder), made,
        f"{settings.stop_timeout:g}", spec.state.nonce,
    )  # fmt: skip
    env = {
        **spec.env, **containers.engine_environment(base),
        "PYTHONPATH": importable(), "PYTHONSAFEPATH": "1",
    }  # fmt: skip
    state = replace(spec.state, container=made, docker=where or None)
    return (
        containers.Box(docker, made, engine.inside_port, settings.image),
        replace(spec, state=state, env=env, run=follow),
    )


def importable() -> str:
    """Give a PYTHONPATH by which a child finds all that we can import, however that came to be."""
    package = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join(dict.fromkeys([package, *filter(None, sys.path)]))


def start_keeper(folder: Path, spec: Spec) -> socket.socket:
    """Start the detached keeper and tell it what to do; give our end of the line."""
    ours, theirs = socket.socketpair()
    with theirs, (folder / "keeper.log").open("ab") as log:
        env = {
            **environment({"PYTHONPATH": importable(), MARK: str(folder)}),
            "PYTHONSAFEPATH": "1",
        }
        starter = subprocess.Popen(
            [sys.executable, "-m", keeper.__name__, str(folder), str(theirs.fileno())],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, cwd="/",
            pass_fds=(theirs.fileno(),), start_new_session=True,
        )  # fmt: skip
        ours.sendall(spec.to_json().encode() + b"\n")
    starter.wait()
    return ours


def prepare(folder: Path, key: str | None) -> None:
    """Make the server's folder, private to its owner; move an old log aside; put the key down."""
    try:
        for each in (folder, folder / "config"):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        _rotate(folder / "server.log")
        (folder / "keeper.log").write_bytes(b"")
        for left in (keeper.CONTAINER_NOTE, containers.MARKED):
            (folder / left).unlink(missing_ok=True)
        _put_key(folder / states.KEY_FILE, key)
    except OSError as error:
        raise _unusable(error) from error


def _unusable(error: OSError) -> HostError:
    return HostError(
        f"the server's folder cannot be used: {error.strerror}", where=str(error.filename),
        hint="free some space or mend the permissions there", id="state-not-writable",
    )  # fmt: skip


def _rotate(log: Path) -> None:
    for number in range(OLD_LOGS, 0, -1):
        older = log.with_name(f"{log.name}.{number}")
        newer = log if number == 1 else log.with_name(f"{log.name}.{number - 1}")
        if newer.exists():
            os.replace(newer, older)
    log.touch(mode=0o600)


def _put_key(path: Path, key: str | None) -> None:
    path.unlink(missing_ok=True)
    if key is not None:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            # Of a single key the engine logs the last letters; of two only how many they are.
            file.write(f"{key}\n{secrets.token_hex(16)}\n")


def kept_key(folder: Path) -> str | None:
    """Give the API key that a running server was started with."""
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
