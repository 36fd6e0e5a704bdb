"""A guard that is killed: nothing of what ran below it goes on, and the command has failed."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from bakehouse.system.child_guard import descendants
from bakehouse.system.process import GUARD, Finished, Processes, end_orphans, environment

pytestmark = pytest.mark.integration

TREE = """
import subprocess, sys, time
quiet = sys.argv[1] == "quiet"
out = subprocess.DEVNULL if quiet else None
below = [sys.executable, "-S", "-c", "import time; time.sleep(120)"]
subprocess.Popen(["sh", "-c", '"$@"; true', "sh", *below], stdout=out, stderr=out)
print("started", flush=True)
time.sleep(120)
"""


def guards() -> list[int]:
    """Guards that run below this process."""
    found = []
    for pid in descendants(os.getpid()):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if GUARD.encode() in command:
            found.append(pid)
    return found


@pytest.mark.parametrize("output", ["quiet", "holds the pipe"])
def test_orphans_of_a_killed_guard_are_ended(output: str) -> None:
    done: list[Finished] = []
    started = threading.Event()

    def work() -> None:
        argv = (sys.executable, "-S", "-c", TREE, output)
        run = Processes().run
        done.append(run(argv, env=environment(), on_line=lambda _: started.set(), timeout=60))

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(20)
    (guard,) = guards()
    deadline = time.monotonic() + 10
    while len(below := descendants(guard)) < 3:  # the child, a shell, what the shell runs
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(guard, signal.SIGKILL)
    began = time.monotonic()
    thread.join(20)
    assert done
    assert done[0].signal == "SIGKILL"
    assert time.monotonic() - began < 10
    assert not [pid for pid in below if Path(f"/proc/{pid}/exe").exists()]
    assert not set(below) & set(descendants(os.getpid()))


def test_orphans_of_one_command_do_not_affect_another() -> None:
    """Two at once: one is ended by a signal of its own, the other goes on."""
    done: list[Finished] = []
    argv = (sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(2)")
    up = threading.Event()

    def work() -> None:
        run = Processes().run
        done.append(run(argv, env=environment(), on_line=lambda _: up.set(), timeout=60))

    thread = threading.Thread(target=work)
    thread.start()
    assert up.wait(20)
    ended = Processes().run(("sh", "-c", "kill -9 $$"), env=environment(), timeout=60)
    assert ended.signal == "SIGKILL"
    end_orphans()
    thread.join(20)
    assert done[0].ok
