"""Checks, errors and progress as text, for a terminal or a plain file."""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from bakehouse.errors import BakehouseError
from bakehouse.models import Check, Verdict
from bakehouse.progress import Bar, Progress
from bakehouse.redact import Redactor, clean
from bakehouse.util.text import quantity as amount

if TYPE_CHECKING:
    import rich.console
    import rich.progress

_COLOURS = {Verdict.PASSED: "32", Verdict.FAILED: "1;31", Verdict.UNKNOWN: "33"}


def wants_colour(stream: TextIO | None, environment: Mapping[str, str]) -> bool:
    """Return whether to use colours: on a terminal that is not dumb, without `NO_COLOR`."""
    if environment.get("NO_COLOR") or environment.get("TERM") == "dumb":
        return False
    return is_terminal(stream)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether this stream is a terminal; a closed one is not."""
    try:
        return bool(stream and stream.isatty())
    except ValueError:
        return False


def width_of(stream: TextIO | None) -> int:
    """Return the width in columns: the terminal's, or 100."""
    return max(60, shutil.get_terminal_size((100, 24)).columns) if is_terminal(stream) else 100


def check_lines(checks: Iterable[Check], *, width: int = 100, colour: bool = False) -> list[str]:
    """Return checks as aligned lines without control characters.

    A check that passed takes one line, cut to the width: verdict, ID and observation. Any other is
    printed in full, on several lines if needed; a path is never cut, so that it can be copied.
    """
    shown = tuple(checks)
    column = min(max((len(c.id) for c in shown), default=0), 28)
    lines: list[str] = []
    for one in shown:
        head = f"{one.verdict.value:7}  {_one_line(one.id):{column}}  "
        if one.passed:
            room = max(width - len(head), 20)
            text = _one_line(one.observed)
            parts = [text if len(text) <= room else text[: room - 1] + "…"]
        else:
            parts = [f"expected: {_one_line(one.expected)}", f"observed: {_one_line(one.observed)}"]
            parts += [f"at: {_one_line(one.where)}"] if one.where else []
        block, indent = [head + "; ".join(parts)], " " * len(head)
        if len(block[0]) > width:  # a line for each part, wrapped and indented
            block = []
            for part in parts:
                block += textwrap.wrap(
                    part, max(width, len(head) + 30), initial_indent=indent,
                    subsequent_indent=indent + "  ", break_on_hyphens=False, break_long_words=False,
                ) or [indent]  # fmt: skip
            block[0] = head + block[0][len(indent) :]
        if colour:
            shade = _COLOURS[one.verdict]
            block[0] = f"\x1b[{shade}m{block[0][:7]}\x1b[0m{block[0][7:]}"
        lines += block
    return lines


def error_lines(error: BakehouseError, record: str | None = None) -> list[str]:
    """Return an error as lines: what, where, hint and the run's record."""
    lines = [f"error: {clean(error.what)}"]
    if error.where:
        lines += [f"  at:   {_below(error.where)}"]
    if error.hint:
        lines += [f"  hint: {_below(error.hint)}"]
    if record:
        lines += [f"  record: {clean(record)}"]
    return lines


def _below(text: str) -> str:
    return clean(text).rstrip("\n").replace("\n", "\n        ")


def _one_line(text: str) -> str:
    return clean(text, one_line=True)


def make_progress(
    stream: TextIO | None, environment: Mapping[str, str], redactor: Redactor
) -> Progress:
    """Return progress bars for a terminal, plain lines for anything else."""
    if is_terminal(stream) and environment.get("TERM") != "dumb":
        return RichProgress(stream, redactor, colour=wants_colour(stream, environment))
    return PlainProgress(stream, redactor)


class PlainProgress:
    """Plain lines for logs and cron mails: at the start, sometimes between, and at the end."""

    def __init__(
        self, stream: TextIO | None, redactor: Redactor | None = None, *, every: float = 10.0
    ) -> None:
        self._stream = stream
        self._redactor = redactor or Redactor()
        self._every = every

    def say(self, text: str) -> None:
        """See `Progress.say`."""
        if self._stream is None:
            return
        try:
            self._stream.write(clean(self._redactor.text(text)) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None  # the reader is gone; the work goes on

    @contextmanager
    def bar(self, title: str, unit: str = "") -> Iterator[Bar]:
        """See `Progress.bar`."""
        bar = _PlainBar(self, title, unit, self._every)
        self.say(f"{title} ...")
        try:
            yield bar
        except BaseException:
            self.say(f"{title}: stopped after {duration(bar.elapsed)}")
            raise
        self.say(f"{title}: done in {duration(bar.elapsed)}")


class _PlainBar:
    def __init__(self, progress: PlainProgress, title: str, unit: str, every: float) -> None:
        self._progress = progress
        self._title = title
        self._unit = unit
        self._every = every
        self._began = self._printed = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def update(self, done: float, total: float | None = None, note: str = "") -> None:
        """Print the status, at growing intervals."""
        now = time.monotonic()
        if now - self._printed < max(self._every, self.elapsed / 20):
            return
        self._printed = now
        words = _figures(done, total, self._unit, self.elapsed)
        if total:
            words.insert(0, f"{done / total:.0%}")
            if 0 < done < total:
                words.append(f"{duration((total - done) / done * self.elapsed)} left")
        self._progress.say(f"{self._title}: {', '.join(filter(None, [*words, note]))}")


def _figures(done: float, total: float | None, unit: str, elapsed: float) -> list[str]:
    """Return the amount, with its total if known, and the rate of bytes."""
    words = [amount(done, unit) + (f" of {amount(total, unit)}" if total else "")]
    if unit == "B" and done and elapsed > 0:
        words.append(f"{amount(done / elapsed, 'B')}/s")
    return words


class RichProgress:
    """Live bars on a terminal, with rate and remaining time."""

    def __init__(self, stream: TextIO | None, redactor: Redactor, *, colour: bool = True) -> None:
        self._stream = stream
        self._redactor = redactor
        self._colour = colour
        self._made: tuple[rich.console.Console, rich.progress.Progress] | None = None
        self._open = 0

    def _tools(self) -> tuple[rich.console.Console, rich.progress.Progress]:
        """Create the display at the first use: rich takes 50 ms to import."""
        if self._made is None:
            from rich import progress as bars
            from rich.console import Console

            console = Console(
                file=self._stream, markup=False, highlight=False, emoji=False,
                no_color=not self._colour,
            )  # fmt: skip
            display = bars.Progress(
                bars.TextColumn("{task.description}", markup=False),
                bars.BarColumn(),
                bars.TextColumn("{task.fields[status]}", markup=False),
                bars.TimeRemainingColumn(elapsed_when_finished=True),
                console=console,
                transient=True,
            )
            self._made = (console, display)
        return self._made

    def say(self, text: str) -> None:
        """See `Progress.say`."""
        console, _ = self._tools()
        console.print(clean(self._redactor.text(text)), soft_wrap=True)

    @contextmanager
    def bar(self, title: str, unit: str = "") -> Iterator[Bar]:
        """See `Progress.bar`."""
        _, display = self._tools()
        title = clean(self._redactor.text(title), one_line=True)
        began = time.monotonic()
        if self._open == 0:
            display.start()
        self._open += 1
        task = display.add_task(title, total=None, status="")
        word = "stopped after"
        try:
            yield _RichBar(display, task, unit, began)
            word = "done in"
        finally:
            display.remove_task(task)
            self._open -= 1
            if self._open == 0:
                display.stop()
            self.say(f"{title}: {word} {duration(time.monotonic() - began)}")


class _RichBar:
    def __init__(
        self, display: rich.progress.Progress, task: rich.progress.TaskID, unit: str, began: float
    ) -> None:
        self._display = display
        self._task = task
        self._unit = unit
        self._began = began

    def update(self, done: float, total: float | None = None, note: str = "") -> None:
        """See `Bar.update`."""
        words = _figures(done, total, self._unit, time.monotonic() - self._began)
        if note:
            words.append(clean(note, one_line=True)[:60])
        fields: dict[str, Any] = {"status": ", ".join(words)}
        self._display.update(self._task, completed=done, total=total, **fields)


def duration(seconds: float) -> str:
    """Format seconds: `0.4 s`, `12 s`, `3 min 5 s`, `2 h 10 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
