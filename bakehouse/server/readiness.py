"""Readiness: wait until a started server is healthy, as long as it shows activity.

A healthy server is not yet READY: it is verified first.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field

from bakehouse.context import Context
from bakehouse.engines.base import engine_of
from bakehouse.errors import BakehouseError, HostError, NotHealthy
from bakehouse.host import read_host
from bakehouse.models import Check, check
from bakehouse.progress import Bar
from bakehouse.server.launcher import ServerSpec, SupervisorConnection
from bakehouse.server.log_tail import Tail
from bakehouse.server.processes import Listener, Reading, owned, read_activity, tree
from bakehouse.server.supervisor import read_container_note
from bakehouse.server.verification import first_cause, get, last_line, read_log, url_of
from bakehouse.util.text import size_text as gib

POLL_S = 0.02
"""Seconds between two polls, so that READY lags the engine by well under 0.1 s."""
CONTAINER_POLL_S = 0.1
"""The same for a container: for each poll the engine's proxy opens a connection inside."""
LOOK_S = 0.25
"""Seconds between two looks at the log and at what was read."""
POLL_BYTES = 4096
"""Maximum bytes that a server reads because of one poll of ours."""
POLL_TRACES = ("/health",)
"""A log line with one of these is the echo of our own polling."""


@dataclass
class IdleTimer:
    """Seconds since a loading server last showed activity, on a monotonic clock.

    Activity is a new log line, or bytes that its processes read: through system calls, from disk,
    or as pages of mapped files. What our own polls cause does not count.
    """

    since: float
    last: Reading = field(default_factory=Reading)

    def update(self, now: float, reading: Reading, lines: Iterable[str], polls: int) -> float:
        """Take in what was seen since the last update; return the idle seconds so far."""
        grown = (
            reading.calls - self.last.calls > polls * POLL_BYTES
            or reading.disk > self.last.disk
            or reading.mapped > self.last.mapped
        )
        if grown or any(is_server_output(line) for line in lines):
            self.since = now
        self.last = reading
        return now - self.since


def is_server_output(line: str) -> bool:
    """Return whether a log line is the server's own, and not the echo of our polling."""
    return bool(line.strip()) and not any(trace in line for trace in POLL_TRACES)


class Waiting:
    """Waits until one server is healthy."""

    def __init__(self, ctx: Context, connection: SupervisorConnection, spec: ServerSpec) -> None:
        self.ctx = ctx
        self.connection = connection
        self.spec = spec
        self.host = spec.plan.host
        self.engine = engine_of(spec.engine)
        self.log = Tail(connection.folder / "server.log")
        self.stage = "starting"
        self.listener: Listener | None = None
        self.last = "it never listened"
        self.began = ctx.clock.monotonic()
        self.looked = self.began - LOOK_S
        self.idle = IdleTimer(since=self.began)
        self.polls = 0
        self.shown = 0
        """Number of the guard's alarms that were shown."""

    def until_healthy(self, name: str) -> int:
        """Return the port once the server is healthy.

        Raises NotHealthy with the check that failed, or HostError if the container or its engine
        failed.
        """
        with self.ctx.progress.bar(f"loading {name}", "B") as bar:
            while True:
                if self.connection.poll():
                    raise self.died()
                if self.listener is None:
                    self._find_socket()
                if self.listener is not None and self._healthy(self.listener):
                    return self.listener.port
                self._look(bar)
                self.ctx.clock.sleep(CONTAINER_POLL_S if self.connection.box else POLL_S)

    def _find_socket(self) -> None:
        if box := self.connection.box:
            if port := box.port():
                self.listener = Listener(ipaddress.ip_address(self.host), port, 0)
        elif mine := owned(tree(self.connection.server)):
            self.listener = min(mine, key=lambda one: one.port)
        if self.listener:
            self.connection.send_port(self.listener.port)

    def _healthy(self, listener: Listener) -> bool:
        answer = get(self.ctx, f"{url_of(self.host, listener.port)}/health")
        self.polls += 1
        if self.engine.healthy(answer):
            return True
        if not self.connection.poll() and (200 <= answer.status < 500):
            seen = check("health", self.engine.health, answer.says, "GET /health", ok=False)
            raise self._failed(f"/health responded, but not like {self.engine.server}", seen)
        self.last = answer.says
        return False

    def _look(self, bar: Bar) -> None:
        """Now and then, check the time and the activity, and show the progress."""
        now = self.ctx.clock.monotonic()
        if now - self.looked < LOOK_S:
            return
        self.looked = now
        for alarm in self.connection.alarms[self.shown :]:
            self.ctx.progress.say(f"memory: {alarm['reason']}")
        self.shown = len(self.connection.alarms)
        lines = self.log.lines()
        self.stage = next(filter(None, map(self.engine.stage, reversed(lines))), self.stage)
        box = self.connection.box
        reading = read_activity((*tree(self.connection.server), *(box.pids() if box else ())))
        idle = self.idle.update(now, reading, lines, self.polls)
        self.polls = 0
        total, stall, ready = (
            self.spec.weights_size, self.spec.stall_timeout, self.spec.ready_timeout,
        )  # fmt: skip
        bar.update(min(reading.loaded, total), total, self.stage)
        if idle > stall:
            seen = f"no log output and no file reads for {idle:.0f} s ({self.stage})"
            wanted = f"activity at least every {stall:g} s"
            raise self._stalled(check("loading", wanted, seen, "server.log, /proc", ok=False))
        if now - self.began > ready:
            seen = f"not healthy after {now - self.began:.0f} s; last {self.last}"
            wanted = f"healthy within {ready:g} s"
            raise self._failed(f"not {wanted}", check("health", wanted, seen, "GET /health",
                                                      ok=False))  # fmt: skip

    def died(self) -> BakehouseError:
        """Return the error for a server that ended, or a container that never started."""
        connection = self.connection
        if connection.box and (failed := read_container_note(connection.folder).get("failed")):
            return HostError(
                str(failed["what"]), where=failed["where"], hint=failed["hint"], id=failed["id"]
            )
        says = str((connection.ended or {}).get("says"))
        seen = check("alive", "the server runs until it is ready", says, "process table", ok=False)
        return self._failed(f"the server ended before it was ready: it {says}", seen)

    def _stalled(self, seen: Check) -> BakehouseError:
        """Return the error for a stall; a shard larger than the free memory makes vLLM hang."""
        free, largest = read_host().memory_available, self.spec.largest_file
        error = self._failed("loading stalled", seen)
        if largest and "shards" in self.stage:
            error.what += (
                f" at {self.stage}: the largest shard is {gib(largest)}, and {gib(free)} of "
                "memory are available"
            )
            if largest > free:
                error.hint = "split it into small shards with 'invoke reshard', or free memory"
        return error

    def _failed(self, what: str, seen: Check) -> BakehouseError:
        """Return the error, with the first cause in the log."""
        connection = self.connection
        try:
            box = connection.box.inspect() if connection.box else None
        except HostError as error:
            return HostError(
                f"{what}; and {error.what}", where=error.where, hint=error.hint, id=error.id,
                checks=(seen,),
            )  # fmt: skip
        if box and box.state == "paused":
            what += f"; somebody paused its container; resume it with: docker unpause {box.name}"
        log = connection.folder / "server.log"
        lines = read_log(log)
        cause = first_cause(lines, self.engine.name, died=connection.ended is not None)
        hint = (cause.fix if cause else None) or f"read {log}" + " (it is empty)" * (not lines)
        line = cause or last_line(lines)
        return NotHealthy(what, where=line.where if line else str(log), hint=hint, checks=(seen,))
