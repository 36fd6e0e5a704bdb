"""Rewrite a checkpoint into small shards.

Output is made in `OUT.part` and renamed to `OUT` when all of it is verified and on disk. Whenever
it was ended, asking for the same cut again goes on from what is whole, and verifies that too.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bakehouse.checkpoints.checkpoint import (
    INDEX,
    CheckpointFile,
    check_numbers,
    check_shards,
    read_index,
)
from bakehouse.checkpoints.gguf import SAFETENSORS_BITS, Tensor
from bakehouse.checkpoints.reader import FileSource
from bakehouse.checkpoints.safetensors import SafetensorsHeader, read_safetensors
from bakehouse.errors import CheckpointError, HostError, NotFound, UsageError, is_disk_full
from bakehouse.models import digest
from bakehouse.progress import Bar, Progress
from bakehouse.util.files import file_lock


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


COPIED = 512 * 2**10
"""Bytes that are copied at once: what stays in a core's own cache. Larger pieces, and the kernel's
own copying from file to file at odd offsets, take half as long again (`scripts/bench`)."""
BUFFER = 8 * 2**20
"""Bytes that are hashed at once, and between two reports of progress."""


def copy_range(
    source: int, offset: int, target: int, length: int, on_bytes: Callable[[int], None]
) -> None:
    """Copy `length` bytes from `offset` of one open file to where the other one stands.

    Raises OSError, and EOFError where the source ends early.
    """
    buffer = memoryview(bytearray(min(COPIED, max(length, 1))))
    done = 0
    while length:
        piece = buffer[: min(len(buffer), length)]
        count = os.preadv(source, [piece], offset)
        if not count:
            raise EOFError
        _write_all(target, piece[:count])
        offset += count
        length -= count
        done += count
        if done >= BUFFER or not length:
            on_bytes(done)
            done = 0


def _write_all(target: int, view: memoryview) -> None:
    while view:
        view = view[os.write(target, view) :]


def sha256_range(file: int, offset: int, length: int, on_bytes: Callable[[int], None]) -> str:
    """Hash a part of an open file, in hex. Raises OSError, and EOFError for a short file."""
    summed = hashlib.sha256()
    buffer = memoryview(bytearray(min(COPIED, max(length, 1))))
    done = 0
    while length:
        count = os.preadv(file, [buffer[: min(len(buffer), length)]], offset)
        if not count:
            raise EOFError
        summed.update(buffer[:count])
        offset += count
        length -= count
        done += count
        if done >= BUFFER or not length:
            on_bytes(done)
            done = 0
    return summed.hexdigest()


def forget(file: int) -> None:
    """Give a file's pages back to the machine; on unified memory they stand in the way."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
NOTE = ".bakehouse-reshard.json"
MARGIN = 64 * 2**20
"""Bytes of disk that are left free."""
WRITERS = 2
"""Shards that are written at the same time."""


@dataclass(frozen=True)
class Source:
    """An input checkpoint: its files, and the tensors to write in the order of the files."""

    folder: Path
    files: tuple[Path, ...]
    tensors: tuple[Placed, ...]
    duplicates: tuple[tuple[Placed, Placed], ...]
    """Tensors that are in two files: the one that is kept, and the other."""
    metadata: dict[str, str]
    index_metadata: dict[str, object]
    carried: tuple[str, ...]
    """Other files that go along: configuration, tokenizer, templates."""


@dataclass(frozen=True)
class Resharded:
    """What was made. Bytes."""

    out: Path
    cut: Cut
    verified: int
    """Tensors whose hash in the output equals that in the input."""
    carried: tuple[str, ...]
    duplicates: int
    reused: int
    """Shards that an earlier run had finished."""


def read_source(folder: Path) -> Source:
    """Read what is to be resharded. Raises NotFound or CheckpointError."""
    index_path = folder / INDEX
    index = read_index(index_path) if index_path.is_file() else None
    names = sorted(set(index.values())) if index else sorted(
        p.name for p in folder.glob("*.safetensors")
    )  # fmt: skip
    if not names:
        gguf = any(folder.glob("*.gguf"))
        raise NotFound(
            "there is no safetensors file to reshard" + (", only GGUF files" if gguf else ""),
            where=str(folder),
            hint="split those with llama-gguf-split --split-max-size" if gguf
            else "give the folder of a safetensors checkpoint, with its weights",
        )  # fmt: skip
    if index is None:
        check_numbers(names, str(folder))
    paths = tuple(folder / name for name in names)
    headers = [_header(path) for path in paths]
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
        doubtful = {kept_one.tensor.name for kept_one, _ in twice}
        check_shards(files, {k: v for k, v in index.items() if k not in doubtful})
    metadata = {k: v for header in headers for k, v in header.metadata.items()}
    return Source(folder, paths, tuple(kept.values()), tuple(twice), metadata,
                  _index_metadata(index_path), tuple(_others(folder)))  # fmt: skip


def _header(path: Path) -> SafetensorsHeader:
    with FileSource(path) as source:
        return read_safetensors(source)


def _index_metadata(path: Path) -> dict[str, object]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_bytes())
        metadata = found.get("metadata") if isinstance(found, dict) else None
        return metadata if isinstance(metadata, dict) else {}
    return {}


def _others(folder: Path) -> Iterator[str]:
    """Files that belong to the checkpoint and hold no weights, in folders below too."""
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
        _check_places(folder, out)  # another run may have ended meanwhile
        if out.is_dir():
            out.rename(part)
        reused = _begin(part, plan)
        _check_disk(source, part, plan, reused)
        with _opened(source.files) as inputs:
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
        # Last, so that an output with a note is one whose maker was ended here: it is taken back.
        (out / NOTE).unlink()
    return Resharded(out, plan, verified, source.carried, len(source.duplicates), len(reused))


def _check_places(folder: Path, out: Path) -> None:
    if not folder.is_dir():
        hint = "give the folder that holds the safetensors files"
        raise NotFound.named("folder", folder.name, where=str(folder), hint=hint)
    if os.path.lexists(out) and not (out / NOTE).is_file():
        raise UsageError("the output folder is there already", where=str(out),
                         hint="name a new folder, or remove that one")  # fmt: skip
    if out.resolve().is_relative_to(folder.resolve()):
        raise UsageError("the output would lie inside the checkpoint", where=str(out),
                         hint="name a folder beside it")  # fmt: skip
    if not out.parent.is_dir():
        hint = "the output would lie in it: make it first"
        raise NotFound.named("folder", out.parent.name, where=str(out.parent), hint=hint)


@contextmanager
def _alone(part: Path) -> Iterator[None]:
    """Keep a second reshard from the same output."""
    busy = HostError(
        "another reshard writes to this output", where=str(part), hint="wait for it to end"
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
        hint = "let nothing write to the checkpoint meanwhile"
        where = str(out)
        what = "a shard became shorter while it was read"
        raise CheckpointError(what, where=where, hint=hint) from error
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise HostError(
            "the disk became full", where=str(out), id="disk-full",
            hint="free some space and run it again: shards that are whole are kept",
        ) from error  # fmt: skip


@contextmanager
def _opened(paths: tuple[Path, ...]) -> Iterator[list[int]]:
    files: list[int] = []
    try:
        files += [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]
        yield files
    finally:
        for file in files:
            os.close(file)


def _begin(part: Path, plan: Cut) -> set[str]:
    """Make the folder, or go on in it; the names of the shards that are there whole."""
    note = part / NOTE
    with suppress(OSError, ValueError):
        if json.loads(note.read_bytes()) == {"digest": plan.digest}:
            return {s.name for s in plan.shards
                    if (p := part / s.name).is_file() and p.stat().st_size == s.size}  # fmt: skip
    if note.is_file():
        shutil.rmtree(part)
    elif part.exists() and (not part.is_dir() or any(part.iterdir())):
        raise UsageError("a folder is in the way, and no reshard made it", where=str(part),
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
            f"the disk has {free} bytes free, the shards need {need}", where=str(part.parent),
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
                f"the tensor {one.tensor.name!r} is in two files, and differs",
                where=f"{source.files[one.file]} and {source.files[other.file]}",
                hint="the checkpoint is broken: which one counts depends on the loader; "
                "ask its maker",
                id="checkpoint-duplicate-tensor",
            )


def _sum(placed: Placed, inputs: list[int], on_bytes: Callable[[int], None]) -> str:
    tensor = placed.tensor
    return sha256_range(inputs[placed.file], tensor.offset, tensor.size, on_bytes)


class _Stopped(Exception):
    """Another writer failed, or we were interrupted."""


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
                for number, offset, length in _runs(shard):
                    copy_range(inputs[number], offset, file.fileno(), length, advance)
            half.rename(part / shard.name)
        except BaseException as error:
            if not stop.is_set():  # the first; the others are waited for in their order
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


def _runs(shard: Shard) -> Iterator[tuple[int, int, int]]:
    """File, offset and length of the stretches that lie together in the input."""
    run: tuple[int, int, int] | None = None
    for placed in shard.tensors:
        tensor = placed.tensor
        if run and run[0] == placed.file and run[1] + run[2] == tensor.offset:
            run = (run[0], run[1], run[2] + tensor.size)
            continue
        if run:
            yield run
        run = (placed.file, tensor.offset, tensor.size)
    if run:
        yield run


def _carry(source: Source, part: Path) -> None:
    for name in source.carried:
        target = part / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / name, target)


def _settle(folder: Path, *, deep: bool = True) -> None:
    """Have a folder on disk, with what is in it: only then may it get its name."""
    for path in (*(folder.rglob("*") if deep else ()), folder):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def _verify(plan: Cut, part: Path, inputs: list[int], bar: Bar) -> int:
    """Hash every tensor in input and output, on all cores at once. Raises CheckpointError."""
    done, total, count = 0, sum(p.tensor.size for s in plan.shards for p in s.tensors), 0
    with ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0)))) as pool:
        for shard in plan.shards:
            with (part / shard.name).open("rb") as file:
                os.fsync(file.fileno())  # else its pages cannot be given back
                if file.read(len(shard.head)) != shard.head:
                    raise _differs(shard, "its header", part)
                pairs = [
                    (
                        placed.tensor,
                        pool.submit(_sum, placed, inputs, _nothing),
                        pool.submit(
                            sha256_range, file.fileno(), offset, placed.tensor.size, _nothing
                        ),
                    )
                    for placed, offset in zip(shard.tensors, shard.offsets(), strict=True)
                ]
                for tensor, theirs, ours in pairs:
                    if ours.result() != theirs.result():
                        for _, *rest in pairs:
                            for waiting in rest:
                                waiting.cancel()
                        raise _differs(shard, f"the tensor {tensor.name!r}", part)
                    count, done = count + 1, done + tensor.size
                    bar.update(done, total)
                forget(file.fileno())
    for number in inputs:
        forget(number)
    return count


def _nothing(_: int) -> None:
    """Count no bytes."""


def _differs(shard: Shard, what: str, part: Path) -> CheckpointError:
    with suppress(OSError):
        (part / shard.name).unlink()
    return CheckpointError(
        f"{what} came out different in {shard.name}", where=str(part / shard.name),
        hint="the disk or the memory is failing, or the input changed meanwhile; run it again, "
        "that shard is written anew",
    )  # fmt: skip
