"""Children: one way to run a command, with its own session, log and certain end.

Every child gets an argv tuple (never a shell string), an environment that is given whole (never
inherited), a working folder and no standard input. It runs below `ports/guard.py`, so that it and
all its descendants end when Bakehouse ends, kill -9 included.
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
from contextlib import nullcontext
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Protocol, cast

from bakehouse.logs import debug

GUARD = str(Path(__file__).with_name("guard.py"))

PASSED_ON = (
    "HOME", "USER", "LOGNAME", "PATH", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip
"""Variables that every child may see. No tokens: the step that needs one names it."""


def environment(
    extra: Mapping[str, str] | None = None, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Give a child's whole environment: allowlist, fixed locale and time zone, `extra`."""
    base = os.environ if base is None else base
    chosen = {name: base[name] for name in PASSED_ON if name in base}
    return {**chosen, "LC_ALL": "C.UTF-8", "LANG": "C.UTF-8", "TZ": "UTC", **(extra or {})}


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
    """What a short command answered: both streams apart, as text."""

    argv: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def ok(self) -> bool:
        """Whether it ended with 0."""
        return self.code == 0


class Processes(Protocol):
    """The process port."""

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

    def capture(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        timeout: float = 60,
        stdin: bytes | None = None,
    ) -> Captured:
        """Run a short command and give both streams; a command that is not there gives code 127."""


class RealProcesses:
    """The process port on this machine."""

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
        """See `Processes.run`."""
        from bakehouse.ports.orphans import adopting  # ctypes, which `plan` can do without

        started = time.monotonic()
        tail: deque[str] = deque(maxlen=keep_lines)
        with adopting():
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
        """See `Processes.capture`."""
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
    """Run a command below a guard, let `read` have its output; give how the guard ended."""
    from bakehouse.ports.orphans import end_orphans, start_guard, watched

    lifeline_read, lifeline_write = os.pipe()

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
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

    try:
        guard = start_guard(start)
    except BaseException:
        os.close(lifeline_write)
        raise
    finally:
        os.close(lifeline_read)
    timer = threading.Timer(timeout, guard.terminate) if timeout else None
    if timer:
        timer.daemon = True
        timer.start()
    with watched(guard.pid):
        try:
            read(guard)
        finally:
            os.close(lifeline_write)
            if timer:
                timer.cancel()
            code = guard.wait()
            if code < 0:
                end_orphans()  # the watch may have come too late to see how it ended
            if guard.stdout:
                guard.stdout.close()
    return code


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
