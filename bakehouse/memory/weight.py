"""The weights of one role, and how much of them goes where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bakehouse.checkpoints.files import read_paths
from bakehouse.checkpoints.shape import ModelShape
from bakehouse.checkpoints.whole import Checkpoint, layer_number
from bakehouse.lock import WeightPin

REPACKED = {"Q1_0", "Q2_K", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4"}


@dataclass(frozen=True)
class Weight:
    """The files of one role (model, drafter, projector). Bytes."""

    size: int
    largest: int
    checkpoint: Checkpoint | None = None
    source: str = "file sizes"
    figures: ModelShape | None = None
    """The model's shape where it is known from elsewhere than these files."""

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> Weight:
        """Of a checkpoint whose headers were read."""
        return cls(checkpoint.size, checkpoint.largest.size, checkpoint, "the files' headers")

    @classmethod
    def locate(cls, pin: WeightPin, files: Sequence[Path]) -> Weight:
        """Of a lock's pin: by its headers where all `files` are there, else by the pinned sizes.

        Raises CheckpointError for files that are there and damaged.
        """
        weights = [f for f in pin.files if f.path.endswith((".gguf", ".safetensors"))] or pin.files
        if files and all(file.is_file() for file in files):
            return cls.read(read_paths(files))
        return cls(sum(f.size for f in weights), max(f.size for f in weights))

    @property
    def resident(self) -> int:
        """Bytes that the loaded tensors take."""
        return self.checkpoint.tensor_bytes if self.checkpoint else self.size

    @property
    def shape(self) -> ModelShape | None:
        """The model's shape where it is known."""
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
        """Bytes of a GGUF that go to the GPU with `-ngl gpu_layers`: the last layers come first.

        The input embedding stays in the machine's memory; the output goes with one layer more than
        the model has. Without a header the whole is taken in proportion, over 64 layers.
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
                # tied: the same tensor is the output too, and the GPU gets a copy
                total += tensor.size if tied else 0
            elif (number := layer_number(tensor.name)) < 0 or number >= first:
                total += tensor.size
        return total

    def kept(self, gpu_layers: int | None) -> int:
        """Bytes of a GGUF that stay in the machine's memory beside a discrete GPU."""
        return max(0, self.resident - self.offloaded(gpu_layers))
