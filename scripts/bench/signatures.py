"""How fast a log is scanned for all signatures, against `grep -E` with all of them as one pattern.

Three logs of the same size are made: `server` repeats lines of a healthy llama-server with other
numbers, with one bad line in ten thousand; `varied` has no two lines of the same words; `errors`
consists of bad lines only. Both sides read the same file in the same run, and CPU time is compared,
so that other work on the machine disturbs little.

    python scripts/bench/signatures.py [--size MB]
"""

from __future__ import annotations

import argparse
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bakehouse.logscan.catalogue import catalogue
from bakehouse.logscan.scanner import Scanner

ROOT = Path(__file__).resolve().parents[2]
HEALTHY = ROOT / "tests" / "data" / "logs" / "llama-server.log"
BAD = "0.07.{n:03d}.118 E llama_decode[1] returned -{n}"


def server(choice: random.Random) -> Iterator[str]:
    """Lines of a healthy server with other numbers, one bad line in ten thousand."""
    lines = HEALTHY.read_text().splitlines()
    digits = str.maketrans("0123456789", "0123456789")
    while True:
        for line in lines:
            shift = choice.randrange(10)
            digits = str.maketrans("0123456789", "".join(str((d + shift) % 10) for d in range(10)))
            yield line.translate(digits)
        if choice.random() < len(lines) / 10_000:
            yield BAD.format(n=choice.randrange(1, 999))


def varied(choice: random.Random) -> Iterator[str]:
    """Lines of invented words, no two alike."""
    letters = "etaoinshrdlucmfwypvbgk"
    while True:
        words = ("".join(choices) for choices in _words(choice, letters))
        yield f"2026-01-02T03:04:05Z INFO {' '.join(words)}"


def _words(choice: random.Random, letters: str) -> Iterator[list[str]]:
    for _ in range(12):
        yield choice.choices(letters, k=choice.randrange(2, 11))


def errors(choice: random.Random) -> Iterator[str]:
    """Nothing but one error, with other numbers."""
    while True:
        yield BAD.format(n=choice.randrange(1, 999))


def write(path: Path, lines: Iterator[str], size: int) -> int:
    """Write about `size` bytes of lines; give the bytes written."""
    with path.open("w") as out:
        while out.tell() < size:
            out.write("".join(f"{next(lines)}\n" for _ in range(1000)))
    return path.stat().st_size


def scan(path: Path) -> float:
    """Scan a file as `diagnose` does; seconds of CPU time."""
    started = time.process_time()
    scanner = Scanner()
    with path.open("rb") as log:
        while data := log.read(1 << 18):
            scanner.feed_bytes(data)
    scanner.finish()
    return time.process_time() - started


def grep(path: Path, patterns: Path) -> float:
    """Let grep look for all signatures; seconds of CPU time."""
    started = _spent()
    command = ["grep", "-c", "-i", "-E", "-f", str(patterns), str(path)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False, env={"LC_ALL": "C"})
    return _spent() - started


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def expression(text: str) -> str:
    """Put a compiled template into grep's dialect, with unbounded repeats, which it likes best."""
    text = re.sub(r"\(\?P<\w+>", "(", text)
    for ours, theirs in (
        (r"(?<![A-Za-z0-9])", ""), (r"(?![A-Za-z0-9])", ""), (r"(?<=\S)", ""), (r"(?=\S)", ""),
        (r"\A", ""), (r"\s*\Z", "$"), ("(?:", "("), (".{0,240}?", ".*"), (r"\S{1,300}?", "[^ ]+"),
        (r"\ ", " "), (r"\s+", " +"), (r"\d[\d.,]*", "[0-9][0-9.,]*"), (r"\-", "-"), (r"\#", "#"),
        (r"\&", "&"), (r"\~", "~"), (r"[^\W\d_]{3,12}?", "[a-z]+"),
        ("(?P=syllable)", ""), ("(?P=sign)", ""), ("{3,}", ""), ("{15,}", ""),
    ):  # fmt: skip
        text = text.replace(ours, theirs)
    return text


def main() -> int:
    """Print a table: log, MB/s of both sides, ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=64, help="megabytes of each log")
    size = parser.parse_args().size * 10**6
    known = catalogue()
    templates = [s.template for found in known.by_word.values() for s in found]
    print(f"{len(known.rows)} signatures, {len(templates)} templates")
    with tempfile.TemporaryDirectory() as folder:
        patterns = Path(folder) / "patterns"
        patterns.write_text("\n".join(sorted({expression(t.expression) for t in templates})))
        print(f"{'log':10}{'scanner MB/s':>14}{'grep -E MB/s':>14}{'ratio':>8}")
        for make in (server, varied, errors):
            path = Path(folder) / make.__name__
            choice = random.Random(7)  # noqa: S311 - the same text each time, no secret
            written = write(path, make(choice), size) / 10**6
            ours, theirs = scan(path), grep(path, patterns)
            row = f"{written / ours:14.1f}{written / theirs:14.1f}{theirs / ours:8.2f}"
            print(f"{make.__name__:10}{row}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
