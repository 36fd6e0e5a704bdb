"""What steps on a GPU machine have in common: commands that are run, and evidence that is kept."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
MACHINE = {
    "gpu": "nvidia-smi --query-gpu=name,compute_cap,driver_version,memory.total --format=csv",
    "nvcc": "nvcc --version",
    "kernel": "uname -srm",
    "system": "cat /etc/os-release",
    "gcc": "gcc --version",
    "cmake": "cmake --version",
    "ninja": "ninja --version",
    "git": "git --version",
    "strip": "strip --version",
    "unshare": "unshare --version",
    "memory": "free -m",
    "disk": "df -h /tmp",
    "cuda libraries": 'sh -c \'ldconfig -p | grep -E "libcuda|libcublas"; ls -d /usr/local/cuda*; '
    "ls /usr/local/cuda/lib64/stubs /usr/local/nvidia/lib64 2>&1 | head -40'",
}


class Steps:
    """Steps over one folder; what they see is written as soon as it is there."""

    def __init__(self, work: Path, url: str, recipe: str) -> None:
        self.work = work
        self.evidence: dict[str, Any] = {"recipe": recipe}
        self.lock = threading.Lock()
        extra = [str(work / "site")] if (work / "site").is_dir() else []
        path = [p for p in ("/usr/local/cuda/bin", "/usr/local/nvidia/bin") if os.path.isdir(p)]
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([os.environ.get("PATH", os.defpath), *path]),
            "BAKEHOUSE_HOME": str(work / "home"),
            "PIP_INDEX_URL": url,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *extra]),
        }

    def keep(self, step: str, said: Any) -> Any:
        """Add to the evidence and write all of it."""
        path = self.work / "out" / "evidence.json"
        with self.lock:
            self.evidence[step] = said
            path.with_suffix(".part").write_text(json.dumps(self.evidence, indent=1))
            path.with_suffix(".part").replace(path)
        return said

    def run(
        self, *argv: str, cwd: Path = REPOSITORY, over: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Run one command to its end; give its exit code, its words, its wall and CPU seconds."""
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        try:
            done = subprocess.run(
                argv, cwd=cwd, env={**self.environment, **(over or {})}, capture_output=True,
                text=True, errors="replace", check=False,
            )  # fmt: skip
        except OSError as error:
            print(f"== {argv[0]}: {error}")
            return {"exit": 127, "seconds": 0.0, "cpu_seconds": 0.0, "out": "", "err": str(error)}
        seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(
            f"== {' '.join(argv)[:200]}: exit {done.returncode}, {seconds:.1f} s, CPU {cpu:.0f} s"
        )
        if done.returncode:
            print(done.stdout[-1500:], done.stderr[-3000:], sep="\n")
        return {
            "exit": done.returncode, "seconds": round(seconds, 3), "cpu_seconds": round(cpu, 1),
            "out": done.stdout, "err": done.stderr[-20000:],
        }  # fmt: skip

    def task(
        self, name: str, *flags: str, over: Mapping[str, str] | None = None, limit: int = 0
    ) -> dict[str, Any]:
        """Run one of Bakehouse's tasks as a user would; its JSON document takes `out`'s place."""
        argv = (sys.executable, "-m", "invoke", name, *flags, "--json")
        said = self.run(*(("timeout", str(limit)) if limit else ()), *argv, over=over)
        try:
            said["document"] = json.loads(said["out"])
            del said["out"]
        except ValueError:
            said["document"] = None
        return said

    def machine(self) -> None:
        """Ask the machine what it is."""
        said = {}
        for name, command in MACHINE.items():
            argv = ["sh", "-c", command[7:-1]] if command.startswith("sh -c") else command.split()
            try:
                done = subprocess.run(
                    argv, env=self.environment, capture_output=True, text=True, timeout=60,
                    check=False,
                )  # fmt: skip
                said[name] = (done.stdout + done.stderr).strip()
            except (OSError, subprocess.SubprocessError) as error:
                said[name] = str(error)
        said["cpus"] = str(len(os.sched_getaffinity(0)))
        said["LD_LIBRARY_PATH"] = os.environ.get("LD_LIBRARY_PATH", "")
        self.keep("machine", said)
