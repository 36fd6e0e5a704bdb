"""SQLite index of all runs, for fast queries.

It only copies `runs/<id>/record.json`. Every read first brings it up to date with the folders, so a
missing, damaged, older or newer index is rebuilt in one pass. Every use holds a file lock for
milliseconds, so two processes never use it at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from bakehouse.paths import Places

SCHEMA = 1
"""Version of the table; an index of another version is rebuilt from the folders."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Entry:
    """One run in the index. Times in UTC, ISO 8601; `seconds` of wall time."""

    id: str
    task: str
    recipe: str | None
    started: str
    ended: str
    seconds: float
    ok: bool
    exit: int
    verdict: str
    lock: str | None = None
    build: str | None = None

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Entry:
        """Read an entry from a record's JSON. Raises KeyError, TypeError or ValueError."""
        kinds: dict[str, Any] = {
            "id": str, "task": str, "started": str, "ended": str, "seconds": float, "ok": bool,
            "exit": int, "verdict": str,
        }  # fmt: skip
        values: dict[str, Any] = {name: data.get(name) for name in ("recipe", "lock", "build")}
        return cls(**values | {name: kind(data[name]) for name, kind in kinds.items()})


_NAMES = tuple(f.name for f in fields(Entry))
_COLUMNS = ", ".join(_NAMES)
_CREATE = """
CREATE TABLE runs (
  id TEXT PRIMARY KEY, task TEXT NOT NULL, recipe TEXT, started TEXT NOT NULL, ended TEXT NOT NULL,
  seconds REAL NOT NULL, ok INTEGER NOT NULL, exit INTEGER NOT NULL, verdict TEXT NOT NULL,
  lock TEXT, build TEXT
)
"""


class Index:
    """The index. Disk errors are raised as OSError or sqlite3.Error."""

    def __init__(self, places: Places) -> None:
        self._file = places.index
        self._runs = places.runs

    def add(self, entry: Entry) -> None:
        """Insert or replace one run."""
        self._use(lambda db: _insert(db, [entry]))

    def list(
        self,
        *,
        task: str | None = None,
        recipe: str | None = None,
        ok: bool | None = None,
        limit: int = 50,
    ) -> tuple[Entry, ...]:
        """Return the runs that match, newest first."""

        def query(db: sqlite3.Connection) -> tuple[Entry, ...]:
            found = db.execute("PRAGMA quick_check(1)").fetchone()[0]  # pages that no query reads
            if found != "ok":
                error = sqlite3.DatabaseError(f"the index is damaged: {found}")
                error.sqlite_errorname = "SQLITE_CORRUPT"
                raise error
            self._update(db)
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM runs WHERE (?1 IS NULL OR task = ?1) "  # noqa: S608 - our own names
                "AND (?2 IS NULL OR recipe = ?2) AND (?3 IS NULL OR ok = ?3) "
                "ORDER BY started DESC, id DESC LIMIT ?4",
                (task, recipe, ok, limit),
            )
            return tuple(
                Entry(**{**dict(zip(_NAMES, row, strict=True)), "ok": bool(row[6])}) for row in rows
            )

        return self._use(query)

    def _use(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run `work` in one transaction; a damaged index is deleted and rebuilt."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        lock = self._file.with_suffix(".lock")
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # the kernel releases it when the process ends
            try:
                return self._transaction(work)
            except sqlite3.DatabaseError as error:
                if not _damaged(error):
                    raise
            for suffix in ("", "-journal", "-wal", "-shm"):
                Path(f"{self._file}{suffix}").unlink(missing_ok=True)
            return self._transaction(work)
        finally:
            os.close(handle)

    def _transaction(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        with contextlib.closing(sqlite3.connect(self._file, timeout=10)) as db, db:
            if db.execute("PRAGMA user_version").fetchone()[0] != SCHEMA:
                db.execute("DROP TABLE IF EXISTS runs")
                db.execute(_CREATE)
                db.execute(f"PRAGMA user_version = {SCHEMA}")
            return work(db)

    def _update(self, db: sqlite3.Connection) -> None:
        """Add missing runs, and drop those whose folder is gone."""
        there = set(os.listdir(self._runs)) if self._runs.exists() else set()
        known = {row[0] for row in db.execute("SELECT id FROM runs")}
        _insert(db, [e for name in there - known if (e := read_entry(self._runs / name))])
        db.executemany("DELETE FROM runs WHERE id = ?", [(name,) for name in known - there])


def read_entry(folder: Path) -> Entry | None:
    """Read a run's entry from its folder; None if its record is unreadable."""
    try:
        return Entry.from_data(json.loads((folder / "record.json").read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _insert(db: sqlite3.Connection, entries: list[Entry]) -> None:
    marks = ", ".join("?" for _ in _NAMES)
    db.executemany(
        f"INSERT OR REPLACE INTO runs ({_COLUMNS}) VALUES ({marks})",  # noqa: S608 - our own names
        [astuple(entry) for entry in entries],
    )


def _damaged(error: sqlite3.DatabaseError) -> bool:
    """Return whether the file itself is damaged, not the disk, a permission or a lock."""
    name = getattr(error, "sqlite_errorname", "")
    return name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_FORMAT", "SQLITE_ERROR"))
