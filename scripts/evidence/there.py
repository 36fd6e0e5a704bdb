"""Work on a machine without network: begun by a delivery, waited for, its evidence copied."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.evidence.carry import receive

ROOT = Path(__file__).resolve().parents[2]
WORK = Path(os.environ.get("BAKEHOUSE_EVIDENCE_WORK", "/tmp/bakehouse-evidence"))  # noqa: S108
DONE = WORK / "out" / "finished"
TREE = (
    "bakehouse", "docker", "recipes", "scripts", "tasks.py", "pyproject.toml", "constraints.txt",
)  # fmt: skip
"""What the work needs of this repository; the rest need not travel."""


@dataclass(frozen=True)
class Job:
    """What is done there."""

    name: str
    """The program in `scripts/evidence` that people call."""
    module: str
    """Does the work."""
    markdown: Callable[[Mapping[str, Any]], str]
    """Writes its evidence for people."""


def deliver(job: Job, parts: Path, out: Path, seconds: float) -> int:
    """Take files in, see that the work has begun, wait for it, give what there is."""
    started = time.monotonic()
    receive(parts, WORK / "in")
    if not (WORK / "begun").exists():
        begin(job)
    return collect(job, out, seconds - (time.monotonic() - started))


def begin(job: Job) -> None:
    """Start the work in a session of its own, in a copy of this tree that later calls leave be."""
    (WORK / "out").mkdir(parents=True, exist_ok=True)
    for name in TREE:
        source, target = ROOT / name, WORK / "repository" / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=ignored)
        else:
            shutil.copyfile(source, target)
    if wheels := sorted(map(str, (ROOT / ".whl").glob("*.whl"))):
        flags = ("-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade")
        subprocess.run(
            [sys.executable, "-m", "pip", "install", *flags, "--target", WORK / "site", *wheels],
            check=True,
        )
    with (WORK / "out" / "work.log").open("ab") as log:
        path = os.pathsep.join(filter(None, [str(WORK / "site"), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
        worker = subprocess.Popen(
            [sys.executable, "-m", job.module, WORK],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
            start_new_session=True, cwd=WORK / "repository",
        )  # fmt: skip
    (WORK / "begun").write_text(str(worker.pid))


def collect(job: Job, out: Path, seconds: float) -> int:
    """Wait for the end of the work, at most so long; copy the evidence in any case."""
    deadline = time.monotonic() + seconds
    while not DONE.exists() and running() and time.monotonic() < deadline:
        time.sleep(0.5)
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted((WORK / "out").glob("*.*")):
        if file.is_file():
            shutil.copyfile(file, out / file.name)
    with tarfile.open(out / "records.tar.gz", "w:gz") as pack:
        found = list(WORK.glob("out/logs/**/*"))
        for home in (WORK / "home", WORK / "home-elsewhere" / "deeper"):
            found += [*home.glob("state/runs/**/*"), *home.glob("cache/builds/*/build.json")]
        for file in found:
            if file.is_file() and file.stat().st_size < 2**23:
                pack.add(file, file.relative_to(WORK))
    try:
        evidence = json.loads((WORK / "out" / "evidence.json").read_text())
        (out / "evidence.md").write_text(job.markdown(evidence))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        traceback.print_exc()
    log = (WORK / "out" / "work.log").read_text(errors="replace")
    print(log[-9000:])
    state = "finished" if DONE.exists() else "still at work" if running() else "ended too early"
    print(f"== {state}")
    return 0 if DONE.exists() and DONE.read_text() == "0" else 1


def running() -> bool:
    """Whether the work is under way."""
    try:
        pid = (WORK / "begun").read_text()
        state = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def main(job: Job, prepare: Callable[[Path], None], arguments: list[str]) -> int:
    """Do what is asked for."""
    match arguments:
        case ["prepare", folder]:
            prepare(Path(folder).resolve())
        case ["deliver", parts, out, seconds]:
            return deliver(job, Path(parts), Path(out), float(seconds))
        case ["collect", out, seconds]:
            return collect(job, Path(out), float(seconds))
        case ["report", evidence]:
            print(job.markdown(json.loads(Path(evidence).read_text())))
        case _:
            print(f"see the head of scripts/evidence/{job.name}", file=sys.stderr)
            return 2
    return 0
