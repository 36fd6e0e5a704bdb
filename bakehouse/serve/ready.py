"""From launched to healthy: wait while there are signs of life, fail at once where none can be.

Nothing here decides that a server is ready: a healthy one is then proven, in `serve.proof`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field

from bakehouse.checks import Check, check
from bakehouse.context import Context
from bakehouse.engines.engine import engine_of
from bakehouse.errors import BakehouseError, HostError, NotHealthy
from bakehouse.host import read_host
from bakehouse.memory.types import gib
from bakehouse.progress import Bar
from bakehouse.serve.keeper import read_container_note
from bakehouse.serve.launch import Link
from bakehouse.serve.processes import Listener, Reading, owned, read_activity, tree
from bakehouse.serve.proof import first_cause, get, last_words, read_log, url_of
from bakehouse.serve.watch import Tail

POLL_S = 0.02
"""Between two questions, so that READY lags the engine by well under 0.1 s."""
BOX_POLL_S = 0.1
"""The same for a container: each question makes the engine's proxy open a connection inside."""
POLL_BYTES = 4096
"""Maximum bytes that a server reads because of one poll of ours."""
POLL_TRACES = ("/health",)
"""A log line with one of these is the echo of our own polling."""
LOOK_S = 0.25
"""Between two looks at the log and at what was read."""


@dataclass(frozen=True)
class Limits:
    """How long a server may take, and how long it may be silent meanwhile. Seconds."""

    ready: float
    stall: float


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
    """One wait for health."""

    def __init__(
        self,
        ctx: Context,
        link: Link,
        host: str,
        limits: Limits,
        weights_size: int,
        engine: str,
        largest: int = 0,
    ) -> None:
        self.ctx = ctx
        self.link = link
        self.host = host
        self.limits = limits
        self.total = weights_size
        self.largest = largest
        self.engine = engine_of(engine)
        self.began = ctx.clock.monotonic()
        self.silence = IdleTimer(self.began)
        self.log = Tail(link.folder / "server.log")
        self.listener: Listener | None = None
        self.last = "it never listened"
        self.stage = "starting"
        self.polls = self.warned = 0
        self.looked = self.began - LOOK_S

    def until_healthy(self, name: str) -> int:
        """Give the port once the engine says that it is healthy; NotHealthy in any other case."""
        with self.ctx.progress.bar(f"loading {name}", "B") as bar:
            while True:
                if self.link.poll():
                    raise self.died()
                if self.listener is None:
                    self._find_socket()
                if self.listener is not None and self._healthy(self.listener):
                    return self.listener.port
                self._look(bar)
                self.ctx.clock.sleep(BOX_POLL_S if self.link.box else POLL_S)

    def _find_socket(self) -> None:
        if self.link.box:
            if port := self.link.box.port():
                self.listener = Listener(ipaddress.ip_address(self.host), port, 0)
                self.link.tell_port(port)
            return
        mine = owned(tree(self.link.server))
        if mine:
            self.listener = min(mine, key=lambda one: one.port)
            self.link.tell_port(self.listener.port)

    def _healthy(self, listener: Listener) -> bool:
        answer = get(self.ctx, f"{url_of(self.host, listener.port)}/health")
        self.polls += 1
        if self.engine.healthy(answer):
            return True
        if not self.link.poll() and (200 <= answer.status < 500):
            seen = check("health", self.engine.health, answer.says, "GET /health", ok=False)
            raise self._failed(f"it answers /health, and not as {self.engine.server} does", seen)
        self.last = answer.says
        return False

    def _look(self, bar: Bar) -> None:
        """Judge the time and the silence, now and then, and show what is loaded."""
        now = self.ctx.clock.monotonic()
        if now - self.looked < LOOK_S:
            return
        self.looked = now
        for alarm in self.link.alarms[self.warned :]:
            self.ctx.progress.say(f"memory: {alarm['reason']}")
        self.warned = len(self.link.alarms)
        lines = self.log.lines()
        self.stage = next(filter(None, map(self.engine.stage, reversed(lines))), self.stage)
        reading = read_activity(self._pids())
        silent = self.silence.update(now, reading, lines, self.polls)
        self.polls = 0
        bar.update(min(reading.loaded, self.total), self.total, self.stage)
        took = now - self.began
        if silent > self.limits.stall:
            seen = f"nothing logged and nothing read for {silent:.0f} s ({self.stage})"
            wanted = f"a sign of life every {self.limits.stall:g} s"
            raise self._stalled(check("loading", wanted, seen, "server.log, /proc", ok=False))
        if took > self.limits.ready:
            wanted = f"healthy within {self.limits.ready:g} s"
            seen = f"not healthy after {took:.0f} s; last {self.last}"
            raise self._failed(
                "it was not healthy in time", check("health", wanted, seen, "GET /health", ok=False)
            )

    def _pids(self) -> tuple[int, ...]:
        """The server's processes, as far as this machine sees them."""
        inside = self.link.box.pids() if self.link.box else ()
        return (*tree(self.link.server), *inside)

    def died(self) -> BakehouseError:
        """Make the error for a server that ended, or for a container that never started."""
        if self.link.box and (failed := read_container_note(self.link.folder).get("failed")):
            return HostError(
                str(failed["what"]), where=failed["where"], hint=failed["hint"], id=failed["id"]
            )
        says = str((self.link.ended or {}).get("says"))
        seen = check("alive", "the server runs until it is ready", says, "process table", ok=False)
        return self._failed(f"the server ended before it was ready: it {says}", seen)

    def _stalled(self, seen: Check) -> BakehouseError:
        """Say beside a stall whether a shard could be the reason: one that does not fit hangs."""
        free = read_host().memory_available
        error = self._failed("loading stalled", seen)
        if self.largest and "shards" in self.stage:
            error.what += (
                f" at {self.stage}: the largest shard is {gib(self.largest)}, and {gib(free)} of "
                "memory are available"
            )
            if self.largest > free:
                error.hint = "make small shards of it with 'invoke reshard', or free memory first"
        return error

    def _failed(self, what: str, seen: Check) -> BakehouseError:
        box = None
        try:
            box = self.link.box.asked() if self.link.box else None
        except HostError as error:
            return HostError(
                f"{what}; and {error.what}", where=error.where, hint=error.hint, id=error.id,
                checks=(seen,),
            )  # fmt: skip
        if box and box.state == "paused":
            what += f"; somebody paused its container: docker unpause {box.name} lets one go on"
        return explain(what, (seen,), self.link, self.engine.name)


def explain(what: str, checks: tuple[Check, ...], link: Link, engine: str) -> NotHealthy:
    """Make the error, with the first cause in the log."""
    lines = read_log(link.folder / "server.log")
    cause = first_cause(lines, engine, died=link.ended is not None)
    log = link.folder / "server.log"
    hint = f"read {log}" + ("" if lines else " (it is empty)")
    if cause and cause.mend:
        hint = cause.mend
    said = cause or last_words(lines)
    return NotHealthy(what, where=said.where if said else str(log), hint=hint, checks=checks)
