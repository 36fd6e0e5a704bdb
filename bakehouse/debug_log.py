"""Structured events of Bakehouse itself: one for each step, with fields, through structlog.

`event` goes to standard error with `--debug` and to `events.jsonl` in the folder of the run that is
open; `debug` goes to standard error only. structlog takes 50 ms to import and is imported when the
first of them is written.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from bakehouse.redact import Redactor

_debug_loggers: list[Any] = []
"""At most one; logging is a state of the whole process, as it is in structlog itself."""
_run_files: list[tuple[Path, Redactor]] = []
"""Where the events of the open runs go, the innermost last."""


def _logger(stream: TextIO, redactor: Redactor, *, as_json: bool) -> Any:
    import structlog  # see the module's docstring

    def hide(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        hidden: MutableMapping[str, Any] = redactor.data(event)
        return hidden

    renderer: Any = structlog.processors.JSONRenderer(default=str)
    if not as_json:
        renderer = structlog.dev.ConsoleRenderer(colors=stream.isatty())
    return structlog.wrap_logger(
        structlog.PrintLogger(stream),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            hide,
            renderer,
        ],
    )


def configure(stream: TextIO, redactor: Redactor, *, as_json: bool) -> None:
    """Log to `stream`, as JSON lines or for people, without secrets."""
    _debug_loggers[:] = [_logger(stream, redactor, as_json=as_json)]


def silence() -> None:
    """Stop logging to a stream."""
    _debug_loggers.clear()


@contextmanager
def run_events(file: Path, redactor: Redactor) -> Iterator[None]:
    """Append the events of this block to `file`, one JSON document a line, without secrets."""
    entry = (file, redactor)
    _run_files.append(entry)
    try:
        yield
    finally:
        _run_files.remove(entry)


def event(name: str, **fields: Any) -> None:
    """Log something that belongs to the run, such as a step. A full disk is no error here."""
    for file, redactor in _run_files[-1:]:
        with suppress(OSError), file.open("a", encoding="utf-8", errors="replace") as stream:
            _logger(stream, redactor, as_json=True).info(name, **fields)
    for logger in _debug_loggers:
        logger.info(name, **fields)


def debug(name: str, **fields: Any) -> None:
    """Log a detail for whoever looks for a bug in Bakehouse itself."""
    for logger in _debug_loggers:
        logger.debug(name, **fields)
