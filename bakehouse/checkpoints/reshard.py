"""Rewrite a checkpoint into small shards.

The output is written to `OUT.part` and renamed to `OUT` once all of it is verified and on disk. An
interrupted run is resumed by the same command: it keeps complete shards, and verifies them too.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from bakehouse.checkpoints.checkpoint import (
    INDEX,
    CheckpointFile,
    check_numbers,
    check_shards,
    read_index,
)
from bakehouse.checkpoints.gguf import SAFETENSORS_BITS, Tensor
from bakehouse.checkpoints.reader import FileSource
from bakehouse.checkpoints.safetensors import read_safetensors
from bakehouse.errors import CheckpointError, HostError, NotFound, UsageError, is_disk_full
from bakehouse.models import digest
from bakehouse.progress import Bar, Progress
from bakehouse.util.files import file_lock


@dataclass(frozen=True)
class Placed:
    """A tensor and the index of the input file that it is read from."""

    tensor: Tensor
    file: int


@dataclass(frozen=True)
class Shard:
    """One output file: its header, and its tensors in the order they are written."""

    name: str
    head: bytes
    tensors: tuple[Placed, ...]

    @property
    def size(self) -> int:
        """Bytes of the finished file."""
        return len(self.head) + sum(placed.tensor.size for placed in self.tensors)

    def offsets(self) -> list[int]:
        """Offset of each tensor in the file."""
        sizes = (placed.tensor.size for placed in self.tensors)
        return list(accumulate(sizes, initial=len(self.head)))[:-1]


@dataclass(frozen=True)
class Cut:
    """The whole plan."""

    shards: tuple[Shard, ...]
    index: bytes | None
    """The index file; None if there is only one shard."""
    oversized: tuple[str, ...]
    """Tensors that are larger than a shard may be."""

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(shard.size for shard in self.shards)

    @property
    def digest(self) -> str:
        """Identifies this plan: only the same plan resumes an unfinished output."""
        return digest([[s.name, s.size, s.head[8:].decode()] for s in self.shards])


def cut(
    tensors: Sequence[Placed], most: int, metadata: Mapping[str, str], index: Mapping[str, object]
) -> Cut:
    """Distribute tensors, in order, over files of at most `most` bytes each.

    A larger tensor gets a file of its own. `metadata` goes into every header, `index` into the
    metadata of the index.
    """
    groups: list[list[Placed]] = []
    oversized = []
    held = 0
    base = len(_head([], metadata)) + 8
    for placed in tensors:
        # Name, type, shape and offsets, with space for the longest numbers.
        entry = len(json.dumps(placed.tensor.name)) + 96 + 21 * len(placed.tensor.shape)
        need = placed.tensor.size + entry
        if base + need > most:
            oversized.append(placed.tensor.name)
        if not groups or held + need > most:
            groups.append([])
            held = base
        groups[-1].append(placed)
        held += need
    shards = []
    for i, group in enumerate(groups, 1):
        # Wide types first, as the safetensors library writes them, so that tensors stay aligned.
        group.sort(key=lambda p: -SAFETENSORS_BITS[p.tensor.type])
        name = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        head = _head([p.tensor for p in group], metadata)
        shards.append(Shard(name if len(groups) > 1 else "model.safetensors", head, tuple(group)))
    made = _index(shards, index) if len(shards) > 1 else None
    return Cut(tuple(shards), made, tuple(oversized))


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


COPIED = 512 * 2**10
"""Bytes that are copied at once: what stays in a core's own cache. Larger pieces, and the kernel's
own copying from file to file at odd offsets, take half as long again (`scripts/bench`)."""
BUFFER = 8 * 2**20
"""Bytes between two reports of progress."""


def copy_range(
    source: int, offset: int, target: int, length: int, on_bytes: Callable[[int], None]
) -> None:
    """Copy `length` bytes from `offset` of one open file to the current position of another.

    Raises OSError, and EOFError if the source ends early.
    """
    for piece in _pieces(source, offset, length, on_bytes):
        rest = piece
        while rest:
            rest = rest[os.write(target, rest) :]


def sha256_range(
    file: int, offset: int, length: int, on_bytes: Callable[[int], None] = lambda _: None
) -> str:
    """Hash a range of an open file, in hex. Raises OSError, and EOFError if the file is short."""
    summed = hashlib.sha256()
    for piece in _pieces(file, offset, length, on_bytes):
        summed.update(piece)
    return summed.hexdigest()


def _pieces(
    file: int, offset: int, length: int, on_bytes: Callable[[int], None]
) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(COPIED, max(length, 1))))
    end, done = offset + length, 0
    while offset < end:
        count = os.preadv(file, [buffer[: end - offset]], offset)
        if not count:
            raise EOFError
        yield buffer[:count]
        offset += count
        done += count
        if done >= BUFFER or offset == end:
            on_bytes(done)
            done = 0


def forget(file: int) -> None:
    """Drop a file's pages from the page cache, which on unified memory takes room from the GPU."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
NOTE = ".bakehouse-reshard.json"
MARGIN = 64 * 2**20
"""Bytes of disk to leave free."""
WRITERS = 2
"""Shards written at the same time."""


@dataclass(frozen=True)
class Source:
    """An input checkpoint: its files, and the tensors to write, in the order of the files."""

    folder: Path
    files: tuple[Path, ...]
    tensors: tuple[Placed, ...]
    duplicates: tuple[tuple[Placed, Placed], ...]
    """Tensors in two files: the one to keep, and the other."""
    metadata: dict[str, str]
    index_metadata: dict[str, object]
    carried: tuple[str, ...]
    """Other files to copy: configuration, tokenizer, templates."""


@dataclass(frozen=True)
class Resharded:
    """The result of a reshard."""

    out: Path
    cut: Cut
    verified: int
    """Tensors with the same hash in output and input."""
    carried: tuple[str, ...]
    duplicates: int
    reused: int
    """Shards kept from an earlier run."""


def read_source(folder: Path) -> Source:
    """Read the headers of a checkpoint to reshard. Raises NotFound or CheckpointError."""
    index_path = folder / INDEX
    index = read_index(index_path) if index_path.is_file() else None
    names = sorted(set(index.values())) if index else sorted(
        p.name for p in folder.glob("*.safetensors")
    )  # fmt: skip
    if not names:
        what, hint = (
            "no safetensors files to reshard",
            "give the folder of a safetensors checkpoint",
        )
        if any(folder.glob("*.gguf")):
            what += ", only GGUF files"
            hint = "split GGUF files with llama-gguf-split --split-max-size"
        raise NotFound(what, where=str(folder), hint=hint)
    if index is None:
        check_numbers(names, str(folder))
    paths = tuple(folder / name for name in names)
    headers = []
    for path in paths:
        with FileSource(path) as file:
            headers.append(read_safetensors(file))
    kept: dict[str, Placed] = {}
    twice: list[tuple[Placed, Placed]] = []
    for number, header in enumerate(headers):
        for tensor in header.tensors:
            placed = Placed(tensor, number)
            if tensor.name in kept:
                twice.append((kept[tensor.name], placed))
            else:
                kept[tensor.name] = placed
    files = [
        CheckpointFile(h.name, h.file_size, tuple(p.tensor for p in kept.values() if p.file == i))
        for i, h in enumerate(headers)
    ]
    if index is not None:
        duplicates = {one.tensor.name for one, _ in twice}
        check_shards(files, {k: v for k, v in index.items() if k not in duplicates})
    metadata = {k: v for header in headers for k, v in header.metadata.items()}
    own = json.loads(index_path.read_bytes()).get("metadata") if index else None
    return Source(folder, paths, tuple(kept.values()), tuple(twice), metadata,
                  own if isinstance(own, dict) else {}, tuple(_others(folder)))  # fmt: skip


def _others(folder: Path) -> Iterator[str]:
    """Files of the checkpoint without weights, also in subfolders; relative paths."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(names):
            path = Path(root, name)
            if name.endswith((*WEIGHTS, ".index.json")) or not path.is_file():
                continue
            yield str(path.relative_to(folder))


def reshard(folder: Path, out: Path, most: int, progress: Progress) -> Resharded:
    """Rewrite the checkpoint in `folder` into `out`, shards of at most `most` bytes.

    Raises NotFound, CheckpointError, UsageError, HostError (disk).
    """
    _check_places(folder, out)
    source = read_source(folder)
    plan = cut(source.tensors, most, source.metadata, source.index_metadata)
    part = out.with_name(out.name + ".part")
    with _alone(part), _explained(out):
        _check_places(folder, out)  # another run may have finished meanwhile
        if out.is_dir():
            out.rename(part)
        reused = _begin(part, plan)
        _check_disk(source, part, plan, reused)
        with ExitStack() as opened:
            files = [opened.enter_context(path.open("rb", buffering=0)) for path in source.files]
            inputs = [file.fileno() for file in files]
            if source.duplicates:
                with progress.bar("verifying duplicates", "B") as bar:
                    _check_duplicates(source, inputs, bar)
            with progress.bar("writing shards", "B") as bar:
                _write(plan, part, inputs, reused, bar)
            _carry(source, part)
            if plan.index is not None:
                (part / INDEX).write_bytes(plan.index)
            with progress.bar("verifying", "B") as bar:
                verified = _verify(plan, part, inputs, bar)
        _settle(part)
        part.rename(out)
        _settle(out.parent, deep=False)
        # Last: an output that still has its note was interrupted here, and is resumed.
        (out / NOTE).unlink()
    return Resharded(out, plan, verified, source.carried, len(source.duplicates), len(reused))


def _check_places(folder: Path, out: Path) -> None:
    if not folder.is_dir():
        hint = "give the folder that holds the safetensors files"
        raise NotFound.named("folder", folder.name, where=str(folder), hint=hint)
    if os.path.lexists(out) and not (out / NOTE).is_file():
        raise UsageError("the output folder already exists", where=str(out),
                         hint="name a new folder, or remove that one")  # fmt: skip
    if out.resolve().is_relative_to(folder.resolve()):
        raise UsageError("the output would be inside the checkpoint", where=str(out),
                         hint="name a folder beside it")  # fmt: skip
    if not out.parent.is_dir():
        hint = "create the parent folder of the output first"
        raise NotFound.named("folder", out.parent.name, where=str(out.parent), hint=hint)


@contextmanager
def _alone(part: Path) -> Iterator[None]:
    """Lock the output against a second reshard."""
    busy = HostError(
        "another reshard is writing to this output", where=str(part), hint="wait for it to end"
    )
    lock = Path(f"{part}.lock")
    with file_lock(lock, str(part), lambda _: None, busy=busy):
        yield
        lock.unlink(missing_ok=True)


@contextmanager
def _explained(out: Path) -> Iterator[None]:
    try:
        yield
    except EOFError as error:
        raise CheckpointError(
            "a shard became shorter while it was read", where=str(out),
            hint="do not write to the checkpoint meanwhile",
        ) from error  # fmt: skip
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise HostError(
            "the disk is full", where=str(out), id="disk-full",
            hint="free some space and run it again: complete shards are kept",
        ) from error  # fmt: skip


def _begin(part: Path, plan: Cut) -> set[str]:
    """Create the folder or resume it; returns the names of complete shards."""
    note = part / NOTE
    with suppress(OSError, ValueError):
        if json.loads(note.read_bytes()) == {"digest": plan.digest}:
            return {s.name for s in plan.shards
                    if (p := part / s.name).is_file() and p.stat().st_size == s.size}  # fmt: skip
    if note.is_file():
        shutil.rmtree(part)
    elif part.exists() and (not part.is_dir() or any(part.iterdir())):
        raise UsageError("this folder exists and is not from a reshard", where=str(part),
                         hint="move it away, or name another output")  # fmt: skip
    part.mkdir(exist_ok=True)
    note.write_text(json.dumps({"digest": plan.digest}))
    return set()


def _check_disk(source: Source, part: Path, plan: Cut, reused: set[str]) -> None:
    need = sum(shard.size for shard in plan.shards if shard.name not in reused) + MARGIN
    need += sum((source.folder / name).stat().st_size for name in source.carried)
    free = shutil.disk_usage(part).free
    if need > free:
        raise HostError(
            f"the shards need {need} bytes, the disk has {free} free", where=str(part.parent),
            hint="free some space, or name an output on another disk", id="disk-full",
        )  # fmt: skip


def _check_duplicates(source: Source, inputs: list[int], bar: Bar) -> None:
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        bar.update(done)

    for one, other in source.duplicates:
        same = (one.tensor.type, one.tensor.shape) == (other.tensor.type, other.tensor.shape)
        if not same or _sum(one, inputs, advance) != _sum(other, inputs, advance):
            raise CheckpointError(
                f"the tensor {one.tensor.name!r} differs between two files",
                where=f"{source.files[one.file]} and {source.files[other.file]}",
                hint="the checkpoint is broken: which one is used depends on the loader; "
                "report it to its author",
                id="checkpoint-duplicate-tensor",
            )


def _sum(
    placed: Placed, inputs: list[int], on_bytes: Callable[[int], None] = lambda _: None
) -> str:
    tensor = placed.tensor
    return sha256_range(inputs[placed.file], tensor.offset, tensor.size, on_bytes)


class _Stopped(Exception):
    """Another writer failed, or the run was interrupted."""


def _write(plan: Cut, part: Path, inputs: list[int], reused: set[str], bar: Bar) -> None:
    done, total = sum(s.size for s in plan.shards if s.name in reused), plan.size
    lock, stop = threading.Lock(), threading.Event()

    def advance(count: int) -> None:
        nonlocal done
        if stop.is_set():
            raise _Stopped
        with lock:
            done += count
            bar.update(done, total)

    def write(shard: Shard) -> None:
        half = part / (shard.name + ".half")
        try:
            with half.open("wb", buffering=0) as file:
                file.write(shard.head)
                for run in _runs(shard):
                    copy_range(inputs[run.file], run.offset, file.fileno(), run.length, advance)
            half.rename(part / shard.name)
        except BaseException as error:
            if not stop.is_set():  # only the first; pool.map reports in order
                failed.append(error)
                stop.set()
            raise

    failed: list[BaseException] = []
    pool = ThreadPoolExecutor(WRITERS)
    try:
        for _ in pool.map(write, [s for s in plan.shards if s.name not in reused]):
            pass
    except _Stopped:
        raise failed[0] from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


class _Run(NamedTuple):
    """A contiguous range of an input: file index, offset and length in bytes."""

    file: int
    offset: int
    length: int


def _runs(shard: Shard) -> list[_Run]:
    """Join tensors that are adjacent in the input."""
    runs: list[_Run] = []
    for file, tensor in ((placed.file, placed.tensor) for placed in shard.tensors):
        last = runs[-1] if runs else None
        if last and last.file == file and last.offset + last.length == tensor.offset:
            runs[-1] = last._replace(length=last.length + tensor.size)
        else:
            runs.append(_Run(file, tensor.offset, tensor.size))
    return runs


def _carry(source: Source, part: Path) -> None:
    for name in source.carried:
        target = part / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / name, target)


def _settle(folder: Path, *, deep: bool = True) -> None:
    """Flush a folder and its content to disk, before it gets its final name."""
    for path in (*(folder.rglob("*") if deep else ()), folder):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _verify(plan: Cut, part: Path, inputs: list[int], bar: Bar) -> int:
    """Compare each tensor's hash in input and output, on all cores. Raises CheckpointError."""
    done, total, count = 0, sum(p.tensor.size for s in plan.shards for p in s.tensors), 0
    with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
        for shard in plan.shards:
            with (part / shard.name).open("rb") as file:
                os.fsync(file.fileno())  # dirty pages cannot be dropped
                if file.read(len(shard.head)) != shard.head:
                    raise _differs(shard, "its header", part)
                sums = [
                    (
                        pool.submit(_sum, placed, inputs),
                        pool.submit(sha256_range, file.fileno(), offset, placed.tensor.size),
                    )
                    for placed, offset in zip(shard.tensors, shard.offsets(), strict=True)
                ]
                for placed, (before, after) in zip(shard.tensors, sums, strict=True):
                    if before.result() != after.result():
                        pool.shutdown(wait=True, cancel_futures=True)
                        raise _differs(shard, f"the tensor {placed.tensor.name!r}", part)
                    count, done = count + 1, done + placed.tensor.size
                    bar.update(done, total)
                forget(file.fileno())
    for number in inputs:
        forget(number)
    return count


def _differs(shard: Shard, what: str, part: Path) -> CheckpointError:
    with suppress(OSError):
        (part / shard.name).unlink()
    return CheckpointError(
        f"{what} is different in {shard.name}", where=str(part / shard.name),
        hint="the disk or the memory is failing, or the input changed meanwhile; run it again to "
        "write that shard again",
    )  # fmt: skip
