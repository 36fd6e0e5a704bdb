"""Checks as aligned lines; progress on a terminal and in files."""

from __future__ import annotations

import io
from contextlib import suppress

from bakehouse.console import (
    PlainProgress,
    RichProgress,
    check_lines,
    duration,
    make_progress,
    wants_colour,
)
from bakehouse.models import check
from bakehouse.redact import Redactor
from bakehouse.util.text import quantity

CHECKS = (
    check("alive", "runs", "runs", "process table", ok=True),
    check("offloaded-layers", "33/33", "0/33", "server.log:7", ok=False),
    check("nonce", "bk-1", None, "GET /v1/models", ok=True),
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_checks_passed_take_one_line_and_others_are_printed_in_full() -> None:
    assert check_lines(CHECKS) == [
        "passed   alive             runs",
        "failed   offloaded-layers  expected: 33/33; observed: 0/33; at: server.log:7",
        "unknown  nonce             expected: bk-1; observed: nothing; at: GET /v1/models",
    ]


def test_checks_passed_are_cut_to_the_width() -> None:
    long = check("x", "anything", "/a/long/path" * 20, "there", ok=True)
    (line,) = check_lines([long], width=80)
    assert len(line) <= 80
    assert line.endswith("…")


def test_checks_wrap_in_their_column_and_escape_control_characters() -> None:
    long = check("x", "word " * 40, "a\x1b[2J\nb", "w" * 300, ok=False)
    lines = check_lines([long], width=80)
    assert lines[0].startswith("failed   x  expected: word")
    assert all(line.startswith(" " * 12) for line in lines[1:])
    assert not any("\x1b" in line or "\n" in line for line in lines)
    assert "\\x1b[2J\\nb" in "".join(lines)


def test_checks_have_colour_only_on_a_terminal() -> None:
    assert check_lines(CHECKS, colour=True)[1].startswith("\x1b[1;31mfailed \x1b[0m")
    assert wants_colour(Terminal(), {})
    assert not wants_colour(Terminal(), {"NO_COLOR": "1"})
    assert not wants_colour(Terminal(), {"TERM": "dumb"})
    assert not wants_colour(io.StringIO(), {})
    assert not wants_colour(None, {})


def test_progress_plain_prints_start_status_and_end() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, Redactor(["top-secret"]), every=0)
    with progress.bar("fetch top-secret\x1b", "B") as bar:
        bar.update(2**20, 4 * 2**20, "shard 1")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "fetch [hidden]\\x1b ..."
    assert lines[1].startswith("fetch [hidden]\\x1b: 25%, 1.0 MiB of 4.0 MiB, ")
    assert "left, shard 1" in lines[1]
    assert lines[2].endswith("done in 0.0 s")


def test_progress_plain_is_rare_and_reports_a_stop() -> None:
    stream = io.StringIO()
    with suppress(ZeroDivisionError), PlainProgress(stream).bar("work") as bar:
        for n in range(1000):
            bar.update(n, 1000)
        raise ZeroDivisionError
    assert len(stream.getvalue().splitlines()) == 2
    assert "stopped after" in stream.getvalue()


def test_progress_survives_a_closed_stream() -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        progress = PlainProgress(stream)
        with progress.bar("work") as bar:
            bar.update(1)
        progress.say("anything")


def test_progress_bars_on_a_terminal() -> None:
    stream = Terminal()
    progress = make_progress(stream, {"TERM": "xterm"}, Redactor())
    assert isinstance(progress, RichProgress)
    with progress.bar("fetch [bold]x[/bold]", "B") as outer, progress.bar("inner", "steps") as bar:
        bar.update(1, 2, "[red]note")
        outer.update(10, 100)
        progress.say("a line [that] stays")
    text = stream.getvalue()
    assert "fetch [bold]x[/bold]: done in" in text
    assert "inner: done in" in text
    assert "a line [that] stays" in text
    assert isinstance(make_progress(io.StringIO(), {}, Redactor()), PlainProgress)
    assert isinstance(make_progress(Terminal(), {"TERM": "dumb"}, Redactor()), PlainProgress)


def test_console_formats_amounts_and_durations() -> None:
    amounts = {
        (0, "B"): "0 B",
        (1023, "B"): "1.0 KiB",
        (98_362_432, "B"): "93.8 MiB",
        (5 * 2**40, "B"): "5120.00 GiB",
        (3, "steps"): "3 steps",
        (2.5, ""): "2.5",
    }
    assert {given: quantity(*given) for given in amounts} == amounts
    durations = {0.04: "0.0 s", 9.94: "9.9 s", 9.96: "10 s", 59.6: "1 min 0 s", 7800: "2 h 10 min"}
    assert {given: duration(given) for given in durations} == durations


def test_checks_never_cut_a_path() -> None:
    path = "/" + "/".join(["folder"] * 30) + "/CMakeCache.txt"
    bad = check("configure.used", "all of them", "one is not", path, ok=False)
    assert any(line.endswith(f"at: {path}") or line.strip() == path for line in check_lines([bad]))
