"""Folders of runs and their records.

A run is a context manager. Its record is written atomically when it starts, at every step and at
the end, so a killed run leaves a whole record: its verdict is `unfinished`, and its last step is
the one that was running.
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
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from bakehouse.debug_log import event, run_events
from bakehouse.errors import BakehouseError, NotFound, os_error
from bakehouse.models import Check, Frozen, not_passed, plain, to_json
from bakehouse.paths import Places
from bakehouse.redact import secret_values
from bakehouse.runs.index import Entry, Index
from bakehouse.util import files
from bakehouse.util.text import size_text

if TYPE_CHECKING:
    from bakehouse.context import Context
    from bakehouse.system.process import Captured, Finished


class StepRecord(Frozen):
    """One step. `seconds` of wall time; `code` is the exit code, negative for a signal."""

    id: str
    argv: tuple[str, ...] = ()
    started: str
    seconds: float
    code: int | None = None
    log: str | None = None
    """Relative to the run's folder."""


class Answer(Frozen):
    """A server's whole answer to one question."""

    question: str
    mode: str
    wanted: tuple[str, ...]
    content: str
    reasoning: str = ""
    finish_reason: str | None = None
    verdict: str
    """`right`, `wrong`, `never started` or `unanswered`."""
    why: str = ""
    """What was found, or why nothing was."""
    found_in: str | None = None
    """`content` or `reasoning`: where the answer was found."""
    tokens: int | None = None
    """Completion tokens, by the server's count."""
    seconds: float
    retried: bool = False
    http_status: int | None = None


class Cost(Frozen):
    """Cost of a suite. `seconds` of wall time."""

    requests: int = 0
    tokens: int = 0
    """Decoded tokens, by the server's count."""
    prompt_tokens: int = 0
    """Prompt tokens not taken from the cache, by the server's count."""
    seconds: float = 0.0


SuiteVerdict = Literal[
    "true", "true (provisional)", "wrong", "never started", "unable", "unstable"
]  # fmt: skip
"""Result of a suite. *never started*: the token budget ended before an answer; *unable*: the server
lacks a feature that the suite needs; *unstable*: unusable answers, or different ones each time."""


class SuiteRecord(Frozen):
    """Result of one suite."""

    suite: str
    verdict: SuiteVerdict
    summary: str
    """One sentence."""
    figures: dict[str, Any] = {}
    """Measurements, with units in their names."""
    cost: Cost = Cost()


class Failure(Frozen):
    """Why a run failed."""

    id: str
    what: str
    where: str | None = None
    hint: str | None = None


class Record(Frozen):
    """One run of a task."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    id: str
    task: str
    recipe: str | None
    started: str
    """UTC, ISO 8601."""
    ended: str
    seconds: float
    ok: bool
    exit: int
    verdict: str
    """One sentence."""
    lock: str | None = None
    build: str | None = None
    versions: dict[str, str] = {}
    host: dict[str, Any] = {}
    steps: tuple[StepRecord, ...] = ()
    checks: tuple[Check, ...] = ()
    answers: tuple[Answer, ...] = ()
    suites: tuple[SuiteRecord, ...] = ()
    facts: dict[str, Any] = {}
    """Other observations: URL, process ID, memory, the engine's properties."""
    error: Failure | None = None


_NOTE = "record: "


def add_record(error: BaseException, folder: str) -> None:
    """Attach the record's folder to an exception, as a note."""
    error.add_note(f"{_NOTE}{folder}")


def record_of(error: BaseException) -> str | None:
    """Return the record's folder that is attached to an exception, if any."""
    for note in getattr(error, "__notes__", ()):
        if note.startswith(_NOTE):
            return str(note.removeprefix(_NOTE))
    return None


UNFINISHED = "unfinished"
"""The verdict of a run that has not ended, or was killed."""


EVENTS = "events.jsonl"
"""In a run's folder: one JSON document for each step, appended as it ends."""


class StepRun:
    """A running step; set `code`, or call `ended`."""

    def __init__(self, log: Path) -> None:
        self.log = log
        """Log file of the step's child; recorded if it exists at the end."""
        self.code: int | None = None

    def ended(self, child: Finished | Captured) -> None:
        """Record the exit code of the step's child."""
        self.code = child.code


class Run:
    """One run of a task, opened with `Run.start`."""

    def __init__(self, ctx: Context, task: str, recipe: str | None, now: datetime) -> None:
        self._ctx = ctx
        self._redactor = ctx.redactor
        self._clock_began = ctx.clock.monotonic()
        self._fields: dict[str, Any] = {"task": task, "recipe": recipe, "started": _utc(now)}
        self._versions: dict[str, str] = {}
        self._host: dict[str, Any] = {}
        self._facts: dict[str, Any] = {}
        self._steps: list[StepRecord] = []
        self._checks: list[Check] = []
        self._answers: list[Answer] = []
        self._suites: list[SuiteRecord] = []
        self._finished: tuple[str, int] | None = None
        runs, stamp = ctx.places.runs, now.strftime("%Y%m%dT%H%M%SZ")
        runs.mkdir(parents=True, exist_ok=True)
        stem = "-".join([stamp, _slug(task), *([_slug(recipe)] if recipe else [])])
        while True:
            self.id = f"{stem}-{random.token_hex(2)}"
            self.folder = runs / self.id
            with suppress(FileExistsError):
                self.folder.mkdir(mode=0o700)
                break

    @classmethod
    @contextmanager
    def start(
        cls, ctx: Context, task: str, recipe_name: str | None, *, secrets: Iterable[str] = ()
    ) -> Iterator[Run]:
        """Open a run; its record is written however it ends.

        `secrets` names environment variables whose values are hidden, besides the well-known ones.
        An exception is recorded and raised again, with a note that names the record.
        Raises HostError if the state folder cannot be written.
        """
        ctx.redactor.add(*secret_values(ctx.environment, secrets))
        with _disk_errors(ctx.places.state):
            run = cls(ctx, task, recipe_name, ctx.clock.now())
            run._write(UNFINISHED, exit_code=1)
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
        missing = not_passed(run._checks)
        failed = f"{len(missing)} of {len(run._checks)} checks did not pass"
        verdict, code = run._finished or ((failed, 1) if missing else ("done", 0))
        with _disk_errors(ctx.places.state):
            run._write(verdict, exit_code=code)

    @property
    def record(self) -> Path:
        """Path of `record.json`."""
        return self.folder / "record.json"

    @property
    def judged(self) -> tuple[Check, ...]:
        """All checks so far."""
        return tuple(self._checks)

    @contextmanager
    def step(self, id: str, argv: Sequence[str] = ()) -> Iterator[StepRun]:  # noqa: A002
        """Time a step and record it; its log goes into the run's folder."""
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
        """Record checks."""
        self._checks += checks

    def checks(self, checks: Iterable[Check]) -> None:
        """Record checks."""
        self._checks += checks

    def answers(self, answers: Iterable[Answer]) -> None:
        """Record a server's answers."""
        self._answers += answers

    def suites(self, suites: Iterable[SuiteRecord]) -> None:
        """Record the results of probe suites."""
        self._suites += suites

    def fact(self, name: str, value: Any) -> None:
        """Record any other observation, as plain data or a type that becomes plain data."""
        self._facts[name] = value

    def version(self, name: str, value: str) -> None:
        """Record the version of a tool or engine."""
        self._versions[name] = value

    def host(self, facts: Mapping[str, Any]) -> None:
        """Record facts about the machine."""
        self._host.update(facts)

    def pin(self, *, lock: str | None = None, build: str | None = None) -> None:
        """Record the digests of the lock and the build in use."""
        self._fields |= {k: v for k, v in (("lock", lock), ("build", build)) if v}

    def hide(self, *values: str) -> None:
        """Hide more secrets, such as a key read from a file."""
        self._redactor.add(*values)

    def finish(self, verdict: str, *, exit_code: int = 0) -> None:
        """Set the verdict, one sentence; with an exit code other than 0 the run is not ok."""
        self._finished = (verdict, exit_code)

    def save(self) -> None:
        """Write the record as `unfinished`."""
        with _disk_errors(self._ctx.places.state):
            self._write(UNFINISHED, exit_code=1, last=False)

    def _end_with(self, error: BaseException) -> None:
        """Write the record of a run that failed; never hides its exception with another."""
        if isinstance(error, BakehouseError):
            hide = self._redactor.text  # before the error is printed
            error.what = hide(error.what)
            error.args = (error.what,)
            error.where = error.where and hide(error.where)
            error.hint = error.hint and hide(error.hint)
            code = error.exit_code
            failure = Failure(id=error.id, what=error.what, where=error.where, hint=error.hint)
            self._checks += [c for c in error.checks if c not in self._checks]
        elif isinstance(error, KeyboardInterrupt):
            code, failure = 130, Failure(id="interrupted", what="interrupted")
        else:
            code, failure = 1, Failure(id="unexpected", what=f"{type(error).__name__}: {error}")
        try:
            if failure.id == "unexpected":
                text = self._redactor.text("".join(traceback.format_exception(error)))
                (self.folder / "traceback.txt").write_text(text, errors="replace")
            self._write(failure.what, exit_code=code, error=failure)
        except OSError as second:
            error.add_note(f"the record could not be written: {second}")

    def _write(
        self, verdict: str, *, exit_code: int, error: Failure | None = None, last: bool = True
    ) -> None:
        """Write the record; sync it and add it to the index if this may be the last time.

        A failure of the index is only reported, since it can be rebuilt.
        """
        record = Record(
            id=self.id,
            ended=_utc(self._ctx.clock.now()),
            seconds=round(self._ctx.clock.monotonic() - self._clock_began, 3),
            ok=exit_code == 0,
            exit=exit_code,
            verdict=verdict,
            versions=self._versions,
            host=plain(self._host),
            steps=tuple(self._steps),
            checks=tuple(self._checks),
            answers=tuple(self._answers),
            suites=tuple(self._suites),
            facts=plain(self._facts),
            error=error,
            **self._fields,
        )
        data = self._redactor.data(record.to_data())
        files.write(self.record, to_json(data).encode(errors="replace"), sync=last)
        if not last:
            return
        try:
            Index(self._ctx.places).add(Entry.from_data(data))
        except (OSError, sqlite3.Error) as failed:
            self._ctx.progress.say(
                f"could not write the index of runs ({failed}); the record itself is safe"
            )

    def _hide_in(self, log: Path) -> None:
        """Rewrite a log without the secrets in it."""
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
    """Read one run's record. Raises NotFound if it is missing or unreadable."""
    path = places.runs / id / "record.json"
    if "/" in id or not path.exists():
        raise NotFound(f"run '{id}' not found", where=str(places.runs))
    try:
        return Record.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise NotFound(f"cannot read the record of run '{id}': {first}", where=str(path)) from error


@contextmanager
def _disk_errors(state: Path) -> Iterator[None]:
    """Turn an OSError into a HostError that names the state folder and a fix."""
    try:
        yield
    except OSError as error:
        free = ""
        with suppress(OSError):
            free = f" ({size_text(shutil.disk_usage(state).free)} free)"
        failed = os_error(
            error,
            "cannot write this run's record",
            state,
            "free some space, fix the permissions, or set BAKEHOUSE_HOME to a writable folder",
            "state-not-writable",
        )
        failed.where = f"{failed.where}{free}"
        raise failed from error


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.")[:64] or "x"


def _utc(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
