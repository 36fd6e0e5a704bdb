"""What verdicts rest on: counts that are compared, answers and logs that are read."""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bakehouse.patches.contrast import contrast, tail
from bakehouse.patches.generation import Item, read
from bakehouse.patches.kinds import Kind
from bakehouse.patches.measure import read_log
from bakehouse.probe.reply import Told

PATTERN = r"llama_decode\[\d\] returned -?\d+"
LINES = [f"0.07.{n:03d}.118 E llama_decode[1] returned -{n}" for n in range(2)]
LINES += ["0.00.000.001 I srv  start", "0.00.000.002 I slot 1 | done", "", "x" * 5000]


@given(st.integers(0, 300), st.integers(0, 300))
def test_a_tail_is_a_probability(a: int, b: int) -> None:
    exact = sum(math.comb(a + b, k) for k in range(a, a + b + 1)) / 2 ** (a + b)
    assert tail(a, b, 0.5) == pytest.approx(exact, rel=1e-6, abs=1e-12)


def test_a_tail_of_many_is_near_the_exact_one() -> None:
    assert tail(2100, 1900, 0.5) == pytest.approx(tail(2101, 1900, 0.5), rel=0.2)


@given(st.integers(1, 4000))
def test_a_log_against_itself_shows_nothing(count: int) -> None:
    kind = Kind(level="error", text="x", count=count, line_number=1, line="x")
    assert contrast([kind], [kind]) == ()


def test_work_counts_in_a_comparison() -> None:
    """Twice as many requests log twice as many lines."""
    one = Kind(level="error", text="x", count=100, line_number=1, line="x")
    two = one.model_copy(update={"count": 200})
    assert contrast([one], [two], share=2 / 3) == ()
    (raised,) = contrast([one], [two])
    assert raised.how == "raised"
    (lowered,) = contrast([two], [one])
    assert lowered.how == "lowered"


def test_an_answer_is_read_with_its_timings() -> None:
    item = Item("prose", "completion")
    choice = {"choices": [{"text": "x"}], "usage": {"completion_tokens": 5}}
    timings = {"predicted_n": 7, "predicted_ms": 350.0, "draft_n": 4, "draft_n_accepted": 3}
    found = read(item, Told({**choice, "timings": timings}, seconds=9.0))
    assert (found.tokens, found.seconds, found.drafted, found.accepted) == (7, 0.35, 4, 3)
    found = read(item, Told(choice, seconds=2.0))
    assert (found.tokens, found.seconds, found.drafted) == (5, 2.0, None)
    found = read(item, Told({**choice, "timings": {"predicted_ms": "soon", "draft_n": True}}))
    assert (found.tokens, found.seconds, found.drafted) == (None, None, 0)
    assert read(item, Told(problem="HTTP 500", http_status=500)).problem == "HTTP 500"


@given(st.lists(st.sampled_from(LINES), max_size=30))
def test_a_log_is_read_once_for_everything(written: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "server.log")
        path.write_text("".join(f"{line}\n" for line in written))
        found = read_log(path, "llama.cpp", (PATTERN, "^$"), (), frozenset())
    count = sum(bool(re.search(PATTERN, line)) for line in written)
    assert found.matches == {PATTERN: count, "^$": written.count("")}
    assert {g.id: g.count for g in found.graves} == ({"draft-head-failing": count} if count else {})
    assert found.lines == len(written)
