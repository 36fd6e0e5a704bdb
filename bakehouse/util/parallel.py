"""Run jobs on threads; the first error cancels the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from bakehouse.progress import Bar

T = TypeVar("T")
NAME = "all-at-once"
"""Of the threads."""
LINGER_S = 2.0
"""Seconds that all jobs together get to notice a cancellation."""


class _Cancelled(Exception):
    """Another job failed, or the user interrupted."""


_off = threading.local()


def run_parallel(jobs: Sequence[Callable[[], T]], most: int) -> list[T]:
    """Run jobs on at most `most` threads; give their results in order.

    The first error, or an interrupt, cancels the others: each notices with its next report of
    progress (`SharedProgress`). One that waits for a silent host is left behind, and ends with us.
    """
    if len(jobs) <= 1:
        return [job() for job in jobs]
    done: dict[int, T] = {}
    errors: list[BaseException] = []
    waiting = iter(enumerate(jobs))
    lock, off = threading.Lock(), threading.Event()

    def work() -> None:
        _off.event = off
        while not off.is_set():
            with lock:
                number, job = next(waiting, (-1, None))
            if job is None:
                return
            try:
                done[number] = job()
            except _Cancelled:
                return
            except BaseException as error:  # raised in the caller's thread
                errors.append(error)
                off.set()

    count = max(1, min(most, len(jobs)))
    threads = [threading.Thread(target=work, name=NAME, daemon=True) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not off.is_set():
                thread.join(0.1)
    finally:
        off.set()
        deadline = time.monotonic() + LINGER_S
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    return [done[number] for number in range(len(jobs))]


class SharedProgress:
    """One bar for several jobs whose totals are known."""

    def __init__(self, bar: Bar, total: int) -> None:
        self._bar = bar
        self._total = total
        self._done: dict[Hashable, int] = {}
        self._lock = threading.Lock()

    def of(self, key: Hashable) -> Callable[[int, int | None], None]:
        """Make the callback for one job: bytes done, and its total, which is not needed."""

        def report(done: int, _: int | None = None) -> None:
            event = getattr(_off, "event", None)
            if event is not None and event.is_set():
                raise _Cancelled
            with self._lock:
                self._done[key] = done
                self._bar.update(sum(self._done.values()), self._total)

        return report
