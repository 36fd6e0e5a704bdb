"""An engine on a machine that has none, and base images out of the machine's own root file system.

What the machine lacks of NVIDIA's images is nothing: it was made from one. What it has beside them
(its driver, profilers, other people's packages) is left out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOTS = ("usr", "etc", "bin", "sbin", "lib", "lib64")
SITE = "usr/local/lib/python3.12/dist-packages"
TOOLKIT = "usr/local/cuda-13.0"
LIBRARIES = f"{TOOLKIT}/targets/x86_64-linux/lib"
DRIVER = "/usr/local/nvidia"
TORCH = "bakehouse-evidence/torch:2.11"
PATHS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LOADER = f"ENV LD_LIBRARY_PATH={DRIVER}/lib:{DRIVER}/lib64"
"""As NVIDIA's images have it."""
NOT_OURS = (
    "usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/src",
    "usr/local/nvidia", "usr/lib/libcuda*", "usr/lib/libnvidia*", "usr/lib/modules",
    "usr/lib/firmware", *(f"usr/lib/x86_64-linux-gnu/{n}" for n in
    ("libcudnn*", "libnccl*", "libnvidia*", "libcuda*", "libcutensor*")),
)  # fmt: skip
"""Documents, the driver, which the engine brings in, and libraries that nothing here loads."""
NO_TOOLS = (
    *(f"{TOOLKIT}/{n}" for n in ("nsight*", "compute-sanitizer", "extras", "gds*", "doc", "share",
    "libnvvp", "tools", "compat")),
    *(f"{LIBRARIES}/lib{n}*" for n in ("cufft", "cusparse", "cusolver", "npp", "curand", "nvjpeg",
    "cufile")),
    *(f"{LIBRARIES}/lib{n}*_static.a" for n in ("cublas", "nvrtc", "nvptxcompiler", "nvJitLink",
    "nvfatbin")),
)  # fmt: skip
NO_COMPILERS = (
    "usr/include", "usr/lib/gcc", f"{TOOLKIT}/bin", f"{TOOLKIT}/nvvm", f"{TOOLKIT}/include",
    f"{TOOLKIT}/targets/x86_64-linux/include", f"{LIBRARIES}/stubs", f"{LIBRARIES}/*.a",
)  # fmt: skip
OTHERS = Path(__file__).with_name("machine-packages.txt")
"""What of the machine's Python packages vLLM imports, and what those need."""


@dataclass(frozen=True)
class StandIns:
    """Where things lie on the machine, or what stands in for them in a rehearsal."""

    packages: str = "/opt/torch/.venv/lib/python3.12/site-packages"
    toolkit: str = f"/{TOOLKIT}"
    gpu: bool = True
    vllm_root: str = ""
    """A whole root file system with vLLM, in place of one that is made here."""
    llama: str = "smollm2-cuda-image"
    """The recipe that is served; another one where none can be compiled."""
    build_s: int = 600
    dockerd: tuple[str, ...] = ()
    """More options of the engine."""

    @staticmethod
    def given() -> StandIns:
        """What the environment names."""
        path = os.environ.get("BAKEHOUSE_EVIDENCE_STAND_INS")
        return StandIns(**json.loads(Path(path).read_text())) if path else StandIns()


@dataclass(frozen=True)
class Engine:
    """An engine that was started here."""

    host: str
    programs: str
    """The folder to put on PATH; empty where the machine has its own."""

    def environment(self, base: Mapping[str, str], work: Path) -> dict[str, str]:
        """What leads to it."""
        path = os.pathsep.join(filter(None, (self.programs, base["PATH"])))
        return {**base, "PATH": path, "DOCKER_HOST": self.host, "DOCKER_CONFIG": str(work / "cli")}


def start(work: Path, bundle: Path | None, more: Iterable[str]) -> Engine:
    """Start an engine in a session of its own, which outlives us. Raises RuntimeError."""
    folder = work / "docker"
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    programs = ""
    if bundle:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["tar", "-C", folder, "-xf", bundle], check=True)
        for name in ("iptables", "iptables-save", "iptables-restore", "ip6tables"):
            (folder / "bin" / name).unlink(missing_ok=True)
            (folder / "bin" / name).symlink_to("xtables-nft-multi")
        (folder / "bin" / "docker-init").unlink(missing_ok=True)
        (folder / "bin" / "docker-init").symlink_to("tini-static")
        programs = str(folder / "bin")
        environment |= {
            "PATH": f"{programs}:{environment['PATH']}", "LD_LIBRARY_PATH": str(folder / "lib"),
            "XTABLES_LIBDIR": str(folder / "lib" / "xtables"),
        }  # fmt: skip
    run = work / "engine"
    (run / "root").mkdir(parents=True, exist_ok=True)
    (run / "daemon.json").write_text('{"features": {"cdi": true}}' if bundle else "{}")
    host = f"unix://{run}/docker.sock"
    log = work / "out" / "logs" / "dockerd.log"
    argv = [
        "dockerd", "--config-file", str(run / "daemon.json"), "--host", host, "--data-root",
        str(run / "root"), "--exec-root", str(run / "exec"), "--pidfile", str(run / "pid"), *more,
    ]  # fmt: skip
    with log.open("wb") as out:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment,
            start_new_session=True,
        )  # fmt: skip
    engine = Engine(host, programs)
    asking = engine.environment(environment, work)
    for _ in range(120):
        if child.poll() is not None:
            break
        asked = subprocess.run(["docker", "version"], env=asking, capture_output=True, check=False)
        if asked.returncode == 0:
            return engine
        time.sleep(0.25)
    raise RuntimeError(f"dockerd did not come up: {log.read_text()[-2000:]}")


def describe_gpus() -> dict[str, Any]:
    """Write what a container gets as `nvidia.com/gpu`: device nodes, and the driver's folder."""
    nodes = [
        {"path": str(p)} for p in sorted(Path("/dev").glob("nvidia*")) if p.is_char_device()
    ]  # fmt: skip
    mount = {
        "hostPath": DRIVER, "containerPath": DRIVER, "options": ["ro", "rbind", "nosuid", "nodev"],
    }  # fmt: skip
    spec = {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [
            {"name": name, "containerEdits": {"deviceNodes": nodes}} for name in ("all", "0")
        ],
        "containerEdits": {"mounts": [mount], "env": ["NVIDIA_VISIBLE_DEVICES=void"]},
    }
    Path("/etc/cdi").mkdir(exist_ok=True)
    Path("/etc/cdi/nvidia.json").write_text(json.dumps(spec))
    return spec


def import_root(
    name: str,
    argv: Iterable[str],
    changes: Iterable[str],
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Import what tar packs as an image; say how it went."""
    started = time.monotonic()
    options = [word for change in changes for word in ("--change", change)]
    packing = ["tar", "-c", *argv]
    with subprocess.Popen(packing, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tar:
        done = subprocess.run(
            ["docker", "import", *options, "-", name], stdin=tar.stdout, env=environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if tar.stdout:
            tar.stdout.close()
        said = tar.stderr.read().decode(errors="replace") if tar.stderr else ""
    return {
        "exit": done.returncode, "id": done.stdout.strip(), "err": (done.stderr + said)[-2000:],
        "tar": packing, "changes": list(changes), "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip


def _of_root(work: Path, *left_out: str) -> list[str]:
    there = [name for name in ROOTS if Path("/", name).exists()]
    empty = work / "empty"
    for name in ("tmp", "var/tmp", "root", "run", "home"):
        (empty / name).mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "var/tmp"):
        (empty / name).chmod(0o1777)
    excluded = (f"--exclude={name}" for name in (*NOT_OURS, *left_out))
    return [*excluded, "-C", str(empty), ".", "-C", "/", *there]


def _moved(path: str, to: str) -> str:
    return f"--transform=s,^{re.escape(path.strip('/'))},{to},"


def cuda_root(stands: StandIns, work: Path, *, builder: bool) -> list[str]:
    """What tar packs as NVIDIA's development image with CMake and Ninja, or as its runtime."""
    left, more = list(NO_TOOLS), []
    moved = []
    if stands.toolkit != f"/{TOOLKIT}":
        left, more = [TOOLKIT], [stands.toolkit.strip("/")]
        moved.append(_moved(stands.toolkit, TOOLKIT))
    if not builder:
        return [*moved, *_of_root(work, *left, *NO_COMPILERS), *more]
    cmake = f"{stands.packages}/cmake/data"
    ninja = str(Path(stands.packages).parents[2] / "bin" / "ninja")
    moved += [_moved(cmake, "usr/local/cmake"), _moved(ninja, "usr/local/bin/ninja")]
    return [*moved, *_of_root(work, *left), *more, cmake.strip("/"), ninja.strip("/")]


def vllm_root(stands: StandIns, work: Path) -> list[str]:
    """What tar packs as the base of an image with vLLM: PyTorch and its company, a C++ compiler."""
    if stands.vllm_root:
        return ["-C", stands.vllm_root, *(f"--exclude=./{n}" for n in ("dev", "proc", "sys")), "."]
    wanted = set(OTHERS.read_text().split())
    kept: set[str] = set()
    for one in distributions(path=[stands.packages]):
        if re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower() in wanted:
            kept |= {path.parts[0] for path in one.files or () if path.parts[0] != ".."}
    there = [n for n in sorted(kept) if Path(stands.packages, n).exists()]
    compile_below(*(Path(stands.packages, n) for n in there))
    inside = stands.packages.strip("/")
    # The system's own packages of that folder would stand in the image twice.
    own = _of_root(work, TOOLKIT, SITE)
    return [_moved(inside, SITE), *own, *(f"{inside}/{name}" for name in there)]


def compile_below(*folders: Path) -> None:
    """Make byte code, where there is none: without it each start of a container takes longer."""
    subprocess.run(
        ["python3.12", "-m", "compileall", "-q", "-j", "8", *folders], check=False,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def add_vllm(work: Path, pack: Path) -> Path:
    """Unpack what was carried, with byte code, as the context of a build; give its folder."""
    context = work / "vllm"
    shutil.rmtree(context, ignore_errors=True)
    site = context / "over" / SITE
    site.mkdir(parents=True)
    subprocess.run(["tar", "-C", site, "-xf", pack], check=True)
    compile_below(site)
    command = context / "over" / "usr/local/bin/vllm"
    command.parent.mkdir(parents=True, exist_ok=True)
    command.write_text(
        "#!/usr/bin/python3\nimport sys\n\nfrom vllm.entrypoints.cli.main import main\n\n"
        'if __name__ == "__main__":\n    sys.exit(main())\n'
    )
    command.chmod(0o755)
    (context / "Dockerfile").write_text(
        f'FROM {TORCH}\nCOPY over /\nENTRYPOINT ["vllm", "serve"]\n'
    )
    return context
