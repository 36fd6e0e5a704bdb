"""This machine: architecture, cores, memory and GPUs.

Available memory is `MemAvailable`, never `MemFree`: the page cache can be reclaimed.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from pydantic import Field

from bakehouse.models import Frozen
from bakehouse.system.process import Processes, environment


class HostFacts(Frozen):
    """Facts of one machine at one moment. Memory in bytes."""

    arch: str
    """`x86_64` or `aarch64`, as `uname -m` says."""
    system: str
    cpus: int
    """Cores that this process may use."""
    cpu_model: str
    cpu_flags: str
    """The kernel's list of CPU features, sorted; may be empty."""
    memory_total: int
    memory_available: int
    memory_free: int = 0
    """Unused; the rest of what is available is page cache that can be reclaimed."""


def read_host(proc: Path = Path("/proc")) -> HostFacts:
    """Read /proc; `proc` is replaced in tests."""
    memory = _colon_table(proc / "meminfo")
    cpu = _colon_table(proc / "cpuinfo")

    def kib(name: str) -> int:
        return int(memory.get(name, "0 kB").split(maxsplit=1)[0]) * 1024

    return HostFacts(
        arch=platform.machine(),
        system=platform.system(),
        cpus=len(os.sched_getaffinity(0)),
        cpu_model=cpu.get("model name", cpu.get("CPU part", "unknown")),
        cpu_flags=" ".join(sorted(cpu.get("flags", cpu.get("Features", "")).split())),
        memory_total=kib("MemTotal"),
        memory_available=kib("MemAvailable") if "MemAvailable" in memory else kib("MemFree"),
        memory_free=kib("MemFree"),
    )


def _colon_table(path: Path) -> dict[str, str]:
    """First value of each `name : value` line; empty if the file cannot be read."""
    table: dict[str, str] = {}
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return table
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            table.setdefault(name.strip(), value.strip())
    return table


class Gpu(Frozen):
    """One NVIDIA GPU as its driver describes it. Memory in bytes, at the moment of the query."""

    index: int = 0
    name: str
    compute_capability: str = ""
    """Major and minor, as in 12.1; empty for a GPU that is only planned for."""
    driver: str = ""
    """The driver's own version, as in 580.159.03; not a toolkit's."""
    memory_total: int | None = Field(default=None, exclude=True)
    """None if the driver has no figure, as on unified memory."""
    memory_free: int | None = Field(default=None, exclude=True)


GPU_QUERY = (
    "nvidia-smi",
    "--query-gpu=index,name,compute_cap,driver_version,memory.total,memory.free",
    "--format=csv,noheader",
)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Read the answer to GPU_QUERY; lines of any other form, such as errors, are left out.

    Memory that the driver gives as `[N/A]` or `[Not Supported]` is None and never 0.
    """
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]  # names hold no comma
        if len(fields) != 6 or not fields[0].isdigit() or not fields[1]:
            continue
        if re.fullmatch(r"\d+\.\d+", fields[2]):
            gpus.append(
                Gpu(
                    index=int(fields[0]),
                    name=fields[1],
                    compute_capability=fields[2],
                    driver=fields[3],
                    memory_total=_mebibytes(fields[4]),
                    memory_free=_mebibytes(fields[5]),
                )
            )
    return tuple(gpus)


def _mebibytes(value: str) -> int | None:
    found = re.fullmatch(r"(\d{1,9})(?:\s*MiB)?", value)
    return int(found[1]) * 2**20 if found else None


def read_gpus(processes: Processes) -> tuple[Gpu, ...]:
    """Query the driver with nvidia-smi; empty without a driver or a GPU."""
    answer = processes.capture(GPU_QUERY, env=environment(), timeout=20)
    return parse_gpus(answer.out) if answer.ok else ()
