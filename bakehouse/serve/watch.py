"""What the keeper looks at while a server runs: its log.

Standard library at the top level; the signatures are imported once there is a line to judge.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bakehouse.signatures.scanner import Scanner

CHUNK = 1 << 20
LONGEST_LINE = 1 << 16


class Tail:
    """Gives the lines that a growing file has won since the last look; never waits."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self.path = path
        self.position = position
        self.rest = b""

    def lines(self) -> list[str]:
        """Give the new whole lines, decoded with replacement characters, without line ends."""
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
    """Feeds a server's log to the signatures as it grows."""

    def __init__(self, path: Path, engine: str, known: frozenset[str] = frozenset()) -> None:
        self.tail = Tail(path)
        self.engine = engine
        self.known = known
        """Ids of signatures that are expected of this server."""
        self.scanner: Scanner | None = None

    def findings(self) -> list[dict[str, Any]]:
        """Give what new lines show of fatal, silent or lost-feature faults, as plain data."""
        lines = self.tail.lines()
        if not lines:
            return []
        if self.scanner is None:
            from bakehouse.signatures.scanner import Scanner

            self.scanner = Scanner(engine=self.engine)
        new = {(f.id, f.severity) for line in lines for f in self.scanner.feed(line)}
        return [
            {"id": f.id, "severity": str(f.severity), "line_number": f.line_number, "line": f.line}
            for f in (self.scanner.findings() if new else ())
            if f.bad and (f.id, f.severity) in new and f.id not in self.known
        ]
