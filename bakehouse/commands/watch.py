"""`watch`: judge a running server again and again, and never be silent about what is found."""

from __future__ import annotations

import os
import shlex
import shutil
from dataclasses import dataclass
from functools import partial
from typing import Any

from bakehouse import flags
from bakehouse.commands import serve as serving
from bakehouse.commands.target import identify_any, target_of
from bakehouse.context import Context
from bakehouse.errors import BakehouseError, Interrupted, NotCorrect, NotHealthy, UsageError
from bakehouse.outcome import Outcome
from bakehouse.patches import for_run
from bakehouse.ports.process import environment
from bakehouse.preflight.combinations import load_good
from bakehouse.recipe.load import find, load
from bakehouse.recipe.scalars import parse_duration
from bakehouse.records.store import Run
from bakehouse.redact import clean
from bakehouse.serve.control import look, stop
from bakehouse.serve.rounds import STALL_S, Round, Rounds, Watched
from bakehouse.util.text import did_you_mean

KEPT = 500
"""So many rounds, the last ones, are kept in the record."""
RESTARTS = 3
"""So many in a row, without a good round between them, and no more."""
TICK_S = 2.0
"""Between two looks at whether the server's process still runs."""
ADOPT_S = 1800.0
"""So long a server that somebody else starts may take, in seconds, before it is served anew."""
COMMAND_S = 600.0
"""A command that is run on failure gets so long, in seconds."""


Options = flags.Watch


@dataclass(frozen=True)
class Wish:
    """The options, read."""

    every: float
    count: int | None
    action: str
    """`end`, `restart`, `stop` or `command`."""
    command: tuple[str, ...] = ()


def run(ctx: Context, options: Options) -> Outcome:
    """Watch. Exit 0 where every round was right; else that of the last failure."""
    wish = read_wish(options)
    # A failure would stumble over these, when nobody looks any more.
    if wish.command:
        _must_run(ctx, wish.command)
    if patches := for_run.asked(options):
        load_good(find(options.recipe, ctx.recipes), options.set_, patches.change(ctx))
    watch = Watch(ctx, options, wish)
    error: BakehouseError | None = None
    try:
        with Run.start(ctx, "watch", watch.name, secrets=watch.secrets) as record:
            try:
                watch.go(record)
            except KeyboardInterrupt as signal:
                raise Interrupted(
                    f"the watch was interrupted after {watch.says}",
                    hint="what it watched runs on; invoke stop --recipe NAME stops a server",
                ) from signal
            if watch.error:
                raise watch.error
            record.finish(watch.says)
    except (NotCorrect, NotHealthy) as failed:
        error = failed
    return Outcome(watch.result(record), watch.says, record.judged, error=error)


def read_wish(options: Options, flag: str = "--every") -> Wish:
    """Read the options; `flag` gave the time between. Raises UsageError."""
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
    known = {(): "end", ("restart",): "restart", ("stop",): "stop"}
    action = known.get(words, "command")
    if action in ("restart", "stop") and not options.recipe:
        raise UsageError(f"--on-failure {action} belongs to --recipe")
    if for_run.asked(options) and not options.recipe:
        raise UsageError("--patch and --no-patch belong to --recipe")
    command = words if action == "command" else ()
    return Wish(every, int(count) if count else None, action, command)


def _must_run(ctx: Context, command: tuple[str, ...]) -> None:
    """See that the command of --on-failure is one. Raises UsageError."""
    name = command[0]
    path = environment(base=ctx.environment).get("PATH", os.defpath)
    if shutil.which(name, path=path):
        return
    if name in ("restart", "stop"):
        raise UsageError(f"--on-failure {name} takes no arguments", hint=f"--on-failure {name}")
    what = (
        "cannot be run" if os.path.lexists(name) else "is neither restart nor stop, nor a program"
    )
    hint = did_you_mean(name, ("restart", "stop"))
    raise UsageError(
        f"--on-failure: '{clean(name, one_line=True)}' {what}",
        where=None if "/" in name else f"looked for in {path}",
        hint=hint or "give a program with its arguments; no shell reads them, so what needs one "
        "goes into a script that may be executed",
    )  # fmt: skip


class Watch:
    """One watch over one server."""

    def __init__(self, ctx: Context, options: Options, wish: Wish) -> None:
        self._ctx = ctx
        self._options = options
        self._wish = wish
        self._target = target_of(ctx, options)
        self._seen: list[Round] = []
        self._counts = {"right": 0, "busy": 0, "failed": 0}
        self._actions: list[str] = []
        self._restarts = 0
        self.error: BakehouseError | None = None

    @property
    def name(self) -> str | None:
        """The recipe's."""
        return self._target.recipe

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of variables whose values are hidden."""
        return self._target.secrets

    @property
    def says(self) -> str:
        """One sentence."""
        counts = ", ".join(f"{n} {word}" for word, n in self._counts.items() if n)
        last = f"; last failure: {self.error.what}" if self.error else ""
        rounds = sum(self._counts.values())
        return f"{rounds} round{'' if rounds == 1 else 's'}: {counts or 'none'}{last}"

    def result(self, record: Run) -> dict[str, Any]:
        """Plain data."""
        return {
            "url": self._target.endpoint.url, "recipe": self.name, "counts": self._counts,
            "rounds": [one.to_data() for one in self._seen[-KEPT:]], "actions": self._actions,
            "record": str(record.folder),
        }  # fmt: skip

    def go(self, record: Run) -> None:
        """Look, again and again, until there is an end to it."""
        record.hide(*(v.removeprefix("Bearer ") for v in self._target.endpoint.headers.values()))
        record.fact("url", self._target.endpoint.url)
        if told := self._other_patches():
            record.fact("other_patches", told)
            self._ctx.progress.say(told)
        rounds = Rounds(self._ctx, self._watched(record))
        while True:
            one = rounds.one()
            self._note(one, record)
            if one.error:
                if not self._act(one, record):
                    return
                if self._wish.action == "restart":
                    rounds = Rounds(self._ctx, self._watched(record))
            if self._wish.count and sum(self._counts.values()) >= self._wish.count:
                return
            self._wait(failed=one.error is not None)

    def _other_patches(self) -> str | None:
        """Say where the flags, or the recipe, have other patches than the server that runs."""
        server, was = self._target.server, self._options
        if server is None:
            return None
        loaded = load(find(was.recipe, self._ctx.recipes), was.set_)
        state = look(server.folder).state
        changed = for_run.asked(was).change(self._ctx)(loaded)
        told = for_run.unlike(self._ctx, state.record if state else None, changed)
        restart = "; a restart serves it as it is asked for now"
        return told and told + restart * (self._wish.action == "restart")

    def _note(self, one: Round, record: Run) -> None:
        """Keep a round; the judgements of the first one and of those that were not right."""
        self._seen = [*self._seen[-KEPT + 1 :], one]
        self._counts[one.word] += 1
        first = sum(self._counts.values()) == 1
        if first or one.word != "right":
            record.checks(c for c in one.checks if c not in record.judged)
            record.answers(one.answers)
        if one.word == "right":
            self._restarts = 0
        if one.error:
            self.error = one.error
        for name, value in self.result(record).items():
            if name in ("counts", "rounds", "actions"):
                record.fact(name, value)
        record.save()
        self._ctx.progress.say(f"{one.at}  {one.word:6}  {one.says}  ({one.seconds:.1f} s)")

    def _act(self, one: Round, record: Run) -> bool:
        """Do what is wished for on a failure; False where the watch ends."""
        action = self._wish.action
        if action == "command":
            self._command(one, record)
            return True
        if action == "restart":
            self._restart(record)
            return True
        if action == "stop" and self._target.server:
            self._did(stop(self._target.server.folder).says, record)
        return False

    def _did(self, what: str, record: Run) -> None:
        self._actions.append(what)
        record.fact("actions", self._actions)
        record.save()
        self._ctx.progress.say(f"on failure: {what}")

    def _command(self, one: Round, record: Run) -> None:
        """Run the command, without a shell; what happened stands in its environment."""
        error = one.error
        told = {
            "BAKEHOUSE_WATCH_RECIPE": self.name or "",
            "BAKEHOUSE_WATCH_URL": self._target.endpoint.url,
            "BAKEHOUSE_WATCH_ERROR": error.id if error else "",
            "BAKEHOUSE_WATCH_WHAT": " ".join((error.what if error else "").split())[:500],
            "BAKEHOUSE_WATCH_RECORD": str(record.folder),
        }
        log = record.folder / f"on-failure-{one.number}.log"
        try:
            done = self._ctx.processes.run(
                self._wish.command, env=environment(told, self._ctx.environment), log=log,
                timeout=COMMAND_S,
            )  # fmt: skip
        except BakehouseError as failed:
            self._did(f"the command could not be run: {failed.what}", record)
            return
        how = "was ended after its time" if done.timed_out else f"ended with {done.code}"
        self._did(f"{self._wish.command[0]} {how}; its output: {log}", record)

    def _restart(self, record: Run) -> None:
        """Stop it, serve it again, and take it as a new server. Raises what serving raises."""
        self._restarts += 1
        if self._restarts > RESTARTS and self.error:
            raise self.error
        if self._adopted(record):
            return
        if self._target.server:
            self._did(stop(self._target.server.folder).says, record)
        port = self._target.server.port if self._target.server else 0
        was = self._options
        asked = serving.Options(
            was.recipe, was.set_, str(port), locked=True, instance=was.instance,
            patch=was.patch, no_patch=was.no_patch, allow=was.allow,
        )  # fmt: skip
        try:
            ready = serving.run(self._ctx, asked)
            self._target = target_of(self._ctx, self._options)
        except BakehouseError as failed:
            self.error = failed
            raise
        self._did(f"served again at {ready.result['url']}", record)

    def _adopted(self, record: Run) -> bool:
        """Take what somebody else served meanwhile, such as another watch: do not stop it again."""
        was = self._target.server
        if was is None:
            return False
        clock = self._ctx.clock
        deadline = clock.monotonic() + ADOPT_S
        while (seen := look(was.folder)).alive:
            if seen.state and seen.state.server == was.process:
                return False
            if seen.word == "running":
                self._target = target_of(self._ctx, self._options)
                self._did("another one has served it again; that one is watched", record)
                return True
            if seen.word != "starting" or clock.monotonic() >= deadline:
                return False
            clock.sleep(TICK_S)
        return False

    def _wait(self, *, failed: bool) -> None:
        """Wait for the next round; a server that ends meanwhile brings it on at once."""
        clock = self._ctx.clock
        deadline = clock.monotonic() + self._wish.every
        server = self._target.server
        while (left := deadline - clock.monotonic()) > 0:
            if server and not failed and not server.process.alive:
                return
            clock.sleep(min(left, TICK_S))

    def _watched(self, record: Run) -> Watched:
        """Say what is watched; a stranger's server is asked who it is in the first round."""
        target = self._target
        stall, identify = STALL_S, None
        if target.server:
            recipe = load(find(self._options.recipe, self._ctx.recipes), self._options.set_).recipe
            stall = recipe.serve.stall_timeout
        else:
            identify = partial(identify_any, self._ctx, run=record)
        return Watched(target.endpoint, target.probe, target.server, target.known, stall, identify)
