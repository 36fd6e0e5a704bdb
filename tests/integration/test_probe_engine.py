"""The real llama-server with the real model is judged correct; a wrong question is judged wrong."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bakehouse.context import Context
from bakehouse.models import Verdict
from bakehouse.probe.models import Endpoint
from bakehouse.probe.runner import run_probe
from bakehouse.recipe.models import Facts, Probe, Question
from bakehouse.system.http import Unreachable

pytestmark = [pytest.mark.integration, pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def url(
    llama_server: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "server.log"
    argv = [str(llama_server), "-m", str(smollm2), "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*argv, "-c", "4096", "-np", "1", "-t", "1"], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)


def wait_for(context: Context, url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if context.http.ask("GET", f"{url}/health", timeout=2).status == 200:
                return
        except Unreachable:
            pass
        time.sleep(0.1)
    pytest.fail("the server did not become healthy")


@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_the_real_model_knows_the_built_in_questions(context: Context, url: str, mode: str) -> None:
    wait_for(context, url)
    proof = run_probe(context, Endpoint(url), Probe(facts=Facts.model_validate({"mode": mode})))
    assert proof.verdict is Verdict.PASSED, [(a.question, a.content) for a in proof.answers]


def test_a_recipe_s_own_questions_can_fail(context: Context, url: str) -> None:
    wait_for(context, url)
    mine = (
        Question(ask="What is the opposite of hot?", answers=("cold",)),
        Question(ask="What is my middle name?", answers=("Xanthippe",)),
    )
    proof = run_probe(context, Endpoint(url), Probe(facts=Facts(questions=mine)))
    assert proof.verdict is Verdict.FAILED
    assert [a.verdict for a in proof.answers] == ["right", "wrong"]
