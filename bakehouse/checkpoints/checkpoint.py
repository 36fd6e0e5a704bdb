"""A whole checkpoint: its files, shards and sizes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
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
        """The largest file, which a loader that reads file by file has to hold."""
        return max(self.files, key=lambda file: file.size)

    @property
    def tensors(self) -> Iterable[Tensor]:
        """Every tensor, file by file."""
        return (tensor for file in self.files for tensor in file.tensors)

    @cached_property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, without headers."""
        return sum(tensor.size for tensor in self.tensors)

    @cached_property
    def parameters(self) -> int:
        """Number of weights; packed integers count as the values they hold."""
        if self.format == "gguf":
            return sum(tensor.elements for tensor in self.tensors)
        total, bits = 0, _quant_bits(self.metadata)
        for tensor in self.tensors:
            if _PACKED.search(tensor.name) and tensor.type in {"I32", "U32", "U8", "I8"}:
                total += tensor.size * 8 // bits
            elif not _SCALES.search(tensor.name):
                total += tensor.elements
        return total

    @cached_property
    def types(self) -> dict[str, tuple[int, int]]:
        """Element type to (number of tensors, bytes), most bytes first."""
        found: dict[str, tuple[int, int]] = {}
        for tensor in self.tensors:
            count, size = found.get(tensor.type, (0, 0))
            found[tensor.type] = (count + 1, size + tensor.size)
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    @cached_property
    def formats(self) -> frozenset[str]:
        """Element types of weights (without scales), and formats that a config.json names.

        Packed FP4 is stored in plain bytes, with scales in FP8.
        """
        types = {tensor.type for tensor in self.tensors if not _SCALES.search(tensor.name)}
        quant = self.metadata.get("quantization_config") if self.format == "safetensors" else None
        named = [quant.get(key) for key in _FORMAT_KEYS] if isinstance(quant, Mapping) else []
        found = (_FORMAT.search(name) for name in named if isinstance(name, str))
        return frozenset(types | {one[0].upper() for one in found if one})

    @property
    def quantisation(self) -> str:
        """The element type that takes the most bytes."""
        return next(iter(self.types), "none")

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of weights that decoding one token reads (for the roofline).

        Everything in a dense model; of routed experts the used share; not the separate input
        embedding (one row), vision, projector and MTP layers.
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
    """Number of the layer that a tensor belongs to; -1 for none."""
    found = _LAYER.match(name)
    return int(found[1]) if found else -1


def _quant_bits(config: Mapping[str, Any]) -> int:
    """Bits of a packed weight by quantization_config; 4 by default."""
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


SHARD_NAME = re.compile(
    r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.(?P<format>gguf|safetensors)$"
)
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
    """Read a model from the paths of all its files. Raises NotFound or CheckpointError."""
    if not paths:
        raise NotFound("no weight files given", hint="name at least one file")
    if any(path.suffix == ".safetensors" for path in paths):
        weights = [path for path in paths if path.suffix == ".safetensors"]
        return _safetensors(weights, weights[0].parent)
    weights = [path for path in paths if path.suffix == ".gguf"] or list(paths)
    return _gguf(split_paths(weights[0]) if len(weights) == 1 else weights)


def split_paths(path: Path) -> list[Path]:
    """All files of a split GGUF, by the name of one; only `path` if it is not split.

    Raises NotFound if some are missing.
    """
    found = SHARD_NAME.match(path.name)
    count = int(found["count"]) if found and found["format"] == "gguf" else 0
    if not found or not 1 <= count <= 10_000:
        return [path]
    names = (f"{found['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1))
    paths = [path.with_name(name) for name in names]
    if missing := [p.name for p in paths if not p.exists()]:
        raise _missing(missing, count, path.parent)
    return paths


def _missing(names: Sequence[str], count: int, where: Path | str) -> NotFound:
    shown = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
    return NotFound(
        f"{len(names)} of {count} files of the model are missing: {shown}",
        where=str(where),
        hint="fetch all of them; a model is loaded whole",
    )


def _gguf(paths: Sequence[Path]) -> Checkpoint:
    headers = []
    for path in paths:
        with FileSource(path) as source:
            headers.append(read_gguf(source))
    return join_gguf(headers)


def join_gguf(headers: Sequence[GgufHeader]) -> Checkpoint:
    """Combine the headers of one model. Raises CheckpointError if they do not match."""
    ordered = sorted(headers, key=lambda h: h.split_number)
    first = ordered[0]
    _check_splits(ordered)
    files = tuple(CheckpointFile(h.name, h.file_size, h.tensors) for h in ordered)
    held, declared = len(_tensor_files(files)), first.metadata.get("split.tensors.count")
    if len(ordered) > 1 and isinstance(declared, int) and declared != held:
        raise CheckpointError(
            f"the split model declares {declared} tensors, its files hold {held}",
            where=first.name,
            hint="the files come from different downloads; fetch all of them again",
        )
    return Checkpoint("gguf", files, gguf_shape(first.metadata, first.name), first.metadata)


def _check_splits(headers: Sequence[GgufHeader]) -> None:
    first = headers[0]
    for header in headers:
        if header.split_count > 1 and not SHARD_NAME.match(PurePosixPath(header.name).name):
            merged = header.trailing > 65_536
            raise CheckpointError(
                f"the header says this is one of {header.split_count} splits, but the file name "
                "does not" + (": the splits were joined with cat" if merged else ""),
                where=f"{header.name}, split.count = {header.split_count}",
                hint="join splits with llama-gguf-split --merge, or use the first of the "
                "original files (NAME-00001-of-N.gguf)",
                id="checkpoint-merged-by-cat",
            )
    numbers = [header.split_number for header in headers]
    counts = {header.split_count for header in headers}
    if counts != {len(headers)} or numbers != list(range(len(headers))):
        given = ", ".join(str(n + 1) for n in numbers[:20])
        raise CheckpointError(
            f"the files are not one complete model: {len(headers)} files given, with numbers "
            f"{given} of {'/'.join(map(str, sorted(counts)))} by their headers",
            where=first.name,
            hint="fetch every split of the same model",
        )


def _read_folder(folder: Path) -> Checkpoint:
    weights = sorted(folder.glob("*.safetensors"))
    if weights:
        return _safetensors(weights, folder)
    # Projectors are stored beside their model, but are models of their own.
    ggufs = sorted(p for p in folder.glob("*.gguf") if not p.name.startswith("mmproj"))
    firsts = [p for p in ggufs if not (m := SHARD_NAME.match(p.name)) or m["number"] == "00001"]
    if len(firsts) == 1:
        return read_path(firsts[0])
    what, hint = "no weight files (.gguf, .safetensors) in the folder", "fetch the weights"
    if firsts:
        names = ", ".join(p.name for p in firsts[:6])
        what, hint = f"the folder holds {len(firsts)} models: {names}", "name one of them"
    elif (folder / "config.json").is_file():
        what = "config.json without weight files: only the configuration was fetched"
    raise NotFound(what, where=str(folder), hint=hint)


def _safetensors(paths: Sequence[Path], folder: Path) -> Checkpoint:
    index = read_index(folder / INDEX) if (folder / INDEX).is_file() else None
    if index is not None and any(path.name in index.values() for path in paths):
        names = sorted(set(index.values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise _missing(missing, len(names), folder / INDEX)
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
    """Check that no number is missing among numbered safetensors shards. Raises NotFound."""
    found = [match for match in map(SHARD_NAME.match, names) if match]
    for stem, count in dict.fromkeys((match["stem"], match["count"]) for match in found):
        numbered = (f"{stem}-{n:05d}-of-{count}.safetensors" for n in range(1, int(count) + 1))
        if missing := sorted(set(numbered) - set(names)):
            raise _missing(missing, int(count), where)


def read_index(path: Path) -> dict[str, str]:
    """Read the `weight_map` of an index: tensor to file name. Raises CheckpointError."""
    with FileSource(path) as source:
        if source.size > MAX_INDEX:
            raise _bad_index(path, f"it has {source.size} bytes")
        raw = source.read(0, source.size)
    return parse_index(raw, path)


def parse_index(raw: bytes, path: Path | PurePosixPath) -> dict[str, str]:
    """Parse an index's bytes; `path` is for messages. Raises CheckpointError."""
    try:
        weights = json.loads(raw.decode())["weight_map"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        if raw[:1] != b"{":
            raise wrong_format(BytesSource(str(path), raw), "safetensors index", raw) from error
        raise _bad_index(path, "it is not JSON with a weight_map") from error
    if not isinstance(weights, dict) or not weights:
        raise _bad_index(path, "its weight_map is empty or not a map")
    for name in set(map(str, weights.values())):
        # Only plain names: an index must not point outside its folder.
        if not name.endswith(".safetensors") or PurePosixPath(name).name != name or "\0" in name:
            raise _bad_index(path, f"it names the file {name!r}")
    return {str(k): str(v) for k, v in weights.items()}


def check_shards(files: Sequence[CheckpointFile], index: dict[str, str] | None) -> None:
    """Check that each tensor is there once, where the index says. Raises CheckpointError."""
    held = _tensor_files(files)
    for tensor, named in (index or {}).items():
        real = held.get(tensor)
        if real is None or PurePosixPath(real).name != named:
            where = f"in {PurePosixPath(real).name}" if real else "nowhere"
            raise CheckpointError(
                f"the index says that the tensor {tensor!r} is in {named}; it is {where}",
                where=INDEX,
                hint="index and shards come from different revisions; fetch them again",
            )


def _tensor_files(files: Sequence[CheckpointFile]) -> dict[str, str]:
    """Map each tensor to its file. Raises CheckpointError for a tensor in two files."""
    held: dict[str, str] = {}
    for file in files:
        for tensor in file.tensors:
            if tensor.name in held:
                raise CheckpointError(
                    f"the tensor {tensor.name!r} is in two files: which one is used depends on "
                    "the loader",
                    where=f"{held[tensor.name]} and {file.name}",
                    hint="use a checkpoint without duplicates, or write one with `invoke reshard`",
                    id="checkpoint-duplicate-tensor",
                )
            held[tensor.name] = file.name
    return held


def _bad_index(path: Path | PurePosixPath, what: str) -> CheckpointError:
    return CheckpointError(
        f"the safetensors index is damaged: {what}", where=str(path), hint="fetch it again"
    )


def _config(path: Path) -> tuple[dict[str, Any], ModelShape]:
    if not path.is_file():
        unknown = ("config.json not found: layers and cache sizes are unknown",)
        return {}, ModelShape("", (), assumptions=unknown)
    with FileSource(path) as source:
        config = parse_config(source.read(0, MAX_CONFIG), str(path))
    return config, hf_shape(config, str(path))
