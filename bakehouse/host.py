"""What this machine is: architecture, cores, memory, and what others use of it.

Memory that can be had is `MemAvailable`, never `MemFree`: the page cache counts as available.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from bakehouse.base import Frozen


class HostFacts(Frozen):
    """Facts of one machine at one moment. Memory in bytes."""

    arch: str
    """`x86_64` or `aarch64`, as `uname -m` says."""
    system: str
    cpus: int
    """Cores that this process may use."""
    cpu_model: str
    cpu_flags: str
    """The kernel's list of CPU features, sorted; empty where it gives none."""
    memory_total: int
    memory_available: int


def read_host(proc: Path = Path("/proc")) -> HostFacts:
    """Ask this machine; `proc` is replaced in tests."""
    memory = _colon_table(proc / "meminfo")
    cpu = _colon_table(proc / "cpuinfo")
    return HostFacts(
        arch=platform.machine(),
        system=platform.system(),
        cpus=len(os.sched_getaffinity(0)),
        cpu_model=cpu.get("model name", cpu.get("CPU part", "unknown")),
        cpu_flags=" ".join(sorted(cpu.get("flags", cpu.get("Features", "")).split())),
        memory_total=_kib(memory.get("MemTotal", "0 kB")),
        memory_available=_kib(memory.get("MemAvailable", memory.get("MemFree", "0 kB"))),
    )


def _colon_table(path: Path) -> dict[str, str]:
    """First value of each `name : value` line; empty where the file cannot be read."""
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


def _kib(value: str) -> int:
    return int(value.split(maxsplit=1)[0]) * 1024
