"""The memory budget of a recipe on a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bakehouse.checkpoints.checkpoint import Checkpoint, layer_number, read_paths
from bakehouse.checkpoints.model_shape import LayerKind, ModelShape
from bakehouse.lock import WeightPin
from bakehouse.memory.machines import Machine
from bakehouse.memory.requirements import (
    GIB,
    Basis,
    Budget,
    Demand,
    Line,
    Phase,
    Pool,
    PoolUsage,
    cache_lines,
    context_of,
)
from bakehouse.recipe.models import Measured
from bakehouse.util.text import size_text as gib

REPACKED = {"Q1_0", "Q2_K", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4"}


@dataclass(frozen=True)
class Weight:
    """The files of one role (model, drafter, projector). Bytes."""

    size: int
    largest: int
    checkpoint: Checkpoint | None = None
    source: str = "file sizes"
    figures: ModelShape | None = None
    """The model's shape if known from elsewhere than these files."""

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Weight:
        """The weights of a checkpoint."""
        return cls(checkpoint.size, checkpoint.largest.size, checkpoint, "the files' headers")

    @classmethod
    def locate(cls, pin: WeightPin, files: Sequence[Path]) -> Weight:
        """The weights of a lock's pin: by headers if all `files` exist, else by pinned sizes.

        Raises CheckpointError for damaged files.
        """
        weights = [f for f in pin.files if f.path.endswith((".gguf", ".safetensors"))] or pin.files
        if files and all(file.is_file() for file in files):
            return cls.read(read_paths(files))
        return cls(sum(f.size for f in weights), max(f.size for f in weights))

    @property
    def resident(self) -> int:
        """Bytes of the loaded tensors."""
        return self.checkpoint.tensor_bytes if self.checkpoint else self.size

    @property
    def shape(self) -> ModelShape | None:
        """The model's shape, if known."""
        if self.checkpoint is None:
            return self.figures
        return self.checkpoint.shape if self.checkpoint.shape.layers else self.figures

    @property
    def repackable(self) -> int:
        """Bytes of a GGUF in types that llama.cpp's CPU backend may repack, depending on the CPU.

        Source: ggml-cpu/repack.cpp of build 11434.
        """
        if self.checkpoint is None or self.checkpoint.format != "gguf":
            return 0
        types = self.checkpoint.types
        return sum(size for name, (_, size) in types.items() if name.upper() in REPACKED)

    def offloaded(self, gpu_layers: int | None) -> int:
        """Bytes of a GGUF on the GPU with `-ngl gpu_layers`, which takes the last layers first.

        The input embedding stays in the machine's memory; the output counts as one more layer.
        Without a header the size is split evenly over 64 layers.
        """
        if gpu_layers == 0:
            return 0
        if self.checkpoint is None or self.shape is None:
            return self.size if gpu_layers is None else self.size * min(gpu_layers, 64) // 64
        layers = len(self.shape.layers) + len(self.shape.mtp)
        first = 0 if gpu_layers is None else max(0, layers + 1 - gpu_layers)
        tied = not any(tensor.name == "output.weight" for tensor in self.checkpoint.tensors)
        total = 0
        for tensor in self.checkpoint.tensors:
            if tensor.name.startswith("token_embd"):
                # tied: the same tensor is also the output, and the GPU gets a copy
                total += tensor.size if tied else 0
            elif (number := layer_number(tensor.name)) < 0 or number >= first:
                total += tensor.size
        return total

    def kept(self, gpu_layers: int | None) -> int:
        """Bytes of a GGUF that stay in the machine's memory beside a discrete GPU."""
        return max(0, self.resident - self.offloaded(gpu_layers))


CUDA_CONTEXT = GIB // 2
PROCESS = GIB // 8
VLLM_WORKING = int(4.65 * GIB)
"""Activations and CUDA graphs, from one run of a 30B model: 75.45 - 60.7 - 10.1 GiB."""
VLLM_CPU_WORKING = 2 * GIB
IDLE = 4 * GIB
"""Assumed use of an idle system with unified memory."""
RULE = "rule of thumb"


def make_budget(
    machine: Machine,
    demand: Demand,
    weights: Mapping[str, Weight],
    *,
    measured: Sequence[Measured] = (),
    reserve: int | None = None,
) -> Budget:
    """Count everything. `weights` maps the roles `model`, `drafter`, `projector`. Pure."""
    model = weights["model"]
    context = context_of(model.shape, demand) if model.shape else demand.context
    count = _Count(machine, demand, weights, context, {m.what: m for m in measured})
    count.weights_held()
    if "left" in count.measured:
        count.all_the_rest()
    elif demand.share is not None and machine.has_gpu:
        count.working()
        count.share()
        count.staging()
    else:
        count.caches()
        count.working()
        count.staging()
    pools = (Pool.GPU, Pool.SYSTEM) if machine.discrete else (Pool.SYSTEM,)
    return Budget(
        machine=machine.name,
        context=context,
        lines=(*machine.lines(), *count.lines),
        purses=tuple(count.purse(pool, reserve) for pool in pools),
        unknown=tuple(count.unknown),
        lacking=tuple(count.lacking),
    )


def compute_bytes(shape: ModelShape | None, demand: Demand, context: int | None) -> tuple[int, str]:
    """Bytes of one batch's scratch buffers by a rule that errs on the high side; and the rule.

    Compared with llama-server 11434: SmolLM2 at 8192 tokens 22.6 MiB (rule 23.8), at 512 tokens
    15.1 MiB (rule 16.3).
    """
    if shape is None or not shape.embedding:
        return GIB, "1 GiB, as the model's sizes are unknown"
    each = 4 * (6 * shape.embedding + 3 * shape.feed_forward)
    attended = context or shape.context_limit or 4096
    formula = f"{demand.batch} tokens x (4 B x (6 x embedding + 3 x feed-forward)"
    attention = (LayerKind.FULL, LayerKind.LATENT, LayerKind.SLIDING)
    if any(layer.kind in attention for layer in shape.layers):
        if demand.flash:
            each += 2 * attended
            formula += " + 2 B x context"
        else:
            each += 4 * shape.heads * attended
            formula += " + 4 B x heads x context"
    return demand.batch * each, formula + ")"


@dataclass
class _Count:
    """Collects the lines of a budget."""

    machine: Machine
    demand: Demand
    weights: Mapping[str, Weight]
    context: int | None
    measured: Mapping[str, Measured]
    lines: list[Line] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)

    @property
    def compute_pool(self) -> Pool:
        return self.machine.pool if self.demand.gpu_layers != 0 else Pool.SYSTEM

    @property
    def on_cpu(self) -> bool:
        """Whether llama.cpp computes on the CPU."""
        cpu = not self.machine.has_gpu or self.demand.gpu_layers == 0
        return self.demand.engine == "llama.cpp" and cpu

    def add(
        self, item: str, size: int, formula: str, source: str, pool: Pool, *,
        basis: Basis = Basis.COMPUTED, phase: Phase = Phase.ALWAYS,
    ) -> None:  # fmt: skip
        line = Line(item=item, bytes=size, formula=formula, source=source, basis=basis,
                    pool=pool, phase=phase)  # fmt: skip
        self.lines.append(line)

    def as_measured(self, what: str, item: str, pool: Pool, phase: Phase) -> bool:
        """Use a measured figure; False if there is none."""
        if found := self.measured.get(what):
            self.add(item, found.size, "as measured", found.source, pool,
                     basis=Basis.MEASURED, phase=phase)  # fmt: skip
        return found is not None

    def purse(self, pool: Pool, reserve: int | None) -> PoolUsage:
        held = dict.fromkeys(Phase, 0)
        for line in self.lines:
            if line.pool is pool:
                held[line.phase] += line.bytes
        gpu = pool is Pool.GPU
        return PoolUsage(
            pool=pool,
            total=self.machine.gpu_total() if gpu else self.machine.total,
            available=self.machine.gpu_free() if gpu else self.machine.available,
            reserve=self.machine.reserve(pool) if reserve is None or gpu else reserve,
            loading=held[Phase.ALWAYS] + held[Phase.LOADING],
            serving=held[Phase.ALWAYS] + held[Phase.SERVING],
        )

    def weights_held(self) -> None:
        """Weights by role; a measured figure counts for all roles together."""
        pool = self.machine.pool
        if self.as_measured("weights", "weights, all", pool, Phase.ALWAYS):
            return
        split = self.machine.discrete and self.demand.engine == "llama.cpp"
        for role, weight in self.weights.items():
            item = "weights" if role == "model" else role
            what = "sum of tensor sizes" if weight.checkpoint else "sum of file sizes"
            if pool is Pool.SYSTEM and self.on_cpu and (packed := weight.repackable):
                what += (
                    f"; {gib(packed)} of it in types that the CPU may repack into buffers of its "
                    "own: then the mapped pages of those can be reclaimed"
                )
            if not split or role != "model":
                self.add(item, weight.resident, what, weight.source, pool)
                continue
            if on_gpu := weight.offloaded(self.demand.gpu_layers):
                self.add(item, on_gpu, what + " of offloaded layers", weight.source, pool)
            if kept := weight.kept(self.demand.gpu_layers):
                self.add(f"{item}, not offloaded", kept, what, weight.source, Pool.SYSTEM)

    def caches(self) -> None:
        """Caches of model and drafter for the served context."""
        pool = self.compute_pool if self.demand.cache_on_gpu else Pool.SYSTEM
        if self.as_measured("cache", "cache", pool, Phase.SERVING):
            return
        for role in ("model", "drafter"):
            if not (weight := self.weights.get(role)):
                continue
            if weight.shape is None or self.context is None:
                self.unknown.append(f"the cache of the {role}: its header was not read")
                continue
            found = cache_lines(weight.shape, self.demand, self.context, pool)
            if found is None:
                kinds = f"{self.demand.keys}/{self.demand.values}"
                self.unknown.append(f"the cache of the {role}: unknown type {kinds}")
                continue
            prefix = "" if role == "model" else "drafter's "
            self.lines += [x.model_copy(update={"item": prefix + x.item}) for x in found]
            self.unknown += [f"{role}: {a}" for a in weight.shape.assumptions if "as 0" in a]

    def working(self) -> None:
        """Compute buffers, and what engine and driver use themselves."""
        pool, shape = self.compute_pool, self.weights["model"].shape
        if self.as_measured("compute", "compute buffers", pool, Phase.SERVING):
            pass
        elif self.demand.engine == "vllm":
            size = VLLM_WORKING if self.machine.has_gpu else VLLM_CPU_WORKING
            self.add("activations and graphs", size, gib(size), RULE + ", from one measured run",
                     pool, basis=Basis.ASSUMED, phase=Phase.SERVING)  # fmt: skip
        else:
            size, formula = compute_bytes(shape, self.demand, self.context)
            self.add("compute buffers", size, formula, RULE + ", compared with llama-server",
                     pool, basis=Basis.ASSUMED, phase=Phase.SERVING)  # fmt: skip
        if self.as_measured("engine", "engine and driver", pool, Phase.ALWAYS):
            return
        if self.machine.has_gpu and self.demand.share is None:
            self.add("CUDA context", CUDA_CONTEXT, "0.5 GiB per process", RULE,
                     self.machine.pool, basis=Basis.ASSUMED)  # fmt: skip
        self.add("the server's process", PROCESS, "0.125 GiB", RULE, Pool.SYSTEM,
                 basis=Basis.ASSUMED)  # fmt: skip

    def share(self) -> None:
        """The cache: what is left of vLLM's share of the total memory, which it takes whole."""
        pool, share = self.machine.pool, self.demand.share or 0.0
        total = self.machine.gpu_total() if self.machine.discrete else self.machine.total
        # Buffers are part of the share, which is reserved before the server is ready.
        inside = [x for x in self.lines if x.pool is pool and x.item != "the server's process"]
        room = int(share * total) - sum(line.bytes for line in inside)
        source = "vLLM takes --gpu-memory-utilization of the total"
        if known := self.measured.get("cache"):
            source += f"; {gib(known.size)} measured: {known.source}"
        self.add("cache, what the share leaves", max(room, 0),
                 f"{share:g} x {gib(total)} = {gib(int(share * total))}, minus the above",
                 source, pool, phase=Phase.SERVING)  # fmt: skip
        shape = self.weights["model"].shape
        found = None
        if shape is not None and self.context is not None:
            found = cache_lines(shape, self.demand, self.context, pool)
        if room <= 0:
            self.lacking.append(f"weights and buffers fill the share of {gib(int(share * total))}")
        elif found is None:
            self.unknown.append("the cache that one sequence needs: unknown layers or type")
        elif (need := sum(line.bytes for line in found)) > room:
            self.lacking.append(
                f"{self.context} tokens need {gib(need)}, the share leaves {gib(room)}"
            )

    def staging(self) -> None:
        """What loading needs on top: files that are read but not yet in place."""
        if self.as_measured("staging", "loader staging", Pool.SYSTEM, Phase.LOADING):
            return
        demand, machine = self.demand, self.machine
        # Without a GPU the mapped file is the weights. For a discrete GPU it is page cache of the
        # machine, which the kernel reclaims.
        if not machine.has_gpu or demand.gpu_layers == 0 or not demand.mmap:
            return
        if demand.engine == "vllm":
            size = max(weight.largest for weight in self.weights.values())
            taken = self.demand.share is not None and machine.unified
            self.add("loader staging", size, "the largest shard",
                     "shards are loaded one by one" + (", beside the reserved share" * taken),
                     Pool.SYSTEM, phase=Phase.LOADING)  # fmt: skip
            if taken:  # the engine holds the share while loading too, and it is one pool
                self.lines = [
                    x.model_copy(update={"phase": Phase.ALWAYS}) if x.phase is Phase.SERVING else x
                    for x in self.lines
                ]
        elif machine.unified:
            size = sum(weight.size for weight in self.weights.values())
            self.add("loader staging", size, "all mapped files, beside the device's copy",
                     "mapped pages and the device's copy share one pool; without mmap nothing "
                     "is stored twice", Pool.SYSTEM, phase=Phase.LOADING)  # fmt: skip

    def all_the_rest(self) -> None:
        """All but the weights, from the memory left on a machine with a server loaded."""
        left = self.measured["left"]
        # A drafter or projector may be newer than the figure: counted on top, to be safe.
        held = sum(line.bytes for line in self.lines if line.item.startswith("weights"))
        total = left.of or self.machine.total
        self.add(
            "cache, buffers and engine", max(0, total - IDLE - left.size - held),
            f"{gib(total)} - {gib(left.size)} left - weights - {gib(IDLE)} of an idle system",
            left.source, self.machine.pool, basis=Basis.MEASURED, phase=Phase.SERVING,
        )  # fmt: skip
