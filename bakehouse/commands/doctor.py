"""`doctor`: what this machine has and lacks, with the mend of each lack."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bakehouse import flags
from bakehouse.checks import Check, check
from bakehouse.console import amount
from bakehouse.context import Context
from bakehouse.errors import HostError
from bakehouse.host import HostFacts, read_gpus, read_host
from bakehouse.outcome import Outcome
from bakehouse.ports.process import environment
from bakehouse.toolchain import Tool, look_over

OLDEST, NEWEST = (3, 11), (3, 14)
"""Versions of Python that Bakehouse is tested with."""
DISK = 3 * 2**30
"""Bytes that a source, a CPU build and a small model take."""
MEMORY = 2 * 2**30
"""Bytes that compiling llama.cpp takes with one job, and more than a small model does."""


Options = flags.Doctor


@dataclass(frozen=True)
class Line:
    """One thing looked at, and the mend if it is not there."""

    check: Check
    mend: str = ""


def run(ctx: Context, _options: Options) -> Outcome:
    """Look at everything; exit 9 where something that CPU recipes need is not there."""
    host = read_host()
    needed = [*_machine(host), *_folders(ctx), _git(ctx), *_tools(ctx)]
    optional = [*_docker(ctx), _gpu(ctx), *_toolkits(ctx), _cache(ctx)]
    missing = [line for line in needed if not line.check.passed]
    result = {
        "host": host.to_data(),
        "needed": [line.check.id for line in needed],
        "optional": [{**line.check.to_data(), "mend": line.mend or None} for line in optional],
        "mends": {line.check.id: line.mend for line in (*needed, *optional) if line.mend},
    }
    checks = tuple(line.check for line in needed)
    return Outcome(result, _text(host, optional, missing), checks, error=_error(missing))


def _error(missing: list[Line]) -> HostError | None:
    if not missing:
        return None
    names = ", ".join(line.check.id for line in missing)
    mends = dict.fromkeys(line.mend for line in missing if line.mend)
    return HostError(
        f"this machine lacks what every recipe needs: {names}",
        where="\n".join(f"{line.check.id}: {line.check.observed}" for line in missing),
        hint="\n".join(mends) or None,
    )


def _text(host: HostFacts, optional: Iterable[Line], missing: list[Line]) -> str:
    """The optional parts, each with its mend, and the conclusion."""
    lines = ["", "only some recipes need:"]
    for line in optional:
        word = "has" if line.check.passed else "lacks"
        mend = f" -> {line.mend}" if line.mend and not line.check.passed else ""
        lines.append(f"{word:5}  {line.check.id:8}  {line.check.observed}{mend}")
    lines.append("")
    if missing:
        lines.append("this machine cannot build and serve yet")
    else:
        memory = amount(host.memory_available, "B")
        lines.append(
            f"this machine is ready: {host.cpus} cores, {memory} of memory to be had, {host.arch}"
        )
    return "\n".join(lines)


def _machine(host: HostFacts) -> list[Line]:
    version = sys.version_info[:2]
    known = host.arch in ("x86_64", "aarch64")
    return [
        Line(
            check(
                "python", "3.11 to 3.14", platform.python_version(), sys.executable,
                ok=OLDEST <= version <= NEWEST,
            ),
            "make the virtual environment with a Python from 3.11 to 3.14",
        ),
        Line(
            check(
                "system", "Linux on x86_64 or aarch64", f"{host.system} on {host.arch}", "uname",
                ok=known and host.system == "Linux",
            ),
            "use Linux on one of these architectures",
        ),
        Line(
            check(
                "memory",
                f"at least {amount(MEMORY, 'B')} to be had",
                amount(host.memory_available, "B") if host.memory_available else None,
                "/proc/meminfo, MemAvailable",
                ok=host.memory_available >= MEMORY,
            ),
            "stop what uses the memory, or use a larger machine",
        ),
    ]  # fmt: skip


def _folders(ctx: Context) -> list[Line]:
    return [_folder("cache", ctx.places.cache, DISK), _folder("state", ctx.places.state, 2**26)]


def _folder(name: str, folder: Path, least: int) -> Line:
    """Whether a folder can be written, and how much room it has; it need not be there yet."""
    mend = f"free some space or mend the permissions of {folder}, or set BAKEHOUSE_HOME"
    there = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free
    except OSError as error:
        observed = f"cannot be written: {(error.strerror or str(error)).lower()}"
        return Line(check(name, "can be written", observed, str(there), ok=False), mend)
    return Line(
        check(
            name,
            f"can be written, at least {amount(least, 'B')} free",
            f"{amount(free, 'B')} free",
            str(folder),
            ok=free >= least,
        ),
        mend,
    )


def _ask(ctx: Context, *argv: str) -> tuple[str | None, str]:
    """Give the first line of a command's output, or None and the first line of its complaint."""
    said = ctx.processes.capture(argv, env=environment(base=ctx.environment), timeout=15)
    out, err = said.out.strip().splitlines(), said.err.strip().splitlines()
    if said.ok and out:
        return out[0], ""
    return None, err[0] if err else f"exit code {said.code}"


def _git(ctx: Context) -> Line:
    version, why = _ask(ctx, "git", "--version")
    one = check("git", "git", version or why, "git --version", ok=version is not None)
    return Line(one, f"{'' if os.geteuid() == 0 else 'sudo '}apt-get install -y git")


_TOOLS = {
    "cmake": "CMake, 3.20 or newer",
    "ninja": "Ninja",
    "cc": "a C compiler",
    "c++": "a C++ compiler",
    "strip": "strip (binutils)",
}


def _tools(ctx: Context) -> list[Line]:
    lines = []
    for name, found in look_over(ctx).items():
        expected = _TOOLS[name]
        if isinstance(found, Tool):
            lines.append(Line(check(name, expected, found.version, found.path, ok=True)))
        else:
            one = check(name, expected, found.what, found.where or "PATH", ok=False)
            lines.append(Line(one, found.hint or ""))
    return lines


def _docker(ctx: Context) -> list[Line]:
    """The engine, whether it gives containers a GPU, and the command line that builds images."""
    expected = "a Docker Engine that answers (recipes with images)"
    try:
        facts = ctx.docker.facts()
    except HostError as error:
        one = check("docker", expected, error.what, error.where or "", ok=False)
        return [Line(one, error.hint or "")]
    seen = f"Docker Engine {facts.version}, {facts.system} on {facts.arch}"
    lines = [Line(check("docker", expected, seen, facts.host, ok=facts.system == "linux"))]
    if read_gpus(ctx.processes):
        wanted = "an NVIDIA runtime, or CDI devices (recipes with images and a GPU)"
        seen = {
            "runtime": "NVIDIA's runtime", "cdi": "CDI devices nvidia.com/gpu",
            "cdi-unlisted": "CDI is on; this engine does not say which devices it has",
        }.get(facts.gpus, ", ".join(facts.runtimes))  # fmt: skip
        ok = None if facts.gpus == "cdi-unlisted" else facts.nvidia
        one = check("nvidia", wanted, seen, "docker info", ok=ok)
        lines.append(Line(one, "install the NVIDIA Container Toolkit, then: nvidia-ctk runtime "
                               "configure --runtime=docker, and restart the engine"))  # fmt: skip
    version, why = _ask(ctx, "docker", "--version")
    one = check("docker-cli", "Docker's command line (building images)", version or why,
                "docker --version", ok=version is not None)  # fmt: skip
    lines.append(Line(one, "install docker-ce-cli and docker-buildx-plugin, or Debian's docker.io"))
    return lines


def _gpu(ctx: Context) -> Line:
    found = read_gpus(ctx.processes)
    named = ", ".join(f"{g.name} (compute capability {g.compute_capability})" for g in found)
    driver = f"; driver {found[0].driver}" if found else ""
    return Line(
        check(
            "gpu",
            "an NVIDIA GPU (CUDA recipes)",
            named + driver if found else "none that nvidia-smi names",
            "nvidia-smi",
            ok=bool(found),
        ),
        "install the NVIDIA driver, if there is a GPU",
    )


def _toolkits(ctx: Context) -> list[Line]:
    from bakehouse.toolkit.find import find_toolkits  # a look into several folders

    found = find_toolkits(ctx)
    sound = [t for t in found.toolkits if not t.faults]
    listed = ", ".join(f"{t.version} in {t.root}" for t in sound)
    halves = [f"{t.version} in {t.root}: {t.faults[0]}" for t in found.toolkits if t.faults]
    broken = ", ".join([*halves, *(f"{b.path}: {b.why}" for b in found.broken)])
    return [
        Line(
            check(
                "cuda",
                "a CUDA toolkit (CUDA recipes)",
                listed or broken or "none found",
                "/usr/local/cuda*, CUDA_HOME, PATH",
                ok=bool(sound),
            ),
            'none is needed where a recipe says build.cuda: {version: "13.0", provide: pypi}',
        )
    ]


def _cache(ctx: Context) -> Line:
    path = ctx.environment.get("PATH", os.defpath)
    found = shutil.which("ccache", path=path)
    return Line(
        check(
            "ccache", "ccache (quicker rebuilds)", found or "none found", "PATH",
            ok=bool(found),
        ),
        f"{'' if os.geteuid() == 0 else 'sudo '}apt-get install -y ccache",
    )  # fmt: skip
