"""How fast several files are hashed, against `openssl dgst -sha256` run on as many cores.

    python scripts/bench/hashing.py [FOLDER]

FOLDER is where 1.6 GB are written for a while (default: the temporary folder). Both sides read the
same files out of the page cache, in turn; the shortest of several rounds counts.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bakehouse.context import Context
from bakehouse.paths import Places
from bakehouse.sources.files import known_sha256s

FILES, SIZE = 8, 200 * 2**20
ROUNDS = 5
CORES = len(os.sched_getaffinity(0))


def cpu() -> float:
    """CPU time of this process and of the children that it waited for, in seconds."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def ours(ctx: Context, paths: list[Path]) -> list[str]:
    """Hash all, whatever is remembered."""
    found = known_sha256s(ctx, paths, again=True)
    return [found[path] for path in paths]


def theirs(paths: list[Path]) -> list[str]:
    """Let openssl hash one file a process, as many processes at once as there are cores."""
    argv = ["xargs", "-0", "-n", "1", "-P", str(CORES), "openssl", "dgst", "-sha256", "-r"]
    names = b"\0".join(os.fsencode(path) for path in paths)
    done = subprocess.run(argv, input=names, capture_output=True, check=True)
    found = {os.fsdecode(line[66:]): line[:64].decode() for line in done.stdout.splitlines()}
    return [found[str(path)] for path in paths]


def main() -> None:
    """Print both rates and their ratio."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as name:
        folder = Path(name)
        block = os.urandom(2**20)
        paths = [folder / f"{i}.gguf" for i in range(FILES)]
        for i, path in enumerate(paths):
            with path.open("wb") as file:
                file.write(bytes([i]))
                for _ in range(SIZE // 2**20):
                    file.write(block)
        ctx = Context(Places(folder / "cache", folder / "state"), folder)
        sides: dict[str, Callable[[], list[str]]] = {
            "openssl": lambda: theirs(paths), "bakehouse": lambda: ours(ctx, paths),
        }  # fmt: skip
        walls: dict[str, list[float]] = {side: [] for side in sides}
        works: dict[str, list[float]] = {side: [] for side in sides}
        results = []
        for _ in range(ROUNDS):
            for side, call in sides.items():
                before, began = cpu(), time.perf_counter()
                results.append(call())
                walls[side].append(time.perf_counter() - began)
                works[side].append(cpu() - before)
    if any(result != results[0] for result in results):
        raise SystemExit("the two sides disagree")
    rate = FILES * SIZE / 1e6
    print(f"{FILES} files of {SIZE // 2**20} MiB on {CORES} cores")
    for side, times in walls.items():
        wall, work = min(times), min(works[side])
        print(
            f"{side:<10} {rate / wall:6.0f} MB/s, {min(walls['openssl']) / wall:.2f} of openssl's; "
            f"{work:.2f} s of CPU, {min(works['openssl']) / work:.2f} by that"
        )


if __name__ == "__main__":
    main()
