"""Helpers that all packages share: retry, file lock, words."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bakehouse.errors import HostError
from bakehouse.util.files import file_lock
from bakehouse.util.retry import Retry, TransientError, retry_after
from bakehouse.util.text import did_you_mean, size_text


def test_retry_after_reads_seconds_and_dates() -> None:
    values = ("7", " 0.5 ", "-1", "soon", "", "9" * 400, "Thu, 01 Jan 1970 00:01:40 GMT")
    got = [retry_after({"Retry-After": value}, now=40) for value in values]
    assert got == [7, 0.5, None, None, None, None, 60]
    assert retry_after({}) is None


def test_retry_says_why_it_waits_and_gives_up() -> None:
    slept: list[float] = []
    said: list[str] = []
    errors = [TransientError("busy", 3.0), TransientError("reset"), TransientError("reset")]

    def job() -> None:
        raise errors.pop(0)

    retry = Retry(slept.append, attempts=3, say=said.append, where="host")
    with pytest.raises(TransientError, match="reset"):
        retry.call(job)
    assert slept == [3.0, pytest.approx(2.0, rel=0.26)]
    assert said[0] == "busy; try 2 of 3 in 3.0 s: host"
    assert not errors


def test_file_lock_says_that_it_waits_or_refuses(tmp_path: Path) -> None:
    lock = tmp_path / "a" / "x.lock"
    said: list[str] = []
    entered = threading.Event()

    def second() -> None:
        with file_lock(lock, "the work", said.append):
            entered.set()

    thread = threading.Thread(target=second)
    with file_lock(lock, "the work", said.append):
        thread.start()
        busy = HostError("busy")
        with pytest.raises(HostError, match="busy"), file_lock(lock, "x", said.append, busy=busy):
            pass
        assert not entered.wait(0.5)
    thread.join(10)
    assert entered.is_set()
    assert said == ["waiting for another process that is working on the work"]


def test_text_sizes_and_suggestions() -> None:
    sizes = [size_text(size) for size in (0, 200, 2048, 98_362_432, -(2**31))]
    assert sizes == ["0 B", "0.2 KiB", "2.0 KiB", "93.8 MiB", "-2.00 GiB"]
    assert did_you_mean("Contxt", ["context", "model"]) == "did you mean context?"
    assert did_you_mean("zzz", ["context"]) is None
