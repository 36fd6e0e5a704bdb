"""The task `logs`: show a server's log, all or its end, and follow it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

from bakehouse import flags
from bakehouse.commands.servers import folder_of
from bakehouse.context import Context, Outcome
from bakehouse.errors import NotFound, UsageError
from bakehouse.redact import Redactor, clean
from bakehouse.server.launcher import kept_key
from bakehouse.server.status import get_status
from bakehouse.server.supervisor import Tail

TICK_S = 0.2
BLOCK = 1 << 16
JSON_LINES = 1000
"""Maximum lines in a JSON document unless `--lines` is given."""


Options = flags.Logs


def run(ctx: Context, options: Options) -> Outcome:
    """Return a server's log. Raises NotFound if it has none, UsageError for a bad number."""
    if options.lines and not (options.lines.isascii() and options.lines.isdigit()):
        raise UsageError(f"--lines takes a whole number, not '{options.lines}'")
    wanted = int(options.lines) if options.lines else None
    folder = folder_of(ctx, options.recipe)
    log = folder / "server.log"
    if not log.exists():
        raise NotFound(
            f"{folder.name} has no log yet", where=str(log),
            hint=f"start it with: invoke serve --recipe {folder.name}",
        )  # fmt: skip
    key = kept_key(folder)
    hide = Redactor((key,) if key else ())
    last = last_lines(log, JSON_LINES if wanted is None else wanted)[0]
    result = {"log": str(log), "lines": [hide.text(clean(text)) for text in last]}
    return Outcome(result=result, lines=shown(ctx, folder, wanted, options.follow, hide))


def last_lines(log: Path, count: int) -> tuple[list[str], Tail]:
    """Return the last `count` whole lines, and a tail that continues after them.

    Reads from the end, so that a log of gigabytes costs no more than a small one.
    """
    size = log.stat().st_size
    span = BLOCK
    while True:
        start = max(size - span, 0)
        tail = Tail(log, start)
        kept: deque[str] = deque(maxlen=count)
        seen = 0
        while new := tail.lines():
            kept.extend(new)
            seen += len(new)
        if seen > count or not start:
            return list(kept), tail
        span *= 4


def shown(
    ctx: Context, folder: Path, count: int | None, follow: bool, hide: Redactor
) -> Iterator[str]:
    """Yield the lines, and with `follow` new ones until the server ends."""
    tail = Tail(folder / "server.log")
    if count is not None:
        last, tail = last_lines(folder / "server.log", count)
        yield from map(hide.text, last)
    while True:
        alive = follow and bool(get_status(folder, inside=False).processes)
        while new := tail.lines():
            yield from map(hide.text, new)
        if not alive:
            break
        ctx.clock.sleep(TICK_S)
    if tail.rest:
        yield hide.text(tail.rest.decode(errors="replace"))
