"""The follower: the supervisor's child for a server in a container.

Run as `python -m THIS_MODULE FOLDER CONTAINER SECONDS NONCE`. To the supervisor it is a server like
any other: its output is the log, a TERM to it stops the server, its exit status is the server's,
and it is killed if it ignores TERM. What an exit status cannot say is written to `container.json`.
The container is removed at the end in every case. If the supervisor is killed, the kernel sends the
follower a TERM, so the server ends too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bakehouse.errors import BakehouseError
from bakehouse.server.memory_guard import signal_name
from bakehouse.server.processes import is_in
from bakehouse.server.state import LOST
from bakehouse.server.supervisor import CONTAINER_NOTE, KILL_CONTAINER
from bakehouse.system.child_guard import PR_SET_PDEATHSIG
from bakehouse.system.docker.client import DockerClient
from bakehouse.system.docker.models import ContainerFacts, Happening

LONG_S = 3600.0
TICK_S = 0.2
SETTLE_S = 0.3
"""Seconds to wait after an end, in case somebody starts the container again."""
RESTART_S = 2.0
"""The same after somebody stopped it: that may be the first half of a restart."""
DRAIN_S = 5.0
"""Seconds to wait for the last lines of the log."""
BACK_S = 30.0
"""Seconds to wait for a Docker Engine that went away."""
DEADLY = frozenset({2, 3, 6, 9, 15})
SOON_S = 60.0
"""An end within this many seconds after a deadly signal is taken for its effect."""


@dataclass(frozen=True)
class ContainerExit:
    """What is known once a container has ended."""

    facts: ContainerFacts | None
    """None if it is gone, or the engine did not answer."""
    events: tuple[Happening, ...]
    gone: bool
    """Whether the engine no longer has it."""
    started: str
    """When the run that was followed began, as the engine writes it."""
    stopping: bool
    """Whether we were asked to stop it."""
    interrupted: bool
    """Whether the engine went away meanwhile: it forgets the events before."""
    lost: str | None
    """Why the engine could not be asked."""

    def verdict(self) -> tuple[int, str]:
        """Return the exit status and a phrase that says how the container ended."""
        facts = self.facts
        if self.gone or (facts and facts.state == "removing"):
            return 137, "was removed by somebody else (docker rm)"
        if facts is None:
            return 1, f"{LOST}: {self.lost}"
        if facts.running or (self.started and facts.started != self.started):
            return 1, "was restarted externally; the new process is not verified"
        code = facts.exit_code or 0
        if facts.oom_killed:
            return code or 137, "was killed by the kernel: it reached its memory limit"
        says = f"exited by itself with {code}"
        if code > 128:
            by = ": somebody killed it" * (not self.stopping and code in (137, 143))
            says = f"died of {signal_name(code - 128)}{by}"
        if not self.stopping and self.interrupted:
            says = f"ended with {code} while the Docker Engine was away or restarted"
        return code, (None if self.stopping else external_cause(self.events)) or says


def external_cause(events: tuple[Happening, ...]) -> str | None:
    """Return who ended a container through the engine; None if nobody did.

    A signal counts if it ends processes and the end came soon after it.
    """
    if any(one.what == "stop" for one in events):
        return "was stopped by somebody else (docker stop)"
    deaths = [one.at for one in events if one.what == "die"]
    ended = deaths[-1] if deaths else float("inf")
    for one in reversed(events):
        deadly = one.what == "kill" and one.signal in DEADLY
        if deadly and one.at <= ended and ended - one.at < SOON_S:
            return f"was killed by somebody else (docker kill, {signal_name(one.signal or 0)})"
    return None


class Follower:
    """Follows one container from its start to its end."""

    def __init__(self, folder: Path, container: str, stop_timeout: float) -> None:
        self.folder = folder
        self.id = container
        self.stop_timeout = stop_timeout
        self.docker = DockerClient()
        self.stopping = threading.Event()
        self.at_once = False
        self.ended = threading.Event()
        self.interrupted = False
        """Whether the engine went away in the meantime."""
        self.lost: str | None = None
        self.started = ""
        self.pid = 0
        self.began = time.time()

    def run(self) -> int:
        """Start, follow, clean up; return the exit status."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        signal.signal(signal.SIGTERM, lambda _number, _frame: self.stopping.set())
        signal.signal(KILL_CONTAINER, lambda _number, _frame: self._kill())
        try:
            self.docker.start(self.id)
        except BakehouseError as error:
            _print(f"the container did not start: {error.what}")
            plain = {key: getattr(error, key) for key in ("id", "what", "where", "hint")}
            self._finish({"failed": plain, "says": f"never started: {error.what}"})
            return 125
        with contextlib.suppress(BakehouseError):
            if first := self.docker.container(self.id):
                self.started, self.pid = first.started, first.pid
        log = threading.Thread(target=self._copy_log, daemon=True)
        log.start()
        threading.Thread(target=self._wait, daemon=True).start()
        stopped = False
        while not self.ended.wait(TICK_S):
            if self.stopping.is_set() and not stopped:
                stopped = True
                with contextlib.suppress(BakehouseError):
                    self.docker.stop(self.id, 0 if self.at_once else self.stop_timeout)
        facts, gone, events = self._settled()
        log.join(0.0 if gone else DRAIN_S)
        code, says = ContainerExit(
            facts, events, gone, self.started, self.stopping.is_set(), self.interrupted, self.lost
        ).verdict()
        if not self.stopping.is_set():
            _print(f"the container {says}")
        self._finish({"code": code, "says": says, "oom": bool(facts and facts.oom_killed)})
        return code

    def _kill(self) -> None:
        """Kill the container's first process directly, if it is on this machine.

        The engine may be too slow when memory runs out; it is told as well.
        """
        self.at_once = True
        self.stopping.set()
        if self.pid and is_in(self.pid, self.id):
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    def _copy_log(self) -> None:
        """Copy the container's log to our standard output, on after an engine's restart."""
        tail: int | None = None
        while not self.ended.is_set():
            with contextlib.suppress(BakehouseError, OSError):
                for chunk in DockerClient().logs(self.id, follow=True, tail=tail):
                    os.write(1, chunk)
                if not self.interrupted:
                    return
            tail = 0
            self.ended.wait(1.0)

    def _wait(self) -> None:
        """Wait for its end on a connection of its own."""
        while True:
            docker = DockerClient()
            try:
                while docker.wait(self.id, LONG_S) is None:
                    continue
                break
            except BakehouseError as error:
                self.interrupted = True
                if not self._still_runs(error):
                    break
        self.ended.set()

    def _still_runs(self, error: BakehouseError) -> bool:
        """Return whether it runs on after its engine went away: an engine can be restarted."""
        deadline = time.monotonic() + BACK_S
        while not self.stopping.is_set() and time.monotonic() < deadline:
            with contextlib.suppress(BakehouseError):
                found = DockerClient(patience=BACK_S).container(self.id)
                return bool(found and found.running and found.started == self.started)
            self.stopping.wait(1.0)
        self.lost = error.what
        return False

    def _settled(self) -> tuple[ContainerFacts | None, bool, tuple[Happening, ...]]:
        """Return its facts, whether it is gone, and its events, once it no longer changes."""
        if not self.stopping.is_set():
            time.sleep(SETTLE_S)
        facts, gone = self._inspect()
        events: tuple[Happening, ...] = ()
        try:
            events = self.docker.happened(self.id, self.began) if self.lost is None else ()
        except BakehouseError:
            self.interrupted = True  # an engine that ends stops its containers, and forgets why
        deadline = time.monotonic() + RESTART_S
        stopped = any(one.what == "stop" for one in events)
        while stopped and facts and facts.state == "exited" and time.monotonic() < deadline:
            if self.stopping.is_set():
                break
            time.sleep(TICK_S)
            facts, gone = self._inspect()
        return facts, gone, events

    def _inspect(self) -> tuple[ContainerFacts | None, bool]:
        """Return its facts, and whether it is gone."""
        try:
            found = self.docker.container(self.id)
        except BakehouseError as error:
            self.lost = error.what
            return None, False
        return found, found is None

    def _finish(self, note: dict[str, Any]) -> None:
        """Remove the container; write down how it ended, and why it may still exist if so."""
        deadline = time.monotonic() + BACK_S
        while True:
            try:
                self.docker.remove(self.id)
            except BakehouseError as error:
                note = {**note, "lost": error.what}
                again = error.id == "docker-daemon" and not self.stopping.wait(1.0)
                if again and time.monotonic() <= deadline:
                    continue
            else:
                note.pop("lost", None)
            break
        with contextlib.suppress(OSError):
            part = self.folder / f".{CONTAINER_NOTE}.part"
            part.write_text(json.dumps(note) + "\n")
            os.replace(part, self.folder / CONTAINER_NOTE)


def _print(text: str) -> None:
    """Add a line of ours to the server's log."""
    with contextlib.suppress(OSError):
        os.write(1, f"bakehouse: {text}\n".encode(errors="replace"))


def main() -> int:
    """Follow one container, or remove one."""
    if sys.argv[1] == "--remove":
        try:
            DockerClient().remove(sys.argv[2])
        except BakehouseError as error:
            os.write(1, error.what.encode(errors="replace"))
            return 1
        return 0
    return Follower(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])).run()


if __name__ == "__main__":
    sys.exit(main())
