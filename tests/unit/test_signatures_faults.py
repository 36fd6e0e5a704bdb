"""Public failures, and others of their kind: the right exit code, the first cause first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from bakehouse.logscan.findings import exit_code
from bakehouse.logscan.scanner import scan

DATA = Path(__file__).resolve().parents[1] / "data"


Case = dict[str, Any]


def _cases() -> dict[str, Case]:
    """All known failures, by name."""
    return {
        f"{name}:{number} {case.get('fault') or case['first']}": case
        for name in ("corpus.yaml", "more.yaml")
        for number, case in enumerate(YAML(typ="safe").load(DATA / "faults" / name))
    }


CASES = _cases()
HEALTHY = sorted((DATA / "logs").glob("*.log"))


def _verdict(lines: list[str], **options: Any) -> tuple[int, str | None]:
    """Exit code, and id of the first finding that is bad."""
    findings = scan(lines, **options)
    bad = [finding for finding in findings if finding.bad]
    return exit_code(findings), findings[0].id if bad else None


def _json_lines(line: str) -> str:
    escaped = line.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t")
    return f'{{"log":"{escaped}\\n","stream":"stderr","time":"2026-01-02T03:04:05.678901234Z"}}'


FORMATS: dict[str, Callable[[str], str]] = {
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


@pytest.mark.parametrize("form", FORMATS)
def test_fault_gets_its_exit_code_and_first_cause_in_every_log_format(form: str) -> None:
    wrong: dict[str, tuple[object, ...]] = {}
    for name, case in CASES.items():
        findings = scan([FORMATS[form](line) for line in case["lines"]])
        bad = [finding for finding in findings if finding.bad]
        got = (exit_code(findings), findings[0].id if bad or case["first"] else None)
        if got != (case["exit"], case["first"]):
            wrong[name] = got
        elif "line" in case and findings[0].line_number != case["line"]:
            wrong[name] = (*got, findings[0].line_number)
    assert wrong == {}


def test_fault_in_a_healthy_log_keeps_its_exit_code() -> None:
    before = (DATA / "logs" / "llama-server.log").read_text().splitlines()[:7]
    codes = {name: exit_code(scan([*before, *case["lines"]])) for name, case in CASES.items()}
    # A log that ends while the model still loads may be healthy: such a fault needs its own start.
    wrong = {name: code for name, code in codes.items() if code != CASES[name]["exit"]}
    assert {name for name in wrong if CASES[name]["exit"] != 7} == set()
    assert len(wrong) < len(CASES) / 10, wrong


def test_fault_between_lines_of_another_process_keeps_its_first_cause() -> None:
    other = (DATA / "logs" / "ninja.log").read_text().splitlines()
    wrong = {}
    for name, case in CASES.items():
        own = case["lines"]
        mixed = [line for i, its in enumerate(own) for line in (other[i % len(other)], its)]
        if case["exit"] and (got := _verdict(mixed)) != (case["exit"], case["first"]):
            wrong[name] = got
    assert wrong == {}


def test_fault_is_found_when_engine_and_stage_are_named() -> None:
    wrong = {}
    for name, case in CASES.items():
        if case.get("engine"):
            found = scan(case["lines"], engine=case["engine"], stage=case.get("stage"))
            if (exit_code(found), found[0].id) != (case["exit"], case["first"]):
                wrong[name] = found[0].id
    assert wrong == {}


def test_healthy_logs_raise_no_alarm() -> None:
    assert HEALTHY
    found = {path.name: _verdict(path.read_text().splitlines()) for path in HEALTHY}
    assert found == dict.fromkeys(found, (0, None))


def test_finding_advice_uses_the_figures_of_the_line() -> None:
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


def test_finding_text_without_its_figure_reads_whole() -> None:
    (found,) = scan(["ggml_cuda_init: no CUDA devices found"])

    assert "(" not in found.cause
    assert "?" not in found.cause
    assert "{" not in found.cause + found.mend


def test_finding_counts_an_error_that_repeats() -> None:
    lines = [f"E llama_decode[1] returned -1 at {n}" for n in range(2661)]

    (found,) = scan(["fine", *lines])

    assert (found.count, found.line_number, found.severity) == (2661, 2, "lost")


def test_finding_of_a_cause_comes_before_its_consequence() -> None:
    findings = scan(
        [
            "RuntimeError: Engine core initialization failed. See root cause above.",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ]
    )

    assert [f.id for f in findings] == ["torch-out-of-memory", "engine-core-failed"]
