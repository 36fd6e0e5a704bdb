"""One way to try a call again: with backoff, and no longer than its host asks for."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from bakehouse.context import Context

T = TypeVar("T")


@dataclass(frozen=True)
class Transient:
    """A failure that another try may not see again."""

    why: str
    after: float = 0.0
    """Seconds that the host asks to wait."""
    attempts: int | None = None
    """Maximum number of attempts where this is the failure; None for the caller's."""


def retry(
    ctx: Context,
    call: Callable[[], T],
    transient: Callable[[Exception], Transient | None],
    *,
    attempts: int,
    max_wait: float,
    name: str,
    where: str,
) -> T:
    """Call until it succeeds. `transient` gives None for an error that ends it.

    The last error is raised when `attempts` are used up, and at once when the host asks for a pause
    of more than `max_wait` seconds. `name` and `where` are for the message before each pause.
    """
    attempt = 1
    while True:
        try:
            return call()
        except Exception as error:
            found = transient(error)
            if found is None or found.after > max_wait:
                raise
            most = min(attempts, found.attempts or attempts)
            if attempt >= most:
                raise
        pause = max(found.after, min(20.0, 0.5 * 2 ** (attempt - 1)) + random.random())  # noqa: S311
        attempt += 1
        ctx.progress.say(f"{name}: {found.why}; try {attempt} of {most} in {pause:.1f} s: {where}")
        ctx.clock.sleep(pause)
