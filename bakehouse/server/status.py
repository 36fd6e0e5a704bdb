"""Status and end of servers, from what is on disk and in the process table.

Works after a crash or a reboot, and with a damaged state file: every process of a server carries
the server's folder in its environment, and none is signalled because of a file alone.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bakehouse.errors import HostError
from bakehouse.paths import Places
from bakehouse.server import containers
from bakehouse.server import state as states
from bakehouse.server.processes import Process, end, marked, marked_folders
from bakehouse.server.state import Ended, ServerState, Unreadable
from bakehouse.server.supervisor import ENGINE_S, REMOVE_S
from bakehouse.system.child_guard import descendants
from bakehouse.system.docker.models import ContainerFacts

SUPERVISOR_GRACE_S = 10.0
"""Seconds that a supervisor may need beyond the server's own time to stop."""
STOP_TIMEOUT_S = 20.0
"""Seconds that a server gets to stop if its state is lost."""


@dataclass(frozen=True)
class ServerStatus:
    """The status of one server.

    `word` is `running` (verified and alive), `starting` (alive, not verified yet), `paused` (alive,
    its container is frozen), `orphaned` (alive without its supervisor), `unclear` (its state cannot
    be read, or its engine does not answer), `gone` (it ended, and the cause is not known) or
    `ended`.
    """

    name: str
    folder: Path
    word: str
    state: ServerState | None
    processes: tuple[Process, ...] = ()
    """The supervisor first, if it lives."""
    trouble: str | None = None
    containers: tuple[ContainerFacts, ...] = ()
    """Its containers, if no process of it is left."""
    error: HostError | None = None
    """Why its engine could not be asked: the state of its container is not known."""

    @property
    def alive(self) -> bool:
        """Whether anything of it is left: a process, or a container without a follower."""
        return bool(self.processes or self.containers)

    @property
    def stop_timeout(self) -> float:
        """Seconds that it gets to stop."""
        return self.state.stop_timeout if self.state else STOP_TIMEOUT_S


def folders(places: Places, *, boxed: bool = False) -> tuple[Path, ...]:
    """Return the folder of each server that left a trace, on disk or among the processes.

    A server whose folder was removed runs on, and has to be found. `boxed` also asks the Docker
    Engine for such servers, if there is one.
    """
    there = {f for f in places.servers.iterdir() if f.is_dir()} if places.servers.is_dir() else ()
    inside = containers.folders_with(places.servers) if boxed else ()
    return tuple(sorted({*there, *marked_folders(places.servers), *inside}))


def get_status(folder: Path, *, inside: bool = True) -> ServerStatus:
    """Return a server's status; record the end of one that is gone.

    `inside` also asks the engine about its container.
    """
    trouble = None
    try:
        known = states.read(folder)
    except Unreadable as error:
        known, trouble = None, f"its state cannot be read: {error}"
    status = ServerStatus(folder.name, folder, "ended", known, trouble=trouble)
    found = all_processes(folder, known)
    if not found:
        return _status_without_processes(status)
    supervisor = next((p for p in found if is_supervisor(p, folder)), None)
    ordered = tuple(sorted(found, key=lambda p: (p != supervisor, p.pid)))
    status = replace(status, processes=ordered, word="starting")
    if supervisor is None:
        status = replace(status, word="orphaned")
    elif known is None:
        status = replace(status, word="unclear", trouble=trouble or "its state is missing")
    elif known.phase == "proven" and known.server_alive:
        status = replace(status, word="running")
    if not (inside and known and known.container and known.phase != "ended"):
        return status
    container = known.container
    try:
        box = containers.ask(known.docker, lambda docker: docker.container(container))
    except HostError as error:
        trouble = f"the status of its container is not known: {error.what}"
        return replace(status, word="unclear", trouble=trouble, error=error)
    if box and box.state == "paused" and status.word in ("running", "starting"):
        trouble = f"somebody paused its container; resume it with: docker unpause {box.name}"
        return replace(status, word="paused", trouble=trouble)
    return status


def _status_without_processes(status: ServerStatus) -> ServerStatus:
    known, trouble = status.state, status.trouble
    try:
        boxes = _leftover_containers(status.folder, known)
    except HostError as error:
        trouble = f"its container may still exist: {error.what}"
        return replace(status, word="unclear", trouble=trouble, error=error)
    if boxes:
        trouble = f"{trouble}; " if trouble else ""
        trouble += ", ".join(f"container {one.name} is {one.state}" for one in boxes)
        return replace(status, word="orphaned", trouble=trouble, containers=boxes)
    if known and known.phase != "ended":
        return replace(status, word="gone", state=_record_gone(status.folder, known), trouble=None)
    return replace(status, word="gone" if trouble else "ended")


def _leftover_containers(folder: Path, known: ServerState | None) -> tuple[ContainerFacts, ...]:
    """Return the containers of a server that has no process left.

    The engine is asked only if there is a reason: a state or a file that mentions a container, or
    no folder at all. A server that ended in an orderly way removed its container.
    """
    if known:
        lost = known.ended and known.ended.says.startswith(states.LOST)
        if not (known.container or known.docker) or (known.phase == "ended" and not lost):
            return ()
        return containers.find(folder, known.docker)
    if not folder.is_dir():
        # Nothing here says that it had a container: an engine that does not answer is no error.
        there = folder in containers.folders_with(folder.parent)
        return containers.find(folder, None) if there else ()
    engine = containers.marked_engine(folder)
    return () if engine is None else containers.find(folder, engine or None)


def all_processes(folder: Path, known: ServerState | None) -> tuple[Process, ...]:
    """Return all live processes of a server: marked ones, those in its state, their descendants.

    A process of the state counts only if its start time and boot match, and if it looks like what
    was started: a supervisor, or a command with the nonce.
    """
    found = set(marked(folder))
    if known and known.this_boot:
        found |= {
            p for p in (known.keeper, known.server)
            if p and p.alive
            and (is_supervisor(p, folder) or any(known.nonce in part for part in p.command))
        }  # fmt: skip
    for process in tuple(found):
        found.update(filter(None, map(Process.of, descendants(process.pid))))
    others = {os.getpid(), os.getppid(), 1}
    return tuple(sorted((p for p in found if p.pid not in others), key=lambda p: p.pid))


def is_supervisor(process: Process, folder: Path) -> bool:
    """Return whether a process is the supervisor of this server.

    It runs as `python -m bakehouse.… FOLDER FD`; the module's name differs between versions.
    """
    command = process.command[-4:]
    return (
        len(command) == 4 and command[0] == "-m" and command[1].startswith("bakehouse.")
        and command[2] == str(folder)
    )  # fmt: skip


def _record_gone(folder: Path, known: ServerState) -> ServerState:
    """Record, once, that a server is gone and the cause is not known."""
    cause = "its supervisor was killed" if known.this_boot else "this machine was restarted"
    return _record_end(folder, known, "lost", f"gone: {cause}")


def _record_end(folder: Path, known: ServerState, why: str, says: str) -> ServerState:
    ended = Ended(at=states.now(), why=why, code=None, says=says)
    known = replace(known, phase="ended", ended=ended)
    states.write(folder, known)
    states.forget_key(folder)
    return known


@dataclass(frozen=True)
class Stopped:
    """The result of stopping one server."""

    name: str
    ran: bool
    """Whether there was anything to stop."""
    killed: bool
    """Whether TERM was not enough."""
    says: str


def stop(folder: Path) -> Stopped:
    """End a server, its supervisor and all their descendants; harmless if nothing runs.

    Raises HostError if its Docker Engine does not answer.
    """
    status = get_status(folder)
    if status.error:
        raise engine_error(status, status.error, "nothing was stopped")
    if not status.alive:
        how = f" ({status.state.ended.says})" if status.state and status.state.ended else ""
        return Stopped(status.name, ran=False, killed=False, says=f"was not running{how}")
    if status.containers:
        return _stop_containers(status)
    supervisor = next((p for p in status.processes if is_supervisor(p, folder)), None)
    grace = status.stop_timeout
    if supervisor:
        boxed = status.state is not None and status.state.container is not None
        longest = grace + SUPERVISOR_GRACE_S + (ENGINE_S + REMOVE_S) * boxed
        end(lambda: [supervisor] if supervisor.alive else [], grace=longest)
        grace = 2.0
    known = _read(folder)
    killed = end(lambda: all_processes(folder, known), grace=grace)
    known = _read(folder)
    lost: HostError | None = None
    if known and known.container:
        try:
            containers.remove(containers.find(folder, known.docker), known.docker)
        except HostError as error:
            lost = error
    states.forget_key(folder)
    if known and (lost or known.phase != "ended"):
        _record_end(
            folder, known, "stopped", f"{states.LOST}: {lost.what}" if lost else "stopped as asked"
        )
    if lost:
        raise engine_error(status, lost, "its processes were ended; its container may still exist")
    by_kill = killed or bool(known and known.ended and known.ended.code == -9)
    says = "stopped" + (" (it ignored TERM and was killed)" if by_kill else "")
    return Stopped(status.name, ran=True, killed=by_kill, says=says)


def wait_for_end(folder: Path) -> None:
    """Wait until no process of a server is left, as long as an orderly end may take."""
    status = get_status(folder, inside=False)
    longest = status.stop_timeout + SUPERVISOR_GRACE_S + ENGINE_S + REMOVE_S
    deadline = time.monotonic() + longest
    while all_processes(folder, status.state) and time.monotonic() < deadline:
        time.sleep(0.1)


def engine_error(status: ServerStatus, error: HostError, result: str) -> HostError:
    """Return the error for a server whose engine does not answer; `result` is what was done."""
    return HostError(
        f"{status.name}: the status of its container is not known: {error.what}; {result}",
        where=error.where, hint=error.hint, id=error.id,
    )  # fmt: skip


def _stop_containers(status: ServerStatus) -> Stopped:
    """Remove the containers that a crash left behind."""
    known = status.state
    containers.remove(status.containers, known.docker if known else None)
    states.forget_key(status.folder)
    if known and known.phase != "ended":
        _record_gone(status.folder, known)
    elif known:
        _record_end(status.folder, known, "stopped", "stopped as asked")
    names = ", ".join(box.name for box in status.containers)
    says = f"stopped: removed orphaned container {names}"
    return Stopped(status.name, ran=True, killed=False, says=says)


def _read(folder: Path) -> ServerState | None:
    with suppress(Unreadable):
        return states.read(folder)
    return None
