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
from bakehouse.ports.docker import ContainerFacts
from bakehouse.ports.docker_engine import RealDocker
from bakehouse.ports.guard import PR_SET_PDEATHSIG
from bakehouse.serve.aftermath import NOTE
from bakehouse.serve.state import LOST

LONG_S = 3600.0
TICK_S = 0.2
SETTLE_S = 0.3
"""After an end so long is waited, in seconds, to see whether somebody starts it again."""
DRAIN_S = 5.0
"""The last lines of the log may be so late, in seconds."""


class Runner:
    """One container, from its start to its end."""

    def __init__(self, folder: Path, container: str, stop_timeout: float) -> None:
        self.folder = folder
        self.id = container
        self.stop_timeout = stop_timeout
        self.docker = RealDocker()
        self.told = threading.Event()
        self.ended = threading.Event()
        self.lost: str | None = None
        self.started = ""

    def run(self) -> int:
        """Start, follow, clean up; give the exit status."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        signal.signal(signal.SIGTERM, lambda _number, _frame: self.told.set())
        try:
            self.docker.start(self.id)
        except BakehouseError as error:
            self._write({"failed": _plain(error), "says": f"never started: {error.what}"})
            _say(f"the container did not start: {error.what}")
            self._remove()
            return 125
        first = self.docker.container(self.id)
        self.started = first.started if first else ""
        follower = threading.Thread(target=self._follow, daemon=True)
        follower.start()
        threading.Thread(target=self._wait, daemon=True).start()
        self._until_ended()
        if not self.told.is_set():
            time.sleep(SETTLE_S)
        facts, gone = self._look()
        follower.join(0.0 if gone else DRAIN_S)
        code, says = self._judge(facts, gone=gone)
        self._write({"code": code, "says": says, "oom": bool(facts and facts.oom_killed)})
        if not self.told.is_set():
            _say(f"the container {says}")
        self._remove()
        return code

    def _until_ended(self) -> None:
        asked = False
        while not self.ended.wait(TICK_S):
            if self.told.is_set() and not asked:
                asked = True
                with contextlib.suppress(BakehouseError):
                    self.docker.stop(self.id, self.stop_timeout)

    def _follow(self) -> None:
        """Bring its log, as it comes, to our own standard output."""
        with contextlib.suppress(BakehouseError, OSError):
            for chunk in RealDocker().logs(self.id, follow=True):
                os.write(1, chunk)

    def _wait(self) -> None:
        """Wait for its end on a connection of its own."""
        docker = RealDocker()
        try:
            while docker.wait(self.id, LONG_S) is None:
                continue
        except BakehouseError as error:
            self.lost = error.what
        self.ended.set()

    def _look(self) -> tuple[ContainerFacts | None, bool]:
        """How it stands, and whether that is because it is gone."""
        try:
            found = self.docker.container(self.id)
        except BakehouseError as error:
            self.lost = error.what
            return None, False
        return found, found is None

    def _judge(self, facts: ContainerFacts | None, *, gone: bool) -> tuple[int, str]:
        """Tell apart how it ended: exit status, and what to say of the container."""
        if gone:
            return 137, "was removed by somebody else"
        if facts is None:
            return 1, f"{LOST}: {self.lost}"
        if facts.running or (self.started and facts.started != self.started):
            return 1, "was restarted by somebody else: what runs now was never proven"
        code = facts.exit_code or 0
        if facts.oom_killed:
            return code or 137, "was ended by the kernel: the memory of its limit had run out"
        if code > 128:
            name = _signal_name(code - 128)
            by_us = "" if self.told.is_set() else ": somebody ended it" * (code in (137, 143))
            return code, f"died of {name}{by_us}"
        return code, f"exited by itself with {code}"

    def _remove(self) -> None:
        with contextlib.suppress(BakehouseError):
            self.docker.remove(self.id)

    def _write(self, data: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            part = self.folder / f".{NOTE}.part"
            part.write_text(json.dumps(data) + "\n")
            os.replace(part, self.folder / NOTE)


def _plain(error: BakehouseError) -> dict[str, str | None]:
    return {"id": error.id, "what": error.what, "where": error.where, "hint": error.hint}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _say(text: str) -> None:
    """Put a line of ours below the server's own."""
    with contextlib.suppress(OSError):
        os.write(1, f"bakehouse: {text}\n".encode(errors="replace"))


def main() -> int:
    """Run one container, or remove one."""
    if sys.argv[1] == "--remove":
        RealDocker().remove(sys.argv[2])
        return 0
    return Runner(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])).run()


if __name__ == "__main__":
    sys.exit(main())
