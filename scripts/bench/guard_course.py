"""When the memory guard warns and stops on a GB10: a scripted kernel, the real sensor and guard.

    python scripts/bench/guard_course.py

For each course of memory: at what is left the guard acts, how long it then takes until nothing is
left if the server went on at its rate, and how long the server gets between TERM and KILL.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bakehouse.server.memory_guard import GIB, Bounds
from bakehouse.server.supervisor import MEMORY_GRACE_S
from bakehouse.util.text import size_text as size
from tests.support.spark import COURSES, TOTAL, play


def main() -> None:
    """Print a line a course."""
    bounds = Bounds.usual(TOTAL, unified=True)
    print(
        f"{size(TOTAL)} of unified memory: warned below {size(bounds.warn)}, stopped below "
        f"{size(bounds.stop)}, above {bounds.stall:.0%} stalls or {size(bounds.swap)}/s of swap"
    )
    print(f"{'course':<36} {'warned':>9} {'stopped':>9} {'to nothing':>11} {'TERM to KILL':>13}")
    for name, course in COURSES.items():
        with tempfile.TemporaryDirectory() as folder:
            events = play(course, Path(folder))
        left = {event.alarm.kind: f"{event.left:.2f} GiB" for event in events}
        told = [f"{left.get('warn', '-'):>9}", f"{left.get('stop', '-'):>9}"]
        if "stop" in left:
            falls = events[-1].alarm.figures["falling_per_second"] / GIB
            told.append(f"{events[-1].left / falls:>9.2f} s" if falls else f"{'-':>11}")
            told.append(f"{events[-1].alarm.patience(MEMORY_GRACE_S):>11.2f} s")
        print(f"{name:<36} {' '.join(told)}")


if __name__ == "__main__":
    main()
