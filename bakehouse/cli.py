"""From a task's flags to an exit code: makes the context, runs the command, prints. Nothing else.

Results go to standard output, everything else to standard error. With `json` standard output holds
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
from dataclasses import MISSING, Field, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TextIO, cast

from bakehouse.base import plain, to_json
from bakehouse.checks import Check
from bakehouse.errors import BakehouseError, HostError, Interrupted, RecipeError, UsageError
from bakehouse.outcome import Outcome
from bakehouse.records.note import record_of
from bakehouse.redact import Redactor, clean, secret_values

SCHEMA = 1
"""Version of the JSON document."""


class Command(Protocol):
    """A module of `bakehouse.commands`."""

    Options: type[Any]
    """A frozen dataclass of `str`, `bool` and `tuple[str, ...]`, named after the task's flags."""

    def run(self, ctx: Any, options: Any) -> Outcome:
        """Do what the task is for."""


@dataclass(frozen=True)
class Result:
    """What is printed: an outcome and an error have this one form."""

    task: str
    exit: int
    result: dict[str, Any]
    text: str = ""
    checks: tuple[Check, ...] = ()
    error: BakehouseError | None = None
    record: str | None = None
    raised: bool = False
    """Whether the error is all there is; its checks are then printed with it."""
    told: bool = False
    """Whether the text tells the checks already."""

    def document(self) -> dict[str, Any]:
        """Give the JSON document."""
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
    """What a call of `main` was given."""

    task: str
    options: Mapping[str, Any]
    json: bool
    debug: bool
    recipes: Path
    redactor: Redactor


def main(
    task: str,
    options: Mapping[str, Any],
    *,
    json: bool = False,
    debug: bool = False,
    recipes: Path | None = None,
) -> int:
    """Run one task, print what came of it and give the exit code. Never raises.

    `options` are the task's flags by name, None where a flag was not given; `recipes` is the folder
    in which `--recipe NAME` is looked up (by default the one in this checkout).
    """
    _fill_standard_streams()
    beside = Path(__file__).resolve().parents[1] / "recipes"
    redactor = Redactor(secret_values(os.environ))
    edge = Edge(task, options, json, debug, recipes or beside, redactor)
    try:
        return _show(_attempt(edge), edge)
    except KeyboardInterrupt:
        return Interrupted.exit_code


def leave(code: int) -> None:
    """End the process of a task; SystemExit where the code is not 0.

    Python would look through all that was imported for garbage once more, which takes 0.1 s after
    the last word was printed, and finds nothing that the end of the process does not free.
    """
    gc.freeze()
    if code:
        raise SystemExit(code)


def _attempt(edge: Edge) -> Result:
    """Run the command; whatever goes wrong becomes a result too."""
    try:
        with _signals(), redirect_stdout(cast(TextIO, sys.stderr if edge.json else sys.stdout)):
            return _run(edge)
    except BaseException as error:  # the one place where everything ends
        return _failed(error, edge)


def _run(edge: Edge) -> Result:
    from importlib import import_module  # `invoke --list` imports none of these

    from bakehouse import console, logs
    from bakehouse.context import Context
    from bakehouse.places import Places

    logs.silence()
    if edge.debug and sys.stderr:
        logs.configure(sys.stderr, edge.redactor, as_json=edge.json)
    if edge.json and edge.options.get("foreground"):
        raise UsageError(
            "--foreground and --json do not go together",
            hint="serve with --json, then follow it with status and logs",
        )
    command = cast(Command, import_module(f"bakehouse.commands.{edge.task}"))
    progress = console.make_progress(sys.stderr, os.environ, edge.redactor)
    context = Context(
        places=Places.from_environment(), recipes=edge.recipes,
        progress=progress, redactor=edge.redactor,
    )  # fmt: skip
    outcome = command.run(context, make_options(command.Options, edge.options))
    text, error = outcome.text, outcome.error
    if outcome.lines and not edge.json:
        _follow(text, outcome.lines, edge.redactor)
        text = ""
    code = error.exit_code if error else outcome.exit
    record = record_of(error) if error else None
    return Result(
        edge.task, code, outcome.result, text, outcome.checks, error, record, told=outcome.told
    )


def make_options(kind: type[Any], given: Mapping[str, Any]) -> Any:
    """Make a command's options of the flags that were given. Raises UsageError."""
    known: dict[str, Field[Any]] = {f.name.strip("_"): f for f in fields(kind)}
    values = {name.strip("_"): value for name, value in given.items() if value is not None}
    for name, value in values.items():
        if name not in known:
            raise UsageError(f"--{_flag(name)} is not an option of this task")
        if value == "":
            raise UsageError(
                f"--{_flag(name)} is given, and its value is empty",
                hint="a variable of the shell that is not set? Give a value, or leave the flag out",
            )
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise UsageError(f"--{_flag(name)} is missing", hint="`invoke TASK --help` shows all")
    return kind(
        **{known[n].name: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
    )


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _failed(error: BaseException, edge: Edge) -> Result:
    """Make a result of an exception; where it is a bug of ours, keep its traceback."""
    if edge.debug:
        import traceback

        lines = "".join(traceback.format_exception(error))
        _emit(sys.stderr, clean(edge.redactor.text(lines)))
    record = record_of(error)
    known = _explain(error)
    if known is None:
        details = _keep_traceback(error, edge, record)
        known = BakehouseError(
            f"unexpected {type(error).__name__}: {error}",
            where=details,
            hint="this is a fault in Bakehouse; --debug shows where it happened",
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
    errno.EROFS: "the file system can only be read",
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
    errno.EMFILE: "too many open files",
    errno.ENFILE: "too many open files on this machine",
    errno.EEXIST: "a file is where a folder should be",
    errno.ENOTDIR: "a file is where a folder should be",
    errno.ENOMEM: "out of memory",
    errno.EIO: "the disk cannot be read or written",
}
"""What an OSError that nobody explained says about the machine, not about us."""


def _explain(error: BaseException) -> BakehouseError | None:
    """Give the error that a user can act on; None where it is a fault in Bakehouse."""
    if isinstance(error, BakehouseError):
        return error
    if isinstance(error, KeyboardInterrupt):
        by = f" by {error}" if str(error) else ""
        return Interrupted(f"interrupted{by}", hint="everything that this task started was ended")
    if isinstance(error, MemoryError):
        return HostError("out of memory", hint="free some memory and run it again")
    if isinstance(error, OSError) and error.errno in _HOST:
        return HostError(
            _HOST[error.errno],
            where=str(error.filename) if error.filename else None,
            hint="free space, mend what is there, or set BAKEHOUSE_HOME to another folder",
        )
    return None


def _keep_traceback(error: BaseException, edge: Edge, record: str | None) -> str:
    """Write the traceback beside the record, or into the state folder; give the path."""
    import traceback

    from bakehouse.places import Places

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
        return f"no file: the details could not be kept ({second})"
    return str(path)


@contextmanager
def _signals() -> Iterator[None]:
    """Make INT, TERM and HUP one thing: a KeyboardInterrupt, once, that unwinds everything.

    A signal that was ignored when we came (nohup, a shell's background job) stays ignored. Once
    interrupted, nothing interrupts the way out: all that is left is a few lines to print.
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
    """Print a result; give the exit code, which is another one if it could not be printed."""
    if edge.json:
        document = edge.redactor.data(result.document())
        failed = _emit(sys.stdout, to_json(document), encoding="utf-8")
    else:
        failed = _emit(sys.stdout, _for_people(result, edge.redactor))
        _show_error(result, edge.redactor)
    if failed and result.exit == 0:
        _emit(sys.stderr, f"error: the result could not be printed: {failed.strerror or failed}\n")
        return HostError.exit_code
    return result.exit


def _for_people(result: Result, redactor: Redactor) -> str:
    """Give the checks, then the command's own words: what matters most stands last."""
    parts = []
    if result.checks and not result.raised and not result.told:
        parts += _check_lines(result.checks, sys.stdout, redactor)
    if result.text:
        parts.append(clean(redactor.text(result.text)).rstrip("\n"))
    return "\n".join(parts) + "\n" if parts else ""


def _show_error(result: Result, redactor: Redactor) -> None:
    if not result.error:
        return
    from bakehouse.console import error_lines

    lines = _check_lines(result.checks, sys.stderr, redactor) if result.raised else []
    lines += map(redactor.text, error_lines(result.error, result.record))
    _emit(sys.stderr, "\n".join(lines) + "\n")


def _check_lines(checks: Iterable[Check], stream: TextIO | None, redactor: Redactor) -> list[str]:
    from bakehouse.console import check_lines, wants_colour, width_of

    lines = check_lines(checks, width=width_of(stream), colour=wants_colour(stream, os.environ))
    return [redactor.text(line) for line in lines]


def _follow(text: str, lines: Iterable[str], redactor: Redactor) -> None:
    """Print lines as they come, until they end or nobody reads any more."""
    if text:
        _emit(sys.stdout, clean(redactor.text(text)).rstrip("\n") + "\n")
    for line in lines:
        if _emit(sys.stdout, clean(redactor.text(line), one_line=True) + "\n", gone=True):
            return


def _emit(
    stream: TextIO | None, text: str, *, encoding: str | None = None, gone: bool = False
) -> OSError | None:
    """Write and flush; a reader that went away is no error (unless `gone` asks), a disk is."""
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
            # What is left in the buffer must go somewhere when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error if gone or not isinstance(error, BrokenPipeError) else None
    return None


def _fill_standard_streams() -> None:
    """Open /dev/null in place of a closed standard stream: else a file gets its number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
