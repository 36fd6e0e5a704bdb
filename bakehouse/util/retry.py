"""One retry policy for everything that asks a host: growing pauses, Retry-After, a message.

An attempt raises `TransientError` if another one may succeed; any other error ends it at once.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import tenacity

T = TypeVar("T")

BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which the same request may succeed."""
ATTEMPTS = 6
NOBODY_LISTENS_ATTEMPTS = 2
"""Attempts if this machine itself refuses the connection."""
FIRST_PAUSE_S = 1.0
LONGEST_BACKOFF_S = 30.0
LONGEST_WAIT_S = 120.0
"""A host that asks for a longer pause is not waited for."""


class TransientError(Exception):
    """Worth another attempt.

    `after` is the pause in seconds that the host asked for, None if it named none. `nobody_listens`
    is for a connection that this machine refuses. `reply` is what the last attempt got, if the
    caller still wants it once the attempts are used up.
    """

    def __init__(
        self,
        reason: str,
        after: float | None = None,
        *,
        nobody_listens: bool = False,
        reply: Any = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after = after
        self.nobody_listens = nobody_listens
        self.reply = reply


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds that a Retry-After header asks for, given as a number or a date; None without one.

    `now` is Unix time in seconds.
    """
    value = next((v.strip() for k, v in headers.items() if k.lower() == "retry-after"), "")
    if re.fullmatch(r"\d{1,9}(\.\d*)?", value, re.ASCII):
        return float(value)
    from email.utils import parsedate_to_datetime  # slow to import, and few hosts send a date

    try:
        date = parsedate_to_datetime(value).timestamp()
    except (ValueError, OverflowError):
        return None
    return max(0.0, date - (time.time() if now is None else now))


def asks_to_return(after: float | None) -> str:
    """Text to append to a message about a busy host."""
    return f", and asks to come back in {after:.0f} s" if after else ""


class Retry:
    """Calls something again while it raises TransientError. Use one value for one piece of work.

    `sleep` waits seconds; `say` gets a line before each pause, which ends with `where`;
    `out_of_time` says whether a deadline has passed.
    """

    def __init__(
        self,
        sleep: Callable[[float], None],
        *,
        attempts: int = ATTEMPTS,
        first_pause: float = FIRST_PAUSE_S,
        longest_wait: float = LONGEST_WAIT_S,
        say: Callable[[str], None] | None = None,
        where: str = "",
        out_of_time: Callable[[], bool] = lambda: False,
    ) -> None:
        self._sleep = sleep
        self._attempts = attempts
        self._first = first_pause
        self._longest = longest_wait
        self._say = say
        self._where = f": {where}" if where else ""
        self._out_of_time = out_of_time
        self._failures = 0

    def made_progress(self) -> None:
        """Count attempts from the start again: the last one got further than those before."""
        self._failures = 0

    def call(self, job: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Give what `job` returns. Raises its last TransientError, or any other error of it."""
        import tenacity  # slow to import, and `plan` needs no network

        def attempt() -> T:
            self._failures += 1
            return job(*args, **kwargs)

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(TransientError),
            stop=self._stop,
            wait=self._pause,
            before_sleep=self._explain,
            sleep=self._sleep,
            reraise=True,
        )
        return retrying(attempt)

    def _stop(self, state: tenacity.RetryCallState) -> bool:
        error = _error_of(state)
        used_up = self._failures >= self._limit(error)
        return used_up or (error.after or 0.0) > self._longest or self._out_of_time()

    def _limit(self, error: TransientError) -> int:
        return min(self._attempts, NOBODY_LISTENS_ATTEMPTS if error.nobody_listens else 99)

    def _pause(self, state: tenacity.RetryCallState) -> float:
        """Seconds: what the host asked for, or twice as long as before, give or take a quarter."""
        if (after := _error_of(state).after) is not None:
            return after
        backoff = min(LONGEST_BACKOFF_S, self._first * 2.0 ** max(0, self._failures - 1))
        return backoff * random.uniform(0.75, 1.25)  # noqa: S311 - spreads load, guards nothing

    def _explain(self, state: tenacity.RetryCallState) -> None:
        error = _error_of(state)
        if self._say and state.upcoming_sleep > 0:
            self._say(
                f"{error.reason}; try {self._failures + 1} of {self._limit(error)} "
                f"in {state.upcoming_sleep:.1f} s{self._where}"
            )


def retry(
    call: Callable[[], T],
    transient: Callable[[Exception], TransientError | None],
    policy: Retry,
) -> T:
    """Call again by `policy` while `transient` names the error; raise the last error itself."""

    def once() -> T:
        try:
            return call()
        except Exception as error:
            if (found := transient(error)) is None:
                raise
            raise found from error

    try:
        return policy.call(once)
    except TransientError as error:
        raise (error.__cause__ or error) from None


def _error_of(state: tenacity.RetryCallState) -> TransientError:
    error = state.outcome.exception() if state.outcome else None
    return error if isinstance(error, TransientError) else TransientError("not tried")
