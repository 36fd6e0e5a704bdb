"""Words for people: the nearest known name, sizes in bytes, amounts."""

from __future__ import annotations

from collections.abc import Iterable


def closest_match(word: str, known: Iterable[str]) -> str | None:
    """Give the known word that is most like `word`, upper and lower case alike, or None."""
    import difflib  # needed for messages only

    choices = {k.lower(): k for k in known}
    found = difflib.get_close_matches(word.lower()[:80], list(choices), n=1, cutoff=0.6)
    return choices[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Give the hint for a misspelled word: `did you mean X?`, or None."""
    found = closest_match(word, known)
    return f"did you mean {found}?" if found else None


def suggestion(word: str, known: Iterable[str]) -> str:
    """Give ` (did you mean X?)` to end a message with, or nothing."""
    hint = did_you_mean(word, known)
    return f" ({hint})" if hint else ""


def size_text(size: float) -> str:
    """Write bytes for people, in binary units: `93.8 MiB`, `1.50 GiB`."""
    for name, unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= unit / 10:
            return f"{size / unit:.2f} {name}" if name == "GiB" else f"{size / unit:.1f} {name}"
    return f"{size:.0f} B"


def quantity(value: float, unit: str) -> str:
    """Write a number with its unit; `B` gets binary units, and no unit gives the bare number."""
    if unit == "B":
        return size_text(value)
    number = f"{value:.0f}" if value == int(value) else f"{value:.1f}"
    return f"{number} {unit}".rstrip()
