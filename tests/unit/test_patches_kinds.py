"""Kinds of log lines: what varies is dropped, what names a part of an engine stays."""

from __future__ import annotations

import random
import re
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bakehouse.logscan.scanner import without_colours
from bakehouse.patch_review import log_diff
from bakehouse.patch_review.log_diff import Kinds, contrast, kind_of, kinds_of, read_kinds
from bakehouse.redact import clean

LOGS = Path(__file__).resolve().parents[1] / "data" / "logs"

SAME = [
    ("0.00.147.118 E decode: failed at 12", "1.02.003.999 E decode: failed at 7"),
    ("slot release: id  1 | task 0 | stop processing: n_tokens = 48",
     "slot release: id  12 | task 3333 | stop processing: n_tokens = 1024"),
    ("eval time =     120.94 ms /    12 tokens (   10.99 ms per token,    90.95 tokens per second)",
     "eval time = 9.1 ms / 2 tokens ( 4.55 ms per token, 219.78 tokens per second)"),
    ("CUDA error at 0x7ffdeadbeef0", "CUDA error at 0x55d1a2b3c4d5"),
    ("request 5f3c1a9b-77aa-4d2e-9c31-0a1b2c3d4e5f done",
     "request 0aa91b2c-1234-4fff-8e00-9f8e7d6c5b4a done"),
    ("init_method=file:///tmp/vllm_dist_4baf91e2ab77d0b1dd3bd6", "init_method=file:///tmp/vllm_dist_0c1d2e3f4a5b6c"),
    ("model size 92.10 MiB", "model size 1.5 GiB"),
    ("2026-11-30T01:02:03.123Z ERROR worker 17 died", "2026-12-01T23:59:59Z ERROR worker 3 died"),
    ("Nov 30 01:02:03 host llama[123]: listening on http://127.0.0.1:8080",
     "Dec  1 23:59:59 other llama[45678]: listening on http://127.0.0.1:18931"),
    ("\x1b[31m0.00.147.118 E bad 1\x1b[0m", "0.00.000.001 E bad 2"),
    ("(EngineCore pid=4711) ERROR 11-30 01:02:03 [core.py:12] died after 3 s",
     "(EngineCore pid=99) ERROR 12-01 23:59:59 [core.py:12] died after 120 s"),
]  # fmt: skip
OTHER = [
    ("E llama_decode[0] returned -1", "E llama_decode[1] returned -1"),
    ("llama_decode(ctx_dft) head=0 failed rc=-1", "llama_decode(ctx_dft) head=1 failed rc=-1"),
    ("0.00.147.118 E decode went on", "0.00.147.118 I decode went on"),
    ("failed to process speculative batch", "failed to process image batch"),
]


def test_log_kind_ignores_what_varies() -> None:
    differ = [pair for pair in SAME if len({kind_of(line.encode()) for line in pair}) > 1]
    assert not differ
    found = [[(k.count, k.line_number) for k in kinds_of(pair)] for pair in SAME]
    assert found == [[(2, 1)]] * len(SAME)


def test_log_kind_keeps_what_names_a_part() -> None:
    assert not [pair for pair in OTHER if len(kinds_of(pair)) != 2]


def test_log_diff_finds_the_head_that_fails() -> None:
    """2,661 times one head, never the other: and the patched log alone has it."""
    quiet = (LOGS / "llama-server.log").read_text().splitlines()
    loud = [f"0.07.{n % 1000:03d}.118 E llama_decode[1] returned -1 ({n})" for n in range(2661)]
    (found, *rest) = contrast(kinds_of(quiet), kinds_of([*quiet, *loud]))
    assert not rest
    assert (found.how, found.level, found.without, found.patched) == ("new", "error", 0, 2661)
    assert found.text == "llama_decode[1] returned <n> (<n>)"
    assert found.line_number == len(quiet) + 1
    assert str(found).startswith("2,661 times, never without: llama_decode[1]")


LEVELS = [
    ("0.00.000.001 E x", "error"),
    ("0.00.000.001 W failed", "warning"),
    ("0.00.000.001 I errors: none failed", "other"),
    ("E decode: failed to initialize batch", "error"),
    ("W srv x", "warning"),
    ("[W1130 01:02:03.123 utils.cpp:12] Warning: numa_migrate_pages failed.", "warning"),
    ("E1130 01:02:03.123456 99 torch/x.py:12] went wrong", "error"),
    ("I1130 01:02:03.123456 99 torch/x.py:12] nothing failed", "other"),
    ("I am no level, and nothing is wrong", "other"),
    ("ERROR 11-30 01:02:03 [core.py:12] x", "error"),
    ("WARNING 11-30 01:02:03 [core.py:12] an error", "warning"),
    ("(EngineCore pid=4711) ERROR 11-30 01:02:03 [core.py:12] x", "error"),
    ("INFO:     127.0.0.1:1 - POST failed", "other"),
    ("terminate called after throwing an instance of 'x'", "error"),
    ("/src/ggml.c:12: GGML_ASSERT(x) failed", "error"),
    ("errors: 0", "other"),
    ("all is well", "other"),
]


def test_log_kind_level() -> None:
    assert [(line, kind_of(line.encode())[0]) for line, _ in LEVELS] == LEVELS


def test_log_kind_ignores_names_of_one_run() -> None:
    old, new = "build b11434-b0a2feb64 at /h/a1", "build b11434-b0a2feb64-pc4568e0 at /h/b2"
    assert kinds_of([old], ["b0a2feb64", "/h/a1"]) != kinds_of([new], [])
    one = kinds_of([old], ["b0a2feb64", "/h/a1"])[0].text
    assert one == kinds_of([new], ["b0a2feb64-pc4568e0", "/h/b2"])[0].text
    assert kind_of(b"E all of it failed", ("",)) == kind_of(b"E all of it failed")


def test_log_kinds_are_ordered_by_level_and_count() -> None:
    lines = ["I x"] * 9 + ["0.0.0 W w"] * 3 + ["0.0.0 E once"] + ["0.0.0 E thrice"] * 3 + ["I y"]
    assert [(k.level, k.count) for k in kinds_of(lines)] == [
        ("error", 3), ("error", 1), ("warning", 3), ("other", 9), ("other", 1),
    ]  # fmt: skip


def test_log_kinds_of_a_real_log_are_few() -> None:
    """One request makes the same kinds as the next."""
    found, read = read_kinds(LOGS / "llama-server.log")
    assert read.lines == 42
    assert sum(k.count for k in found) == 42
    assert len(found) <= 22
    assert not [k for k in found if re.search(r"\d\.\d", k.text)]


WORDS = st.lists(
    st.sampled_from(
        ["E", "slot", "head=3", "[1]", "[12345]", "0x7f", "17", "-1", "3.5", "a1b2c3d4", "failed",
         "MiB", "0.00.147.118", "\x1b[31m", "\t", "é", "\x0f", "q8_0", "1/2", "", "{", "id", "#7"]
    ),
    max_size=8,
).map(" ".join)  # fmt: skip


@given(st.lists(WORDS, max_size=30), st.integers(1, 50))
def test_log_kinds_do_not_depend_on_the_pieces(lines: list[str], step: int) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    whole, pieces = Kinds(), Kinds()
    whole.feed(data)
    for start in range(0, len(data), step):
        pieces.feed(data[start : start + step])
    assert whole.finish() == pieces.finish()
    assert whole.lines == pieces.lines == len(lines)


@given(st.lists(WORDS, max_size=30))
def test_log_kinds_count_each_line_once(lines: list[str]) -> None:
    found = kinds_of(lines)
    said = [line for line in lines if log_diff.outline(without_colours(line.encode())).strip()]
    assert sum(k.count for k in found) == len(said)
    assert len({(k.level, k.text) for k in found}) == len(found)


DIGITS = st.integers(0, 10**6).map(str)


@given(DIGITS, DIGITS, DIGITS, DIGITS, st.integers(0, 99))
def test_log_kind_keeps_indices_and_drops_numbers(
    a: str, b: str, c: str, d: str, index: int
) -> None:
    one = f"0.00.147.118 E llama_decode[{index}] at {a}, {b} tokens"
    other = f"0.00.147.119 E llama_decode[{index}] at {c}, {d} tokens"
    third = f"0.00.147.118 E llama_decode[{index + 1}] at {a}, {b} tokens"
    assert kind_of(one.encode()) == kind_of(other.encode())
    assert kind_of(one.encode()) != kind_of(third.encode())
    assert f"llama_decode[{index}]" in kind_of(one.encode())[1]


@given(st.binary(max_size=3000))
def test_log_kinds_of_any_bytes_are_printable(data: bytes) -> None:
    counted = Kinds()
    counted.feed(data)
    for kind in counted.finish():
        assert clean(kind.text, one_line=True) == kind.text
        assert clean(kind.line, one_line=True) == kind.line


def test_log_kinds_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_diff, "MOST_KINDS", 50)
    monkeypatch.setattr(log_diff, "_REMEMBERED", 1 << 16)
    letters = "abcdefghij"
    names = [a + b + c + d for a in letters for b in letters for c in letters for d in letters]
    counted = Kinds()
    tracemalloc.start()
    counted.feed(b"x" * 2_000_000)
    for name in names:
        counted.feed(f"{name}\n".encode())
    counted.feed(b"E known\n" * 3)
    found = counted.finish()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 50
    assert sum(k.count for k in found) + counted.beyond == len(names) + 3
    assert peak < 8_000_000


def test_log_kind_of_a_long_line_is_by_its_beginning() -> None:
    lines = [f"E {'long ' * 3000}{n}" for n in range(3)]
    assert [k.count for k in kinds_of(lines)] == [3]


def test_log_kinds_by_block_equal_kinds_by_line() -> None:
    lines = (LOGS / "llama-server-verbose.log").read_text().splitlines()
    alone = Counter(kind_of(line.encode()) for line in lines if line.strip())
    assert Counter({(k.level, k.text): k.count for k in kinds_of(lines)}) == alone


def test_log_kind_ignores_request_ids() -> None:
    rng = random.Random(7)
    ids = ["".join(rng.choices("0123456789abcdef", k=16)) for _ in range(200)]
    lines = [f"ERROR 11-30 03:09 [core.py:514] head 1 of request chatcmpl-{i}-{i[:8]} gave up"
             for i in ids]  # fmt: skip
    lines += [f"INFO: finished cmpl-{i}, 12 tokens" for i in ids]
    found = kinds_of(lines, ("", "chatbot"))
    assert [(k.level, k.count) for k in found] == [("error", 200), ("other", 200)]
    assert found[0].text == "head <n> of request <id> gave up"
