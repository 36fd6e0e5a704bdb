"""The keeper: one small process for each server. It is the server's parent, and its guard.

Run as `python -m bakehouse.serve.keeper FOLDER FD` by `serve.launch`; FD is a socket over which it
is told, as one JSON line, what to start, and later that the server is proven. Until then the end
of whoever holds the other end, however it comes, ends the server: what was never proven does not
live on. A TERM to the keeper stops the server. Should the keeper itself be killed, the kernel kills
the server with it (PDEATHSIG): an unwatched server is not left behind either.

Standard library only, save for the signatures, which are loaded once the server runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from bakehouse.ports.guard import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, descendants
from bakehouse.serve import aftermath, oom, state
from bakehouse.serve.guard import SLOW_S, Guard, Sensor
from bakehouse.serve.processes import Process, end
from bakehouse.serve.state import Ended, Spec, State
from bakehouse.serve.watch import LogWatch

LEFTOVERS_S = 2.0
"""What a server leaves running when it ends gets so long, in seconds, between TERM and KILL."""
MEMORY_GRACE_S = 2.0
"""A server that the memory guard stops gets no more between TERM and KILL, in seconds."""
ALARMS = 20
"""So many alarms of the guard are kept."""
MCL_CURRENT, MCL_ONFAULT = 1, 4
OOM_SCORE = 500
"""Where memory runs out, the kernel should take the server and not its neighbours."""


class Keeper:
    """The life of one server, from its start to its record of how it ended."""

    def __init__(self, folder: Path, control: socket.socket) -> None:
        self.folder = folder
        self.control: socket.socket | None = control
        self.heard = b""
        self.spec = Spec.from_json(self._line(wait=True))
        self.state: State = self.spec.state
        self.child = 0
        self.status: int | None = None
        self.why: str | None = None
        self.says = ""
        self.patience = MEMORY_GRACE_S
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.log = LogWatch(
            folder / "server.log", self.spec.engine, frozenset(self.spec.known_losses)
        )
        self.oom = oom.Watch()
        self.guard = Guard(self.spec.guard) if self.spec.guard else None
        self.sensor = Sensor()
        self.sampled = self.read_at = 0.0
        self.written: state.Mark | None = None
        self.blind = False

    def run(self) -> None:
        """Start the server, watch it to its end, write down how it ended."""
        wake = _signals()
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.child = self._start()
        self._note(keeper=Process.of(os.getpid()), server=Process.of(self.child))
        if self.written is None:
            raise SystemExit("the server's state cannot be written")  # nobody could find it again
        self._tell({"event": "started", "pid": self.child})
        # Where memory runs out we must not wait for our own pages; refused to most users, then not.
        self.libc.mlockall(MCL_CURRENT | MCL_ONFAULT)
        with selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ, "wake")
            if self.control:
                selector.register(self.control, selectors.EVENT_READ, "control")
            while self.status is None and self.why is None:
                for key, _ in selector.select(self._pause()):
                    if key.data == "wake":
                        self._woken(wake)
                    elif self.control and not self._listen(self.control):
                        selector.unregister(self.control)
                        self._let_go()
                self._reap()
                self._look()
        self._finish()

    def _start(self) -> int:
        """Fork the server into its own session, tied to this process."""
        keeper = os.getpid()
        out = os.open(self.folder / "server.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        argv, env = self.spec.run or self.spec.state.argv, self.spec.env
        pid = os.fork()
        if pid:
            os.close(out)
            os.close(nothing)
            return pid
        try:
            os.setsid()
            self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != keeper:
                os._exit(137)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            for source, target in ((nothing, 0), (out, 1), (out, 2)):
                os.dup2(source, target)
            os.closerange(3, 4096)
            _lower_claims(last=bool(self.spec.run))
            os.chdir(self.spec.cwd)
            os.execve(argv[0], list(argv), env)  # noqa: S606 - this is where the argv becomes a process
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}\n".encode(errors="replace"))
            os._exit(126 if isinstance(error, PermissionError) else 127)

    def _woken(self, wake: int) -> None:
        """Take TERM as the wish to stop; SIGCHLD only wakes."""
        if signal.SIGTERM in os.read(wake, 512):
            self.why = "stopped"

    def _listen(self, control: socket.socket) -> bool:
        """Take what `serve` says; False when it has gone, or has let go."""
        try:
            chunk = control.recv(65536)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            chunk = b""
        self.heard += chunk
        while b"\n" in self.heard:
            message = json.loads(self._line())
            if message["do"] == "port":
                self._note(port=int(message["port"]))
            elif message["do"] == "proven":
                self._take_proof(message)
            elif message["do"] == "refuse":
                self.why, self.says = "refused", str(message["says"])
        return bool(chunk)

    def _take_proof(self, message: dict[str, Any]) -> None:
        """Note that the server is proven; one of which that cannot be on record is stopped."""
        self._note(
            phase="proven", proven=state.now(), record=message.get("record"),
            foreground=bool(message.get("foreground")),
        )  # fmt: skip
        if self.written is None:
            self.why, self.says = "refused", "that it was proven could not be written down"
        else:
            self._tell({"event": "proven"})

    def _line(self, *, wait: bool = False) -> str:
        while wait and self.control and b"\n" not in self.heard:
            chunk = self.control.recv(65536)
            if not chunk:
                raise SystemExit(0)
            self.heard += chunk
        line, _, self.heard = self.heard.partition(b"\n")
        return line.decode()

    def _let_go(self) -> None:
        """The other end is gone: right after the proof, and reason to stop before it."""
        if self.control:
            self.control.close()
        self.control = None
        if self.state.phase != "proven":
            self.why = "unproven"
        elif self.state.foreground:
            self.why = "stopped"

    def _pause(self) -> float:
        """Seconds until the next sample of memory, or look at the log, is due."""
        wanted = self.guard.interval if self.guard else SLOW_S
        return max(0.0, min(wanted, SLOW_S) - (time.monotonic() - self.sampled))

    def _look(self) -> None:
        """Sample memory, and read the log somewhat more seldom."""
        now = time.monotonic()
        if now - self.sampled + 0.001 >= (self.guard.interval if self.guard else SLOW_S):
            self.sampled = now
            self._watch_memory(now)
        if now - self.read_at >= SLOW_S:
            self.read_at = now
            self._read_log()
            if self.written != state.mark(self.folder):
                self._save()

    def _watch_memory(self, now: float) -> None:
        """Warn, and then stop our own server, before the machine has no memory left."""
        reading = self.sensor.read(now) if self.guard else None
        alarm = self.guard.look(reading) if self.guard and reading else None
        if alarm is None:
            return
        noted = {"at": state.now(), **alarm.to_data()}
        alarms = (*self.state.alarms, noted)[-ALARMS:]
        self.state = replace(self.state, alarms=alarms)
        if alarm.kind == "stop":
            self.why, self.says = self.why or "memory", alarm.reason  # written down when it is over
            self.patience = alarm.patience(MEMORY_GRACE_S)
        else:
            self._save(sync=False)  # a disk that swaps may keep us
        self._tell({"event": "alarm", "alarm": noted})

    def _read_log(self) -> None:
        """Note what the log shows since the proof; up to it whoever proves reads the log.

        A log that cannot be judged is no reason to end a server, and is said, once.
        """
        if self.state.phase != "proven" or self.blind:
            return
        try:
            findings = self.log.findings()
        except Exception as error:
            self.blind = True
            traceback.print_exc()
            line = f"its log is watched no more: {type(error).__name__}: {error}"
            findings = [{"id": "not-watched", "severity": "lost", "line_number": 0, "line": line}]
        if findings:
            self._note(findings=(*self.state.findings, *findings)[:50])

    def _reap(self) -> None:
        """Collect whatever ended below, and remember how the server itself did."""
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self.child:
                    self.status = found[1]
        except ChildProcessError:
            return

    def _finish(self) -> None:
        """Stop what still runs, all of it, and record the end."""
        if self.status is None:
            grace = self.state.stop_timeout
            if self.why == "memory":
                grace = min(grace, self.patience)
            first = signal.SIGTERM
            if self.spec.run:
                # What follows a container needs time of its own: for the engine, and to clean up.
                first = aftermath.AT_ONCE if self.why == "memory" else first
                grace += aftermath.ENGINE_S
            _end_group(self.child, grace, self._reap, first)
        end(self._below, grace=LEFTOVERS_S, tick=self._reap)
        self._reap()
        self._read_log()
        code = None if self.status is None else os.waitstatus_to_exitcode(self.status)
        why = self.why or "exited"
        says = self._words(code, why)
        ended = Ended(at=state.now(), why=why, code=code, says=says)
        self._note(phase="ended", ended=ended)
        self._keep_alarms()
        state.forget_key(self.folder)
        self._tell({"event": "ended", "says": says, "code": code, "why": why})

    def _words(self, code: int | None, why: str) -> str:
        """Say how it ended; for a container its own note, and what a killed follower left goes."""
        note: dict[str, Any] = {}
        if self.spec.run:
            note = aftermath.clear(
                self.folder, self.state.container or "", self.spec.run, self.spec.env
            )
        if "lost" in note:
            return f"{state.LOST}: {note['lost']}"
        if why == "refused":
            return f"stopped: {self.says}"
        if why == "exited" and "says" in note:
            return str(note["says"])
        return oom.explain(code, why, self.oom.killed(self.child), self.says)

    def _keep_alarms(self) -> None:
        """Put the guard's alarms into the record too: the next launch writes a new state."""
        if self.state.alarms and self.state.record:
            text = json.dumps(list(self.state.alarms), indent=2) + "\n"
            with contextlib.suppress(OSError):
                (Path(self.state.record) / "memory-guard.json").write_text(text)

    def _below(self) -> list[Process]:
        return [p for pid in descendants(os.getpid()) if (p := Process.of(pid))]

    def _note(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]
        self._save()

    def _save(self, *, sync: bool = True) -> None:
        """Write the state. A full disk is no reason to end a server: it is tried again later.

        So is a file that was removed or changed: as long as the keeper lives it knows better.
        """
        self.written = None
        with contextlib.suppress(OSError):
            state.write(self.folder, self.state, sync=sync)
            self.written = state.mark(self.folder)

    def _tell(self, message: dict[str, object]) -> None:
        if self.control:
            try:
                self.control.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                return


def _end_group(leader: int, grace: float, reap: object, first: int = signal.SIGTERM) -> None:
    """TERM, or another signal, to the server's group, once; KILL to it after `grace` seconds."""
    for number, patience in ((first, grace), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(leader, number)
        except (ProcessLookupError, PermissionError):
            return
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if callable(reap):
                reap()
            if Process.of(leader) is None:
                return
            time.sleep(0.01)


def _lower_claims(*, last: bool) -> None:
    """No core dumps the size of a model, and first in line where memory runs out.

    Not so, with `last`, what only follows a container: that has the claim itself.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if last:
        return
    try:
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    except OSError:
        return


def _signals() -> int:
    """Turn TERM and the death of children into bytes on a pipe; give its reading end."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda _number, _frame: None)
    return read


def main() -> None:
    """Become a process of our own, so that nobody has to wait for us, and keep the server."""
    folder, fd = Path(sys.argv[1]), int(sys.argv[2])
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    Keeper(folder, socket.socket(fileno=fd)).run()


if __name__ == "__main__":
    main()
