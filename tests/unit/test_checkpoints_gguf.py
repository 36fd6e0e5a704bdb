"""GGUF headers: our own files, files of the gguf package, real files and broken ones."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bakehouse.checkpoints import gguf as gguf_module
from bakehouse.checkpoints.checkpoint import join_gguf, read_path, read_paths
from bakehouse.checkpoints.gguf import GGML_TYPES, Array, read_gguf
from bakehouse.checkpoints.model_shape import Layer, LayerKind, Vision
from bakehouse.checkpoints.reader import BytesSource, FileSource
from bakehouse.errors import CheckpointError, NotFound
from tests.support.checkpoints import explained, f32, gguf_bytes, llama_metadata, text, write
from tests.support.projector import PATCH, PIXELS, TEXT, WIDTH, write_projector


def read(data: bytes, name: str = "m.gguf", chunk: int = 64) -> object:
    return read_gguf(BytesSource(name, data, chunk))


def refused(data: bytes) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read(data)
    return caught.value


def test_gguf_element_types_match_the_gguf_package() -> None:
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        if kind.name == "Q8_1":  # the package counts two 32-bit floats, ggml-common.h two halves
            continue
        assert GGML_TYPES[int(kind)] == (kind.name, block, size)


def test_gguf_reads_back_our_own_file_with_any_read_size() -> None:
    metadata = llama_metadata(x__tokens=["tok"] * 500, x__numbers=list(range(5000)), x__f=True)
    data = gguf_bytes(metadata, [f32("a", 8, 4), ("q", (64,), 8, bytes(68))])
    header, *others = [read_gguf(BytesSource("m.gguf", data, chunk)) for chunk in (64, 1, 7, 4096)]
    assert all(other == header for other in others)
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["x.tokens"] == Array(8, 500)
    assert header.metadata["x.numbers"] == Array(4, 5000)
    assert header.metadata["x.f"] is True
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "b", "c"]
    assert [(t.name, t.shape, t.type, t.size) for t in header.tensors] == [
        ("a", (8, 4), "F32", 128),
        ("q", (64,), "Q8_0", 68),
    ]
    assert header.tensors[0].offset == header.data_start
    assert header.data_start % 32 == 0
    assert header.trailing == 28


def test_gguf_reads_a_file_like_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "moe.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(2)
    writer.add_context_length(4096)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv([2, 1])
    writer.add_expert_count(8)
    writer.add_expert_used_count(2)
    writer.add_custom_alignment(64)
    writer.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((8, 16, 64), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(64, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with FileSource(path) as source:
        header = read_gguf(source)
    theirs = gguf.GGUFReader(path)
    assert [(t.name, t.shape, t.size, t.offset) for t in header.tensors] == [
        (t.name, tuple(t.shape.tolist()), t.n_bytes, t.data_offset) for t in theirs.tensors
    ]
    checkpoint = read_path(path)
    assert checkpoint.shape.experts == 8
    assert [layer.keys for layer in checkpoint.shape.layers] == [32, 16]
    expert_bytes = 8 * 16 * 64 * 4
    assert checkpoint.bytes_per_token == expert_bytes * 2 // 8 + 128


def test_gguf_reads_a_hybrid_moe_model_with_mtp(tmp_path: Path) -> None:
    path = tmp_path / "hybrid.gguf"
    writer = gguf.GGUFWriter(path, "qwen3next")
    writer.add_block_count(9)
    writer.add_nextn_predict_layers(1)
    writer.add_context_length(262_144)
    writer.add_embedding_length(512)
    writer.add_feed_forward_length(1024)
    writer.add_head_count(16)
    writer.add_head_count_kv(2)
    writer.add_key_length(256)
    writer.add_value_length(128)
    writer.add_expert_count(512)
    writer.add_expert_used_count(10)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(256)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(1024)
    writer.add_ssm_state_size(128)
    writer.add_ssm_group_count(4)
    writer.add_token_list(["a"] * 1000)
    kinds = gguf.GGMLQuantizationType
    types = {"blk.0.ffn_up_exps.weight": kinds.Q4_K, "blk.3.attn_q.weight": kinds.Q6_K,
             "blk.8.nextn.eh_proj.weight": kinds.IQ3_XXS, "output.weight": kinds.Q8_0,
             "output_norm.weight": kinds.F32}  # fmt: skip
    for name, kind in types.items():
        block, size = gguf.GGML_QUANT_SIZES[kind]
        rows = 1 if kind is kinds.F32 else 4
        width = 512 // block * size
        data = np.zeros((rows, width), np.uint8).view(np.float32 if rows == 1 else np.uint8)
        writer.add_tensor(name, data, raw_dtype=None if rows == 1 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = read_path(path)
    assert {t.name: t.type for t in checkpoint.tensors} == {n: k.name for n, k in types.items()}
    assert checkpoint.parameters == 4 * 4 * 512 + 512
    shape = checkpoint.shape
    state = 3 * (1024 + 2 * 4 * 128) + 128 * 1024
    recurrent = Layer(LayerKind.RECURRENT, state=state)
    full = Layer(LayerKind.FULL, keys=512, values=256)
    assert shape.layers == (recurrent, recurrent, recurrent, full) * 2
    assert shape.mtp == (full,)
    said = shape.to_data()
    assert {k: said[k] for k in ("architecture", "layers", "mtp_layers", "heads", "kv_heads")} == {
        "architecture": "qwen3next", "layers": 8, "mtp_layers": 1, "heads": 16, "kv_heads": 2,
    }  # fmt: skip
    assert (shape.key_length, shape.value_length, shape.embedding) == (256, 128, 512)
    assert (shape.experts, shape.experts_used, shape.experts_shared) == (512, 10, 1)
    assert (shape.context_limit, shape.vocabulary, shape.feed_forward) == (262_144, 1000, 2560)
    assert not shape.assumptions


def test_gguf_projector_describes_its_encoder(tmp_path: Path) -> None:
    shape = read_path(write_projector(tmp_path / "mmproj.gguf")).shape
    assert shape.vision
    assert shape.pictures == Vision(1, WIDTH, PIXELS, PATCH, TEXT)


@pytest.mark.engine
def test_gguf_reads_the_real_smollm2_file(smollm2: Path) -> None:
    checkpoint = read_path(smollm2)
    theirs = gguf.GGUFReader(smollm2)
    assert [(t.name, t.shape, t.size, t.offset) for t in checkpoint.tensors] == [
        (t.name, tuple(t.shape.tolist()), t.n_bytes, t.data_offset) for t in theirs.tensors
    ]
    shape = checkpoint.shape
    assert (shape.architecture, len(shape.layers), shape.heads, shape.kv_heads) == (
        "llama", 30, 9, 3
    )  # fmt: skip
    assert (shape.key_length, shape.context_limit, shape.vocabulary) == (64, 8192, 49152)
    assert checkpoint.size == 98_362_432
    # llama-server's /v1/models says n_params 134515008 for this file
    assert checkpoint.parameters == 134_515_008
    assert checkpoint.quantisation == "Q4_1"


BROKEN = [
    (b"", "empty"),
    (b"GGUF", "truncated"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git-lfs pointer"),
    (b"<!doctype html><html></html>", "HTML"),
    (b"  \n<HTML><body>", "HTML"),
    (b"Entry not found", "HTTP error message (Entry not found)"),
    (b"Invalid username or password.", "HTTP error message"),
    (b'{"error":"Repository not found"}', "JSON"),
    (bytes(4096), "zeros"),
    (b"PK\x03\x04" + bytes(100), "zip archive"),
    (b"tjgg" + bytes(100), "ggjt"),
    (b"\x7fELF" + bytes(100), "program"),
    (b"hello world, this is no model", "not a GGUF file"),
    (gguf_bytes({}, version=1), "version 1"),
    (gguf_bytes({}, version=2), "version 2"),
    (gguf_bytes({}, version=4), "version 4"),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(64), "tensors are declared"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60) + bytes(64), "keys are declared"),
    (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63) + bytes(64), "metadata key"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 99), "type 99"),
    (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k")
        + struct.pack("<IIQ", 9, 8, 2**61) + bytes(99),
        "the array 'k' needs",
    ),
    (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k")
        + struct.pack("<IIQ", 9, 9, 1) + bytes(99),
        "arrays cannot hold",
    ),
    (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IB", 7, 3),
        "neither 0 nor 1",
    ),
    (gguf_bytes({"general.alignment": 24}), "power of two"),
    (gguf_bytes({"general.alignment": 0}), "power of two"),
    (gguf_bytes({}, [f32("a", 8), f32("a", 8)]), "duplicate tensor"),
    (gguf_bytes({}, [("a", (64,), 31, bytes(64))]), "no longer reads"),
    (gguf_bytes({}, [("a", (64,), 250, bytes(64))]), "type 250"),
    (gguf_bytes({}, [("a", (33,), 8, bytes(34))]), "whole Q8_0 blocks"),
    (gguf_bytes({}, [("a", (1, 1, 1, 1, 1), 0, bytes(4))]), "5 dimensions"),
    (gguf_bytes({}, [("a", (2**40, 2**40), 0, bytes(4))]), "impossible shape"),
    (gguf_bytes({}, [f32("a", 8)], offsets=[33]), "multiple of 32"),
    (gguf_bytes({}, [f32("a", 8), f32("b", 8)], offsets=[0, 0]), "overlaps"),
    (gguf_bytes({}, [f32("a", 8)], offsets=[2**40]), "truncated: the tensor 'a'"),
    (gguf_bytes({}, [f32("blk.3.ffn_up.weight", 64)])[:-8], "'blk.3.ffn_up.weight' ends"),
    (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (text("k") + struct.pack("<II", 4, 1)),
        "duplicate metadata key",
    ),
]  # fmt: skip


def test_gguf_names_what_is_wrong_with_a_file() -> None:
    errors = [(refused(data), words) for data, words in BROKEN]
    assert not [(e.what, words) for e, words in errors if words not in e.what]
    assert all(e.exit_code == 4 and e.hint for e, _ in errors)
    assert all((e.where or "").startswith("m.gguf") for e, _ in errors)


@given(st.binary(max_size=400))
def test_gguf_any_bytes_give_a_header_or_a_clear_error(data: bytes) -> None:
    explained(lambda: read(b"GGUF\x03\0\0\0" + data))


GOOD = gguf_bytes(
    llama_metadata(x__words=["w"] * 70, x__list=[1, 2, 3]), [f32("a", 8, 4), f32("b", 4)]
)


@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=6),
    st.integers(0, len(GOOD)),
    st.sampled_from([1, 13, 4096]),
)
def test_gguf_damaged_file_gives_a_header_or_a_clear_error(
    changes: list[tuple[int, int]], length: int, chunk: int
) -> None:
    data = bytearray(GOOD)
    for at, value in changes:
        data[at] = value
    source = BytesSource("m.gguf", bytes(data[:length]), chunk)
    explained(lambda: join_gguf([read_gguf(source)]).to_data())


def test_gguf_refuses_a_file_cut_at_any_byte() -> None:
    end = len(GOOD) - 16  # the padding behind the last tensor may be missing
    for length in range(end):
        refused(GOOD[:length])
    read(GOOD[:end])


class Endless:
    """A source that claims a terabyte and gives zeros, counting what is asked."""

    name, size, chunk = "m.gguf", 2**40, 256 * 2**10

    def __init__(self, head: bytes) -> None:
        self.head, self.asked = head, 0

    def read(self, offset: int, length: int) -> bytes:
        self.asked += length
        return self.head[offset : offset + length].ljust(length, b"\0")


def test_gguf_huge_file_costs_bounded_reading_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_module, "MAX_HEADER", 2**26)
    for head in (
        struct.pack("<IQQ", 3, 500_000, 0),
        struct.pack("<IQQ", 3, 0, 2**35),
        struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 2**23 - 99),
        struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 0, 2**39),
        struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IQ", 8, 2**38),
    ):
        source = Endless(b"GGUF" + head)
        started = time.monotonic()
        with suppress(CheckpointError):
            read_gguf(source)
        assert source.asked < 66 * 2**20, head
        assert time.monotonic() - started < 60, head


def crowd(entry: bytes, size: int = 2**23) -> bytes:
    """A header of as many keys as fit, each with the same value."""
    each = 8 + 8 + len(entry)
    count = size // each
    keys = b"".join(struct.pack("<Q8s", 8, b"%08d" % i) + entry for i in range(count))
    return b"GGUF" + struct.pack("<IQQ", 3, 0, count) + keys


def test_gguf_header_costs_little_memory() -> None:
    entries = {
        "numbers": struct.pack("<IIQ", 9, 4, 4096) + bytes(4 * 4096),
        "booleans": struct.pack("<IIQ", 9, 7, 4096) + bytes(4096),
        "strings": struct.pack("<IIQ", 9, 8, 64) + bytes(8 * 64),
        "keys": struct.pack("<IB", 0, 1),
    }
    peaks = {}
    for name, entry in entries.items():
        source = BytesSource("crowd.gguf", crowd(entry))
        tracemalloc.start()
        try:
            with suppress(CheckpointError):
                read_gguf(source)
            peaks[name] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert max(peaks.values()) < 8 * 2**20, peaks


def split(number: int, count: int, names: list[str], total: int = 4) -> bytes:
    kv = {"split.no": number, "split.count": count, "split.tensors.count": total}
    return gguf_bytes(
        {**(llama_metadata() if not number else {}), **kv}, [f32(n, 8) for n in names]
    )


def test_gguf_splits_are_found_from_the_first(tmp_path: Path) -> None:
    first = write(tmp_path / "m-00001-of-00002.gguf", split(0, 2, ["a", "b"]))
    with pytest.raises(NotFound, match="1 of 2 files"):
        read_path(first)
    second = write(tmp_path / "m-00002-of-00002.gguf", split(1, 2, ["c", "d"]))
    checkpoint = read_path(first)
    assert [t.name for t in checkpoint.tensors] == ["a", "b", "c", "d"]
    assert checkpoint.shape.architecture == "llama"
    assert read_paths([second, first]).shape.architecture == "llama"
    assert read_path(tmp_path).parameters == 32
    write(second, split(1, 2, ["c"]))
    with pytest.raises(CheckpointError, match="declares 4 tensors, its files hold 3"):
        read_path(first)
    write(second, split(1, 2, ["c", "a"]))
    with pytest.raises(CheckpointError, match="two files"):
        read_path(first)
    write(second, split(1, 3, ["c", "d"]))
    with pytest.raises(CheckpointError, match="not one complete model"):
        read_path(first)


def test_gguf_splits_joined_with_cat_are_named(tmp_path: Path) -> None:
    one = split(0, 3, ["a"])
    merged = write(tmp_path / "model.gguf", one + bytes(100_000))
    with pytest.raises(CheckpointError, match="joined with cat") as caught:
        read_path(merged)
    assert "split.count = 3" in str(caught.value.where)
    renamed = write(tmp_path / "renamed.gguf", one)
    with pytest.raises(CheckpointError) as caught:
        read_path(renamed)
    assert "with cat" not in caught.value.what


def test_checkpoint_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_path(tmp_path / "nowhere.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_path(tmp_path / "pipe.gguf")
    write(tmp_path / "only" / "config.json", b"{}")
    with pytest.raises(NotFound, match="only the configuration"):
        read_path(tmp_path / "only")


def test_gguf_headers_are_fast() -> None:
    tensors = [f32(f"blk.{i}.weight", 1) for i in range(50_000)]
    kv = llama_metadata(tokenizer__ggml__tokens=["token"] * 150_000)
    data = gguf_bytes(kv, tensors)
    started = time.perf_counter()
    header = read_gguf(BytesSource("m.gguf", data, 2**18))
    seconds = time.perf_counter() - started
    assert len(header.tensors) == 50_000
    assert seconds < 30  # the benchmark expects 1 s on an idle machine
