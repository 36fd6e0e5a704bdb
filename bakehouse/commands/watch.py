"""The task `watch`: check a running server again and again, and report every result."""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bakehouse import flags
from bakehouse.commands import serve
from bakehouse.commands.servers import identify_any, target_of
from bakehouse.context import Context, Outcome
from bakehouse.errors import BakehouseError, Interrupted, NotCorrect, NotHealthy, UsageError
from bakehouse.patch_review import overrides
from bakehouse.preflight.rules import load_and_check
from bakehouse.recipe.loader import find, load
from bakehouse.recipe.types import parse_duration
from bakehouse.redact import clean
from bakehouse.runs.store import Run
from bakehouse.server.monitoring import STALL_S, Monitor, Round, Watched
from bakehouse.server.status import get_status, stop
from bakehouse.system.process import environment
from bakehouse.util.text import did_you_mean

KEPT = 500
"""Maximum number of rounds kept in the record, the last ones."""
RESTARTS = 3
"""Maximum number of restarts without a good round between them."""
TICK_S = 2.0
"""Seconds between two looks at whether the server's process still runs."""
ADOPT_S = 1800.0
"""Seconds that a server started by somebody else may take before it is restarted."""
COMMAND_S = 600.0
"""Seconds that a command of --on-failure may take."""


Options = flags.Watch


@dataclass(frozen=True)
class WatchOptions:
    """The flags, parsed. Seconds."""

    every: float
    count: int | None
    action: str
    """`end`, `restart`, `stop` or `command`."""
    command: tuple[str, ...] = ()


def run(ctx: Context, options: Options) -> Outcome:
    """Watch a server. Exit 0 if every round was right, else the code of the last failure."""
    parsed = parse_flags(options)
    # Check now what a failure would need, when nobody looks any more.
    if parsed.command:
        _check_runnable(ctx, parsed.command)
    if patches := overrides.parse_overrides(options):
        load_and_check(find(options.recipe, ctx.recipes), options.set_, patches.change(ctx))
    watch = Watch(ctx, options, parsed)
    error: BakehouseError | None = None
    try:
        with Run.start(ctx, "watch", watch.target.recipe, secrets=watch.target.secrets) as record:
            try:
                watch.go(record)
            except KeyboardInterrupt as signal:
                raise Interrupted(
                    f"the watch was interrupted after {watch.summary}",
                    hint="the server keeps running; invoke stop --recipe NAME stops it",
                ) from signal
            if watch.error:
                raise watch.error
            record.finish(watch.summary)
    except (NotCorrect, NotHealthy) as failed:
        error = failed
    result = {
        "url": watch.target.endpoint.url, "recipe": watch.target.recipe, **watch.progress(),
        "record": str(record.folder),
    }  # fmt: skip
    return Outcome(result, watch.summary, record.judged, error=error)


def parse_flags(options: Options, flag: str = "--every") -> WatchOptions:
    """Parse the flags; `flag` names the one that gave the interval. Raises UsageError."""
    try:
        every = parse_duration(options.every)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}", hint=f"such as {flag} 10m") from None
    count = options.count
    if count and not (count.isascii() and count.isdigit() and 0 < int(count) < 10**9):
        raise UsageError(f"--count takes a whole number above 0, not '{count}'")
    try:
        words = tuple(shlex.split(options.on_failure))
    except ValueError as error:
        raise UsageError(f"--on-failure: {error}", hint="close the quotes") from None
    if options.on_failure and not words:
        raise UsageError("--on-failure is empty", hint="restart, stop, or a command")
    action = {(): "end", ("restart",): "restart", ("stop",): "stop"}.get(words, "command")
    if not options.recipe and action in ("restart", "stop"):
        raise UsageError(f"--on-failure {action} requires --recipe")
    if not options.recipe and overrides.parse_overrides(options):
        raise UsageError("--patch and --no-patch require --recipe")
    command = words if action == "command" else ()
    return WatchOptions(every, int(count) if count else None, action, command)


def _check_runnable(ctx: Context, command: tuple[str, ...]) -> None:
    """Check that the command of --on-failure can be run. Raises UsageError."""
    name = command[0]
    path = environment(base=ctx.environment).get("PATH", os.defpath)
    if shutil.which(name, path=path):
        return
    if name in ("restart", "stop"):
        raise UsageError(f"--on-failure {name} takes no arguments", hint=f"--on-failure {name}")
    exists = os.path.lexists(name)
    what = "is not executable" if exists else "is not restart, stop or a program"
    raise UsageError(
        f"--on-failure: '{clean(name, one_line=True)}' {what}",
        where=None if "/" in name else f"searched in {path}",
        hint=did_you_mean(name, ("restart", "stop")) or "give a program with its arguments; no "
        "shell is used, so put shell commands into an executable script",
    )  # fmt: skip


class Watch:
    """One watch of one server."""

    def __init__(self, ctx: Context, options: Options, parsed: WatchOptions) -> None:
        self._ctx = ctx
        self._options = options
        self._parsed = parsed
        self._rounds: list[Round] = []
        self._counts = {"right": 0, "busy": 0, "failed": 0}
        self._actions: list[str] = []
        self._restarts = 0
        self.target = target_of(ctx, options)
        self.error: BakehouseError | None = None

    @property
    def _total(self) -> int:
        return sum(self._counts.values())

    @property
    def summary(self) -> str:
        """One sentence."""
        counts = ", ".join(f"{n} {word}" for word, n in self._counts.items() if n)
        last = f"; last failure: {self.error.what}" if self.error else ""
        return f"{self._total} round{'s' * (self._total != 1)}: {counts or 'none'}{last}"

    def progress(self) -> dict[str, Any]:
        """Return rounds and actions so far, as plain data."""
        rounds = [one.to_data() for one in self._rounds]
        return {"counts": self._counts, "rounds": rounds, "actions": self._actions}

    def go(self, record: Run) -> None:
        """Run round after round until the count is reached or a failure ends the watch."""
        record.hide(*(v.removeprefix("Bearer ") for v in self.target.endpoint.headers.values()))
        record.fact("url", self.target.endpoint.url)
        if mismatch := self._patch_mismatch():
            record.fact("other_patches", mismatch)
            self._ctx.progress.say(mismatch)
        monitor = Monitor(self._ctx, self._watched(record))
        while True:
            one = monitor.check_once()
            self._add(one, record)
            if one.error:
                action = self._parsed.action
                if action == "stop" and self.target.server:
                    self._did(stop(self.target.server.folder).says, record)
                if action in ("stop", "end"):
                    return
                if action == "command":
                    self._run_command(one, record)
                else:
                    self._restart(record)
                    monitor = Monitor(self._ctx, self._watched(record))
            if self._parsed.count and self._total >= self._parsed.count:
                return
            self._wait(failed=one.error is not None)

    def _patch_mismatch(self) -> str | None:
        """Describe how the patches of the flags or recipe differ from the running server's."""
        server, options = self.target.server, self._options
        if server is None:
            return None
        loaded = load(find(options.recipe, self._ctx.recipes), options.set_)
        state = get_status(server.folder).state
        changed = overrides.parse_overrides(options).change(self._ctx)(loaded)
        text = overrides.describe_mismatch(self._ctx, state.record if state else None, changed)
        restart = "; a restart uses the patches of the flags and the recipe"
        return text and text + restart * (self._parsed.action == "restart")

    def _add(self, one: Round, record: Run) -> None:
        """Record a round, with checks and answers if it is the first or was not right."""
        self._rounds = [*self._rounds[-KEPT + 1 :], one]
        self._counts[one.word] += 1
        if self._total == 1 or one.word != "right":
            record.checks(c for c in one.checks if c not in record.judged)
            record.answers(one.answers)
        if one.word == "right":
            self._restarts = 0
        self.error = one.error or self.error
        for name, value in self.progress().items():
            record.fact(name, value)
        record.save()
        self._ctx.progress.say(f"{one.at}  {one.word:6}  {one.says}  ({one.seconds:.1f} s)")

    def _did(self, what: str, record: Run) -> None:
        self._actions.append(what)
        record.fact("actions", self._actions)
        record.save()
        self._ctx.progress.say(f"on failure: {what}")

    def _run_command(self, one: Round, record: Run) -> None:
        """Run the command without a shell; its environment describes the failure."""
        error = one.error
        variables = {
            "BAKEHOUSE_WATCH_RECIPE": self.target.recipe or "",
            "BAKEHOUSE_WATCH_URL": self.target.endpoint.url,
            "BAKEHOUSE_WATCH_ERROR": error.id if error else "",
            "BAKEHOUSE_WATCH_WHAT": " ".join((error.what if error else "").split())[:500],
            "BAKEHOUSE_WATCH_RECORD": str(record.folder),
        }
        log = record.folder / f"on-failure-{one.number}.log"
        try:
            done = self._ctx.processes.run(
                self._parsed.command, env=environment(variables, self._ctx.environment), log=log,
                timeout=COMMAND_S,
            )  # fmt: skip
        except BakehouseError as failed:
            self._did(f"the command could not be run: {failed.what}", record)
            return
        how = "timed out" if done.timed_out else f"ended with {done.code}"
        self._did(f"{self._parsed.command[0]} {how}; its output: {log}", record)

    def _restart(self, record: Run) -> None:
        """Stop the server, serve it again, and watch the new one. Raises what `serve` raises."""
        self._restarts += 1
        if self._restarts > RESTARTS and self.error:
            raise self.error
        if self._adopted(record):
            return
        server, options = self.target.server, self._options
        if server:
            self._did(stop(server.folder).says, record)
        asked = serve.Options(
            options.recipe, options.set_, str(server.port if server else 0), locked=True,
            instance=options.instance, patch=options.patch, no_patch=options.no_patch,
            allow=options.allow,
        )  # fmt: skip
        try:
            # A copy reads the GPUs again: their free memory has changed since the first start.
            ready = serve.run(replace(self._ctx), asked)
            self.target = target_of(self._ctx, options)
        except BakehouseError as failed:
            self.error = failed
            raise
        self._did(f"served again at {ready.result['url']}", record)

    def _adopted(self, record: Run) -> bool:
        """Watch a server that somebody else has restarted, such as another watch."""
        old = self.target.server
        if old is None:
            return False
        clock = self._ctx.clock
        deadline = clock.monotonic() + ADOPT_S
        while (seen := get_status(old.folder)).alive:
            if seen.state and seen.state.server == old.process:
                return False
            if seen.word == "running":
                self.target = target_of(self._ctx, self._options)
                self._did("somebody else restarted it; watching the new server", record)
                return True
            if seen.word != "starting" or clock.monotonic() >= deadline:
                return False
            clock.sleep(TICK_S)
        return False

    def _wait(self, *, failed: bool) -> None:
        """Wait for the next round, or until the server's process ends."""
        clock = self._ctx.clock
        deadline = clock.monotonic() + self._parsed.every
        server = self.target.server
        while (left := deadline - clock.monotonic()) > 0:
            if server and not failed and not server.process.alive:
                return
            clock.sleep(min(left, TICK_S))

    def _watched(self, record: Run) -> Watched:
        """Return what is watched; an unknown server is asked for its models in the first round."""
        target = self.target
        stall, identify = STALL_S, None
        if target.server:
            recipe = load(find(self._options.recipe, self._ctx.recipes), self._options.set_).recipe
            stall = recipe.serve.stall_timeout
        else:
            identify = partial(identify_any, self._ctx, run=record)
        return Watched(target.endpoint, target.probe, target.server, target.known, stall, identify)
