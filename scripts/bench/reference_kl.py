"""Holds the suite `reference` against llama.cpp's own Kullback-Leibler divergence.

    python scripts/bench/reference_kl.py --perplexity LLAMA_PERPLEXITY --model SMOLLM2.gguf

`llama-perplexity --kl-divergence` compares all 49,152 probabilities at each place and has to load
the weights beside the server. The suite asks the server that runs for the ten likeliest tokens.
Both are given the same mutants; the suite's figures are those of `docs/gate.json`, measured by
`scripts/bench/gate.py`. Printed: both divergences in nats, and how well they agree in order
(Spearman's rank correlation).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bakehouse.probe.suites.likelihood import texts
from scripts.bench.gate_run import read_row
from scripts.bench.gate_variants import ALL, Variant
from scripts.bench.gate_weights import Weights

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "gate.json"
WINDOW = 64
"""Tokens; llama-perplexity judges the second half of each window, and wants two of them."""
_ROW = re.compile(r"^\s+\d+((?:\s+\S+\s+\u00b1\s+\S+){3})", re.M)
"""A line a window: perplexity, its ratio, and the divergence over all windows so far."""


def run(program: Path, model: Path, *more: str) -> str:
    """Run llama-perplexity with one thread; give what it printed."""
    argv = (str(program), "-m", str(model), "-c", str(WINDOW), "-t", "1", "-ngl", "0", *more)
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        sys.exit(f"llama-perplexity ended with {done.returncode}:\n{done.stderr[-800:]}")
    return done.stdout + done.stderr


def ours(variant: Variant, kept: dict[str, dict[str, object]]) -> float | None:
    """Give the divergence that the suite measured; None where there is none."""
    if variant.name not in kept or not variant.edit:
        return None
    row = read_row(kept[variant.name]["row"])  # type: ignore[arg-type]
    judged = row.suites.get("reference")
    found = judged.figures.get("divergence_nats") if judged else None
    return float(found) if found is not None else None


def theirs(program: Path, model: Path, base: Path, variant: Variant, work: Path) -> float | None:
    """Give the divergence that llama-perplexity finds for a mutant; None for not a number."""
    mutant = work / "mutant.gguf"
    shutil.copyfile(model, mutant)
    if variant.edit:
        variant.edit(Weights(mutant, "r+"))
    said = run(program, mutant, "--kl-divergence", "--kl-divergence-base", str(base))
    rows = _ROW.findall(said)
    found = float(rows[-1].split()[6]) if rows else math.nan
    return found if math.isfinite(found) else None


def ranks(values: Sequence[float]) -> np.ndarray:
    """Give the place of each value among all, from 0."""
    return np.argsort(np.argsort(np.asarray(values))).astype(float)


def main() -> None:
    """Measure both sides and print a line for each mutant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--perplexity", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    options = parser.parse_args()
    kept = json.loads(RESULTS.read_text())
    pairs = []
    with tempfile.TemporaryDirectory(prefix="reference-kl-") as folder:
        work = Path(folder)
        text, base = work / "text.txt", work / "base.kld"
        text.write_text("\n\n".join(texts().values()))
        run(options.perplexity, options.model, "-f", str(text), "--kl-divergence-base", str(base))
        print(f"{'mutant':28} {'suite':>10} {'llama-perplexity':>18}   nats")
        for variant in ALL:
            suite = ours(variant, kept)
            if suite is None or variant.flags or variant.kv != "f16":
                continue
            whole = theirs(options.perplexity, options.model, base, variant, work)
            told = "not a number" if whole is None else f"{whole:.5f}"
            print(f"{variant.name:28} {suite:10.5f} {told:>18}", flush=True)
            if whole is not None:
                pairs.append((suite, whole))
    if not pairs:
        sys.exit("docs/gate.json holds no mutant, or llama-perplexity printed no divergence")
    order = np.corrcoef(ranks([a for a, _ in pairs]), ranks([b for _, b in pairs]))[0, 1]
    print(f"{len(pairs)} mutants; rank correlation {order:.3f}")


if __name__ == "__main__":
    main()
