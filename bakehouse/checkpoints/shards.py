"""How a checkpoint is cut into shards: pure planning over headers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bakehouse.base import digest
from bakehouse.checkpoints.tensors import SAFETENSORS_BITS, Tensor


@dataclass(frozen=True)
class Placed:
    """A tensor and the file (by its number among the inputs) that it is read from."""

    tensor: Tensor
    file: int


@dataclass(frozen=True)
class Shard:
    """One output file: its header, and its tensors in the order in which they are written."""

    name: str
    head: bytes
    tensors: tuple[Placed, ...]

    @property
    def size(self) -> int:
        """Bytes of the finished file."""
        return len(self.head) + sum(placed.tensor.size for placed in self.tensors)

    def offsets(self) -> list[int]:
        """Where each tensor begins in the file."""
        at, found = len(self.head), []
        for placed in self.tensors:
            found.append(at)
            at += placed.tensor.size
        return found


@dataclass(frozen=True)
class Cut:
    """The whole plan."""

    shards: tuple[Shard, ...]
    index: bytes | None
    """The index file; None where there is one shard only."""
    oversized: tuple[str, ...]
    """Tensors that alone are larger than a shard may be."""

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size for shard in self.shards)

    @property
    def digest(self) -> str:
        """Names this plan, so that a half-made output is only gone on with by the same one."""
        return digest([[s.name, s.size, s.head[8:].decode()] for s in self.shards])


def cut(
    tensors: Sequence[Placed], most: int, metadata: Mapping[str, str], index: Mapping[str, object]
) -> Cut:
    """Put tensors, in their order, into files of at most `most` bytes each.

    A tensor that is larger gets a file of its own. `metadata` goes into every header, `index` into
    the index's own metadata.
    """
    groups: list[list[Placed]] = []
    oversized = []
    held = 0
    base = len(_head([], metadata)) + 8
    for placed in tensors:
        # Name, type, shape and offsets, with room for the longest numbers.
        entry = len(json.dumps(placed.tensor.name)) + 96 + 21 * len(placed.tensor.shape)
        need = placed.tensor.size + entry
        if base + need > most:
            oversized.append(placed.tensor.name)
        if not groups or held + need > most:
            groups.append([])
            held = base
        groups[-1].append(placed)
        held += need
    shards = tuple(_shard(i, len(groups), group, metadata) for i, group in enumerate(groups, 1))
    return Cut(shards, _index(shards, index) if len(shards) > 1 else None, tuple(oversized))


def _shard(number: int, count: int, group: list[Placed], metadata: Mapping[str, str]) -> Shard:
    # Wide types first, as the safetensors library writes them: so every tensor stays aligned.
    group = sorted(group, key=lambda p: -SAFETENSORS_BITS[p.tensor.type])
    name = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
    return Shard(name, _head([p.tensor for p in group], metadata), tuple(group))


def _head(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.type,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.size],
        }
        at += tensor.size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _index(shards: Sequence[Shard], metadata: Mapping[str, object]) -> bytes:
    places = {p.tensor.name: shard.name for shard in shards for p in shard.tensors}
    total = sum(p.tensor.size for shard in shards for p in shard.tensors)
    made = {
        "metadata": {**metadata, "total_size": total},
        "weight_map": dict(sorted(places.items())),
    }
    return (json.dumps(made, indent=2, ensure_ascii=False) + "\n").encode()
