"""How an exception remembers the record of the run that it ended, from the run to the printer."""

from __future__ import annotations

_NOTE = "record: "


def add_record(error: BaseException, folder: str) -> None:
    """Note the folder of the record; Python prints such notes below a traceback."""
    error.add_note(f"{_NOTE}{folder}")


def record_of(error: BaseException) -> str | None:
    """Give the folder of the record of the run that this exception ended, if one was noted."""
    for note in getattr(error, "__notes__", ()):
        if note.startswith(_NOTE):
            return str(note.removeprefix(_NOTE))
    return None
