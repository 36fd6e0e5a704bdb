"""What Bakehouse says about itself while it works: `debug(event, ...)`, on standard error.

Off unless `configure` was called (by `--debug`). structlog does the work and is imported only then:
it takes 50 ms to import, and a logger that nobody configured would print to standard output.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, TextIO

from bakehouse.redact import Redactor

_loggers: list[Any] = []
"""The one logger, once there is one: logging is per process, as it is in structlog itself."""


def configure(stream: TextIO, redactor: Redactor, *, as_json: bool) -> None:
    """Log to `stream`, as JSON lines or for people, without secrets."""
    import structlog  # see the module's docstring

    def hide(_logger: Any, _name: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        hidden: MutableMapping[str, Any] = redactor.data(event)
        return hidden

    renderer: Any = structlog.processors.JSONRenderer(default=str)
    if not as_json:
        renderer = structlog.dev.ConsoleRenderer(colors=stream.isatty())
    logger = structlog.wrap_logger(
        structlog.PrintLogger(stream),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            hide,
            renderer,
        ],
    )
    _loggers[:] = [logger]


def silence() -> None:
    """Log nothing again."""
    _loggers.clear()


def debug(event: str, **fields: Any) -> None:
    """Say what happens, for whoever looks for a fault in Bakehouse itself."""
    for logger in _loggers:
        logger.debug(event, **fields)
