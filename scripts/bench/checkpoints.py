"""What reading headers and resharding cost: seconds, and bytes a second against `cp`.

    python scripts/bench/checkpoints.py [FOLDER]

FOLDER is where about 2.5 GB are written for a while (default: the temporary folder).
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bakehouse.checkpoints import reshard
from bakehouse.checkpoints.gguf import read_gguf
from bakehouse.checkpoints.reader import FileSource
from bakehouse.checkpoints.reshard import cut, read_source
from bakehouse.checkpoints.safetensors import read_safetensors
from bakehouse.progress import Silent

SIZE = 800 * 2**20
"""Bytes of the checkpoint that is resharded."""
ROUNDS = 5


def best(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The shortest of several runs, in seconds."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def cpu() -> float:
    """CPU time of this process and of the children that it waited for, in seconds."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _work(call: Callable[[], object]) -> float:
    """CPU time of one run, in seconds."""
    before = cpu()
    call()
    return cpu() - before


def safetensors_file(path: Path, count: int, each: int) -> Path:
    """Write `count` tensors of `each` bytes."""
    entries = {
        f"model.layers.{i}.weight": {
            "dtype": "U8", "shape": [each], "data_offsets": [i * each, (i + 1) * each],
        }
        for i in range(count)
    }  # fmt: skip
    head = json.dumps(entries).encode()
    block = os.urandom(min(each, 2**20))
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for _ in range(count):
            left = each
            while left:
                left -= file.write(block[:left])
    return path


def gguf_file(path: Path, count: int) -> Path:
    """Write a GGUF of `count` tensors of one element."""
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, count, 0))
    for i in range(count):
        name = f"blk.{i}.weight".encode()
        head += struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 1, 0, 32 * i)
    path.write_bytes(bytes(head) + bytes(-len(head) % 32 + 32 * count))
    return path


def headers(folder: Path) -> None:
    """Header reading, for 100 and for 50,000 tensors."""
    for count in (100, 50_000):
        for name, path, read in (
            ("safetensors", safetensors_file(folder / "h.safetensors", count, 1), read_safetensors),
            ("gguf", gguf_file(folder / "h.gguf", count), read_gguf),
        ):

            def once(path: Path = path, read: Callable[[FileSource], object] = read) -> None:
                with FileSource(path) as source:
                    read(source)

            wall, work = best(once), min(_work(once) for _ in range(ROUNDS))
            print(
                f"header of {count:>6} tensors, {name:<11} {wall * 1e3:8.1f} ms, "
                f"{work * 1e3:.1f} ms of CPU"
            )


def write_shards(folder: Path, part: Path) -> None:
    """Resharding without its verification."""
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    source = read_source(folder)
    plan = cut(source.tensors, 100 * 2**20, {}, {})
    with ExitStack() as stack, Silent().bar("") as bar:
        files = [stack.enter_context(open(path, "rb")) for path in source.files]
        reshard._write(plan, part, [file.fileno() for file in files], set(), bar)  # noqa: SLF001


def against_cp(folder: Path) -> None:
    """Resharding against `cp` of the same bytes on the same disk, in turn."""
    source, target = folder / "in", folder / "out"
    source.mkdir()
    file = safetensors_file(source / "model.safetensors", 200, SIZE // 200)

    def copy() -> None:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        subprocess.run(["cp", "--reflink=never", str(file), str(target)], check=True)

    walls: dict[str, list[float]] = {"cp": [], "reshard": []}
    works: dict[str, list[float]] = {"cp": [], "reshard": []}
    for _ in range(ROUNDS):
        for name, call in (("cp", copy), ("reshard", lambda: write_shards(source, target))):
            shutil.rmtree(target, ignore_errors=True)
            started = cpu()
            walls[name].append(best(call, 1))
            works[name].append(cpu() - started)
    rate = file.stat().st_size / 1e6
    for name, times in walls.items():
        wall, work = min(times), min(works[name])
        print(
            f"{name:<8} {rate / wall:6.0f} MB/s, {min(walls['cp']) / wall:.2f} of cp's throughput;"
            f" {work:.2f} s of CPU, {min(works['cp']) / work:.2f} by that"
        )
    shutil.rmtree(target)
    spent = best(lambda: reshard.reshard(source, target, 100 * 2**20, Silent()), 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"reshard  {rate / spent:6.0f} MB/s with verification by sha256 and fsync")
    print(f"peak memory of all of this {peak:.0f} MiB")


def main() -> None:
    """Print all figures."""
    base = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(dir=base) as folder:
        headers(Path(folder))
        against_cp(Path(folder))


if __name__ == "__main__":
    main()
