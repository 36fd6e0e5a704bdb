"""The memory of this machine, or of a named profile."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from bakehouse.errors import UsageError
from bakehouse.host import Gpu, HostFacts
from bakehouse.memory.requirements import GIB, Basis, Line, Pool
from bakehouse.recipe.types import parse_size


@dataclass(frozen=True)
class Machine:
    """Memory in bytes, measured now or from a profile."""

    name: str
    total: int
    available: int
    """MemAvailable, or the profile's total minus an idle system's use."""
    cached: int = 0
    """Reclaimable page cache in `available`; 0 if unknown."""
    unified: bool = False
    gpus: tuple[Gpu, ...] = ()
    bandwidth: float | None = None
    """Bytes per second of the memory that holds the weights."""
    source: str = "/proc/meminfo"
    measured: bool = True

    @property
    def has_gpu(self) -> bool:
        """Whether the machine has a GPU."""
        return bool(self.gpus)

    @property
    def discrete(self) -> bool:
        """Whether the GPU has its own memory."""
        return self.has_gpu and not self.unified

    @property
    def pool(self) -> Pool:
        """The pool of offloaded weights and caches."""
        return Pool.GPU if self.discrete else Pool.SYSTEM

    def gpu_total(self) -> int:
        """Memory of all discrete GPUs."""
        return sum(gpu.memory_total or 0 for gpu in self.gpus)

    def gpu_free(self) -> int:
        """Free memory of all discrete GPUs."""
        return sum(gpu.memory_free or 0 for gpu in self.gpus)

    def reserve(self, pool: Pool) -> int:
        """Bytes to keep free: running out of unified memory takes the machine down."""
        if pool is Pool.GPU:
            return max(256 * 2**20, self.gpu_total() // 50)
        return max(GIB // 2, self.total // 20)

    def lines(self) -> tuple[Line, ...]:
        """Budget lines of the machine itself."""
        basis = Basis.MEASURED if self.measured else Basis.ASSUMED
        used = self.total - self.available
        lines = [
            Line(item="memory of the machine", bytes=self.total, formula="MemTotal",
                 source=self.source, basis=Basis.MEASURED),
            Line(item="used by others", bytes=used, source=self.source, basis=basis,
                 formula="MemTotal - MemAvailable; page cache that can be reclaimed is not in it"),
        ]  # fmt: skip
        if self.cached:
            lines.append(
                Line(item="page cache that can be reclaimed", bytes=self.cached,
                     source=self.source, basis=basis,
                     formula="MemAvailable - MemFree; counted as available" + (
                         ", but CUDA may not see it so: 'sync; echo 3 > /proc/sys/vm/drop_caches' "
                         "as root gives it back" if self.unified else ""))
            )  # fmt: skip
        if self.discrete:
            lines.append(
                Line(item="memory of the GPU", bytes=self.gpu_total(), formula="memory.total",
                     source="nvidia-smi" if self.measured else self.source,
                     basis=Basis.MEASURED, pool=Pool.GPU)
            )  # fmt: skip
        return tuple(lines)


_UNIFIED_NAME = re.compile(r"\b(GB10|Tegra|Orin|Thor|Xavier|DGX Spark)\b", re.IGNORECASE)


def this_machine(facts: HostFacts, gpus: tuple[Gpu, ...] = ()) -> Machine:
    """Make a machine of what this host says.

    MemAvailable counts, never MemFree. Memory is unified if a GPU has no figures, or is of a kind
    without its own memory (whatever its driver reports).
    """
    unified = any(gpu.memory_total is None or _UNIFIED_NAME.search(gpu.name) for gpu in gpus)
    bandwidth = None
    if gpus:
        rates = {p.gpus[0].name: p.bandwidth for p in PROFILES.values() if p.gpus}
        bandwidth = next((rate for name, rate in rates.items() if name in gpus[0].name), None)
    available = min(facts.memory_available, facts.memory_total)
    cached = max(0, available - facts.memory_free) if facts.memory_free else 0
    return Machine("this machine", facts.memory_total, available, cached, unified, gpus, bandwidth)


def _discrete(
    name: str, gpu: str, memory: float, bandwidth: float, source: str, *, idle: float = 2.0
) -> Machine:
    """A discrete GPU in a machine with twice its memory; GiB and GB/s."""
    total = int(memory * GIB)
    return Machine(
        name=name, total=2 * total, available=2 * total - int(idle * GIB), measured=False,
        gpus=(Gpu(name=gpu, memory_total=total, memory_free=total - GIB // 2),),
        bandwidth=bandwidth * 1e9, source=source,
    )  # fmt: skip


def _unified(
    name: str, gpu: str, memory: float, bandwidth: float, source: str, *, idle: float
) -> Machine:
    total = int(memory * GIB)
    return Machine(
        name=name, total=total, available=total - int(idle * GIB), unified=True, measured=False,
        gpus=(Gpu(name=gpu),), bandwidth=bandwidth * 1e9, source=source,
    )  # fmt: skip


_SHEET = "profile: NVIDIA's data sheet; use by an idle system is assumed"
PROFILES: dict[str, Machine] = {
    "gb10": _unified(
        "gb10", "GB10", 121.7, 273,
        "profile: DGX Spark, 121.7 GiB and 273 GB/s as measured on one; 4 GiB assumed idle",
        idle=4.0,
    ),
    "thor": _unified("thor", "Thor", 122.8, 273, _SHEET, idle=4.0),
    "h100": _discrete("h100", "H100", 79.6, 3350, _SHEET),
    "h200": _discrete("h200", "H200", 139.8, 4800, _SHEET),
    "b200": _discrete("b200", "B200", 178.0, 8000, _SHEET),
    "a100-80": _discrete("a100-80", "A100-SXM4-80GB", 79.3, 2039, _SHEET),
    "l40s": _discrete("l40s", "L40S", 44.9, 864, _SHEET),
    "rtx3090": _discrete("rtx3090", "RTX 3090", 23.7, 936, _SHEET),
    "rtx4090": _discrete("rtx4090", "RTX 4090", 23.6, 1008, _SHEET),
    "rtx5090": _discrete("rtx5090", "RTX 5090", 31.4, 1792, _SHEET),
    "rtxpro6000": _discrete("rtxpro6000", "RTX PRO 6000", 95.0, 1792, _SHEET),
}  # fmt: skip


def named_machine(name: str) -> Machine:
    """A profile by name, or e.g. `unified:121GiB`, `gpu:24GiB`, `cpu:64GiB`. Raises UsageError."""
    if name in PROFILES:
        return PROFILES[name]
    kind, colon, size = name.partition(":")
    if colon and kind in {"unified", "gpu", "cpu"}:
        try:
            memory = parse_size(size) / GIB
        except ValueError as error:
            hint = "write e.g. unified:121GiB"
            raise UsageError(f"--machine {name}: {error}", hint=hint) from error
        source = "as given by --machine; use by an idle system is assumed"
        if kind == "gpu":
            return _discrete(name, "GPU", memory, 0, source)
        machine = _unified(name, "GPU", memory, 0, source, idle=min(4.0, memory / 8))
        if kind == "cpu":
            return replace(machine, unified=False, gpus=(), bandwidth=None)
        return machine
    raise UsageError(
        f"unknown machine: --machine {name}",
        hint=f"known: {', '.join(PROFILES)}; or unified:SIZE, gpu:SIZE, cpu:SIZE",
    )
