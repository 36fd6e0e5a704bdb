"""A whole checkpoint: every file of it, its tensors, its shape."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from bakehouse.checkpoints.shape import ModelShape
from bakehouse.checkpoints.tensors import Tensor

_EXPERT = re.compile(r"(_exps\.|_chexps\.|\.experts\.)")
_SHARED_EXPERT = re.compile(r"(_shexp\.|shared_expert)")
_SCALES = re.compile(
    r"(_scale|_scale_inv|_scale_2|\.scales|\.qzeros|\.g_idx|_zero_point|_scale_shape|_shape)$"
)
_PACKED = re.compile(r"\.(qweight|weight_packed)$")
_FORMAT = re.compile(r"(?:mx|nv)fp4|fp8", re.IGNORECASE)
_FORMAT_KEYS = ("quant_method", "quant_algo", "format")
_LOOKED_UP = re.compile(r"(^token_embd\.weight$|\bembed_tokens\.weight$|\bwte\.weight$)")
_OUTPUT = re.compile(r"(^output\.weight$|\blm_head\.weight$)")
_PICTURES = re.compile(r"(^|\.)(vision_tower|vision_model|visual|multi_modal_projector|mm_proj)")


@dataclass(frozen=True)
class CheckpointFile:
    """One weight file as its header describes it."""

    name: str
    """Path or URL."""
    size: int
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Checkpoint:
    """All files of one model."""

    format: Literal["gguf", "safetensors"]
    files: tuple[CheckpointFile, ...]
    shape: ModelShape
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """A GGUF's metadata, or the config.json."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def largest(self) -> CheckpointFile:
        """The largest file: what a loader that goes file by file has to hold."""
        return max(self.files, key=lambda file: file.size)

    @property
    def tensors(self) -> Iterable[Tensor]:
        """Every tensor, file by file."""
        return (tensor for file in self.files for tensor in file.tensors)

    @cached_property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors: what has to be in memory, headers apart."""
        return sum(tensor.size for tensor in self.tensors)

    @cached_property
    def parameters(self) -> int:
        """How many weights the model has; packed integers count as the values they hold."""
        return sum(self._weights_in(tensor) for tensor in self.tensors)

    def _weights_in(self, tensor: Tensor) -> int:
        if self.format == "gguf":
            return tensor.elements
        if _SCALES.search(tensor.name):
            return 0
        if _PACKED.search(tensor.name) and tensor.type in {"I32", "U32", "U8", "I8"}:
            return tensor.size * 8 // _quant_bits(self.metadata)
        return tensor.elements

    @cached_property
    def types(self) -> dict[str, tuple[int, int]]:
        """Element type to how many tensors and bytes have it, most bytes first."""
        found: dict[str, tuple[int, int]] = {}
        for tensor in self.tensors:
            count, size = found.get(tensor.type, (0, 0))
            found[tensor.type] = (count + 1, size + tensor.size)
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    @cached_property
    def formats(self) -> frozenset[str]:
        """Element types of weights, scales apart, and the formats that a config.json names.

        Packed FP4 stands in bytes whose type says nothing, beside scales in FP8.
        """
        types = {tensor.type for tensor in self.tensors if not _SCALES.search(tensor.name)}
        told = self.metadata.get("quantization_config") if self.format == "safetensors" else None
        named = [told.get(key) for key in _FORMAT_KEYS] if isinstance(told, Mapping) else []
        found = (_FORMAT.search(name) for name in named if isinstance(name, str))
        return frozenset(types | {one[0].upper() for one in found if one})

    @property
    def quantisation(self) -> str:
        """The element type that takes the most bytes."""
        return next(iter(self.types), "none")

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of weights that one decoded token reads, without a cache: the roofline's size.

        All of a dense model. Of routed experts only the share that is used; of a separate input
        embedding one row, counted as nothing; of vision, projector and MTP layers nothing.
        """
        shape = self.shape
        share = shape.experts_used / shape.experts if shape.experts else 1.0
        separate_output = any(_OUTPUT.search(t.name) for t in self.tensors)
        first_mtp = len(shape.layers)
        total = 0.0
        for tensor in self.tensors:
            if _PICTURES.search(tensor.name) or layer_number(tensor.name) >= first_mtp > 0:
                continue
            if separate_output and _LOOKED_UP.search(tensor.name):
                continue
            routed = _EXPERT.search(tensor.name) and not _SHARED_EXPERT.search(tensor.name)
            total += tensor.size * (share if routed else 1.0)
        return round(total)

    def to_data(self) -> dict[str, object]:
        """Plain data for a JSON document."""
        return {
            "format": self.format,
            "files": [{"name": f.name, "size": f.size} for f in self.files],
            "size": self.size,
            "tensors": sum(len(f.tensors) for f in self.files),
            "parameters": self.parameters,
            "types": {k: {"tensors": n, "bytes": b} for k, (n, b) in self.types.items()},
            "bytes_per_token": self.bytes_per_token,
            "shape": self.shape.to_data(),
        }


_LAYER = re.compile(r"^(?:blk|(?:model\.)?(?:language_model\.)?(?:model\.)?layers)\.(\d{1,5})\.")


def layer_number(name: str) -> int:
    """The layer that a tensor belongs to; -1 for none."""
    found = _LAYER.match(name)
    return int(found[1]) if found else -1


def _quant_bits(config: Mapping[str, Any]) -> int:
    """Bits of a packed weight, as quantization_config says; 4 where it does not."""
    quant = config.get("quantization_config")
    if not isinstance(quant, dict):
        return 4
    bits = quant.get("bits")
    groups = quant.get("config_groups")
    if isinstance(groups, dict):
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, dict) else None
            if isinstance(weights, dict):
                bits = weights.get("num_bits", bits)
    return bits if isinstance(bits, int) and 1 <= bits <= 16 else 4
