"""Start-up cost: `invoke --list` against a bare one-task file, and `invoke plan`, offline."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INVOKE = str(Path(sys.executable).with_name("invoke"))
ROUNDS = 15

BARE = """\
from invoke import task


@task
def hello(context):
    "Say hello."
"""


def seconds(argv: list[str], cwd: Path) -> float:
    """Wall time of one run; its output is thrown away."""
    started = time.perf_counter()
    subprocess.run(argv, cwd=cwd, check=True, capture_output=True)
    return time.perf_counter() - started


def measure(recipe: str) -> dict[str, list[float]]:
    """Return the seconds of every run, by command; commands alternate, so that load hits all."""
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder)
        (bare / "tasks.py").write_text(BARE)
        runs = {
            "bare invoke --list": ([INVOKE, "--list"], bare),
            "invoke --list": ([INVOKE, "--list"], ROOT),
            f"invoke plan --recipe {recipe}": ([INVOKE, "plan", "--recipe", recipe], ROOT),
        }
        for argv, cwd in runs.values():
            seconds(argv, cwd)
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS):
            for name, (argv, cwd) in runs.items():
                samples[name].append(seconds(argv, cwd))
    return samples


def main() -> None:
    """Print medians and the ratio."""
    samples = measure(sys.argv[1] if len(sys.argv) > 1 else "smollm2-cpu")
    medians = {name: statistics.median(values) for name, values in samples.items()}
    for name, median in medians.items():
        spread = f"{min(samples[name]):.3f} to {max(samples[name]):.3f}"
        print(f"{name:<40} {median:.3f} s  ({spread}, {ROUNDS} runs)")
    first, second, *_ = medians.values()
    print(f"invoke --list against bare: {second / first:.2f}")


if __name__ == "__main__":
    main()
