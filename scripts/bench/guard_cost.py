"""What the memory guard costs: share of a core that a keeper takes while its server idles.

    python scripts/bench/guard_cost.py [SECONDS]

The keeper samples memory, swap, pressure and the kernel's messages, and reads the server's log.
Both its rates are measured: where there is plenty of memory, and near the bounds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bakehouse.context import Context
from bakehouse.host import read_host
from bakehouse.paths import Places
from bakehouse.server.memory_guard import FAST_S, SLOW_S, Bounds
from bakehouse.server.session import start_or_reuse
from bakehouse.server.status import get_status, stop
from tests.support.serving import Notes, agree, order

MIB = 2**20


def spent(pid: int) -> float:
    """Time that a process was on a core, in seconds; to the nanosecond, not in clock ticks."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def measure(folder: Path, name: str, bounds: Bounds | None, every: float, seconds: float) -> None:
    """Run a keeper with a server that does nothing; print what it took."""
    ctx = Context(Places(folder / "cache", folder / "state"), folder)
    wanted = order(ctx, name="idle", guard=bounds)
    run = folder / "run"
    run.mkdir(exist_ok=True)
    start_or_reuse(ctx, wanted, agree, Notes(run))
    seen = get_status(wanted.folder)
    keeper = seen.processes[0].pid
    try:
        time.sleep(1)
        before, began = spent(keeper), time.monotonic()
        time.sleep(seconds)
        share = (spent(keeper) - before) / (time.monotonic() - began)
        status = Path(f"/proc/{keeper}/status").read_text()
        held = next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]
    finally:
        stop(wanted.folder)
    rate = f"{1 / every:.0f} Hz" if bounds else "no guard"
    print(f"{name:<18} {rate:>8}  {share:7.2%} of a core  {int(held) / 1024:5.1f} MiB resident")


def main() -> None:
    """Print one line for each rate."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    far = Bounds(64 * MIB, 32 * MIB, 1.0, 0)
    near = Bounds(read_host().memory_available * 3 // 4, 32 * MIB, 1.0, 0)
    with tempfile.TemporaryDirectory() as folder:
        for name, bounds, every in (
            ("no guard", None, SLOW_S), ("plenty of memory", far, SLOW_S),
            ("near the bounds", near, FAST_S),
        ):  # fmt: skip
            measure(Path(folder), name, bounds, every, seconds)


if __name__ == "__main__":
    main()
