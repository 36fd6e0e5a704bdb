"""The task `doctor`: check this machine's prerequisites and suggest fixes."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bakehouse import flags
from bakehouse.context import Context, Outcome
from bakehouse.errors import HostError
from bakehouse.host import Gpu, HostFacts, read_gpus, read_host
from bakehouse.models import Check, check
from bakehouse.system.process import environment
from bakehouse.toolchain import Tool, inspect_tools
from bakehouse.util.text import quantity as amount

OLDEST, NEWEST = (3, 11), (3, 14)
"""Versions of Python that Bakehouse is tested with."""
DISK = 3 * 2**30
"""Bytes for a source, a CPU build and a small model."""
MEMORY = 2 * 2**30
"""Bytes that compiling llama.cpp takes with one job, which is more than a small model takes."""
_TOOLS = {
    "cmake": "CMake, 3.20 or newer",
    "ninja": "Ninja",
    "cc": "a C compiler",
    "c++": "a C++ compiler",
    "strip": "strip (binutils)",
}

Options = flags.Doctor


@dataclass(frozen=True)
class Line:
    """One prerequisite, and how to fix it if it is missing."""

    check: Check
    fix: str


def run(ctx: Context, _options: Options) -> Outcome:
    """Check everything; exit 9 if something is missing that CPU recipes need."""
    host, gpus = read_host(), read_gpus(ctx.processes)
    needed = [
        *_machine(host),
        _folder("cache", ctx.places.cache, DISK),
        _folder("state", ctx.places.state, 2**26),
        _git(ctx),
        *_tools(ctx),
    ]
    optional = [*_docker(ctx, gpus), _gpu(gpus), _toolkits(ctx), _ccache(ctx)]
    missing = [line for line in needed if not line.check.passed]
    result = {
        "host": host.to_data(),
        "needed": [line.check.id for line in needed],
        "optional": [{**line.check.to_data(), "mend": line.fix or None} for line in optional],
        "mends": {line.check.id: line.fix for line in (*needed, *optional) if line.fix},
    }
    checks = tuple(line.check for line in needed)
    return Outcome(result, _text(host, optional, missing), checks, error=_error(missing))


def _line(
    id: str,  # noqa: A002 - the check's name for it
    expected: str,
    observed: str | None,
    where: str,
    fix: str,
    *,
    ok: bool | None,
) -> Line:
    return Line(check(id, expected, observed, where, ok=ok), fix)


def _error(missing: list[Line]) -> HostError | None:
    if not missing:
        return None
    fixes = dict.fromkeys(line.fix for line in missing if line.fix)
    return HostError(
        f"missing on this machine: {', '.join(line.check.id for line in missing)}",
        where="\n".join(f"{line.check.id}: {line.check.observed}" for line in missing),
        hint="\n".join(fixes) or None,
    )


def _text(host: HostFacts, optional: Iterable[Line], missing: list[Line]) -> str:
    """Return the optional parts, each with its fix, and the conclusion."""
    lines = ["", "optional, for some recipes:"]
    for line in optional:
        word = "found" if line.check.passed else "missing"
        fix = f" -> {line.fix}" if line.fix and not line.check.passed else ""
        lines.append(f"{word:7}  {line.check.id:10}  {line.check.observed}{fix}")
    memory = amount(host.memory_available, "B")
    ready = f"ready: {host.cpus} cores, {memory} of memory available, {host.arch}"
    return "\n".join([*lines, "", "not ready to build and serve" if missing else ready])


def _machine(host: HostFacts) -> list[Line]:
    known = host.system == "Linux" and host.arch in ("x86_64", "aarch64")
    return [
        _line(
            "python", "3.11 to 3.14", platform.python_version(), sys.executable,
            "create the virtual environment with Python 3.11 to 3.14",
            ok=OLDEST <= sys.version_info[:2] <= NEWEST,
        ),
        _line(
            "system", "Linux on x86_64 or aarch64", f"{host.system} on {host.arch}", "uname",
            "use Linux on one of these architectures", ok=known,
        ),
        _line(
            "memory", f"at least {amount(MEMORY, 'B')} available",
            amount(host.memory_available, "B") if host.memory_available else None,
            "/proc/meminfo, MemAvailable",
            "stop programs that use memory, or use a larger machine",
            ok=host.memory_available >= MEMORY,
        ),
    ]  # fmt: skip


def _folder(name: str, folder: Path, least: int) -> Line:
    """Check that a folder is writable and has `least` bytes free; it need not exist yet."""
    fix = f"free some space or fix the permissions of {folder}, or set BAKEHOUSE_HOME"
    existing = next((p for p in (folder, *folder.parents) if p.exists()), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        observed = f"not writable: {(error.strerror or str(error)).lower()}"
        return _line(name, "writable", observed, str(existing), fix, ok=False)
    expected = f"writable, at least {amount(least, 'B')} free"
    return _line(name, expected, f"{amount(free, 'B')} free", str(folder), fix, ok=free >= least)


def _version(ctx: Context, name: str, expected: str, fix: str, *argv: str) -> Line:
    """Check a program by the first line that it prints for `argv`."""
    done = ctx.processes.capture(argv, env=environment(base=ctx.environment), timeout=15)
    out, err = done.out.strip().splitlines(), done.err.strip().splitlines()
    ok = bool(done.ok and out)
    observed = out[0] if ok else err[0] if err else f"exit code {done.code}"
    return _line(name, expected, observed, " ".join(argv), fix, ok=ok)


def _apt(package: str) -> str:
    return f"{'' if os.geteuid() == 0 else 'sudo '}apt-get install -y {package}"


def _git(ctx: Context) -> Line:
    return _version(ctx, "git", "git", _apt("git"), "git", "--version")


def _tools(ctx: Context) -> list[Line]:
    return [
        _line(name, _TOOLS[name], found.version, found.path, "", ok=True)
        if isinstance(found, Tool)
        else _line(
            name, _TOOLS[name], found.what, found.where or "PATH", found.hint or "", ok=False
        )
        for name, found in inspect_tools(ctx).items()
    ]


def _docker(ctx: Context, gpus: Sequence[Gpu]) -> list[Line]:
    """Check the engine, its GPU support, and the command line that builds images."""
    expected = "a running Docker Engine (recipes with images)"
    try:
        facts = ctx.docker.facts()
    except HostError as error:
        where, hint = error.where or "", error.hint or ""
        return [_line("docker", expected, error.what, where, hint, ok=False)]
    engine = f"Docker Engine {facts.version}, {facts.system} on {facts.arch}"
    lines = [_line("docker", expected, engine, facts.host, "", ok=facts.system == "linux")]
    if gpus:
        observed = {
            "runtime": "NVIDIA's runtime", "cdi": "CDI devices nvidia.com/gpu",
            "cdi-unlisted": "CDI is on; this engine does not list its devices",
        }.get(facts.gpus, ", ".join(facts.runtimes))  # fmt: skip
        lines.append(_line(
            "nvidia", "an NVIDIA runtime or CDI devices (recipes with images and a GPU)",
            observed, "docker info",
            "install the NVIDIA Container Toolkit, then: nvidia-ctk runtime "
            "configure --runtime=docker, and restart the engine",
            ok=None if facts.gpus == "cdi-unlisted" else facts.nvidia,
        ))  # fmt: skip
    lines.append(_version(
        ctx, "docker-cli", "Docker's command line (building images)",
        "install docker-ce-cli and docker-buildx-plugin, or Debian's docker.io",
        "docker", "--version",
    ))  # fmt: skip
    return lines


def _gpu(gpus: Sequence[Gpu]) -> Line:
    names = ", ".join(f"{g.name} (compute capability {g.compute_capability})" for g in gpus)
    observed = f"{names}; driver {gpus[0].driver}" if gpus else "nvidia-smi lists none"
    fix = "if there is a GPU, install the NVIDIA driver"
    return _line("gpu", "an NVIDIA GPU (CUDA recipes)", observed, "nvidia-smi", fix, ok=bool(gpus))


def _toolkits(ctx: Context) -> Line:
    from bakehouse.cuda.toolkit import find_toolkits

    found = find_toolkits(ctx)
    good = ", ".join(f"{t.version} in {t.root}" for t in found.toolkits if not t.faults)
    bad = [f"{t.version} in {t.root}: {t.faults[0]}" for t in found.toolkits if t.faults]
    bad += [f"{broken.path}: {broken.why}" for broken in found.broken]
    return _line(
        "cuda", "a CUDA toolkit (CUDA recipes)", good or ", ".join(bad) or "none found",
        "/usr/local/cuda*, CUDA_HOME, PATH",
        'not needed for a recipe with build.cuda: {version: "13.0", provide: pypi}',
        ok=bool(good),
    )  # fmt: skip


def _ccache(ctx: Context) -> Line:
    found = shutil.which("ccache", path=ctx.environment.get("PATH", os.defpath))
    expected = "ccache (faster rebuilds)"
    return _line("ccache", expected, found or "none found", "PATH", _apt("ccache"), ok=bool(found))
