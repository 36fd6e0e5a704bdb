"""The scanner finds the same as a simple one that tries every template on every line."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from bakehouse.logscan import scanner as module
from bakehouse.logscan.catalogue import Signature, catalogue
from bakehouse.logscan.findings import Finding, judge
from bakehouse.logscan.scanner import Scanner, decoded, message, spoken_from, without_colours
from bakehouse.logscan.scanner import Scanner as Quick

DATA = Path(__file__).resolve().parents[1] / "data"


def _lines() -> list[bytes]:
    """Lines of all known faults, of healthy logs, of people's talk, and invented ones."""
    lines: list[str] = []
    for name in ("corpus.yaml", "more.yaml"):
        for case in YAML(typ="safe").load(DATA / "faults" / name):
            lines += case["lines"]
    lines += [f"0.00.147.118 E {line}" for line in lines[::7]]
    lines += [f"\x1b[31m{line}\x1b[0m" for line in lines[::31]]
    lines += [f"  0%\r 50% {line}\r100%" for line in lines[::41]]
    lines += [f'{{"content": "{line}"}}' for line in lines[::37]]
    lines += [f"{line} Received request a-1: prompt: {line}" for line in lines[::53]]
    for path in (DATA / "logs").glob("*.log"):
        lines += path.read_text().splitlines()[:60]
    lines += [
        "",
        " ",
        "error",
        "ERROR 4711",
        "CUDA error: a thing unheard of",
        "llama_decode[1] -1",
    ]
    return [line.encode() for line in lines]


LINES = _lines()
ERROR = b"E llama_process[1] returned -1"
OTHER = b"allocating 4870.12 MiB on device 0: cudaMalloc failed: out of memory"


@lru_cache(maxsize=1)
def _signatures() -> tuple[Signature, ...]:
    known = catalogue()
    return tuple(s for found in known.by_word.values() for s in found)


@lru_cache(maxsize=4096)
def _caught(data: bytes) -> dict[Signature, dict[str, str]]:
    """What every template catches of a line, what people say left out."""
    line = decoded(data)
    body, spoken = message(line), spoken_from(data)
    tried = {s: module._caught(s, line, body, spoken) for s in _signatures()}
    return {s: found for s, found in tried.items() if found is not None}


class Plain:
    """Nothing is looked up, nothing is learnt of one line for another."""

    def __init__(self) -> None:
        self._inner = Quick()

    def scan(self, log: bytes) -> tuple[Finding, ...]:
        inner = self._inner
        for number, raw in enumerate(without_colours(log).split(b"\n"), 1):
            for drawn in raw.rstrip(b"\r").split(b"\r"):
                inner._count(number, drawn, _caught(drawn), explained=False)
        return judge(catalogue().rows, inner._hits, None, complete=True)


def _told(findings: tuple[Finding, ...]) -> list[Any]:
    return [(f.id, f.severity, f.line_number, f.count, f.line, f.cause) for f in findings]


def _mixture(seed: int, kinds: int, size: int) -> bytes:
    """Lines of a few kinds over and over, with other numbers, in any order."""
    choice = random.Random(seed)
    some = choice.sample(LINES, kinds)
    weights = [choice.choice((1, 1, 5, 50)) for _ in some]
    lines = []
    for line in _choices(choice, some, weights, size):
        if choice.random() < 0.3:
            shift = choice.randrange(1, 10)
            to = bytes(48 + (d + shift) % 10 for d in range(10))
            line = line.translate(bytes.maketrans(b"0123456789", to))  # noqa: PLW2901
        lines.append(line)
    return b"\n".join(lines)


def _choices(choice: random.Random, some: list[bytes], weights: list[int], n: int) -> list[bytes]:
    return choice.choices(some, weights, k=n)


@given(st.integers(0, 10**9), st.integers(1, 40), st.integers(1, 150))
@settings(max_examples=150)
def test_scanner_finds_what_trying_every_template_finds(seed: int, kinds: int, size: int) -> None:
    log = _mixture(seed, kinds, size)
    plain = _told(Plain().scan(log))

    whole = Scanner()
    whole.feed_bytes(log)
    assert _told(whole.finish()) == plain

    tail, choice = Scanner(), random.Random(seed)
    at = 0
    while at < len(log):
        size = choice.choice((1, 7, 100, 3000))
        tail.feed_bytes(log[at : at + size])
        at += size
    assert _told(tail.finish()) == plain


@pytest.mark.parametrize("few", [0, 10**6])
@pytest.mark.parametrize("seed", range(2))
def test_scanner_finds_the_same_with_either_lookup(
    few: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks so small that shapes are met again in other ones, and each way to find lines."""
    monkeypatch.setattr(module, "_FEW", few)
    monkeypatch.setattr(module, "_BLOCK", 1500)
    log = _mixture(seed, 60, 1200)
    scanner = Scanner()
    scanner.feed_bytes(log)
    assert _told(scanner.finish()) == _told(Plain().scan(log))


def test_scanner_counts_a_line_taken_in_pieces_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line so long that it is taken in pieces is one line, also where its end is well known."""
    monkeypatch.setattr(module, "_LINE", 4000)
    monkeypatch.setattr(module, "_OVERLAP", 300)
    for middle in (b"x" * 9000, b"x" * 3000 + ERROR + b"x" * 5000, b"x" * 3800 + b" " + ERROR):
        others = [word + b" " + ERROR for word in b"one two three four five six seven".split()]
        log = b"\n".join([*others, middle + b" " + ERROR + b" " + b"x" * 200] * 6)
        scanner = Scanner()
        for at in range(0, len(log), 1000):
            scanner.feed_bytes(log[at : at + 1000])
        (found,) = scanner.finish()
        assert (found.count, found.line_number) == (48, 1)


def test_scanner_counts_a_redrawn_line_once() -> None:
    scanner = Scanner()
    for _ in range(3):
        scanner.feed_bytes((b"\r".join([ERROR] * 4) + b"\n") * 5)
    (found,) = scanner.finish()
    assert (found.count, scanner.lines) == (15, 15)


def test_scanner_counts_repeated_lines_between_other_lines() -> None:
    scanner = Scanner()
    scanner.feed_bytes(ERROR + b"\n")
    scanner.feed_bytes((ERROR + b"\n" + OTHER + b"\n" + ERROR.upper() + b"\n") * 100)
    assert {f.id: f.count for f in scanner.finish()} == {
        "draft-head-failing": 201, "cuda-alloc-failed": 100,
    }  # fmt: skip
