"""What a cold `invoke build` adds to plain CMake with the same flags; what a repeated one costs.

    .venv/bin/python scripts/bench/build_cost.py [RECIPE]

Needs two full builds, one after the other, on this machine, ours with an empty cache. CPU seconds
count whole process trees, a compiler cache's misses on our side included.
"""

from __future__ import annotations

import io
import json
import os
import resource
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECIPE = sys.argv[1] if len(sys.argv) > 1 else "smollm2-cpu"
OWN = """\
import json, resource, sys
from bakehouse.cli import main
code = main("build", {"recipe": sys.argv[1]})
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"code": code, "own": used.ru_utime + used.ru_stime}), file=sys.stderr)
"""
"""Runs the task in this interpreter and tells what CPU time the interpreter itself took."""


@dataclass(frozen=True)
class Cost:
    """Wall and CPU seconds of a command and everything below it."""

    wall: float
    cpu: float
    err: str


def timed(argv: list[str], environment: dict[str, str], cwd: Path) -> Cost:
    """Run a command to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run(
        argv, env=environment, cwd=cwd, capture_output=True, text=True, check=False
    )
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{shlex.join(argv)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(wall, cpu, done.stderr)


def planned(environment: dict[str, str]) -> dict[str, Any]:
    """Give the build's steps as `invoke plan` prints them."""
    invoke = str(Path(sys.executable).with_name("invoke"))
    argv = [invoke, "plan", "--recipe", RECIPE, "--json"]
    done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, check=True)
    steps = json.loads(done.stdout)["result"]["build"]["steps"]
    return {step["id"]: step for step in steps}


def plain(folder: Path, environment: dict[str, str], source: Path) -> Cost:
    """Configure and build as a person would, with the flags of the plan."""
    steps = planned(environment)
    work = steps["configure"]["cwd"]
    given = [a for a in steps["configure"]["argv"] if "_LAUNCHER=" not in a and "GIT_E" not in a]
    configure = [a.replace(f"{work}/src", str(source)).replace(work, str(folder)) for a in given]
    targets = [a for a in steps["compile"]["argv"][1:] if not a.startswith(("-", "/"))]
    jobs = next(t for t in targets if t.isdigit())
    build = [given[0], "--build", str(folder / "build"), "-j", jobs, "--target"]
    parts = [
        timed(configure, environment, folder),
        timed([*build, *(t for t in targets if not t.isdigit())], environment, folder),
    ]
    return Cost(sum(p.wall for p in parts), sum(p.cpu for p in parts), "")


def write_source(home: Path, target: Path) -> None:
    """Write the pinned tree that the build used, straight from its repository."""
    lock = json.loads((ROOT / "recipes" / f"{RECIPE}.lock.json").read_text())
    tree = lock["source_tree"] or lock["source"]["tree"]
    holder = next(
        repository
        for repository in sorted((home / "cache" / "git").glob("*.git"))
        if not subprocess.run(
            ["git", "--git-dir", str(repository), "cat-file", "-e", tree],
            check=False, stderr=subprocess.DEVNULL,
        ).returncode
    )  # fmt: skip
    packed = subprocess.run(
        ["git", "--git-dir", str(holder), "archive", tree], check=True, stdout=subprocess.PIPE
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(target, filter="data")


def main() -> None:
    """Build with Bakehouse, again with Bakehouse, then by hand; print all three."""
    invoke = str(Path(sys.executable).with_name("invoke"))
    with tempfile.TemporaryDirectory(prefix="bakehouse-bench-") as name:
        folder = Path(name)
        environment = {**os.environ, "BAKEHOUSE_HOME": str(folder / "home")}
        timed([invoke, "fetch", "--recipe", RECIPE], environment, ROOT)
        ours = timed([sys.executable, "-c", OWN, RECIPE], environment, ROOT)
        own = json.loads(ours.err.strip().splitlines()[-1])["own"]
        again = timed([invoke, "build", "--recipe", RECIPE], environment, ROOT)
        write_source(folder / "home", folder / "source")
        by_hand = plain(folder, environment, folder / "source")
    print(f"{'plain CMake':<24} {by_hand.wall:8.1f} s wall  {by_hand.cpu:8.1f} s CPU")
    print(f"{'invoke build, cold':<24} {ours.wall:8.1f} s wall  {ours.cpu:8.1f} s CPU")
    print(f"{'invoke build, repeated':<24} {again.wall:8.2f} s wall  {again.cpu:8.2f} s CPU")
    print(f"our own process: {own:.2f} s CPU, {100 * own / by_hand.cpu:.2f}% of the build's")
    print(f"whole tree against plain CMake: {ours.cpu / by_hand.cpu:.3f} of the CPU time")


if __name__ == "__main__":
    main()
