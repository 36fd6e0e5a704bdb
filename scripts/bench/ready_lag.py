"""How long after the engine's first 200 `serve` says READY, the probe's own requests left out.

    .venv/bin/python scripts/bench/ready_lag.py [RECIPE] [PORT]

An observer of its own asks `/health` every two milliseconds while `invoke serve` runs.
"""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INVOKE = str(Path(sys.executable).with_name("invoke"))
RECIPE = sys.argv[1] if len(sys.argv) > 1 else "smollm2-cpu"
PORT = int(sys.argv[2]) if len(sys.argv) > 2 else 18080
ROUNDS = 7
POLL_S = 0.002


def first_ok(found: list[float], until: threading.Event) -> None:
    """Note when `/health` first answers 200."""
    while not until.is_set():
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=1)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                found.append(time.monotonic())
                return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(POLL_S)


def once() -> tuple[float, float, float]:
    """Serve; give seconds from the first 200 to READY and to the end of the process.

    And those that the probe's suites took in between.
    """
    found: list[float] = []
    until = threading.Event()
    watcher = threading.Thread(target=first_ok, args=(found, until))
    argv = [INVOKE, "serve", "--recipe", RECIPE, "--port", str(PORT), "--json"]
    watcher.start()
    with subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as serve:
        said = serve.stdout.read(1) if serve.stdout else b""
        ready = time.monotonic()
        document = json.loads(said + (serve.stdout.read() if serve.stdout else b"{}"))
    ended = time.monotonic()
    until.set()
    watcher.join()
    subprocess.run(
        [INVOKE, "stop", "--recipe", RECIPE], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    if not document["ok"] or not found:
        sys.exit(f"the server did not come up: {document['error']}")
    record = json.loads(Path(document["result"]["record"]).read_text())
    asked = sum(suite["cost"]["seconds"] for suite in record["suites"])
    return ready - found[0], ended - found[0], asked


def main() -> None:
    """Print every round, and the median of what is left without the suites' own requests."""
    rest, over = [], []
    for number in range(1, ROUNDS + 1):
        ready, ended, asked = once()
        rest.append(ready - asked)
        over.append(ended - asked)
        print(f"round {number}: READY {ready:.3f} s after the first 200, suites {asked:.3f} s,"
              f" rest {rest[-1]:.3f} s; {over[-1]:.3f} s to the end of the process")  # fmt: skip
    print(f"median of the rest: {statistics.median(rest):.3f} s; to the end of the process"
          f" {statistics.median(over):.3f} s")  # fmt: skip


if __name__ == "__main__":
    main()
