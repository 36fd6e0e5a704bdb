"""Resharding: what the safetensors library reads back is what was there before."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from bakehouse.checkpoints import reshard as copying
from bakehouse.checkpoints import reshard as module
from bakehouse.checkpoints.checkpoint import INDEX, read_path
from bakehouse.checkpoints.reader import BytesSource
from bakehouse.checkpoints.reshard import NOTE, Resharded, reshard
from bakehouse.checkpoints.safetensors import read_safetensors
from bakehouse.commands import reshard as command
from bakehouse.context import Context
from bakehouse.errors import CheckpointError, HostError, NotFound, UsageError
from bakehouse.progress import Silent
from tests.support.checkpoints import safetensors_bytes, write

Arrays = dict[str, np.ndarray[Any, Any]]


def arrays(count: int = 12, rows: int = 100) -> Arrays:
    random = np.random.default_rng(7)
    made: Arrays = {
        f"model.layers.{i}.weight": random.random((rows, 32), np.float32) for i in range(count)
    }
    made["scalar"] = np.array(3, np.int64)
    made["nothing"] = np.zeros((0, 5), np.float16)
    made["odd"] = np.arange(13, dtype=np.uint8)
    return made


def checkpoint(folder: Path, tensors: Arrays) -> Path:
    folder.mkdir()
    names = sorted(tensors)
    half = len(names) // 2
    placed = {"a.safetensors": names[:half], "b.safetensors": names[half:]}
    for file, held in placed.items():
        save_file({n: tensors[n] for n in held}, folder / file, {"format": "pt"})
    weights = {n: file for file, held in placed.items() for n in held}
    write(folder / INDEX, json.dumps({"metadata": {"x": 1}, "weight_map": weights}).encode())
    write(folder / "config.json", b'{"num_hidden_layers": 12}')
    write(folder / "tokenizer.json", b"{}")
    write(folder / "chat_templates" / "a.jinja", b"x")
    write(folder / "pytorch_model.bin", b"old weights")
    return folder


def read_back(folder: Path) -> Arrays:
    found: Arrays = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                assert name not in found
                found[name] = file.get_tensor(name)
            assert file.metadata() == {"format": "pt"}
    return found


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and one[n].shape == other[n].shape
        and one[n].tobytes() == other[n].tobytes() for n in one
    )  # fmt: skip


def run(folder: Path, out: Path, most: int = 40_000) -> Resharded:
    return reshard(folder, out, most, Silent())


def test_reshard_keeps_every_tensor(tmp_path: Path) -> None:
    tensors = arrays()
    made = run(checkpoint(tmp_path / "in", tensors), tmp_path / "out")
    out = tmp_path / "out"
    assert same(read_back(out), tensors)
    files = sorted(p.name for p in out.glob("*.safetensors"))
    assert len(files) == len(made.cut.shards) > 3
    assert all((out / name).stat().st_size <= 40_000 for name in files)
    assert [(out / s.name).stat().st_size for s in made.cut.shards] == [
        s.size for s in made.cut.shards
    ]
    index = json.loads((out / INDEX).read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"] == {"x": 1, "total_size": sum(t.nbytes for t in tensors.values())}
    assert made.verified == len(tensors)
    assert sorted(made.carried) == ["chat_templates/a.jinja", "config.json", "tokenizer.json"]
    assert (out / "chat_templates" / "a.jinja").read_bytes() == b"x"
    assert not (out / "pytorch_model.bin").exists()
    assert not (out / NOTE).exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]
    assert len(read_path(out).files) == len(files)


def test_reshard_types_unknown_to_numpy(tmp_path: Path) -> None:
    tensors = {
        "bf16": ("BF16", [2, 3], bytes(range(12))),
        "fp8": ("F8_E4M3", [5], b"12345"),
        "int4.weight_packed": ("I32", [2], bytes(8)),
        "fp4": ("F4", [4], b"ab"),
        "scalar": ("BF16", [], b"xy"),
    }
    write(tmp_path / "in" / "model.safetensors", safetensors_bytes(tensors))
    run(tmp_path / "in", tmp_path / "out", 300)
    found = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        content = path.read_bytes()
        for t in read_safetensors(BytesSource(path.name, content)).tensors:
            found[t.name] = (t.type, list(t.shape), content[t.offset : t.offset + t.size])
    assert found == {name: (k, list(s), raw) for name, (k, s, raw) in tensors.items()}


def test_reshard_one_shard_needs_no_index(tmp_path: Path) -> None:
    tensors = arrays(2)
    run(checkpoint(tmp_path / "in", tensors), tmp_path / "out", 10**9)
    assert [p.name for p in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]
    assert same(read_back(tmp_path / "out"), tensors)


def test_reshard_large_tensor_gets_its_own_shard(tmp_path: Path) -> None:
    tensors = {**arrays(2), "large": np.ones(50_000, np.float32)}
    made = run(checkpoint(tmp_path / "in", tensors), tmp_path / "out")
    assert made.cut.oversized == ("large",)
    assert same(read_back(tmp_path / "out"), tensors)


def test_reshard_ten_thousand_tensors(tmp_path: Path) -> None:
    tensors: Arrays = {f"t.{i:05d}": np.full(3, i, np.int32) for i in range(10_000)}
    made = run(checkpoint(tmp_path / "in", tensors), tmp_path / "out", 200_000)
    assert made.verified == 10_000
    assert same(read_back(tmp_path / "out"), tensors)


def test_reshard_keeps_equal_duplicates_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        held = {"t": ("U8", [4], b"abcd"), f"own.{name}": ("U8", [1], name.encode())}
        write(tmp_path / "in" / f"{name}.safetensors", safetensors_bytes(held))
    made = run(tmp_path / "in", tmp_path / "out", 10**6)
    assert (made.duplicates, made.verified) == (1, 3)
    assert {t.name for t in read_path(tmp_path / "out").tensors} == {"t", "own.a", "own.b"}


def test_reshard_refuses_duplicates_that_differ(tmp_path: Path) -> None:
    for name, raw in (("a", b"abcd"), ("b", b"abcX")):
        write(tmp_path / "in" / f"{name}.safetensors", safetensors_bytes({"t": ("U8", [4], raw)}))
    with pytest.raises(CheckpointError, match="'t' differs between two files"):
        run(tmp_path / "in", tmp_path / "out", 10**6)
    assert not (tmp_path / "out").exists()


def test_reshard_resumes_after_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = arrays()
    folder = checkpoint(tmp_path / "in", tensors)
    real, calls = copying.copy_range, 0

    def dies(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(module, "copy_range", dies)
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(module, "copy_range", real)
    made = run(folder, tmp_path / "out")
    assert made.reused >= 1
    assert same(read_back(tmp_path / "out"), tensors)
    assert not (tmp_path / "out.part").exists()


def test_reshard_replaces_an_unfinished_output_of_another_plan(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "in", arrays())
    write(tmp_path / "out.part" / NOTE, b'{"digest": "other"}')
    write(tmp_path / "out.part" / "model-00001-of-00002.safetensors", b"x")
    assert run(folder, tmp_path / "out").reused == 0
    assert not (tmp_path / "out" / "model-00001-of-00002.safetensors").exists()


def test_reshard_finds_a_wrong_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "in", arrays())
    real = module._carry

    def spoils(source: Any, part: Path) -> None:
        real(source, part)
        path = next(iter(sorted(part.glob("*.safetensors"))))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(module, "_carry", spoils)
    with pytest.raises(CheckpointError, match="is different in model-00001"):
        run(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(module, "_carry", real)
    run(folder, tmp_path / "out")


def test_reshard_handles_short_reads_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write_ = os.preadv, os.write
    monkeypatch.setattr(
        os,
        "preadv",
        lambda file, views, at: read(file, [views[0][: max(1, len(views[0]) // 3)]], at),
    )
    monkeypatch.setattr(os, "write", lambda file, data: write_(file, data[: len(data) // 2 + 1]))
    tensors = arrays()
    run(checkpoint(tmp_path / "in", tensors), tmp_path / "out")
    monkeypatch.undo()
    assert same(read_back(tmp_path / "out"), tensors)


def test_reshard_checks_disk_space_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "in", arrays())
    monkeypatch.setattr(module, "MARGIN", 2**60)
    with pytest.raises(HostError, match="the shards need") as caught:
        run(folder, tmp_path / "out")
    assert caught.value.id == "disk-full"


def test_reshard_refuses_invalid_folders(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "in", arrays(2))
    with pytest.raises(UsageError, match="already exists"):
        run(folder, folder)
    with pytest.raises(UsageError, match="inside"):
        run(folder, folder / "out")
    with pytest.raises(NotFound, match="folder 'no' not found"):
        run(folder, tmp_path / "no" / "out")
    with pytest.raises(NotFound):
        run(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match="no safetensors"):
        run(tmp_path / "empty", tmp_path / "out")
    write(tmp_path / "out.part" / "precious", b"mine")
    with pytest.raises(UsageError, match="not from a reshard"):
        run(folder, tmp_path / "out")
    assert (tmp_path / "out.part" / "precious").exists()


def test_reshard_refuses_a_second_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(tmp_path / "in", arrays(2))
    inside, go_on = threading.Event(), threading.Event()
    real = module._carry

    def waits(source: Any, part: Path) -> None:
        inside.set()
        go_on.wait(20)
        real(source, part)

    monkeypatch.setattr(module, "_carry", waits)
    first = threading.Thread(target=run, args=(folder, tmp_path / "out"))
    first.start()
    assert inside.wait(20)
    with pytest.raises(HostError, match="another reshard"):
        run(folder, tmp_path / "out")
    go_on.set()
    first.join(20)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_reshard_memory_stays_small(tmp_path: Path) -> None:
    large: Arrays = {f"t{i}": np.zeros(60 * 2**20, np.uint8) for i in range(7)}
    folder = checkpoint(tmp_path / "in", large)
    del large
    code = (
        "import sys, resource; from pathlib import Path\n"
        "from bakehouse.checkpoints.reshard import reshard\n"
        "from bakehouse.progress import Silent\n"
        "reshard(Path(sys.argv[1]), Path(sys.argv[2]), 200_000_000, Silent())\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    argv = [sys.executable, "-c", code, str(folder), str(tmp_path / "out")]
    done = subprocess.run(argv, capture_output=True, check=True, text=True)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = int(done.stdout)  # KiB; a child starts with what its parent had when it forked
    assert peak < 300 * 1024 or peak <= own


def test_reshard_command(tmp_path: Path, context: Context) -> None:
    folder = checkpoint(tmp_path / "in", arrays())
    options = command.Options(str(folder), str(tmp_path / "out"), "40kB")
    outcome = command.run(context, options)
    assert outcome.checks[0].passed
    assert outcome.result["largest"] <= 40_000
    assert "verified by sha256" in outcome.text
    for wrong in ("4000000000", "4", "4G", "1e9", "-4GB", "four", "0GB"):
        with pytest.raises(UsageError, match="--max-shard") as caught:
            command.run(context, command.Options(str(folder), str(tmp_path / "o"), wrong))
        assert wrong == "0GB" or "4GiB" in str(caught.value.hint)


KILLED = """
import os, sys
from pathlib import Path
from bakehouse.checkpoints.reshard import reshard
from bakehouse.progress import Silent

folder, out = Path(sys.argv[1]), Path(sys.argv[2])
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}


def forked(last):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    seen = 0

    def hook(event, args):
        nonlocal seen
        if event in EVENTS and any(out.name in str(a) for a in args[:2]):
            seen += 1
            if seen == last:
                os._exit(9)

    sys.addaudithook(hook)
    try:
        reshard(folder, out, 5000, Silent())
    finally:
        os._exit(0 if (out / "config.json").exists() else 1)


moment = 1
while forked(moment):
    done = out.exists() and not (out / ".bakehouse-reshard.json").exists()
    if not done and forked(0):
        sys.exit(f"killed at {moment}: it could not be gone on with")
    left = [p.name for p in out.parent.glob("out*") if p.name != "out.part.lock"]
    if left != ["out"]:
        sys.exit(f"killed at {moment}: {left}")
    held = sorted(p.name for p in out.iterdir())
    if any(n.endswith((".half", ".json")) and n.startswith(".") for n in held):
        sys.exit(f"killed at {moment}: {held}")
    for path in sorted(out.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    out.rmdir()
    moment += 1
print(moment)
"""


@pytest.mark.integration
def test_reshard_killed_at_any_moment_is_complete_or_resumes(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "in", arrays(3, 10))
    argv = [sys.executable, "-c", KILLED, str(folder), str(tmp_path / "out")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 20
    assert same(read_back(tmp_path / "out"), arrays(3, 10))


def test_reshard_refuses_missing_numbered_shards(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002", "other-00002-of-00003"):
        folder = tmp_path / name
        folder.mkdir()
        save_file({"a": np.zeros(3)}, folder / f"{name}.safetensors")
        for read in (read_path, lambda folder: run(folder, tmp_path / "out")):
            with pytest.raises(NotFound, match="files of the model are missing: "):
                read(folder)


def test_reshard_full_disk_keeps_complete_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, calls = checkpoint(tmp_path / "in", arrays()), 0
    real = copying.copy_range

    def full(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise OSError(28, "No space left on device")
        real(*args)

    monkeypatch.setattr(module, "copy_range", full)
    with pytest.raises(HostError, match="disk is full") as caught:
        run(folder, tmp_path / "out")
    assert caught.value.id == "disk-full"
    monkeypatch.undo()
    assert run(folder, tmp_path / "out").reused >= 1


def test_reshard_failed_writer_stops_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "in", arrays())
    began, ended = threading.Event(), threading.Event()

    def copies(_: int, __: int, ___: int, ____: int, on_bytes: Any) -> None:
        if began.is_set():
            raise EOFError
        began.set()
        for _ in range(500):
            try:
                on_bytes(1)
            except Exception:
                ended.set()
                raise
            ended.wait(0.01)

    monkeypatch.setattr(module, "copy_range", copies)
    with pytest.raises(CheckpointError, match="became shorter"):
        run(folder, tmp_path / "out")
    assert ended.is_set()


def test_reshard_refuses_gguf_files(tmp_path: Path) -> None:
    write(tmp_path / "in" / "m.gguf", b"GGUF")
    with pytest.raises(NotFound, match="only GGUF files"):
        run(tmp_path / "in", tmp_path / "out")
