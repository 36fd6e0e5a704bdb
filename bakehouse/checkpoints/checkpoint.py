"""A whole checkpoint: its files, shards and sizes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from bakehouse.checkpoints.gguf import GgufHeader, Tensor, read_gguf
from bakehouse.checkpoints.hf_config import MAX_CONFIG, hf_shape, parse_config
from bakehouse.checkpoints.model_shape import ModelShape, gguf_shape
from bakehouse.checkpoints.reader import BytesSource, FileSource, wrong_format
from bakehouse.checkpoints.safetensors import read_safetensors
from bakehouse.errors import CheckpointError, NotFound

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


SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
SHARD_NAME = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")
INDEX = "model.safetensors.index.json"
MAX_INDEX = 256 * 2**20


def read_path(path: Path) -> Checkpoint:
    """Read the model at `path`: a GGUF (the first of its splits), a safetensors file, a folder.

    Raises NotFound or CheckpointError.
    """
    if path.is_dir():
        return _read_folder(path)
    if path.suffix == ".safetensors":
        return _safetensors([path], path.parent)
    return _gguf(split_paths(path))


def read_paths(paths: Sequence[Path]) -> Checkpoint:
    """Read a model whose files are all named. Raises NotFound or CheckpointError."""
    if not paths:
        raise NotFound("no weight file is named", hint="name at least one file")
    if any(path.suffix == ".safetensors" for path in paths):
        weights = [path for path in paths if path.suffix == ".safetensors"]
        return _safetensors(weights, weights[0].parent)
    weights = [path for path in paths if path.suffix == ".gguf"] or list(paths)
    return _gguf(split_paths(weights[0]) if len(weights) == 1 else weights)


def split_paths(path: Path) -> list[Path]:
    """All files of a split GGUF, told from the name of one; itself where it is not split."""
    found = SPLIT_NAME.match(path.name)
    if not found or not 1 <= int(found["count"]) <= 10_000:
        return [path]
    count = int(found["count"])
    names = (f"{found['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1))
    paths = [path.with_name(name) for name in names]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        raise NotFound(
            f"{len(missing)} of {count} files of the split model are not there: "
            + ", ".join(missing[:4]) + (" ..." if len(missing) > 4 else ""),
            where=str(path.parent),
            hint="fetch all of them; a split model is loaded whole",
        )  # fmt: skip
    return paths


def _gguf(paths: Sequence[Path]) -> Checkpoint:
    headers = []
    for path in paths:
        with FileSource(path) as source:
            headers.append(read_gguf(source))
    return join_gguf(headers)


def join_gguf(headers: Sequence[GgufHeader]) -> Checkpoint:
    """Put the headers of one model together. Raises CheckpointError where they do not fit."""
    ordered = sorted(headers, key=lambda h: h.split_number)
    first = ordered[0]
    _check_splits(ordered)
    seen: dict[str, str] = {}
    for header in ordered:
        for tensor in header.tensors:
            if tensor.name in seen:
                raise _twice(tensor.name, seen[tensor.name], header.name)
            seen[tensor.name] = header.name
    declared = first.metadata.get("split.tensors.count")
    if len(ordered) > 1 and isinstance(declared, int) and declared != len(seen):
        raise CheckpointError(
            f"the split model declares {declared} tensors, its files hold {len(seen)}",
            where=first.name,
            hint="the files come from different downloads; fetch all of them again",
        )
    files = tuple(CheckpointFile(h.name, h.file_size, h.tensors) for h in ordered)
    return Checkpoint("gguf", files, gguf_shape(first.metadata, first.name), first.metadata)


def _check_splits(headers: Sequence[GgufHeader]) -> None:
    first = headers[0]
    for header in headers:
        named = SPLIT_NAME.match(PurePosixPath(header.name).name)
        if header.split_count > 1 and not named:
            merged = header.trailing > 65_536
            raise CheckpointError(
                f"this file is the first of {header.split_count} splits by its header, and its "
                "name is not a split's name"
                + (": the splits were put together with cat" if merged else ""),
                where=f"{header.name}, split.count = {header.split_count}",
                hint="join splits with llama-gguf-split --merge, or give the first of the "
                "original files (NAME-00001-of-N.gguf)",
                id="checkpoint-merged-by-cat",
            )
    numbers = [header.split_number for header in headers]
    counts = {header.split_count for header in headers}
    if counts != {len(headers)} or numbers != list(range(len(headers))):
        have = ", ".join(str(n + 1) for n in numbers[:20])
        raise CheckpointError(
            f"the files do not make one whole: {len(headers)} are given, their headers say "
            f"{'/'.join(map(str, sorted(counts)))} in all, numbers {have}",
            where=first.name,
            hint="fetch every split of one and the same model",
        )


def _read_folder(folder: Path) -> Checkpoint:
    weights = sorted(folder.glob("*.safetensors"))
    if weights:
        return _safetensors(weights, folder)
    # Projectors lie beside their model and are models of their own.
    ggufs = sorted(p for p in folder.glob("*.gguf") if not p.name.startswith("mmproj"))
    firsts = [p for p in ggufs if not (m := SPLIT_NAME.match(p.name)) or m["number"] == "00001"]
    if len(firsts) == 1:
        return read_path(firsts[0])
    if firsts:
        raise NotFound(
            f"the folder holds {len(firsts)} models: {', '.join(p.name for p in firsts[:6])}",
            where=str(folder),
            hint="name one of them",
        )
    config = (folder / "config.json").is_file()
    raise NotFound(
        "there is a config.json and no weight file: only the configuration was fetched"
        if config
        else "there is no weight file (.gguf, .safetensors) in the folder",
        where=str(folder),
        hint="fetch the weights",
    )


def _safetensors(paths: Sequence[Path], folder: Path) -> Checkpoint:
    index = read_index(folder / INDEX) if (folder / INDEX).is_file() else None
    if index is not None and any(path.name in index.values() for path in paths):
        names = sorted(set(index.values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise NotFound(
                f"{len(missing)} of {len(names)} shards are not there: {', '.join(missing[:4])}",
                where=str(folder / INDEX),
                hint="fetch all shards that the index names",
            )
        paths = [folder / name for name in names]
    else:
        check_numbers([path.name for path in paths], str(folder))
    files = []
    for path in paths:
        with FileSource(path) as source:
            header = read_safetensors(source)
        files.append(CheckpointFile(header.name, header.file_size, header.tensors))
    check_shards(files, index)
    config, shape = _config(folder / "config.json")
    return Checkpoint("safetensors", tuple(files), shape, config)


def check_numbers(names: Sequence[str], where: str) -> None:
    """See that of shards which are numbered in their names all are there. Raises NotFound."""
    have: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if found := SHARD_NAME.match(name):
            have.setdefault((found["stem"], found["count"]), set()).add(int(found["number"]))
    for (stem, count), numbers in have.items():
        if missing := sorted(set(range(1, int(count) + 1)) - numbers):
            shown = ", ".join(f"{stem}-{n:05d}-of-{count}.safetensors" for n in missing[:4])
            raise NotFound(
                f"{len(missing)} of {int(count)} shards are not there: {shown}",
                where=where,
                hint="fetch all of them; a model is loaded whole",
            )


def read_index(path: Path) -> dict[str, str]:
    """Read `weight_map` of an index: tensor to file name. Raises CheckpointError."""
    with FileSource(path) as source:
        if source.size > MAX_INDEX:
            raise _bad_index(path, f"it has {source.size} bytes")
        raw = source.read(0, source.size)
    return parse_index(raw, path)


def parse_index(raw: bytes, path: Path | PurePosixPath) -> dict[str, str]:
    """Read an index's bytes; `path` is what messages call it. Raises CheckpointError."""
    try:
        data = json.loads(raw.decode())
        weights = data["weight_map"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        if raw[:1] != b"{":
            raise wrong_format(BytesSource(str(path), raw), "safetensors index", raw) from error
        raise _bad_index(path, "it is not JSON with a weight_map") from error
    if not isinstance(weights, dict) or not weights:
        raise _bad_index(path, "its weight_map is empty or no map")
    for name in set(map(str, weights.values())):
        # Only plain names: an index must not lead out of its folder.
        if not name.endswith(".safetensors") or PurePosixPath(name).name != name or "\0" in name:
            raise _bad_index(path, f"it names the file {name!r}")
    return {str(k): str(v) for k, v in weights.items()}


def check_shards(files: Sequence[CheckpointFile], index: dict[str, str] | None) -> None:
    """Every tensor once, and where the index says. Raises CheckpointError."""
    home: dict[str, str] = {}
    for tensor, file in _places(files):
        if tensor in home:
            raise _twice(tensor, home[tensor], file)
        home[tensor] = file
    if index is None:
        return
    for tensor, named in index.items():
        real = home.get(tensor)
        if real is None or PurePosixPath(real).name != named:
            where = f"in {PurePosixPath(real).name}" if real else "nowhere"
            raise CheckpointError(
                f"the index says that the tensor {tensor!r} is in {named}; it is {where}",
                where=INDEX,
                hint="index and shards come from different revisions; fetch them again",
            )


def _places(files: Sequence[CheckpointFile]) -> Iterator[tuple[str, str]]:
    return ((tensor.name, file.name) for file in files for tensor in file.tensors)


def _twice(tensor: str, one: str, other: str) -> CheckpointError:
    return CheckpointError(
        f"the tensor {tensor!r} is in two files: which one counts would depend on the loader",
        where=f"{one} and {other}",
        hint="take a checkpoint without duplicates, or write one with `invoke reshard`",
        id="checkpoint-duplicate-tensor",
    )


def _bad_index(path: Path | PurePosixPath, what: str) -> CheckpointError:
    return CheckpointError(
        f"the safetensors index is damaged: {what}", where=str(path), hint="fetch it again"
    )


def _config(path: Path) -> tuple[dict[str, Any], ModelShape]:
    if not path.is_file():
        nothing = ("there is no config.json: layers and cache sizes are not known",)
        return {}, ModelShape("", (), assumptions=nothing)
    with FileSource(path) as source:
        config = parse_config(source.read(0, MAX_CONFIG), str(path))
    return config, hf_shape(config, str(path))
