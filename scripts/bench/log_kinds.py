"""How fast the kinds of a log are counted, against `sed`, `sort` and `uniq -c` doing as much.

The three logs are those of `signatures.py`: lines of a healthy llama-server, no two lines of the
same words, and nothing but one error. Both sides read the same file in the same run; CPU time is
compared. The pipeline only flattens numbers: it knows no levels and keeps no indices.

    python scripts/bench/log_kinds.py [--size MB]
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bakehouse.patch_review.log_diff import Kind, read_kinds
from scripts.bench import signatures as logs


def ours(path: Path) -> tuple[float, tuple[Kind, ...]]:
    """Count the kinds; seconds of CPU time, and the kinds."""
    started = time.process_time()
    kinds, _ = read_kinds(path)
    return time.process_time() - started, kinds


def pipeline(path: Path) -> float:
    """Flatten numbers, sort, count; seconds of CPU time of all three."""
    before = _spent()
    with path.open("rb") as log:
        flat = subprocess.Popen(
            ["sed", "-E", "s/[0-9]+/N/g"], stdin=log, stdout=subprocess.PIPE, env={"LC_ALL": "C"}
        )
        ordered = subprocess.Popen(
            ["sort"], stdin=flat.stdout, stdout=subprocess.PIPE, env={"LC_ALL": "C"}
        )
        subprocess.run(["uniq", "-c"], stdin=ordered.stdout, stdout=subprocess.DEVNULL, check=True)
        for child in (flat, ordered):
            if child.stdout:
                child.stdout.close()
            child.wait()
    return _spent() - before


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    """Print a table: log, seconds of both sides, kinds, peak memory of this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=100, help="megabytes of each log")
    size = parser.parse_args().size * 10**6
    print(f"{'log':10}{'MB':>6}{'kinds s':>10}{'pipeline s':>12}{'kinds':>8}{'peak MB':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for make in (logs.server, logs.errors, logs.varied):
            path = Path(folder) / make.__name__
            choice = random.Random(7)  # noqa: S311 - the same text each time, no secret
            written = logs.write(path, make(choice), size) / 10**6
            (seconds, kinds), theirs = ours(path), pipeline(path)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            row = f"{written:6.0f}{seconds:10.1f}{theirs:12.1f}{len(kinds):8}{peak:9}"
            print(f"{make.__name__:10}{row}", flush=True)
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
