"""Runs on disk: one folder a run, with `record.json`, logs, and a row in the index.

A run is a context manager. Its record is written when it starts, at every step and on every way
out, each time to a new file that is renamed over the old one: a run that was killed leaves a whole
record whose verdict is `unfinished` and whose last step is the one that was running.
"""

from __future__ import annotations

import re
import secrets as random
import shutil
import sqlite3
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from bakehouse import atomic
from bakehouse.base import plain, to_json
from bakehouse.checks import Check, not_passed
from bakehouse.errors import BakehouseError, NotFound, os_error
from bakehouse.logs import event, run_events
from bakehouse.places import Places
from bakehouse.ports.clock import Clock
from bakehouse.progress import Progress
from bakehouse.records.index import Entry, Index
from bakehouse.records.model import Answer, Failure, Record, StepRecord, SuiteRecord
from bakehouse.records.note import add_record
from bakehouse.redact import Redactor, secret_values
from bakehouse.util.text import size_text

UNFINISHED = "unfinished"
"""The verdict of a run that has not ended, or never could end."""


class Around(Protocol):
    """What a run needs of the context."""

    @property
    def places(self) -> Places: ...  # noqa: D102
    @property
    def environment(self) -> Mapping[str, str]: ...  # noqa: D102
    @property
    def clock(self) -> Clock: ...  # noqa: D102
    @property
    def progress(self) -> Progress: ...  # noqa: D102
    @property
    def redactor(self) -> Redactor: ...  # noqa: D102


class Ended(Protocol):
    """Whatever says how a child ended: `Finished` and `Captured` of the process port."""

    @property
    def code(self) -> int: ...  # noqa: D102


EVENTS = "events.jsonl"
"""In a run's folder: one JSON document for each step, appended as it ends."""


class StepRun:
    """A step while it runs. Set `code`, or hand over what the process port gave."""

    def __init__(self, log: Path) -> None:
        self.log = log
        """Where the step's child writes to; recorded if it exists in the end."""
        self.code: int | None = None

    def ended(self, child: Ended) -> None:
        """Note how the step's child ended."""
        self.code = child.code


class Run:
    """One run of a task. Make it with `Run.start`."""

    def __init__(self, ctx: Around, task: str, recipe: str | None, now: datetime) -> None:
        self._ctx = ctx
        self._task = task
        self._recipe = recipe
        self._redactor = ctx.redactor
        self._began = now
        self._clock_began = ctx.clock.monotonic()
        self._fields: dict[str, str | None] = {"lock": None, "build": None}
        self._versions: dict[str, str] = {}
        self._host: dict[str, Any] = {}
        self._facts: dict[str, Any] = {}
        self._steps: list[StepRecord] = []
        self._checks: list[Check] = []
        self._answers: list[Answer] = []
        self._suites: list[SuiteRecord] = []
        self._finished: tuple[str, int] | None = None
        self.id, self.folder = _make_folder(ctx.places.runs, task, recipe, now)

    @classmethod
    @contextmanager
    def start(
        cls, ctx: Around, task: str, recipe_name: str | None, *, secrets: Iterable[str] = ()
    ) -> Iterator[Run]:
        """Open a run; on the way out, whichever it is, its record is written.

        `secrets` names environment variables whose values are hidden, beside the well-known ones.
        The exception that ends a run is recorded and raised again, with a note that names the
        record. Raises HostError where the state folder cannot be written.
        """
        ctx.redactor.add(*secret_values(ctx.environment, secrets))
        with _explained(ctx.places.state):
            run = cls(ctx, task, recipe_name, ctx.clock.now())
            run._write(UNFINISHED, exit_code=1, ok=False)
        try:
            with run_events(run.folder / EVENTS, ctx.redactor):
                yield run
        except BaseException as error:
            add_record(error, str(run.folder))
            run._end_with(error)
            raise
        finally:
            with suppress(OSError):
                run._hide_in(run.folder / EVENTS)
        verdict, code = run._verdict()
        with _explained(ctx.places.state):
            run._write(verdict, exit_code=code, ok=code == 0)

    @property
    def record(self) -> Path:
        """Path of the record."""
        return self.folder / "record.json"

    @property
    def judged(self) -> tuple[Check, ...]:
        """All judgements so far."""
        return tuple(self._checks)

    @contextmanager
    def step(self, id: str, argv: Sequence[str] = ()) -> Iterator[StepRun]:  # noqa: A002
        """Time a step; its log, if one is written, lies in the run's folder."""
        number = len(self._steps)
        log = self.folder / f"{number + 1:02d}-{_slug(id)}.log"
        started, clock_began = self._ctx.clock.now(), self._ctx.clock.monotonic()
        step = StepRun(log)
        self._steps.append(StepRecord(id=id, argv=tuple(argv), started=_utc(started), seconds=0))
        self.save()
        try:
            yield step
        finally:
            with suppress(OSError):
                self._hide_in(log)
            self._steps[number] = ended = StepRecord(
                id=id,
                argv=tuple(argv),
                started=_utc(started),
                seconds=round(self._ctx.clock.monotonic() - clock_began, 3),
                code=step.code,
                log=log.name if log.exists() else None,
            )
            event("step", run=self.id, **ended.to_data())
        self.save()

    def check(self, *checks: Check) -> None:
        """Record judgements."""
        self._checks += checks

    def checks(self, checks: Iterable[Check]) -> None:
        """Record judgements."""
        self._checks += checks

    def answers(self, answers: Iterable[Answer]) -> None:
        """Record what a server answered."""
        self._answers += answers

    def suites(self, suites: Iterable[SuiteRecord]) -> None:
        """Add what suites came to."""
        self._suites += suites

    def fact(self, name: str, value: Any) -> None:
        """Record something seen: plain data, or a type that can become plain data."""
        self._facts[name] = value

    def version(self, name: str, value: str) -> None:
        """Record the version of a tool or engine that took part."""
        self._versions[name] = value

    def host(self, facts: Mapping[str, Any]) -> None:
        """Record what the machine is."""
        self._host.update(facts)

    def pin(self, *, lock: str | None = None, build: str | None = None) -> None:
        """Record the digests of the lock and of the artifact that were used."""
        self._fields["lock"] = lock or self._fields["lock"]
        self._fields["build"] = build or self._fields["build"]

    def hide(self, *values: str) -> None:
        """Hide further secrets, such as a key that was read from a file."""
        self._redactor.add(*values)

    def finish(self, verdict: str, *, exit_code: int = 0) -> None:
        """Say in one sentence what came out; with an exit code other than 0 the run is not ok."""
        self._finished = (verdict, exit_code)

    def save(self) -> None:
        """Write the record as it stands, as unfinished."""
        with _explained(self._ctx.places.state):
            self._write(UNFINISHED, exit_code=1, ok=False, last=False)

    def _verdict(self) -> tuple[str, int]:
        if self._finished:
            return self._finished
        if missing := not_passed(self._checks):
            return f"{len(missing)} of {len(self._checks)} checks did not pass", 1
        return "done", 0

    def _end_with(self, error: BaseException) -> None:
        """Write the record of a run that an exception ended; never raises over that exception."""
        if isinstance(error, BakehouseError):
            self._hide_in_error(error)
            code, failure = error.exit_code, _failure(error)
            self._checks += [c for c in error.checks if c not in self._checks]
        elif isinstance(error, KeyboardInterrupt):
            code, failure = 130, Failure(id="interrupted", what="interrupted")
        else:
            code, failure = 1, Failure(id="unexpected", what=f"{type(error).__name__}: {error}")
        try:
            if failure.id == "unexpected":
                text = self._redactor.text("".join(traceback.format_exception(error)))
                (self.folder / "traceback.txt").write_text(text, errors="replace")
            self._write(failure.what, exit_code=code, ok=False, error=failure)
        except OSError as second:
            error.add_note(f"the record could not be written: {second}")

    def _hide_in_error(self, error: BakehouseError) -> None:
        """Take this run's secrets out of an error that is about to be printed."""
        hide = self._redactor.text
        error.args = (hide(error.what),)
        error.what = hide(error.what)
        error.where = error.where and hide(error.where)
        error.hint = error.hint and hide(error.hint)

    def _write(
        self,
        verdict: str,
        *,
        exit_code: int,
        ok: bool,
        error: Failure | None = None,
        last: bool = True,
    ) -> None:
        """Write the record; for good, and into the index, where this may be the last time."""
        record = Record(
            id=self.id,
            task=self._task,
            recipe=self._recipe,
            started=_utc(self._began),
            ended=_utc(self._ctx.clock.now()),
            seconds=round(self._ctx.clock.monotonic() - self._clock_began, 3),
            ok=ok,
            exit=exit_code,
            verdict=verdict,
            lock=self._fields["lock"],
            build=self._fields["build"],
            versions=self._versions,
            host=plain(self._host),
            steps=tuple(self._steps),
            checks=tuple(self._checks),
            answers=tuple(self._answers),
            suites=tuple(self._suites),
            facts=plain(self._facts),
            error=error,
        )
        data = self._redactor.data(record.to_data())
        atomic.write(self.record, to_json(data).encode(errors="replace"), sync=last)
        if last:
            self._index(Entry.from_data(data))

    def _index(self, entry: Entry) -> None:
        """Add a row; the folders are the truth, so a failure here is said and no more."""
        try:
            Index(self._ctx.places).add(entry)
        except (OSError, sqlite3.Error) as error:
            self._ctx.progress.say(
                f"the index of runs could not be written ({error}); the record itself is safe"
            )

    def _hide_in(self, log: Path) -> None:
        """Write a log again without the secrets that it turned out to hold."""
        if not self._redactor.secrets or not log.exists():
            return
        cleared = log.with_suffix(".cleared")
        with log.open(errors="surrogateescape", newline="") as old:
            if not any(self._redactor.text(line) != line for line in old):
                return
            old.seek(0)
            with cleared.open("w", errors="surrogateescape", newline="") as new:
                new.writelines(map(self._redactor.text, old))
        cleared.replace(log)


def read_record(places: Places, id: str) -> Record:  # noqa: A002
    """Read one run's record. Raises NotFound where there is none, or none that can be read."""
    path = places.runs / id / "record.json"
    if "/" in id or not path.exists():
        raise NotFound(f"there is no run '{id}'", where=str(places.runs))
    try:
        return Record.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise NotFound(
            f"the record of run '{id}' cannot be read: {first}", where=str(path)
        ) from error


@contextmanager
def _explained(state: Path) -> Iterator[None]:
    """Turn an OSError into one that names the state folder and the mend."""
    try:
        yield
    except OSError as error:
        free = ""
        with suppress(OSError):
            free = f" ({size_text(shutil.disk_usage(state).free)} free)"
        failed = os_error(
            error,
            "the record of this run cannot be written",
            state,
            "free some space or fix the permissions there, or set BAKEHOUSE_HOME to a folder "
            "that can be written",
            "state-not-writable",
        )
        failed.where = f"{failed.where}{free}"
        raise failed from error


def _make_folder(runs: Path, task: str, recipe: str | None, now: datetime) -> tuple[str, Path]:
    """Make `runs/<UTC time>-<task>-<recipe>-<4 hex>`; a name that is taken gets other digits."""
    runs.mkdir(parents=True, exist_ok=True)
    parts = [now.strftime("%Y%m%dT%H%M%SZ"), _slug(task), *([_slug(recipe)] if recipe else [])]
    while True:
        id_ = "-".join([*parts, random.token_hex(2)])
        try:
            (runs / id_).mkdir(mode=0o700)
        except FileExistsError:
            continue
        return id_, runs / id_


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[:64] or "x"


def _utc(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _failure(error: BakehouseError) -> Failure:
    return Failure(id=error.id, what=error.what, where=error.where, hint=error.hint)
