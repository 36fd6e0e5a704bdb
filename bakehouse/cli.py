"""Run one task: make the context, run the command, print the result, return the exit code.

Results go to standard output, everything else to standard error. With `json`, standard output holds
exactly one JSON document, whatever happens.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

from bakehouse.context import Outcome
from bakehouse.errors import BakehouseError, HostError, Interrupted, RecipeError, UsageError
from bakehouse.flags import TASKS
from bakehouse.models import Check, plain, to_json
from bakehouse.redact import Redactor, clean, secret_values

SCHEMA = 1
"""Version of the JSON document."""


RUNS_RECIPES = {
    "lock", "plan", "fetch", "build", "serve", "probe", "watch", "nightly", "patch",
}  # fmt: skip
"""Tasks that print the recipes folder in use: the same name in another is another recipe."""


@dataclass(frozen=True)
class Result:
    """What is printed, for an outcome and an error alike."""

    task: str
    exit: int
    result: dict[str, Any]
    text: str = ""
    checks: tuple[Check, ...] = ()
    error: BakehouseError | None = None
    record: str | None = None
    raised: bool = False
    """Whether there is only an error; its checks are then printed with it."""
    told: bool = False
    """Whether the text already contains the checks."""

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        error = self.error
        return {
            "schema": SCHEMA,
            "task": self.task,
            "ok": self.exit == 0,
            "exit": self.exit,
            "result": plain(self.result),
            "checks": [c.to_data() for c in self.checks],
            "error": None
            if error is None
            else {"id": error.id, "what": error.what, "where": error.where, "hint": error.hint},
        }


@dataclass(frozen=True)
class Edge:
    """The arguments of `main`."""

    task: str
    options: Mapping[str, Any]
    json: bool
    debug: bool
    recipes: Path | str | None
    checkout: Path | None
    redactor: Redactor


def main(
    task: str,
    options: Mapping[str, Any],
    *,
    json: bool = False,
    debug: bool = False,
    recipes: Path | str | None = None,
    checkout: Path | None = None,
) -> int:
    """Run one task, print its result and return the exit code. Never raises.

    `options` are the task's flags by name, None for a flag that was not given; for `recipes` and
    `checkout` see `paths.recipes_folder`.
    """
    for number in (0, 1, 2):  # else a file would get a closed stream's number
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    redactor = Redactor(secret_values(os.environ))
    edge = Edge(task, options, json, debug, recipes, checkout, redactor)
    try:
        return _show(_attempt(edge), edge)
    except KeyboardInterrupt:
        return Interrupted.exit_code


def leave(code: int) -> None:
    """End a task's process; raises SystemExit if the code is not 0.

    Freezing spares the last garbage collection over all imported modules, which takes 0.1 s.
    """
    gc.freeze()
    if code:
        raise SystemExit(code)


def _attempt(edge: Edge) -> Result:
    """Run the command, and turn any exception into a result."""
    try:
        with _signals(), redirect_stdout(cast(TextIO, sys.stderr if edge.json else sys.stdout)):
            return _run(edge)
    except BaseException as error:  # the last place that can report it
        return _failed(error, edge)


def _run(edge: Edge) -> Result:
    from importlib import import_module  # `invoke --list` imports none of these

    from bakehouse import console, debug_log
    from bakehouse.context import Context
    from bakehouse.paths import Places, recipes_folder

    debug_log.silence()
    if edge.debug and sys.stderr:
        debug_log.configure(sys.stderr, edge.redactor, as_json=edge.json)
    if edge.json and edge.options.get("foreground"):
        raise UsageError(
            "--foreground cannot be combined with --json",
            hint="serve with --json, then use status and logs",
        )
    _refuse_empty("recipes", edge.recipes)
    kind = TASKS[edge.task]
    command = import_module(f"bakehouse.commands.{kind.module}")
    progress = console.make_progress(sys.stderr, os.environ, edge.redactor)
    recipes = recipes_folder(edge.recipes, edge.checkout)
    context = Context(
        places=Places.from_environment(), recipes=recipes,
        progress=progress, redactor=edge.redactor,
    )  # fmt: skip
    options = make_options(kind, edge.options)
    if edge.task in RUNS_RECIPES and edge.options.get("recipe"):
        progress.say(f"recipes folder: {recipes.absolute()}")
    outcome: Outcome = getattr(command, kind.function)(context, options)
    text, error = outcome.text, outcome.error
    if outcome.lines and not edge.json:
        if text:
            _emit(sys.stdout, clean(edge.redactor.text(text)).rstrip("\n") + "\n")
        for line in outcome.lines:  # until they end or the reader is gone
            shown = clean(edge.redactor.text(line), one_line=True) + "\n"
            if _emit(sys.stdout, shown, gone=True):
                break
        text = ""
    code = error.exit_code if error else outcome.exit
    record = _record_of(error) if error else None
    return Result(
        edge.task, code, outcome.result, text, outcome.checks, error, record, told=outcome.told
    )


def make_options(kind: type[Any], given: Mapping[str, Any]) -> Any:
    """Return a command's options from the flags that were given. Raises UsageError.

    `kind` is a class of `bakehouse.flags`, or any whose annotations are flags and whose class
    attributes are their defaults.
    """
    known = {name.strip("_"): name for name in kind.__annotations__}
    values = {name.strip("_"): value for name, value in given.items() if value is not None}
    for name, value in values.items():
        if name not in known:
            raise UsageError(f"unknown option --{_flag(name)} of this task")
        _refuse_empty(name, value)
    for name, attribute in known.items():
        if name not in values and not hasattr(kind, attribute):
            raise UsageError(f"--{_flag(name)} is missing", hint="`--help` lists all options")
    return kind(**{known[n]: tuple(v) if isinstance(v, list) else v for n, v in values.items()})


def _refuse_empty(name: str, value: Any) -> None:
    """Raise UsageError for `--flag=$UNSET`, which would otherwise be read as no flag."""
    if value == "":
        raise UsageError(
            f"--{_flag(name)} is empty",
            hint="is a shell variable unset? Give a value, or leave out the flag",
        )


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _record_of(error: BaseException) -> str | None:
    """Return the folder of the run that an error belongs to."""
    from bakehouse.runs.store import record_of  # with SQLite, for failed runs only

    return record_of(error)


def _failed(error: BaseException, edge: Edge) -> Result:
    """Return the result for an exception; the traceback of a bug of ours is kept in a file."""
    if edge.debug:
        import traceback

        lines = "".join(traceback.format_exception(error))
        _emit(sys.stderr, clean(edge.redactor.text(lines)))
    record = _record_of(error)
    known = _explain(error)
    if known is None:
        details = _keep_traceback(error, edge, record)
        known = BakehouseError(
            f"unexpected {type(error).__name__}: {error}",
            where=details,
            hint="this is a bug in Bakehouse; run again with --debug for a traceback",
        )
    result: dict[str, Any] = {"record": record} if record else {}
    if isinstance(known, RecipeError):
        result["faults"] = [vars(fault) for fault in known.faults]
    return Result(
        edge.task, known.exit_code, result,
        checks=known.checks, error=known, record=record, raised=True,
    )  # fmt: skip


_HOST = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
    errno.EMFILE: "too many open files",
    errno.ENFILE: "too many open files on this machine",
    errno.EEXIST: "a file is where a folder should be",
    errno.ENOTDIR: "a file is where a folder should be",
    errno.ENOMEM: "out of memory",
    errno.EIO: "the disk cannot be read or written",
}
"""Errors of the machine, not of Bakehouse, if nothing nearer explained them."""


def _explain(error: BaseException) -> BakehouseError | None:
    """Return an error that a user can act on; None for a bug in Bakehouse."""
    if isinstance(error, BakehouseError):
        return error
    if isinstance(error, KeyboardInterrupt):
        by = f" by {error}" if str(error) else ""
        return Interrupted(f"interrupted{by}", hint="everything that this task started was stopped")
    if isinstance(error, MemoryError):
        return HostError("out of memory", hint="free some memory and try again")
    if isinstance(error, OSError) and error.errno in _HOST:
        return HostError(
            _HOST[error.errno],
            where=str(error.filename) if error.filename else None,
            hint="free space, fix the permissions, or set BAKEHOUSE_HOME to another folder",
        )
    return None


def _keep_traceback(error: BaseException, edge: Edge, record: str | None) -> str:
    """Write the traceback beside the record or into the state folder; return its path."""
    import traceback

    from bakehouse.paths import Places

    if record and (kept := Path(record) / "traceback.txt").exists():
        return str(kept)
    text = edge.redactor.text("".join(traceback.format_exception(error)))
    try:
        folder = Places.from_environment().state / "crashes"
        folder.mkdir(parents=True, exist_ok=True)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        path = folder / f"{stamp}-{edge.task}.txt"
        path.write_text(text, encoding="utf-8", errors="replace")
    except (OSError, BakehouseError) as second:
        return f"the traceback could not be saved ({second})"
    return str(path)


@contextmanager
def _signals() -> Iterator[None]:
    """Turn the first INT, TERM or HUP into a KeyboardInterrupt, and ignore further ones.

    A signal that was ignored at the start (nohup, a shell's background job) stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        if len(seen) == 1:
            raise KeyboardInterrupt(signal.Signals(number).name)

    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if seen else handler)


def _show(result: Result, edge: Edge) -> int:
    """Print a result and return the exit code: 9 if a good result could not be printed."""
    if edge.json:
        document = edge.redactor.data(result.document())
        failed = _emit(sys.stdout, to_json(document), encoding="utf-8")
    else:
        parts = []  # what matters most comes last
        if result.checks and not result.raised and not result.told:
            parts += _check_lines(result.checks, sys.stdout, edge.redactor)
        if result.text:
            parts.append(clean(edge.redactor.text(result.text)).rstrip("\n"))
        failed = _emit(sys.stdout, "\n".join(parts) + "\n" if parts else "")
        if result.error:
            from bakehouse.console import error_lines

            checks = result.checks if result.raised else ()
            lines = _check_lines(checks, sys.stderr, edge.redactor) if checks else []
            lines += map(edge.redactor.text, error_lines(result.error, result.record))
            _emit(sys.stderr, "\n".join(lines) + "\n")
    if failed and result.exit == 0:
        _emit(sys.stderr, f"error: the result could not be printed: {failed.strerror or failed}\n")
        return HostError.exit_code
    return result.exit


def _check_lines(checks: Iterable[Check], stream: TextIO | None, redactor: Redactor) -> list[str]:
    from bakehouse.console import check_lines, wants_colour, width_of

    lines = check_lines(checks, width=width_of(stream), colour=wants_colour(stream, os.environ))
    return [redactor.text(line) for line in lines]


def _emit(
    stream: TextIO | None, text: str, *, encoding: str | None = None, gone: bool = False
) -> OSError | None:
    """Write and flush; return the error, but a closed pipe only with `gone`."""
    if stream is None or not text:
        return None
    try:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding=encoding, errors="backslashreplace")
        stream.write(text)
        stream.flush()
    except ValueError:
        return None  # the stream was closed
    except OSError as error:
        with suppress(OSError, ValueError):
            # The interpreter flushes what is left in the buffer when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error if gone or not isinstance(error, BrokenPipeError) else None
    return None
