"""Safetensors headers, shards and their index, against the safetensors library."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from bakehouse.checkpoints.checkpoint import INDEX, read_path
from bakehouse.checkpoints.reader import BytesSource
from bakehouse.checkpoints.safetensors import SafetensorsHeader, read_safetensors
from bakehouse.errors import CheckpointError, NotFound
from tests.support.checkpoints import explained, safetensors_bytes, write


def read(data: bytes) -> SafetensorsHeader:
    return read_safetensors(BytesSource("m.safetensors", data))


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def one(**changes: object) -> bytes:
    """A file of one tensor, with fields of its entry changed."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
    return raw({"a": entry}, bytes(8))


def test_safetensors_reads_a_file_of_the_library(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray[Any, Any]] = {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "scalar": np.array(1.5, np.float16),
        "none": np.zeros((0, 7), np.int8),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "np"})
    checkpoint = read_path(tmp_path / "model.safetensors")
    found = {t.name: (t.shape, t.type, t.size) for t in checkpoint.tensors}
    assert found == {"w": ((3, 4), "F32", 48), "scalar": ((), "F16", 2), "none": ((0, 7), "I8", 0)}
    content = (tmp_path / "model.safetensors").read_bytes()
    (w,) = (t for t in checkpoint.tensors if t.name == "w")
    assert content[w.offset : w.offset + w.size] == tensors["w"].tobytes()


BROKEN = [
    (b"", "empty"),
    (b"abc", "not a safetensors file"),
    (b"version https://git-lfs.github.com/spec/v1\noid", "git-lfs pointer"),
    (b"<!DOCTYPE html>", "HTML"),
    (b"Entry not found", "HTTP error message"),
    (b"GGUF\3\0\0\0" + bytes(99), "a GGUF file, not safetensors"),
    (b"\x80\x02\x8a\nl\xfc\x9c", "pickle"),
    (struct.pack("<Q", 2**63) + b"{}", "not a safetensors file"),
    (struct.pack("<Q", 100) + b"{}", "truncated"),
    (raw(b"{nonsense"), "not JSON"),
    (raw(b"{" + b'"a":[' * 50_000), "not JSON"),
    (raw(b'{"a":1' + b"0" * 5000 + b"}"), "not JSON"),
    (raw(b'{"\xff":1}'), "not JSON"),
    (raw(b'{"a":{},"a":{}}'), "duplicate key"),
    (raw({"__metadata__": {"a": 1}}), "__metadata__"),
    (raw({"a": 1}), "needs dtype"),
    (raw({"\ud800": 1}), "not text"),
    (raw({"a": {"dtype": "F32", "shape": []}}), "needs dtype"),
    (one(dtype="F128"), "'F128'"),
    (one(dtype=["F32"]), "unknown type"),
    (one(shape=[-2]), "whole numbers"),
    (one(shape=[True, 2]), "whole numbers"),
    (one(shape=[2.0]), "whole numbers"),
    (one(shape=[2**40, 2**40]), "impossible shape"),
    (one(data_offsets=[0, 4]), "takes 4 bytes"),
    (one(data_offsets=[8, 0]), "takes -8 bytes"),
    (one(data_offsets=[0, 8, 9]), "whole numbers"),
    (one(data_offsets=[4, 12]), "gap"),
    (one()[:-1], "truncated"),
    (one() + b"x", "1 bytes follow"),
    (one(dtype="F4", shape=[3], data_offsets=[0, 1]), "1.5"),
    (
        raw(
            {
                "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
            },
            bytes(6),
        ),
        "overlaps",
    ),
]


def test_safetensors_names_what_is_wrong_with_a_file() -> None:
    wrong = []
    for data, words in BROKEN:
        with pytest.raises(CheckpointError) as caught:
            read(data)
        if words not in caught.value.what or not caught.value.hint:
            wrong.append((words, caught.value))
    assert not wrong


GOOD = safetensors_bytes({"a": ("BF16", [2, 2], bytes(8)), "b": ("F8_E4M3", [3], b"abc")})


@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=6),
    st.integers(0, len(GOOD)),
)
def test_safetensors_damaged_file_gives_a_header_or_a_clear_error(
    changes: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(GOOD)
    for at, value in changes:
        data[at] = value
    explained(lambda: read(bytes(data[:length])))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), JSON))
def test_safetensors_any_entry_gives_a_header_or_a_clear_error(entry: dict[str, object]) -> None:
    explained(lambda: read(raw({"a": {"dtype": "F32", "shape": [2], **entry}}, bytes(8))))


def test_safetensors_header_of_brackets_is_refused_before_parsing() -> None:
    started = time.monotonic()
    with pytest.raises(CheckpointError, match="more than 500000 tensors"):
        read(raw(b'{"a":[' + b"[]," * 9_000_000 + b"[]]}"))
    assert time.monotonic() - started < 30


def test_safetensors_fifty_thousand_tensors_are_fast() -> None:
    tensors = {f"model.layers.{i}.weight": ("U8", [1], b"x") for i in range(50_000)}
    data = safetensors_bytes(tensors)
    started = time.perf_counter()
    assert len(read(data).tensors) == 50_000
    assert time.perf_counter() - started < 30  # the benchmark expects 1 s on an idle machine


def shards(folder: Path, placed: dict[str, list[str]], index: dict[str, str] | None) -> Path:
    for name, tensors in placed.items():
        write(folder / name, safetensors_bytes({t: ("U8", [4], b"abcd") for t in tensors}))
    if index is not None:
        write(folder / INDEX, json.dumps({"metadata": {}, "weight_map": index}).encode())
    return folder


def test_safetensors_shards_are_read_by_their_index(tmp_path: Path) -> None:
    folder = shards(
        tmp_path,
        {"s-1.safetensors": ["a"], "s-2.safetensors": ["b"], "consolidated.safetensors": ["a"]},
        {"a": "s-1.safetensors", "b": "s-2.safetensors"},
    )
    checkpoint = read_path(folder)
    assert [Path(f.name).name for f in checkpoint.files] == ["s-1.safetensors", "s-2.safetensors"]
    assert checkpoint.size == sum((folder / f"s-{i}.safetensors").stat().st_size for i in (1, 2))


MISMATCHED: list[tuple[dict[str, list[str]], dict[str, str] | None, str]] = [
    ({"s-1.safetensors": ["a"], "s-2.safetensors": ["a", "b"]}, None, "two files"),
    (
        {"s-1.safetensors": ["a"], "s-2.safetensors": ["a", "b"]},
        {"a": "s-1.safetensors", "b": "s-2.safetensors"},
        "two files",
    ),
    (
        {"s-1.safetensors": ["a"]},
        {"a": "s-1.safetensors", "b": "s-2.safetensors"},
        "1 of 2 files of the model are missing: s-2.safetensors",
    ),
    ({"s-1.safetensors": ["a"]}, {"a": "s-1.safetensors", "b": "s-1.safetensors"}, "nowhere"),
    (
        {"s-1.safetensors": ["a"], "s-2.safetensors": ["b"]},
        {"a": "s-2.safetensors", "b": "s-1.safetensors"},
        "in s-1.safetensors",
    ),
    ({"s-1.safetensors": ["a"]}, {"a": "../s-1.safetensors"}, "it names the file"),
    ({"s-1.safetensors": ["a"]}, {"a": "/etc/passwd"}, "it names the file"),
    ({"s-1.safetensors": ["a"]}, {}, "empty"),
]


def test_safetensors_shards_that_do_not_belong_together(tmp_path: Path) -> None:
    wrong = []
    for i, (placed, index, words) in enumerate(MISMATCHED):
        with pytest.raises((CheckpointError, NotFound)) as caught:
            read_path(shards(tmp_path / str(i), placed, index))
        if words not in caught.value.what:
            wrong.append((words, caught.value))
    assert not wrong


def test_safetensors_duplicate_tensor_names_both_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_path(shards(tmp_path, {"s-1.safetensors": ["a"], "s-2.safetensors": ["a"]}, None))
    assert caught.value.id == "checkpoint-duplicate-tensor"
    assert "s-1.safetensors" in str(caught.value.where)
    assert "s-2.safetensors" in str(caught.value.where)


def test_safetensors_refuses_a_broken_index(tmp_path: Path) -> None:
    shards(tmp_path, {"s-1.safetensors": ["a"]}, None)
    for content in (b"[]", b"{", b'{"weight_map": 3}', b"<html>", b"[" * 10**5):
        write(tmp_path / INDEX, content)
        with pytest.raises(CheckpointError):
            read_path(tmp_path)
