"""The path of a run's record, attached to the exception that ended the run."""

from __future__ import annotations

_NOTE = "record: "


def add_record(error: BaseException, folder: str) -> None:
    """Attach the record's folder to an exception, as a note."""
    error.add_note(f"{_NOTE}{folder}")


def record_of(error: BaseException) -> str | None:
    """Return the record's folder that is attached to an exception, if any."""
    for note in getattr(error, "__notes__", ()):
        if note.startswith(_NOTE):
            return str(note.removeprefix(_NOTE))
    return None
