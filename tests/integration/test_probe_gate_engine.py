"""The gate on the real server and the real model: true as it is, in any setting; wrong when it is.

The mutants are copies of the model in which the bytes of one tensor were changed: what a broken
kernel, a bad download or a bad disk does, while the server starts and answers at normal speed.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from bakehouse.checkpoints.gguf import Tensor, read_gguf
from bakehouse.checkpoints.reader import FileSource
from bakehouse.context import Context
from bakehouse.probe.golden import known_of
from bakehouse.probe.models import Endpoint, Proof, ServedModel, SuiteProof
from bakehouse.probe.runner import run_probe
from bakehouse.recipe.loader import find, load
from bakehouse.recipe.models import Recipe
from bakehouse.resolver import lock_path, read_lock
from bakehouse.system.http import Unreachable

pytestmark = [pytest.mark.integration, pytest.mark.engine, pytest.mark.timeout(600)]

CONTEXT = 2048


@contextlib.contextmanager
def serving(context: Context, server: Path, model: Path, *more: str) -> Iterator[Endpoint]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [str(server), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
    settings = [
        "-c",
        str(CONTEXT),
        "-np",
        "1",
        "--jinja",
        *(("-t", "1") if "-t" not in more else ()),
    ]
    child = subprocess.Popen(
        [*argv, *settings, *more], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={"OMP_WAIT_POLICY": "passive"},
    )  # fmt: skip
    endpoint = Endpoint(f"http://127.0.0.1:{port}", engine="llama.cpp", context=CONTEXT)
    try:
        deadline = time.monotonic() + 60
        while not healthy(context, endpoint):
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield endpoint
    finally:
        child.terminate()
        child.wait(20)


def healthy(context: Context, endpoint: Endpoint) -> bool:
    try:
        return context.http.ask("GET", f"{endpoint.url}/health", timeout=2).status == 200
    except Unreachable:
        return False


def small(context: Context) -> tuple[Recipe, ServedModel]:
    """The recipe that comes along, and what is known of its model, of no certain server."""
    loaded = load(find("smollm2-cpu", context.recipes))
    lock = read_lock(lock_path(loaded.path))
    assert lock
    return loaded.recipe, known_of(loaded.recipe, lock, loaded.folder)


def suites(proof: Proof) -> dict[str, SuiteProof]:
    return {one.suite: one for one in proof.suites}


@pytest.mark.parametrize(
    "settings",
    [(), ("-t", "2"), ("-fa", "off"), ("-b", "32", "-ub", "16"), ("--no-repack",), ("-np", "4")],
    ids=" ".join,
)
def test_the_model_is_true_in_any_setting_that_changes_nothing(
    context: Context, llama_server: Path, smollm2: Path, settings: tuple[str, ...]
) -> None:
    recipe, known = small(context)
    with serving(context, llama_server, smollm2, *settings) as endpoint:
        proof = run_probe(context, endpoint, recipe.effective_probe, known=known)
    assert (proof.word, proof.summary) == ("true", proof.summary)
    found = suites(proof)
    assert set(found) == {"facts", "fluency", "likelihood"}
    assert sum(one.cost.tokens for one in proof.suites) <= 350
    assert found["likelihood"].figures["how"] == "grammar"


def test_token_by_token_gives_the_same_numbers_where_the_server_speculates(
    context: Context, llama_server: Path, smollm2: Path
) -> None:
    recipe, known = small(context)
    probe = recipe.probe.model_copy(update={"suites": ("likelihood", "reference")})
    drafts = ("-md", str(smollm2), "--spec-type", "draft-simple")
    with serving(context, llama_server, smollm2, *drafts) as endpoint:
        proof = run_probe(context, endpoint, probe, known=known)
    assert proof.word == "true", proof.summary
    assert suites(proof)["likelihood"].figures["how"] == "logit_bias"


def test_the_suites_that_are_not_asked_by_default(
    context: Context, llama_server: Path, smollm2: Path
) -> None:
    recipe, known = small(context)
    probe = recipe.probe.model_copy(
        update={
            "suites": ("reference", "context", "json", "tools", "determinism", "concurrency"),
            "context": recipe.probe.context.model_copy(update={"tokens": 300, "must_find": 1}),
        }
    )
    with serving(context, llama_server, smollm2, "-np", "4", "-c", "8192") as endpoint:
        found = suites(run_probe(context, endpoint, probe, known=known))
    verdicts = {name: one.verdict for name, one in found.items()}
    # This model's chat template has no place for tools, and the server drops them in silence.
    assert verdicts == {
        "reference": "true", "context": "true", "json": "true", "tools": "unable",
        "determinism": "true", "concurrency": "true",
    }, [one.summary for one in found.values()]  # fmt: skip


Change = Callable[[BinaryIO, dict[str, Tensor]], None]


def zeroed(name: str, share: float = 1.0) -> Change:
    def change(file: BinaryIO, tensors: dict[str, Tensor]) -> None:
        file.seek(tensors[name].offset)
        file.write(bytes(int(tensors[name].size * share)))

    return change


def numbers(name: str, make: Callable[[float], float]) -> Change:
    """Change the numbers of a tensor of single precision, as norms are."""

    def change(file: BinaryIO, tensors: dict[str, Tensor]) -> None:
        assert tensors[name].type == "F32"
        form = f"<{tensors[name].elements}f"
        file.seek(tensors[name].offset)
        was = struct.unpack(form, file.read(tensors[name].size))
        file.seek(tensors[name].offset)
        file.write(struct.pack(form, *map(make, was)))

    return change


def swapped(one: str, other: str) -> Change:
    def change(file: BinaryIO, tensors: dict[str, Tensor]) -> None:
        pair = (tensors[one], tensors[other])
        data = []
        for tensor in pair:
            file.seek(tensor.offset)
            data.append(file.read(tensor.size))
        for tensor, content in zip(pair, reversed(data), strict=True):
            file.seek(tensor.offset)
            file.write(content)

    return change


MUTANTS: dict[str, Change] = {
    "a feed-forward matrix zeroed": zeroed("blk.10.ffn_down.weight"),
    "a quarter of its rows zeroed": zeroed("blk.10.ffn_down.weight", 0.25),
    "two layers' attention outputs swapped": swapped(
        "blk.5.attn_output.weight", "blk.6.attn_output.weight"
    ),
    "a norm halved": numbers("blk.12.attn_norm.weight", lambda x: x / 2),
    "a norm that is not a number": numbers("output_norm.weight", lambda _: float("nan")),
}


@pytest.mark.parametrize("change", MUTANTS.values(), ids=MUTANTS.keys())
def test_a_mutant_that_still_answers_is_wrong(
    context: Context, llama_server: Path, smollm2: Path, tmp_path: Path, change: Change
) -> None:
    recipe, known = small(context)
    mutant = tmp_path / "mutant.gguf"
    shutil.copyfile(smollm2, mutant)
    with FileSource(smollm2) as source:
        tensors = {tensor.name: tensor for tensor in read_gguf(source).tensors}
    with mutant.open("r+b") as file:
        change(file, tensors)
    probe = recipe.probe.model_copy(update={"suites": ("likelihood",)})
    with serving(context, llama_server, mutant) as endpoint:
        proof = run_probe(context, endpoint, probe, known=known)
    mutant.unlink()
    assert proof.word == "wrong", proof.summary
    figures: dict[str, Any] = dict(suites(proof)["likelihood"].figures)
    assert figures.get("golden", {"spread": 1})["spread"] > 0.08
