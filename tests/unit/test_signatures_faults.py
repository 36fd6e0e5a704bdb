"""Public failures, and others of their kind: the right exit code, and the first cause leads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from bakehouse.signatures import exit_code, scan

DATA = Path(__file__).resolve().parents[1] / "data"


def _cases() -> list[Any]:
    cases = []
    for name in ("corpus.yaml", "more.yaml"):
        for number, case in enumerate(YAML(typ="safe").load(DATA / "faults" / name)):
            label = case.get("fault") or f"{number}-{case['first']}"
            cases.append(pytest.param(case, id=label))
    return cases


def _json_lines(line: str) -> str:
    escaped = line.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t")
    return f'{{"log":"{escaped}\\n","stream":"stderr","time":"2026-01-02T03:04:05.678901234Z"}}'


DRESSES: dict[str, Callable[[str], str]] = {
    "plain": lambda line: line,
    "carriage returns": lambda line: line + "\r",
    "colours": lambda line: f"\x1b[1;31m{line}\x1b[0m",
    "ISO time": lambda line: f"2026-01-02T03:04:05.678901Z {line}",
    "time in brackets": lambda line: f"[2026-01-02 03:04:05,678] {line}",
    "llama.cpp": lambda line: f"0.00.147.118 E {line}",
    "vLLM": lambda line: f"(EngineCore pid=123) ERROR 08-19 12:34:56 [core.py:1330] {line}",
    "journald": lambda line: f"Jan 02 03:04:05 spark llama-server[4242]: {line}",
    "Compose": lambda line: f"vllm-1  | {line}",
    "BuildKit": lambda line: f"#12 34.56 {line}",
    "JSON of Docker": _json_lines,
    "JSON with numbers for quotes": lambda line: json.dumps({"message": line, "level": "info"}),
    "journald, ISO": lambda line: f"2026-01-02T03:04:05+0100 spark llama-server[4242]: {line}",
    "Kubernetes": lambda line: f"2026-01-02T03:04:05.678901234Z stderr F {line}",
    "kubectl": lambda line: f"[pod/vllm-0/vllm] {line}",
    "torchrun": lambda line: f"[rank0]: {line}",
    "GitHub Actions": lambda line: f"2026-01-02T03:04:05.1234567Z ##[error]{line}",
    "logfmt": lambda line: f'time="2026-01-02T03:04:05Z" level=error msg="{line}"',
    "upper case": str.upper,
    "lower case": str.lower,
}


@pytest.mark.parametrize("case", _cases())
def test_verdict_and_first_cause_however_the_lines_are_dressed(case: dict[str, Any]) -> None:
    for name, dress in DRESSES.items():
        findings = scan([dress(line) for line in case["lines"]])

        assert exit_code(findings) == case["exit"], name
        if case["first"] is None:
            assert not [finding for finding in findings if finding.bad], name
        else:
            assert findings[0].id == case["first"], name
        if "line" in case:
            assert findings[0].line_number == case["line"], name


@pytest.mark.parametrize("case", _cases())
def test_in_the_midst_of_a_healthy_log(case: dict[str, Any]) -> None:
    before = (DATA / "logs" / "llama-server.log").read_text().splitlines()[:7]

    findings = scan([*before, *case["lines"]])

    assert exit_code(findings) == case["exit"] or case["exit"] == 7


@pytest.mark.parametrize("case", [c for c in _cases() if c.values[0]["exit"]])
def test_between_the_lines_of_another_process(case: dict[str, Any]) -> None:
    other = (DATA / "logs" / "ninja.log").read_text().splitlines()
    mixed = [line for i, own in enumerate(case["lines"]) for line in (other[i % len(other)], own)]

    findings = scan(mixed)

    assert exit_code(findings) == case["exit"]
    assert findings[0].id == case["first"]


@pytest.mark.parametrize("case", [c for c in _cases() if c.values[0].get("engine")])
def test_the_named_engine_and_stage_lose_nothing(case: dict[str, Any]) -> None:
    findings = scan(case["lines"], engine=case["engine"], stage=case.get("stage"))

    assert exit_code(findings) == case["exit"]
    assert findings[0].id == case["first"]


@pytest.mark.parametrize("name", sorted(p.name for p in (DATA / "logs").glob("*.log")))
def test_real_healthy_logs_raise_no_alarm(name: str) -> None:
    findings = scan((DATA / "logs" / name).read_text().splitlines())

    assert [f.id for f in findings if f.bad] == []
    assert exit_code(findings) == 0


def test_advice_carries_the_figures_of_the_line() -> None:
    free = (
        "ValueError: Free memory on device cuda:0 (101.9/121.69 GiB) on startup is less than "
        "desired GPU memory utilization (0.87, 105.87 GiB). Decrease GPU memory utilization."
    )
    needed = (
        "ValueError: To serve at least one request with the model's max seq len (262144), "
        "(24.0 GiB KV cache is needed, which is larger than the available KV cache memory "
        "(3.18 GiB). Based on the available memory, the estimated maximum model length is "
        "34736. Try increasing `gpu_memory_utilization`."
    )
    flag = (
        'error while handling argument "--draft-max": the argument has been removed. '
        "use --spec-draft-n-max or --spec-ngram-mod-n-max"
    )
    ((memory,), (cache,), removed) = map(scan, ([free], [needed], [flag]))

    assert "0.83" in memory.mend
    assert "--max-model-len 34736" in cache.mend
    assert "24.0" in cache.cause
    assert "3.18" in cache.cause
    assert "use --spec-draft-n-max or --spec-ngram-mod-n-max" in removed[0].mend


def test_a_figure_that_is_not_there_leaves_no_hole() -> None:
    (found,) = scan(["ggml_cuda_init: no CUDA devices found"])

    assert "(" not in found.cause
    assert "?" not in found.cause
    assert "{" not in found.cause + found.mend


def test_the_same_error_2661_times_is_one_finding_with_a_count() -> None:
    lines = [f"E llama_decode[1] returned -1 at {n}" for n in range(2661)]

    (found,) = scan(["fine", *lines])

    assert (found.count, found.line_number, found.severity) == (2661, 2, "lost")


def test_consequences_never_lead() -> None:
    findings = scan(
        [
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ]
    )

    assert [f.id for f in findings] == ["torch-out-of-memory", "engine-core-failed"]
