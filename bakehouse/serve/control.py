"""What runs and how it is ended: speaks to what is on disk and to the process table.

Works after a crash or a reboot, and with a state file that is cut short: every process of a server
carries the server's folder in its environment, and none is signalled on the word of a file alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from bakehouse.errors import HostError
from bakehouse.places import Places
from bakehouse.ports.docker import ContainerFacts
from bakehouse.ports.guard import descendants
from bakehouse.serve import containers
from bakehouse.serve import state as states
from bakehouse.serve.keeper import ENGINE_S, REMOVE_S
from bakehouse.serve.processes import Process, end, marked, marked_folders
from bakehouse.serve.state import Ended, State, Unreadable

KEEPER_GRACE_S = 10.0
"""What a keeper may take beyond the server's own time to stop."""


@dataclass(frozen=True)
class Seen:
    """One server as it stands.

    `word` is `running` (proven and alive), `starting` (alive, not proven yet), `paused` (alive, and
    somebody froze its container), `orphaned` (alive without its keeper), `unclear` (its state
    cannot be read, or its engine does not answer), `gone` (it was there and nobody saw its end) or
    `ended`.
    """

    name: str
    folder: Path
    word: str
    state: State | None
    processes: tuple[Process, ...]
    """The keeper first, where it lives."""
    trouble: str | None = None
    containers: tuple[ContainerFacts, ...] = ()
    """Its containers, where nothing else of it is left."""
    error: HostError | None = None
    """Why its engine could not be asked: nobody knows how its container stands, then."""

    @property
    def alive(self) -> bool:
        """Whether anything of it is left: a process, or a container that nobody follows."""
        return bool(self.processes or self.containers)


def folders(places: Places, *, boxed: bool = False) -> tuple[Path, ...]:
    """Give the folder of each server that left a trace, on disk or among the processes.

    One whose folder was removed runs on, and has to be found all the same; `boxed` asks the Docker
    Engine for such ones too, where there is one.
    """
    there = {f for f in places.servers.iterdir() if f.is_dir()} if places.servers.is_dir() else ()
    inside = containers.folders_with(places.servers) if boxed else ()
    return tuple(sorted({*there, *marked_folders(places.servers), *inside}))


def look(folder: Path, *, inside: bool = True) -> Seen:
    """Find out how a server stands; what is gone is written down as gone.

    A server in a container is asked after at its engine too, unless `inside` is false.
    """
    trouble = None
    try:
        known = states.read(folder)
    except Unreadable as error:
        known, trouble = None, f"its state cannot be read: {error}"
    found = everything(folder, known)
    boxes: tuple[ContainerFacts, ...] = ()
    try:
        boxes = () if found else left_boxes(folder, known)
    except HostError as error:
        said = f"its container may still be there: {error.what}"
        return Seen(folder.name, folder, "unclear", known, (), said, error=error)
    keeper = next((p for p in found if is_keeper(p, folder)), None)
    ordered = tuple(sorted(found, key=lambda p: (p != keeper, p.pid)))
    if boxes:
        trouble = f"{trouble}; " if trouble else ""
        return Seen(folder.name, folder, "orphaned", known, (), trouble + _box_words(boxes), boxes)
    if known and not found and known.phase != "ended":
        known = _note_gone(folder, known)
        return Seen(folder.name, folder, "gone", known, ())
    if not found:
        word = "gone" if trouble else "ended"
        return Seen(folder.name, folder, word, known, (), trouble)
    if keeper is None:
        word = "orphaned"
    elif known is None:
        word, trouble = "unclear", trouble or "its state is missing"
    else:
        word = "running" if known.phase == "proven" and known.server_alive else "starting"
    seen = Seen(folder.name, folder, word, known, ordered, trouble)
    return _look_inside(seen, known) if inside and known and known.container else seen


def _look_inside(seen: Seen, known: State) -> Seen:
    """See how the container of a server stands whose processes run."""
    if known.phase == "ended" or not known.container:
        return seen
    try:
        box = containers.standing(known.container, known.docker)
    except HostError as error:
        said = f"nobody can say whether its container runs: {error.what}"
        return replace(seen, word="unclear", trouble=said, error=error)
    if box and box.state == "paused" and seen.word in ("running", "starting"):
        said = f"somebody paused its container; docker unpause {box.name} lets it go on"
        return replace(seen, word="paused", trouble=said)
    return seen


def left_boxes(folder: Path, known: State | None) -> tuple[ContainerFacts, ...]:
    """Give the containers of a server that has no process left.

    The engine is asked only where there is reason to: a state or a mark that tells of a container,
    or no folder at all. A server that ended in an orderly way took its container with it.
    """
    boxed = known and (known.container or known.docker)
    if known and (not boxed or (known.phase == "ended" and not _lost(known))):
        return ()
    if known:
        return containers.find(folder, known.docker)
    if not folder.is_dir():
        # Nothing here says that there was one: an engine that does not answer is no reason to fear.
        there = folder in containers.folders_with(folder.parent)
        return containers.find(folder, None) if there else ()
    engine = containers.marked_engine(folder)
    return () if engine is None else containers.find(folder, engine or None)


def _lost(known: State) -> bool:
    """Whether the engine went away from below a server: its container may have outlived that."""
    return bool(known.ended and known.ended.says.startswith(states.LOST))


def _box_words(boxes: Iterable[ContainerFacts]) -> str:
    return ", ".join(f"container {one.name} is {one.state}" for one in boxes)


def everything(folder: Path, known: State | None) -> tuple[Process, ...]:
    """All live processes of a server: marked ones, those on record, and all below them.

    A process on record counts only if its start time and boot are the ones on record.
    """
    found = set(marked(folder))
    if known and known.this_boot:
        found |= {
            p for p in (known.keeper, known.server) if p and p.alive and _ours(p, folder, known)
        }
    for process in tuple(found):
        found |= {p for pid in descendants(process.pid) if (p := Process.of(pid))}
    mine = {os.getpid(), os.getppid(), 1}
    return tuple(sorted((p for p in found if p.pid not in mine), key=lambda p: p.pid))


def _ours(process: Process, folder: Path, known: State) -> bool:
    """Whether a process on record also looks like what was started: the nonce is in its command."""
    named = any(known.nonce in argument for argument in process.command)
    return named or is_keeper(process, folder)


def is_keeper(process: Process, folder: Path) -> bool:
    """Return whether a process is the supervisor of this server.

    It runs as `python -m bakehouse.… FOLDER FD`; the module's name differs between versions.
    """
    command = process.command[-4:]
    return (
        len(command) == 4 and command[0] == "-m" and command[1].startswith("bakehouse.")
        and command[2] == str(folder)
    )  # fmt: skip


def _note_gone(folder: Path, known: State) -> State:
    """Write down, once, that a server is gone and nobody saw how."""
    reboot = "this machine was restarted" if not known.this_boot else "its keeper was killed"
    ended = Ended(at=states.now(), why="lost", code=None, says=f"gone: {reboot}")
    gone = replace(known, phase="ended", ended=ended)
    states.write(folder, gone)
    states.forget_key(folder)
    return gone


@dataclass(frozen=True)
class Stopped:
    """What stopping came to."""

    name: str
    ran: bool
    """Whether there was anything to stop."""
    killed: bool
    """Whether TERM was not enough."""
    says: str


def stop(folder: Path) -> Stopped:
    """End a server, its keeper and all their descendants; harmless where nothing runs."""
    seen = look(folder)
    if seen.error:
        raise unasked(seen, seen.error, "nothing was stopped")
    if not seen.alive:
        how = f" ({seen.state.ended.says})" if seen.state and seen.state.ended else ""
        return Stopped(seen.name, ran=False, killed=False, says=f"was not running{how}")
    patience = seen.state.stop_timeout if seen.state else 20.0
    if seen.containers:
        return _stop_boxes(seen)
    keeper = next((p for p in seen.processes if is_keeper(p, folder)), None)
    if keeper:
        boxed = seen.state is not None and seen.state.container is not None
        grace = patience + KEEPER_GRACE_S + (ENGINE_S + REMOVE_S) * boxed
        end(lambda: _alive([keeper]), grace=grace)
    known = _read(folder)
    killed = end(lambda: everything(folder, known), grace=2.0 if keeper else patience)
    known = _read(folder)
    lost: HostError | None = None
    if known and known.container:
        try:
            containers.remove(containers.find(folder, known.docker), known.docker)
        except HostError as error:
            lost = error
    states.forget_key(folder)
    if known and (lost or known.phase != "ended"):
        says = f"{states.LOST}: {lost.what}" if lost else "stopped as asked"
        ended = Ended(at=states.now(), why="stopped", code=None, says=says)
        states.write(folder, replace(known, phase="ended", ended=ended))
    if lost:
        raise unasked(seen, lost, "its processes were ended; its container may still be there")
    by_kill = killed or bool(known and known.ended and known.ended.code == -9)
    says = "stopped" + (" (it ignored TERM and was killed)" if by_kill else "")
    return Stopped(seen.name, ran=True, killed=by_kill, says=says)


def wait_for_end(folder: Path) -> None:
    """Wait until no process of a server is left, as long as an orderly end may take."""
    seen = look(folder, inside=False)
    patience = seen.state.stop_timeout if seen.state else 20.0
    deadline = time.monotonic() + patience + KEEPER_GRACE_S + ENGINE_S + REMOVE_S
    while everything(folder, seen.state) and time.monotonic() < deadline:
        time.sleep(0.1)


def unasked(seen: Seen, error: HostError, so: str) -> HostError:
    """Make the error for a server whose engine does not answer; `so` says what came of it."""
    return HostError(
        f"{seen.name}: nobody can say how its container stands: {error.what}; {so}",
        where=error.where, hint=error.hint, id=error.id,
    )  # fmt: skip


def _stop_boxes(seen: Seen) -> Stopped:
    """Remove what a crash of everything else left behind."""
    containers.remove(seen.containers, seen.state.docker if seen.state else None)
    states.forget_key(seen.folder)
    if seen.state and seen.state.phase != "ended":
        _note_gone(seen.folder, seen.state)
    elif seen.state:
        ended = Ended(at=states.now(), why="stopped", code=None, says="stopped as asked")
        states.write(seen.folder, replace(seen.state, ended=ended))
    says = f"stopped: {_box_words(seen.containers)}, and nobody followed it any more; removed"
    return Stopped(seen.name, ran=True, killed=False, says=says)


def _alive(processes: Iterable[Process]) -> list[Process]:
    return [p for p in processes if p.alive]


def _read(folder: Path) -> State | None:
    try:
        return states.read(folder)
    except Unreadable:
        return None
