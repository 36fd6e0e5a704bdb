"""Serves one variant and measures it with a ruler that the gate does not know.

The ruler is the mean negative log-likelihood of texts of its own, so that whether a mutant is worse
than a harmless variant does not depend on what is judged.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bakehouse.probe.client import Client
from bakehouse.probe.logprobs import score_text
from bakehouse.system.http import Http, Unreachable
from bakehouse.system.process import environment

RULER = (
    """Bread is made from flour, water, salt and yeast. The dough is kneaded, left to rise in a warm
place for an hour or two, shaped, and baked in a hot oven until the crust is brown.""",
    """In 1969 two astronauts landed on the Moon while a third waited in orbit above them. They
collected rocks, planted a flag and returned safely to Earth after eight days.""",
    "for i in range(10):\n    if i % 2 == 0:\n        print(i)\n",
)
"""About 100 tokens; English prose and a little code, none of it a text of the gate's."""

READY_S = 90.0
STOP_S = 10.0


class NotServed(Exception):
    """The server did not come up, or ended; says how."""


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def served(http: Http, binary: Path, model: Path, flags: Sequence[str], log: Path) -> Iterator[str]:
    """Serve a model on loopback and give the URL; the server has ended afterwards.

    One thread and one slot unless `flags` say otherwise (the last of two flags wins).
    """
    port = _free_port()
    argv = (
        str(binary), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "--metrics",
        "-np", "1", "-c", "2048", "-t", "1", "-tb", "1", *flags,
    )  # fmt: skip
    with log.open("wb") as out:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            env=environment({"OMP_WAIT_POLICY": "passive"}), start_new_session=True,
        )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(http, url, child)
        yield url
    finally:
        _end(child)


def _wait(http: Http, url: str, child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if (code := child.poll()) is not None:
            raise NotServed(f"the server ended with {code}")
        try:
            if http.ask("GET", f"{url}/health", timeout=2).status == 200:
                return
        except Unreachable:
            pass
        time.sleep(0.1)
    raise NotServed(f"not ready after {READY_S:.0f} s")


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the server and whatever it started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            return
        os.killpg(child.pid, how)
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            continue


def ruler(talk: Client) -> tuple[float | None, int]:
    """Give the negative log-likelihood of the ruler's texts in nats, and of how many tokens.

    None where a probability is not a number. Raises NotServed where there is no answer of use.
    """
    nats: list[float] = []
    for text in RULER:
        scored = score_text(talk, text)
        if scored.trouble == "numbers":
            return None, 0
        if scored.trouble:
            raise NotServed(scored.problem)
        nats += (-number for number in scored.logprobs)
    return math.fsum(nats), len(nats)


def decoded(http: Http, url: str) -> int:
    """Tokens that the server has decoded so far, from its own counter."""
    for line in http.ask("GET", f"{url}/metrics", timeout=10).text.splitlines():
        if line.startswith("llamacpp:tokens_predicted_total "):
            return round(float(line.split()[1]))
    raise NotServed("no counter of decoded tokens in /metrics")
