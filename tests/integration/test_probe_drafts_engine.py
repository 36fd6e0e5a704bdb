"""The real llama-server with real drafts, and with a real projector of random weights."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bakehouse.context import Context
from bakehouse.probe.models import Endpoint, SuiteInput, SuiteProof
from bakehouse.probe.suites import speculation, vision
from bakehouse.probe.suites.base import Suite, run_suite
from bakehouse.recipe.models import Probe
from bakehouse.system.http import Unreachable
from tests.support.projector import write_projector, write_spoiled

pytestmark = [pytest.mark.integration, pytest.mark.engine, pytest.mark.timeout(600)]

PROBE = Probe.model_validate(
    {
        "request": {"max_tokens": 12},
        "facts": {"questions": [{"ask": "What is 2+2? Answer with a number.", "answers": ["4"]}]},
        "speculation": {"max_tokens": 32},
    }
)


@contextmanager
def serving(context: Context, folder: Path, *argv: str) -> Iterator[str]:
    """Run the real server for the length of a `with` block; one thread, since others run too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fixed = ("--port", str(port), "-c", "1024", "-np", "1", "-t", "1", "-td", "1")
    with (folder / "server.log").open("wb") as out:
        server = subprocess.Popen(
            [*argv, *fixed, "--metrics", "--slots"], stdout=out, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while not _healthy(context, url):
            assert server.poll() is None, (folder / "server.log").read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait(20)


def _healthy(context: Context, url: str) -> bool:
    try:
        return context.http.ask("GET", f"{url}/health", timeout=2).status == 200
    except Unreachable:
        return False


def judged(context: Context, suite: Suite[Any], url: str) -> SuiteProof:
    given = SuiteInput(Endpoint(url, engine="llama.cpp"), PROBE)
    return run_suite(context, suite, given)


@pytest.mark.parametrize("mode", ["draft-simple", "ngram-simple", "ngram-map-k"])
def test_real_speculation_is_lossless(
    context: Context, llama_server: Path, smollm2: Path, tmp_path: Path, mode: str
) -> None:
    drafter = ("-md", str(smollm2)) if mode.startswith("draft") else ()
    flags = (str(llama_server), "-m", str(smollm2), *drafter, "--spec-type", mode)
    with serving(context, tmp_path, *flags) as url:
        proof = judged(context, speculation.SUITE, url)
    assert proof.verdict == "true", proof
    assert proof.figures["accepted"] > 0
    assert sum(proof.figures["accepted_per_position"]) == proof.figures["accepted"]
    assert proof.figures["tokens_compared"] == 32 + 16


def test_a_worse_drafter_is_accepted_less_and_costs_nothing(
    context: Context, llama_server: Path, smollm2: Path, tmp_path: Path
) -> None:
    spoiled = str(write_spoiled(smollm2, tmp_path / "spoiled.gguf"))
    flags = (str(llama_server), "-m", str(smollm2), "-md", spoiled, "--spec-type", "draft-simple")
    with serving(context, tmp_path, *flags) as url:
        proof = judged(context, speculation.SUITE, url)
    seen = {c.id.rpartition(".")[2]: c.verdict.value for c in proof.checks}
    assert seen["same"] == seen["loss"] == "passed"
    assert proof.figures["accepted"] < proof.figures["draft_tokens"]


def test_drafts_that_are_accepted_unseen_are_wrong(
    context: Context, llama_server: Path, smollm2: Path, tmp_path: Path
) -> None:
    """The engine's own switch for benchmarks accepts drafts by chance, not by the model."""
    spoiled = str(write_spoiled(smollm2, tmp_path / "spoiled.gguf"))
    flags = (str(llama_server), "-m", str(smollm2), "-md", spoiled, "--spec-type", "draft-simple",
             "--spec-synth-rates", "1,1,1")  # fmt: skip
    with serving(context, tmp_path, *flags) as url:
        proof = judged(context, speculation.SUITE, url)
    assert proof.verdict == "wrong", proof
    assert "model alone says" in proof.summary


def test_a_drafter_without_a_mode_does_not_speculate(
    context: Context, llama_server: Path, smollm2: Path, tmp_path: Path
) -> None:
    flags = (str(llama_server), "-m", str(smollm2), "-md", str(smollm2))
    with serving(context, tmp_path, *flags) as url:
        proof = judged(context, speculation.SUITE, url)
    assert proof.verdict == "unable"
    assert "--spec-type" in str(proof.hint)


def test_a_projector_of_random_weights_takes_images_and_sees_nothing(
    context: Context, llama_server: Path, smollm2: Path, tmp_path: Path
) -> None:
    projector = str(write_projector(tmp_path / "mmproj.gguf"))
    flags = (str(llama_server), "-m", str(smollm2), "--mmproj", projector)
    with serving(context, tmp_path, *flags) as url:
        proof = judged(context, vision.SUITE, url)
    seen = {c.id.rpartition(".")[2]: c.verdict.value for c in proof.checks}
    assert seen["capability"] == "passed"
    assert seen["text"] == "passed"
    assert seen["print"] == "failed"
    assert proof.verdict == "wrong"
    assert all(a.http_status == 200 for a in proof.answers)


def test_a_server_without_a_projector_is_unable_to_see(
    context: Context, llama_server: Path, smollm2: Path, tmp_path: Path
) -> None:
    with serving(context, tmp_path, str(llama_server), "-m", str(smollm2)) as url:
        proof = judged(context, vision.SUITE, url)
    assert proof.verdict == "unable"
    assert {a.verdict for a in proof.answers[:3]} == {"unanswered"}
    assert proof.answers[-1].verdict == "right"
