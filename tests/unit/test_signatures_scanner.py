"""The log scanner: finished logs and live tails, cut anywhere, of any size, with any bytes."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bakehouse.logscan.catalogue import shape
from bakehouse.logscan.findings import Finding, exit_code
from bakehouse.logscan.scanner import Scanner, message, printable, scan

DATA = Path(__file__).resolve().parents[1] / "data"
OOM = b"ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4870.12 MiB on device 0: cudaMalloc"
OOM += b" failed: out of memory"
LOG = b"\n".join(
    [b"one", b"\x1b[31m" + OOM + b"\x1b[0m", b"three\r", b"Killed\r", b"", OOM, b"last"]
)


def _ids(findings: tuple[Finding, ...]) -> list[tuple[str, int, int]]:
    return [(f.id, f.line_number, f.count) for f in findings]


EXPECTED = [("cuda-alloc-failed", 2, 2), ("process-killed", 4, 1)]


def test_scanner_gives_the_same_for_lines_tail_and_block() -> None:
    tail, block = Scanner(), Scanner()
    for line in LOG.split(b"\n"):
        tail.feed(line)
    block.feed_bytes(LOG)

    assert _ids(scan(LOG.decode().split("\n"))) == EXPECTED
    assert _ids(tail.finish()) == EXPECTED
    assert _ids(block.finish()) == EXPECTED
    assert tail.lines == block.lines == 7


@given(st.lists(st.integers(0, len(LOG)), max_size=12))
@settings(max_examples=100)
def test_scanner_accepts_data_cut_anywhere(cuts: list[int]) -> None:
    scanner = Scanner()
    places = [0, *sorted(cuts), len(LOG)]
    for start, end in pairwise(places):
        scanner.feed_bytes(LOG[start:end])

    assert _ids(scanner.finish()) == EXPECTED


@given(st.binary(max_size=3000))
@settings(max_examples=200)
def test_scanner_reads_any_bytes(data: bytes) -> None:
    scanner = Scanner()
    scanner.feed_bytes(data)

    for finding in scanner.finish():
        assert finding.line.isprintable()


def test_scanner_feed_returns_only_new_findings() -> None:
    scanner = Scanner()

    assert scanner.feed("all is well") == ()
    assert [f.id for f in scanner.feed(OOM)] == ["cuda-alloc-failed"]
    assert scanner.feed(OOM) == ()
    assert [f.id for f in scanner.findings()] == ["cuda-alloc-failed"]


def test_scanner_waits_for_the_end_where_the_next_line_may_refute() -> None:
    scanner = Scanner()
    for _ in range(3):
        scanner.feed("srv  log_server_r: request: GET /health 127.0.0.1 503")

    assert scanner.findings() == ()
    assert [f.id for f in scanner.finish()] == ["health-never-ready"]
    scanner.feed("0.00.542.209 I srv  llama_server: model loaded")
    assert scanner.finish() == ()


def test_scanner_corrects_a_finding_by_a_later_line() -> None:
    scanner = Scanner()
    scanner.feed("warning: no usable GPU found, --gpu-layers option will be ignored")
    before = [f.severity for f in scanner.findings()]
    late = scanner.feed("ggml_cuda_init: found 1 CUDA devices (Total VRAM: 8150 MiB):")

    assert [(f.id, f.severity, f.line_number) for f in late] == [("no-usable-gpu", "harmless", 1)]
    assert before == ["lost"]
    assert [f.severity for f in scanner.findings()] == ["harmless"]


def test_scanner_takes_a_progress_bar_as_one_line() -> None:
    bar = b"".join(b"Loading: %d%%\r" % n for n in range(100))
    scanner = Scanner()
    scanner.feed_bytes(b"first\n" + bar + OOM + b"\r\nthird\n" + OOM + b"\n")

    assert _ids(scanner.finish()) == [("cuda-alloc-failed", 2, 2)]


@pytest.mark.parametrize("filler", [b"x", b"failed ", b"\r", b"\x1b[0m"])
def test_scanner_memory_is_bounded_for_an_endless_line(filler: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scanner = Scanner()
    block = (filler * (1 << 18))[: 1 << 18]
    started = time.process_time()
    for _ in range(30):
        scanner.feed_bytes(block)
    scanner.feed_bytes(b" " + OOM + b" ")
    for _ in range(4):
        scanner.feed_bytes(block)

    assert ("cuda-alloc-failed", 1, 1) in _ids(scanner.finish())
    assert time.process_time() - started < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "kilobytes"


def test_scanner_memory_is_bounded_for_many_different_lines() -> None:
    choice = random.Random(3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scanner = Scanner()
    for _ in range(100):
        words = (bytes(choice.choices(b"abcdefgh", k=9)) for _ in range(2000))
        scanner.feed_bytes(b"failed to ".join(words) + b"\n" + b"\nerror ".join([b"q"] * 99))

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 96 << 10, "kilobytes"


def test_scanner_compares_numbers_in_lines_of_one_shape() -> None:
    findings = scan(
        [
            "load_tensors: offloaded 33/33 layers to GPU",
            "draft acceptance = 0.50000 (50 accepted / 100 generated)",
            "draft acceptance = 0.01000 (1 accepted / 100 generated)",
            "draft acceptance = 0.60000 (60 accepted / 100 generated)",
            "draft acceptance = 0.02000 (2 accepted / 100 generated)",
        ]
    )

    assert _ids(findings) == [("draft-acceptance-floor", 3, 2)]


def test_scanner_counts_every_line_of_a_known_shape() -> None:
    lines = [f"E llama_decode[{n % 7}] returned -{n % 3 + 1}" for n in range(5000)]

    assert _ids(scan(lines)) == [("draft-head-failing", 1, 5000)]


def test_scanner_unknown_error_is_the_cause_only_when_the_engine_dies() -> None:
    lines = ["(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] OSError: nobody knows"]

    alive = scan(lines)
    dead = scan([*lines, "RuntimeError: Engine core initialization failed. See root cause above."])

    assert [(f.id, f.severity) for f in alive] == [("python-exception", "degraded")]
    assert [(f.id, f.severity) for f in dead] == [
        ("python-exception", "fatal"),
        ("engine-core-failed", "fatal"),
    ]


def test_scanner_strips_what_loggers_put_before_a_message() -> None:
    prefixes = [
        "0.00.147.118 E ",
        "2026-01-02T03:04:05.678Z ",
        "[2026-01-02 03:04:05,678] ",
        "Jan  2 03:04:05 host kernel: ",
        "(APIServer pid=1) INFO 01-02 03:04:05 [api.py:12] ",
        "vllm-1  | ",
        "[ 1234.567890] ",
        "vllm-1  | 2026-01-02T03:04:05Z (EngineCore pid=7) ERROR 01-02 03:04:05 [core.py:9] ",
    ]
    assert {prefix: message(prefix + "Killed") for prefix in prefixes} == dict.fromkeys(
        prefixes, "Killed"
    )


def test_scanner_keeps_a_message_that_looks_like_a_prefix() -> None:
    for line in ("srv  load_model: loading", "error: x", "| a | table |", "CMake Error at x:1"):
        assert message(line) == line.lstrip()


def test_scanner_escapes_control_characters_in_shown_lines() -> None:
    shown = printable("a\x1b]0;title\x07b\u202ec" + "x" * 2000)

    assert shown.isprintable()
    assert len(shown) < 600


@given(st.text(max_size=200))
def test_scanner_shape_has_no_case_and_no_digits(text: str) -> None:
    data = text.encode(errors="replace")

    assert shape(data) == shape(data.upper()) if text.isascii() else True
    assert not any(48 <= byte <= 57 for byte in shape(data))
    assert shape(data).count(b"\n") == data.count(b"\n")


def test_scanner_import_is_cheap() -> None:
    code = (
        "import sys, bakehouse.logscan; "
        "print([m for m in ('requests', 'rich', 'ruamel.yaml', 'structlog') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.strip() == "[]"


TALK = (
    "Why do I get CUDA error: out of memory?",
    "Segmentation fault (core dumped)",
    "GGML_ASSERT(x) failed",
    "load_tensors: offloaded 0/33 layers to GPU",
    "RuntimeError: Engine core initialization failed. See root cause above",
    "NVRM: Xid (PCI:0000:01:00): 79, pid=1",
)
SPEECH = (
    "INFO 07-10 12:00:00 [logger.py:43] Received request chatcmpl-a: prompt: '%s'",
    "INFO [logger.py:60] Generated response chatcmpl-1: output: '%s'",
    'srv  log_server_r: request:  {"messages":[{"role":"user","content":"%s"}],"max_tokens":64}',
    'srv  log_server_r: response: {"choices":[{"message":{"content":"%s"}}]}',
    '{"log":"request: {\\"prompt\\": \\"%s\\"}\\n","stream":"stderr"}',
    "{'role': 'user', 'content': '%s'}",
    "Parsing chat message: %s",
    "D slot process_toke: id  0 | task 0 | n_remaining = 61, next token:    12 '%s'",
)


def test_scanner_ignores_what_users_and_models_say() -> None:
    """The same words count when the server itself logs them."""
    codes = {f % talk: exit_code(scan([f % talk])) for f in SPEECH for talk in TALK}
    assert {line for line, code in codes.items() if code} == set()
    for talk in TALK:
        own = talk.removeprefix("Why do I get ")
        assert exit_code(scan([SPEECH[0] % talk, own])) != 0, own


def test_scanner_finds_a_fault_before_quoted_text() -> None:
    line = 'E CUDA error: out of memory while answering {"content":"hello"}'
    assert exit_code(scan([line])) == 7


@pytest.mark.parametrize("cut", [1 << 12, 1 << 20])
def test_scanner_ignores_quoted_text_to_the_end_of_a_long_line(cut: int) -> None:
    said = 'request: {"content":"' + "a word " * 40_000 + TALK[0] + '"}'
    scanner = Scanner()
    data = f"{said}\n{TALK[1]}\n".encode()
    for at in range(0, len(data), cut):
        scanner.feed_bytes(data[at : at + cut])
    assert [(f.id, f.line_number) for f in scanner.finish()] == [("segmentation-fault", 2)]
