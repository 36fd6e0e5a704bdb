"""The end of a growing log, and its scan while a server runs.

Standard library only at the top; signatures are imported with the first line.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bakehouse.logscan.scanner import Scanner

CHUNK = 1 << 20
LONGEST_LINE = 1 << 16


class Tail:
    """Reads the lines added to a growing file since the last read; never waits."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path = path
        self.position = position
        self.rest = b""

    def lines(self) -> list[str]:
        """Return the new whole lines, decoded with replacement characters, without line ends."""
        try:
            with self.path.open("rb") as file:
                file.seek(0, 2)
                if file.tell() < self.position:
                    self.position, self.rest = 0, b""
                file.seek(self.position)
                chunk = file.read(CHUNK)
                self.position = file.tell()
        except OSError:
            return []
        *whole, self.rest = (self.rest + chunk).split(b"\n")
        if len(self.rest) > LONGEST_LINE:
            whole.append(self.rest)
            self.rest = b""
        return [line.decode(errors="replace").rstrip("\r") for line in whole]


class LogWatch:
    """Scans a server's log for signatures as it grows."""

    def __init__(self, path: Path, engine: str, known: frozenset[str] = frozenset()) -> None:
        self.tail = Tail(path)
        self.engine = engine
        self.known = known
        """Ids of signatures that this server is expected to show."""
        self.scanner: Scanner | None = None

    def findings(self) -> list[dict[str, Any]]:
        """Return fatal, silent and lost-feature findings in new lines, as plain data."""
        lines = self.tail.lines()
        if not lines:
            return []
        if self.scanner is None:
            from bakehouse.logscan.scanner import Scanner

            self.scanner = Scanner(engine=self.engine)
        new = {(f.id, f.severity) for line in lines for f in self.scanner.feed(line)}
        return [
            {"id": f.id, "severity": str(f.severity), "line_number": f.line_number, "line": f.line}
            for f in (self.scanner.findings() if new else ())
            if f.bad and (f.id, f.severity) in new and f.id not in self.known
        ]
