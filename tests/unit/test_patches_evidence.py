"""Benchmark of a patch: answers and logs are read, counts are compared."""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bakehouse.context import Context
from bakehouse.patch_review.benchmark import (
    Item,
    Measure,
    Workload,
    generate,
    items,
    read_answer,
    read_log,
)
from bakehouse.patch_review.log_diff import Kind, contrast, tail
from bakehouse.patch_review.verdict import LogReport
from bakehouse.probe.client import Client, JsonResponse
from bakehouse.probe.models import ServedModel
from bakehouse.recipe.models import Probe, Request
from bakehouse.system.http import Reply, Unreachable
from tests.support.scripted import Scripted, endpoint

PATTERN = r"llama_decode\[\d\] returned -?\d+"
LINES = [f"0.07.{n:03d}.118 E llama_decode[1] returned -{n}" for n in range(2)]
LINES += ["0.00.000.001 I srv  start", "0.00.000.002 I slot 1 | done", "", "x" * 5000]


@given(st.integers(0, 300), st.integers(0, 300))
def test_log_diff_probability_is_exact(a: int, b: int) -> None:
    exact = sum(math.comb(a + b, k) for k in range(a, a + b + 1)) / 2 ** (a + b)
    assert tail(a, b, 0.5) == pytest.approx(exact, rel=1e-6, abs=1e-12)
    assert tail(2100, 1900, 0.5) == pytest.approx(tail(2101, 1900, 0.5), rel=0.2)


@given(st.integers(1, 4000))
def test_log_diff_of_equal_logs_is_empty(count: int) -> None:
    kind = Kind(level="error", text="x", count=count, line_number=1, line="x")
    assert contrast([kind], [kind]) == ()


def test_log_diff_allows_for_the_number_of_requests() -> None:
    """Twice as many requests log twice as many lines."""
    one = Kind(level="error", text="x", count=100, line_number=1, line="x")
    two = one.model_copy(update={"count": 200})
    assert contrast([one], [two], share=2 / 3) == ()
    (raised,) = contrast([one], [two])
    assert raised.how == "raised"
    (lowered,) = contrast([two], [one])
    assert lowered.how == "lowered"


def test_benchmark_answer_is_read_with_its_timings() -> None:
    item = Item("prose", "completion")
    choice = {"choices": [{"text": "x"}], "usage": {"completion_tokens": 5}}
    timings = {"predicted_n": 7, "predicted_ms": 350.0, "draft_n": 4, "draft_n_accepted": 3}
    found = read_answer(item, JsonResponse({**choice, "timings": timings}, seconds=9.0))
    assert (found.tokens, found.seconds, found.drafted, found.accepted) == (7, 0.35, 4, 3)
    found = read_answer(item, JsonResponse(choice, seconds=2.0))
    assert (found.tokens, found.seconds, found.drafted) == (5, 2.0, None)
    found = read_answer(
        item, JsonResponse({**choice, "timings": {"predicted_ms": "soon", "draft_n": True}})
    )
    assert (found.tokens, found.seconds, found.drafted) == (None, None, 0)
    assert (
        read_answer(item, JsonResponse(problem="HTTP 500", http_status=500)).problem == "HTTP 500"
    )


@given(st.lists(st.sampled_from(LINES), max_size=30))
def test_benchmark_log_is_read_once_for_everything(written: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "server.log")
        path.write_text("".join(f"{line}\n" for line in written))
        found = read_log(path, "llama.cpp", (PATTERN, "^$"), (), frozenset())
    count = sum(bool(re.search(PATTERN, line)) for line in written)
    assert found.matches == {PATTERN: count, "^$": written.count("")}
    assert {g.id: g.count for g in found.graves} == ({"draft-head-failing": count} if count else {})
    assert found.lines == len(written)


@pytest.mark.parametrize("engine", ["llama.cpp", "vllm"])
def test_benchmark_requests_are_equal_and_greedy(engine: str) -> None:
    """Greedy, from a fixed seed, without the prompt cache of an engine that has a switch for it."""

    def answer(path: str, body: dict[str, Any]) -> Any:
        if path.endswith("/chat/completions"):
            message = {"content": "a harbour", "reasoning_content": "let me see"}
            return {"choices": [{"message": message}], "usage": {"completion_tokens": 3}}
        return {"choices": [{"text": "a boat"}], "usage": {"completion_tokens": 2}}

    asked = Scripted(answer)
    wanted = items(vision=True)
    said = generate(
        Client(asked, endpoint(engine)), Request(reasoning_effort="low"), wanted, 40, rounds=2
    )
    assert [[s.item for s in each] for each in said] == [[i.name for i in wanted]] * 2
    assert {s.text for s in said[0]} == {"let me see\n\na harbour", "a boat"}
    for path, body in asked.asked:
        assert (body["temperature"], body["seed"], body["max_tokens"]) == (0, 1, 40)
        assert body.get("cache_prompt") is (False if engine == "llama.cpp" else None)
        assert ("reasoning_effort" in body) == path.endswith("/chat/completions")
    assert asked.asked[: len(wanted)] == asked.asked[len(wanted) :]
    pictures = [b for _, b in asked.asked if "image_url" in str(b)]
    assert len(pictures) == 2


def test_benchmark_ends_if_the_server_is_gone() -> None:
    said = generate(
        Client(Scripted(lambda *_: Unreachable("connection refused", refused=True)), endpoint()),
        Request(), items(), 40,
    )  # fmt: skip
    assert len(said) == 1
    assert [s.problem for s in said[0]] == ["connection refused"]


def test_benchmark_drafts_by_counters() -> None:
    """Answers without draft counts: the difference of the counters counts."""
    made = iter([(100, 60), (400, 240)])

    def answer(path: str, body: dict[str, Any]) -> Any:
        return {"choices": [{"message": {"content": "x"}, "text": "x"}]}

    class Counting(Scripted):
        def ask(self, method: str, url: str, **more: Any) -> Reply:
            if not url.endswith("/metrics"):
                return super().ask(method, url, **more)
            drafted, kept = next(made)
            text = (
                f"vllm:spec_decode_num_draft_tokens_total {drafted}\n"
                f"vllm:spec_decode_num_accepted_tokens_total {kept}\n"
            )
            return Reply(200, {}, text.encode(), 0.01)

    what = Workload(Probe(), items(), 20, rounds=1)
    heard = Measure(cast(Context, Counting(answer)), what, speed_only=True)
    proof = heard(endpoint("vllm"), cast(ServedModel, None))
    assert proof.passed
    assert heard.counted == (300, 180)
    one = heard.side("with", "b", Path("server.log"), LogReport(), None)
    assert one.drafts(frozenset(one.items)) == (300, 180)
