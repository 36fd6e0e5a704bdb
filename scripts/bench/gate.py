"""Measures the gate: mutants of a real model and harmless variants of it, each served and judged.

    python scripts/bench/gate.py --server LLAMA_SERVER --model SMOLLM2.gguf [--only PREFIX ...]

LLAMA_SERVER and the model are those of the recipe `smollm2-cpu`. One server at a time, one thread;
a variant takes about 150 MB of disk while it is served, and some seconds. What was measured is
kept in a JSON file beside the table, by a digest over everything that could change it, so that a
run that was interrupted goes on where it ended. `llama-quantize` is used where it lies beside
the server. Without `--only`, `docs/gate.md` is written again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.gate_run import Bench, NoTool
from scripts.bench.gate_table import document, line
from scripts.bench.gate_variants import ALL, Variant

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "gate.json"
TABLE = ROOT / "docs" / "gate.md"


def chosen(only: list[str]) -> list[Variant]:
    """Give the variants whose names begin with one of the words; all where there is none."""
    return [v for v in ALL if not only or v.name.startswith(tuple(only))]


def main() -> None:
    """Measure what is not measured yet; print a line as each is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gate-") as work:
        bench = Bench(options.server, options.model, Path(work), options.results)
        wanted = chosen(options.only)
        for variant in wanted:
            try:
                row = bench.measure(variant)
            except NoTool as error:
                print(f"{variant.name:24} left out: {error}", flush=True)
                continue
            print(line(row), flush=True)
    print(f"{time.monotonic() - began:.0f} s in all")
    if not options.only:
        TABLE.write_text(document([kept for v in ALL if (kept := bench.kept(v))]))
        print(f"written: {TABLE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
