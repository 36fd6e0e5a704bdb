"""How much memory a control group has left, where one bounds us: a container, a systemd slice."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 2**60
"""Bytes; the first kind of control group writes a huge number where nothing is limited."""
_STATS = (b"inactive_file", b"active_file", b"total_inactive_file", b"total_active_file")


@dataclass(frozen=True)
class Group:
    """One control group with a limit."""

    folder: Path
    limit: str
    usage: str

    def room(self) -> int | None:
        """Bytes to the limit, counting page cache as free; None where there is no limit now."""
        try:
            limit = number((self.folder / self.limit).read_bytes())
            used = number((self.folder / self.usage).read_bytes())
            stat = (self.folder / "memory.stat").read_bytes()
        except OSError:
            return None
        if limit is None or used is None or limit >= UNLIMITED:
            return None
        counts = dict(re.findall(rb"^(\w+) (\d+)$", stat, re.MULTILINE))
        files = [int(counts.get(name, 0)) for name in _STATS]
        return max(0, limit - used + max(sum(files[:2]), sum(files[2:])))


def number(text: bytes) -> int | None:
    """Read a number; None for `max` and for what is none."""
    return int(text) if text.strip().isdigit() else None


def limited_groups(membership: Path, root: Path) -> tuple[Group, ...]:
    """The control groups above us that have a limit, of either kind."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return ()
    found = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers not in {"", "memory"}:
            continue
        names = ("memory.max", "memory.current")
        if controllers:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        base = root / controllers
        folder = base / path.lstrip("/")
        while folder.is_relative_to(base):
            group = Group(folder, *names)
            if group.room() is not None:
                found.append(group)
            if folder == base:
                break
            folder = folder.parent
    return tuple(found)
