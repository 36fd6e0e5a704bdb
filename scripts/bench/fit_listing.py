"""What `fit` costs on a listing of 60 files, besides the network.

    python scripts/bench/fit_listing.py

The hub is played by this process, its listing over loopback: 15 quantisations of 4 files each, of
50 to 300 GB, with real headers of a mixture of experts with 2,000 tensors and a vocabulary of
150,000.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bakehouse.commands import fit
from bakehouse.context import Context
from bakehouse.paths import Places
from bakehouse.system.http import Http, Reply
from tests.support.checkpoints import gguf_bytes, llama_metadata
from tests.support.filehost import serve_files

QUANTS, SPLITS = 15, 4
TENSORS = 500
"""In each file."""
COMMIT = "5" * 40
ROUNDS = 5


def heads() -> list[bytes]:
    """The headers of one model's splits."""
    made = []
    for number in range(SPLITS):
        own = {"split.no": number, "split.count": SPLITS, "split.tensors.count": SPLITS * TENSORS}
        if not number:
            own |= llama_metadata(llama__expert_count=288, llama__expert_used_count=8,
                                  tokenizer__ggml__tokens=["x" * 9] * 150_000)  # fmt: skip
        rows = [(f"blk.{i % 48}.{number}.{i}_exps.weight", (32,), 8, b"") for i in range(TENSORS)]
        made.append(gguf_bytes(own, rows, offsets=[64 * i for i in range(TENSORS)]))
    return made


@dataclass
class Played(Http):
    """The hub's files: their heads by range."""

    heads: list[bytes]
    files: dict[str, int] = field(default_factory=dict)
    asked: int = 0

    def ask(
        self,
        method: str,  # noqa: ARG002 - the port's own
        url: str,
        *,
        json: Any = None,  # noqa: ARG002
        headers: Mapping[str, str] | None = None,
        timeout: float = 30.0,  # noqa: ARG002
        max_bytes: int = 8 * 2**20,  # noqa: ARG002
    ) -> Reply:
        """Answer at once."""
        self.asked += 1
        head = self.heads[int(url.rpartition("-of-")[0][-5:]) - 1]
        first, _, last = (headers or {})["Range"].removeprefix("bytes=").partition("-")
        body = head[int(first) : int(last) + 1].ljust(int(last) + 1 - int(first), b"\0")
        return Reply(206, {}, body, 0.0)


def main() -> None:
    """Print the median and the spread."""
    hub = Played(heads())
    for quant in range(QUANTS):
        for number in range(1, SPLITS + 1):
            name = f"q{quant}/m-Q{quant % 8 + 1}_{quant // 8}-{number:05d}-of-{SPLITS:05d}.gguf"
            hub.files[name] = (50 + 17 * quant) * 10**9 // SPLITS
    rows = [{"rfilename": name, "size": size} for name, size in hub.files.items()]
    listing = json.dumps({"id": "o/m", "sha": COMMIT, "siblings": rows}).encode()
    place = Path("/nowhere")
    times = []
    with serve_files() as host:
        host.pages["/api/models/o/m/revision/main"] = lambda handler: handler.answer(200, listing)
        ctx = Context(Places(place, place), place, environment={"HF_ENDPOINT": host.url}, http=hub)
        for _ in range(ROUNDS):
            started = time.perf_counter()
            outcome = fit.run(ctx, fit.Options(hub="o/m", host="gb10", context="32768"))
            times.append(time.perf_counter() - started)
    rungs = len(outcome.result["rungs"])
    print(
        f"fit on {len(hub.files)} files, {rungs} quantisations, headers of {SPLITS * TENSORS} "
        f"tensors: {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}, "
        f"{ROUNDS} runs, {hub.asked // ROUNDS} requests each)"
    )


if __name__ == "__main__":
    main()
