"""The supervisor: one small process per server. It is the server's parent, and watches it.

The launcher runs it as `python -m THIS_MODULE FOLDER FD`. Over the socket FD it gets, as one JSON
line, what to start, and later that the server is verified. Until then the server ends as soon as
the other end of the socket closes, for whatever reason: an unverified server never lives on. A TERM
to the supervisor stops the server. If the supervisor itself is killed, the kernel kills the server
too (PDEATHSIG), so no server runs unwatched.

Standard library only, except the log signatures, which are loaded once the server runs.
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
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bakehouse.server import state
from bakehouse.server.memory_guard import SLOW_S, Guard, OomWatch, Sensor, describe_end
from bakehouse.server.processes import Process, end
from bakehouse.server.state import Ended, ServerState, SupervisorInput
from bakehouse.system.child_guard import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, descendants

if TYPE_CHECKING:
    from bakehouse.logscan.scanner import Scanner

LEFTOVERS_S = 2.0
"""Seconds between TERM and KILL for processes that a server leaves behind."""
MEMORY_GRACE_S = 2.0
"""Maximum seconds between TERM and KILL for a server that the memory guard stops."""
ALARMS = 20
"""Maximum number of the guard's alarms kept in the state."""
MCL_CURRENT, MCL_ONFAULT = 1, 4
OOM_SCORE = 500
"""If memory runs out, the kernel should kill the server and not its neighbours."""
CONTAINER_NOTE = "container.json"
"""In the server's folder: how its container ended, or why it never started."""
REMOVE_S = 60.0
"""Seconds that removing a container without a follower may take."""
ENGINE_S = 5.0
"""Seconds that the Docker Engine may need beyond the server's own time to stop."""
KILL_CONTAINER = signal.SIGUSR1
"""Tells the follower to kill its container at once."""


CHUNK = 1 << 20
LONGEST_LINE = 1 << 16


class Tail:
    """Reads the lines added to a growing file since the last read; never waits."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path = path
        self.position = position
        self.rest = b""

    def lines(self) -> list[str]:
        """Return the new whole lines, decoded with replacement characters, without line ends."""
        try:
            with self.path.open("rb") as file:
                file.seek(0, 2)
                if file.tell() < self.position:
                    self.position, self.rest = 0, b""
                file.seek(self.position)
                chunk = file.read(CHUNK)
                self.position = file.tell()
        except OSError:
            return []
        *whole, self.rest = (self.rest + chunk).split(b"\n")
        if len(self.rest) > LONGEST_LINE:
            whole.append(self.rest)
            self.rest = b""
        return [line.decode(errors="replace").rstrip("\r") for line in whole]


class LogWatch:
    """Scans a server's log for signatures as it grows."""

    def __init__(self, path: Path, engine: str, known: frozenset[str] = frozenset()) -> None:
        self.tail = Tail(path)
        self.engine = engine
        self.known = known
        """Ids of signatures that this server is expected to show."""
        self.scanner: Scanner | None = None

    def findings(self) -> list[dict[str, Any]]:
        """Return fatal, silent and lost-feature findings in new lines, as plain data."""
        lines = self.tail.lines()
        if not lines:
            return []
        if self.scanner is None:
            from bakehouse.logscan.scanner import Scanner

            self.scanner = Scanner(engine=self.engine)
        new = {(f.id, f.severity) for line in lines for f in self.scanner.feed(line)}
        return [
            {"id": f.id, "severity": str(f.severity), "line_number": f.line_number, "line": f.line}
            for f in (self.scanner.findings() if new else ())
            if f.bad and (f.id, f.severity) in new and f.id not in self.known
        ]


class Supervisor:
    """Runs one server from its start until its end is recorded."""

    def __init__(self, folder: Path, control: socket.socket) -> None:
        self.folder = folder
        self.control: socket.socket | None = control
        self.received = b""
        self.spec = SupervisorInput.from_json(self._line(wait=True))
        self.state: ServerState = self.spec.state
        self.child = 0
        self.status: int | None = None
        self.why: str | None = None
        self.says = ""
        self.patience = MEMORY_GRACE_S
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.log = LogWatch(
            folder / "server.log", self.spec.engine, frozenset(self.spec.known_losses)
        )
        self.oom = OomWatch()
        self.guard = Guard(self.spec.guard) if self.spec.guard else None
        self.sensor = Sensor()
        self.sampled = self.read_at = 0.0
        self.written: state.Mark | None = None
        self.blind = False

    def run(self) -> None:
        """Start the server, watch it, and record how it ended."""
        wake = _signals()
        self.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.child = self._start()
        self._note(keeper=Process.of(os.getpid()), server=Process.of(self.child))
        if self.written is None:
            raise SystemExit("cannot write the server's state")  # nobody could find it again
        self._send({"event": "started", "pid": self.child})
        # When memory runs out we must not wait for our own pages; not all users may lock them.
        self.libc.mlockall(MCL_CURRENT | MCL_ONFAULT)
        with selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ, "wake")
            if self.control:
                selector.register(self.control, selectors.EVENT_READ, "control")
            while self.status is None and self.why is None:
                for key, _ in selector.select(self._pause()):
                    if key.data == "wake":
                        if signal.SIGTERM in os.read(wake, 512):  # SIGCHLD only wakes
                            self.why = "stopped"
                    elif self.control and not self._listen(self.control):
                        selector.unregister(self.control)
                        self._let_go()
                self._reap()
                self._look()
        self._finish()

    def _start(self) -> int:
        """Fork the server into its own session; it dies with this process."""
        supervisor = os.getpid()
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
            if os.getppid() != supervisor:
                os._exit(137)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            for source, target in ((nothing, 0), (out, 1), (out, 2)):
                os.dup2(source, target)
            os.closerange(3, 4096)
            core = resource.getrlimit(resource.RLIMIT_CORE)[1]
            resource.setrlimit(resource.RLIMIT_CORE, (0, core))
            if not self.spec.run:  # a follower's container has that score itself
                with contextlib.suppress(OSError):
                    Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
            os.chdir(self.spec.cwd)
            os.execve(argv[0], list(argv), env)  # noqa: S606 - this is where the argv becomes a process
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}\n".encode(errors="replace"))
            os._exit(126 if isinstance(error, PermissionError) else 127)

    def _listen(self, control: socket.socket) -> bool:
        """Handle messages of `serve`; False once it closed the connection."""
        try:
            chunk = control.recv(65536)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            chunk = b""
        self.received += chunk
        while b"\n" in self.received:
            message = json.loads(self._line())
            if message["do"] == "port":
                self._note(port=int(message["port"]))
            elif message["do"] == "proven":
                self._take_proof(message)
            elif message["do"] == "refuse":
                self.why, self.says = "refused", str(message["says"])
        return bool(chunk)

    def _take_proof(self, message: dict[str, Any]) -> None:
        """Record that the server is verified; stop it if that cannot be written."""
        self._note(
            phase="proven", proven=state.now(), record=message.get("record"),
            foreground=bool(message.get("foreground")),
        )  # fmt: skip
        if self.written is None:
            self.why, self.says = "refused", "its verification could not be recorded"
        else:
            self._send({"event": "proven"})

    def _line(self, *, wait: bool = False) -> str:
        while wait and self.control and b"\n" not in self.received:
            chunk = self.control.recv(65536)
            if not chunk:
                raise SystemExit(0)
            self.received += chunk
        line, _, self.received = self.received.partition(b"\n")
        return line.decode()

    def _let_go(self) -> None:
        """`serve` closed the connection: fine once verified, a reason to stop before."""
        if self.control:
            self.control.close()
        self.control = None
        if self.state.phase != "proven":
            self.why = "unproven"
        elif self.state.foreground:
            self.why = "stopped"

    def _pause(self) -> float:
        """Seconds until the next memory sample or log read is due."""
        wanted = self.guard.interval if self.guard else SLOW_S
        return max(0.0, min(wanted, SLOW_S) - (time.monotonic() - self.sampled))

    def _look(self) -> None:
        """Sample memory, and read the log less often."""
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
        """Warn, then stop our own server, before the machine runs out of memory."""
        reading = self.sensor.read(now) if self.guard else None
        alarm = self.guard.look(reading) if self.guard and reading else None
        if alarm is None:
            return
        noted = {"at": state.now(), **alarm.to_data()}
        alarms = (*self.state.alarms, noted)[-ALARMS:]
        self.state = replace(self.state, alarms=alarms)
        if alarm.kind == "stop":
            self.why, self.says = self.why or "memory", alarm.reason  # recorded at the end
            self.patience = alarm.patience(MEMORY_GRACE_S)
        else:
            self._save(sync=False)  # a disk that swaps could block us
        self._send({"event": "alarm", "alarm": noted})

    def _read_log(self) -> None:
        """Record log findings since the verification, which reads the log up to then itself.

        If the log cannot be scanned the server runs on; this is recorded once.
        """
        if self.state.phase != "proven" or self.blind:
            return
        try:
            findings = self.log.findings()
        except Exception as error:
            self.blind = True
            traceback.print_exc()
            line = f"its log is no longer scanned: {type(error).__name__}: {error}"
            findings = [{"id": "not-watched", "severity": "lost", "line_number": 0, "line": line}]
        if findings:
            self._note(findings=(*self.state.findings, *findings)[:50])

    def _reap(self) -> None:
        """Reap ended children, and keep the server's exit status."""
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] == self.child:
                    self.status = found[1]
        except ChildProcessError:
            return

    def _finish(self) -> None:
        """Stop everything that still runs and record the end."""

        def below() -> list[Process]:
            return [p for pid in descendants(os.getpid()) if (p := Process.of(pid))]

        if self.status is None:
            grace = self.state.stop_timeout
            if self.why == "memory":
                grace = min(grace, self.patience)
            first = signal.SIGTERM
            if self.spec.run:
                # The follower needs more time, for the Docker Engine and to clean up.
                first = KILL_CONTAINER if self.why == "memory" else first
                grace += ENGINE_S
            _end_group(self.child, grace, self._reap, first)
        end(below, grace=LEFTOVERS_S, tick=self._reap)
        self._reap()
        self._read_log()
        code = None if self.status is None else os.waitstatus_to_exitcode(self.status)
        why = self.why or "exited"
        says = self._describe_end(code, why)
        ended = Ended(at=state.now(), why=why, code=code, says=says)
        self._note(phase="ended", ended=ended)
        if self.state.alarms and self.state.record:  # the next launch overwrites the state
            text = json.dumps(list(self.state.alarms), indent=2) + "\n"
            with contextlib.suppress(OSError):
                (Path(self.state.record) / "memory-guard.json").write_text(text)
        state.forget_key(self.folder)
        self._send({"event": "ended", "says": says, "code": code, "why": why})

    def _describe_end(self, code: int | None, why: str) -> str:
        """Describe how it ended, by its container's note if it has one."""
        note = self._container_note() if self.spec.run else {}
        if "lost" in note:
            return f"{state.LOST}: {note['lost']}"
        if why == "refused":
            return f"stopped: {self.says}"
        if why == "exited" and "says" in note:
            return str(note["says"])
        return describe_end(code, why, self.oom.killed(self.child), self.says)

    def _container_note(self) -> dict[str, Any]:
        """Return how the container ended; `lost` in it says why it may still exist.

        Without a complete note the follower was killed: its container is removed.
        """
        note = read_container_note(self.folder)
        if not self.state.container or (note and "lost" not in note):
            return note
        error = "the Docker Engine did not remove its container in time"
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                [*self.spec.run[:3], "--remove", self.state.container],
                env=self.spec.env, timeout=REMOVE_S, check=False, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, text=True, errors="replace",
            )  # fmt: skip
            if done.returncode == 0:
                note.pop("lost", None)
                return {"says": "was removed: the process following its container was killed",
                        **note}  # fmt: skip
            error = done.stdout.strip() or error
        return {**note, "lost": error}

    def _note(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]
        self._save()

    def _save(self, *, sync: bool = True) -> None:
        """Write the state. If the disk is full the server runs on, and this is retried.

        A state file that was removed or edited is written again, too.
        """
        self.written = None
        with contextlib.suppress(OSError):
            state.write(self.folder, self.state, sync=sync)
            self.written = state.mark(self.folder)

    def _send(self, message: dict[str, object]) -> None:
        if self.control:
            try:
                self.control.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                return


def read_container_note(folder: Path) -> dict[str, Any]:
    """Return what the follower wrote about the container's end; empty if there is nothing."""
    try:
        found = json.loads((folder / CONTAINER_NOTE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _end_group(leader: int, grace: float, reap: Callable[[], None], first: int) -> None:
    """Send `first` to the server's process group once, and KILL after `grace` seconds."""
    for number, patience in ((first, grace), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(leader, number)
        except (ProcessLookupError, PermissionError):
            return
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            reap()
            if Process.of(leader) is None:
                return
            time.sleep(0.01)


def _signals() -> int:
    """Turn TERM and SIGCHLD into bytes on a pipe; return its reading end."""
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
    """Detach from the parent and run the server."""
    folder, fd = Path(sys.argv[1]), int(sys.argv[2])
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    Supervisor(folder, socket.socket(fileno=fd)).run()


if __name__ == "__main__":
    main()
