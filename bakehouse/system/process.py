"""Runs child processes: each in its own session, with a log, and ended with all its descendants.

A child gets an argument list (never a shell string), a whole environment (never inherited), a
working folder and no standard input. It runs below `system/child_guard.py`, which ends it and all
its descendants when Bakehouse ends, kill -9 included. If the guard itself is killed, its
descendants become our children, since we are the next subreaper above it, and we kill them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import IO, cast

from bakehouse.debug_log import debug

GUARD = str(Path(__file__).with_name("child_guard.py"))

PASSED_ON = (
    "HOME", "USER", "LOGNAME", "PATH", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip
"""Variables that every child may see. No tokens: a step that needs one names it."""


def environment(
    extra: Mapping[str, str] | None = None, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Make a child's whole environment: allowed variables, fixed locale and time zone, `extra`."""
    base = os.environ if base is None else base
    chosen = {name: base[name] for name in PASSED_ON if name in base}
    return {**chosen, "LC_ALL": "C.UTF-8", "LANG": "C.UTF-8", "TZ": "UTC", **(extra or {})}


class Clock:
    """Wall time, monotonic time and sleep, which tests replace so that nothing has to wait."""

    def now(self) -> datetime:
        """Wall time, in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds that only grow."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


@dataclass(frozen=True)
class Finished:
    """How a child ended.

    `code` is the exit status, or minus the signal's number; `lines` are the last lines that it
    wrote (standard output and error together, in order); `seconds` is wall time.
    """

    argv: tuple[str, ...]
    code: int
    seconds: float
    lines: tuple[str, ...]
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        """Whether it ended with 0."""
        return self.code == 0

    @property
    def signal(self) -> str | None:
        """The name of the signal that ended it, if one did."""
        if self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"


@dataclass(frozen=True)
class Captured:
    """Result of a short command: both output streams, as text."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def ok(self) -> bool:
        """Whether it ended with 0."""
        return self.code == 0


class Processes:
    """Runs child processes on this machine."""

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        log: Path | None = None,
        on_line: Callable[[str], None] | None = None,
        timeout: float | None = None,
        keep_lines: int = 200,
    ) -> Finished:
        """Run to the end; every line goes to `log` and `on_line`; `timeout` in seconds."""
        started = time.monotonic()
        tail: deque[str] = deque(maxlen=keep_lines)
        with _adopting_orphans():
            code = _guarded(argv, env, cwd, timeout, lambda child: _pump(child, log, tail, on_line))
        seconds = time.monotonic() - started
        timed_out = timeout is not None and code == 143 and seconds >= timeout
        debug("process", argv=list(argv), code=code, seconds=round(seconds, 3))
        return Finished(tuple(argv), code, seconds, tuple(tail), timed_out)

    def capture(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        timeout: float = 60,
        stdin: bytes | None = None,
    ) -> Captured:
        """Run a short command; one that is not found gives code 127. `timeout` in seconds."""
        try:
            done = subprocess.run(
                list(argv),
                input=stdin if stdin is not None else b"",
                capture_output=True,
                cwd=cwd,
                env=dict(env),
                timeout=timeout,
                check=False,
                umask=0o022,
            )
        except FileNotFoundError:
            return Captured(tuple(argv), 127, "", f"{argv[0]}: not found")
        except PermissionError:
            return Captured(tuple(argv), 126, "", f"{argv[0]}: not permitted")
        except subprocess.TimeoutExpired:
            return Captured(tuple(argv), -signal.SIGKILL, "", f"no answer within {timeout:g} s")
        debug("process", argv=list(argv), code=done.returncode)
        out, err = (s.decode(errors="replace") for s in (done.stdout, done.stderr))
        return Captured(tuple(argv), done.returncode, out, err)


def _guarded(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: Path | None,
    timeout: float | None,
    read: Callable[[subprocess.Popen[bytes]], None],
) -> int:
    """Run a command below a guard, let `read` take its output; return the guard's exit code."""
    lifeline_read, lifeline_write = os.pipe()
    try:
        with _lock:  # else the guard itself could be taken for an orphan
            guard = subprocess.Popen(
                [sys.executable, "-I", "-S", GUARD, str(lifeline_read), "--", *argv],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env=dict(env),
                pass_fds=(lifeline_read,),
                start_new_session=True,
                umask=0o022,
            )
            _guards.add(guard.pid)
    except BaseException:
        os.close(lifeline_write)
        raise
    finally:
        os.close(lifeline_read)
    timer = threading.Timer(timeout, guard.terminate) if timeout else None
    if timer:
        timer.daemon = True
        timer.start()

    # Orphans are ended at once: they may hold the pipe from which the output is read.
    def end_left_over() -> None:
        with suppress(ChildProcessError):  # wait without reaping
            ended = os.waitid(os.P_PID, guard.pid, os.WEXITED | os.WNOWAIT)
            if ended and ended.si_code != os.CLD_EXITED:
                end_orphans()

    watch = threading.Thread(target=end_left_over, daemon=True)
    watch.start()
    try:
        read(guard)
    finally:
        os.close(lifeline_write)
        if timer:
            timer.cancel()
        code = guard.wait()
        if code < 0:
            end_orphans()  # the watch may have come too late to see how the guard ended
        if guard.stdout:
            guard.stdout.close()
        watch.join(2 * ORPHANS_S)
        with _lock:
            _guards.discard(guard.pid)
    return code


ORPHANS_S = 5.0
"""Limit for ending orphans, in seconds."""
_lock = threading.Lock()
_adopters = 0
"""Commands that run or are about to."""
_guards: set[int] = set()


def _set_subreaper(wanted: bool) -> None:
    import ctypes  # which `plan` does not need

    from bakehouse.system.child_guard import PR_SET_CHILD_SUBREAPER

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Become the parent of orphans below us; enter before a guard starts."""
    global _adopters  # noqa: PLW0603 - being a subreaper is a state of the whole process
    with _lock:
        _set_subreaper(True)
        _adopters += 1
    try:
        yield
    finally:
        with _lock:
            _adopters -= 1
            _set_subreaper(_adopters > 0)


def end_orphans() -> None:
    """Kill what a killed guard left to us, and all below it, until nothing is left.

    Whatever dies here leaves its own children to us before it can be reaped, so none is missed.
    """
    from bakehouse.system.child_guard import descendants

    deadline = time.monotonic() + ORPHANS_S
    while (found := _orphans()) and time.monotonic() < deadline:
        for pid in [*found, *(below for top in found for below in descendants(top))]:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def _orphans() -> list[int]:
    """Our children in another session that are not guards: what ran below a guard."""
    ours, session = os.getpid(), os.getsid(0)
    found = []
    with _lock:
        for name in os.listdir("/proc"):
            with suppress(OSError, IndexError, ValueError):
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
                parent, of = int(fields[1]), int(fields[3])
                if parent == ours and of != session and int(name) not in _guards:
                    found.append(int(name))
    return found


def _pump(
    child: subprocess.Popen[bytes],
    log: Path | None,
    tail: deque[str],
    on_line: Callable[[str], None] | None,
) -> None:
    """Move the child's output to the log, line by line, until it closes its end."""
    if child.stdout is None:
        return
    if log:
        log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") if log else nullcontext() as file:
        for raw in _pieces(child.stdout):
            if file:
                file.write(raw)
                file.flush()
            text = raw.decode(errors="replace").rstrip("\r\n")
            if not raw.endswith(b"\r"):
                tail.append(text)
            if on_line:
                on_line(text)


_END = re.compile(rb"\r?\n|\r(?=[^\n])")


def _pieces(stream: IO[bytes]) -> Iterator[bytes]:
    """Lines as they come; progress that rewrites its line ends with a carriage return."""
    rest = b""
    while chunk := cast(BufferedReader, stream).read1(2**16):
        rest += chunk
        begin = 0
        for end in _END.finditer(rest):
            yield rest[begin : end.end()]
            begin = end.end()
        rest = rest[begin:]
    if rest:
        yield rest
