"""Compare the file trees of two images."""

from __future__ import annotations

from collections.abc import Iterable

from bakehouse.build.image import ImageFile


def differences(one: Iterable[ImageFile], other: Iterable[ImageFile]) -> tuple[str, ...]:
    """Compare two file trees, one line for each difference."""
    first, second = ({file.path: file for file in files} for files in (one, other))
    lines = []
    for path in sorted({*first, *second}):
        a, b = first.get(path), second.get(path)
        if a is None or b is None:
            lines.append(f"{path}: only in the {'second' if a is None else 'first'}")
        elif a != b:
            was, now = a.to_data(), b.to_data()
            parts = (f"{n} {was[n]} and {now[n]}" for n in was if was[n] != now[n])
            lines.append(f"{path}: {', '.join(parts)}")
    return tuple(lines)
