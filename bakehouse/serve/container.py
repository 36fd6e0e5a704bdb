"""The keeper's child for a server in a container: starts it, brings its log, ends with it.

Run as `python -m bakehouse.serve.container FOLDER CONTAINER SECONDS NONCE`. To the keeper it is a
server like any other: what it writes is the log, a TERM to it stops the server, its exit status
is the server's, and it is killed when the server ignores that. What no exit status tells is written
to `container.json`. The container is removed at the end, however it came.

Should the keeper be killed, the kernel sends us TERM, and the server goes as well.
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
from pathlib import Path
from typing import Any

from bakehouse.errors import BakehouseError
from bakehouse.ports.docker import ContainerFacts, Happening
from bakehouse.ports.docker_engine import RealDocker
from bakehouse.ports.guard import PR_SET_PDEATHSIG
from bakehouse.serve.aftermath import AT_ONCE, NOTE
from bakehouse.serve.container_end import Seen
from bakehouse.serve.processes import is_in

LONG_S = 3600.0
TICK_S = 0.2
SETTLE_S = 0.3
"""After an end so long is waited, in seconds, to see whether somebody starts it again."""
RESTART_S = 2.0
"""The same after somebody stopped it: that may be the first half of a restart."""
DRAIN_S = 5.0
"""The last lines of the log may be so late, in seconds."""
BACK_S = 30.0
"""An engine that went away may be so long in coming back, in seconds."""


class Runner:
    """One container, from its start to its end."""

    def __init__(self, folder: Path, container: str, stop_timeout: float) -> None:
        self.folder = folder
        self.id = container
        self.stop_timeout = stop_timeout
        self.docker = RealDocker()
        self.told = threading.Event()
        self.at_once = False
        self.ended = threading.Event()
        self.cut = False
        """Whether the engine went away in the meantime."""
        self.lost: str | None = None
        self.started = ""
        self.pid = 0
        self.began = time.time()

    def run(self) -> int:
        """Start, follow, clean up; give the exit status."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        signal.signal(signal.SIGTERM, lambda _number, _frame: self.told.set())
        signal.signal(AT_ONCE, lambda _number, _frame: self._kill())
        try:
            self.docker.start(self.id)
        except BakehouseError as error:
            _say(f"the container did not start: {error.what}")
            self._leave({"failed": _plain(error), "says": f"never started: {error.what}"})
            return 125
        with contextlib.suppress(BakehouseError):
            if first := self.docker.container(self.id):
                self.started, self.pid = first.started, first.pid
        follower = threading.Thread(target=self._follow, daemon=True)
        follower.start()
        threading.Thread(target=self._wait, daemon=True).start()
        self._until_ended()
        facts, gone, befell = self._settled()
        follower.join(0.0 if gone else DRAIN_S)
        seen = Seen(facts, befell, gone, self.started, self.told.is_set(), self.cut, self.lost)
        code, says = seen.verdict()
        if not self.told.is_set():
            _say(f"the container {says}")
        self._leave({"code": code, "says": says, "oom": bool(facts and facts.oom_killed)})
        return code

    def _until_ended(self) -> None:
        asked = False
        while not self.ended.wait(TICK_S):
            if self.told.is_set() and not asked:
                asked = True
                with contextlib.suppress(BakehouseError):
                    self.docker.stop(self.id, 0 if self.at_once else self.stop_timeout)

    def _kill(self) -> None:
        """End its first process, and with it all, where this machine's own kernel can be told to.

        Where memory runs out, the engine may be too slow; it is told as well.
        """
        self.at_once = True
        self.told.set()
        if self.pid and is_in(self.pid, self.id):
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    def _follow(self) -> None:
        """Bring its log, as it comes, to our own standard output; on after an engine's restart."""
        tail: int | None = None
        while not self.ended.is_set():
            with contextlib.suppress(BakehouseError, OSError):
                for chunk in RealDocker().logs(self.id, follow=True, tail=tail):
                    os.write(1, chunk)
                if not self.cut:
                    return
            tail = 0
            self.ended.wait(1.0)

    def _wait(self) -> None:
        """Wait for its end on a connection of its own."""
        while True:
            docker = RealDocker()
            try:
                while docker.wait(self.id, LONG_S) is None:
                    continue
                break
            except BakehouseError as error:
                self.cut = True
                if not self._goes_on(error):
                    break
        self.ended.set()

    def _goes_on(self, error: BakehouseError) -> bool:
        """Whether it runs on although its engine went away: engines can be restarted below it."""
        deadline = time.monotonic() + BACK_S
        while not self.told.is_set() and time.monotonic() < deadline:
            with contextlib.suppress(BakehouseError):
                found = RealDocker(patience=BACK_S).container(self.id)
                return bool(found and found.running and found.started == self.started)
            self.told.wait(1.0)
        self.lost = error.what
        return False

    def _settled(self) -> tuple[ContainerFacts | None, bool, tuple[Happening, ...]]:
        """How it stands once nothing more befalls it, and all that did."""
        if not self.told.is_set():
            time.sleep(SETTLE_S)
        facts, gone = self._look()
        befell: tuple[Happening, ...] = ()
        try:
            befell = self.docker.happened(self.id, self.began) if self.lost is None else ()
        except BakehouseError:
            self.cut = True  # an engine that ends takes its containers along, and forgets why
        deadline = time.monotonic() + RESTART_S
        while self._may_restart(facts, befell) and time.monotonic() < deadline:
            time.sleep(TICK_S)
            facts, gone = self._look()
        return facts, gone, befell

    def _may_restart(self, facts: ContainerFacts | None, befell: tuple[Happening, ...]) -> bool:
        stopped = any(one.what == "stop" for one in befell)
        return bool(stopped and facts and facts.state == "exited" and not self.told.is_set())

    def _look(self) -> tuple[ContainerFacts | None, bool]:
        """How it stands, and whether that is because it is gone."""
        try:
            found = self.docker.container(self.id)
        except BakehouseError as error:
            self.lost = error.what
            return None, False
        return found, found is None

    def _not_removed(self) -> BakehouseError | None:
        try:
            self.docker.remove(self.id)
        except BakehouseError as error:
            return error
        return None

    def _leave(self, note: dict[str, Any]) -> None:
        """Remove the container and write down how it ended, and whether it is really gone."""
        deadline = time.monotonic() + BACK_S
        while lost := self._not_removed():
            note = {**note, "lost": lost.what}
            if lost.id != "docker-daemon" or self.told.wait(1.0) or time.monotonic() > deadline:
                break
        else:
            note.pop("lost", None)
        with contextlib.suppress(OSError):
            part = self.folder / f".{NOTE}.part"
            part.write_text(json.dumps(note) + "\n")
            os.replace(part, self.folder / NOTE)


def _plain(error: BakehouseError) -> dict[str, str | None]:
    return {"id": error.id, "what": error.what, "where": error.where, "hint": error.hint}


def _say(text: str) -> None:
    """Put a line of ours below the server's own."""
    with contextlib.suppress(OSError):
        os.write(1, f"bakehouse: {text}\n".encode(errors="replace"))


def main() -> int:
    """Run one container, or remove one."""
    if sys.argv[1] == "--remove":
        try:
            RealDocker().remove(sys.argv[2])
        except BakehouseError as error:
            os.write(1, error.what.encode(errors="replace"))
            return 1
        return 0
    return Runner(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])).run()


if __name__ == "__main__":
    sys.exit(main())
