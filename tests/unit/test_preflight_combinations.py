"""Known-bad combinations and contradictions at the tasks: refused, warned of, acknowledged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bakehouse import flags
from bakehouse.commands import build, plan, serve
from bakehouse.commands.lock import run_fetch, run_lock
from bakehouse.commands.recipes import run_check
from bakehouse.context import Context
from bakehouse.errors import RecipeError
from bakehouse.models import Verdict
from bakehouse.preflight.rules import (
    combination_faults,
    known_bad,
    load_and_check,
    note,
    refuse,
    types_on_disk,
    warnings,
)
from bakehouse.recipe.loader import load
from tests.support.checkpoints import Entry, gguf_bytes, llama_metadata
from tests.support.recipes import recipe_data as data
from tests.support.recipes import write_recipe

Q4_0: Entry = ("a", (256, 4), 2, bytes(32 * 18))
IQ3_S: Entry = ("b", (256, 4), 21, bytes(4 * 110))
CUDA: dict[str, Any] = {
    "cuda": {"version": "13.2"},
    "cmake": {"GGML_CUDA": True, "CMAKE_CUDA_ARCHITECTURES": "90-real"},
}


def bad(folder: Path, **more: object) -> Path:
    weights = {"model": {"path": "model-IQ3_S.gguf"}}
    return write_recipe(folder, data(build=CUDA, weights=weights, **more))


def at(context: Context, folder: Path) -> Context:
    return replace(context, recipes=folder)


TASKS = {
    "plan": lambda ctx: plan.run(ctx, plan.Options("test")),
    "build": lambda ctx: build.run(ctx, build.Options("test")),
    "serve": lambda ctx: serve.run(ctx, serve.Options("test")),
    "lock": lambda ctx: run_lock(ctx, flags.Lock("test")),
    "fetch": lambda ctx: run_fetch(ctx, flags.Fetch("test")),
}


@pytest.mark.parametrize("task", ["plan", "build", "serve"])
def test_a_known_bad_recipe_is_refused_before_anything_is_done(
    task: str, context: Context, tmp_path: Path
) -> None:
    bad(tmp_path)
    with pytest.raises(RecipeError, match="known to fail") as error:
        TASKS[task](at(context, tmp_path))
    (fault,) = error.value.faults
    assert fault.message.startswith("known to be bad, cuda-13.2-iq: ")
    assert "acknowledge: {cuda-13.2-iq: why}" in (fault.hint or "")
    assert fault.line
    assert (error.value.exit_code, error.value.id) == (2, "known-bad")
    assert not context.places.cache.exists()


@pytest.mark.parametrize("task", list(TASKS))
def test_a_recipe_that_contradicts_itself_is_refused_by_every_task(
    task: str, context: Context, tmp_path: Path
) -> None:
    write_recipe(tmp_path, data(build={"cuda": {"version": "13.0"}}))
    with pytest.raises(RecipeError, match="contradicts itself") as error:
        TASKS[task](at(context, tmp_path))
    assert "CUDA backend is not enabled" in error.value.faults[0].message
    assert error.value.exit_code == 2


def test_check_says_contradictions_and_known_bad_beside_each_other(
    context: Context, tmp_path: Path
) -> None:
    cmake = {**CUDA["cmake"], "CUDAToolkit_ROOT": "/usr/local/cuda-13.2"}
    weights = {"model": {"path": "model-IQ3_S.gguf"}}
    write_recipe(tmp_path, data(build={**CUDA, "cmake": cmake}, weights=weights))
    outcome = run_check(at(context, tmp_path), flags.Check("test"))
    assert outcome.exit == 2
    assert "set without CMAKE_CUDA_COMPILER" in outcome.text
    assert "known to be bad, cuda-13.2-iq" in outcome.text
    (one,) = outcome.result["recipes"]
    assert [c["id"] for c in one["known_bad"]] == ["known-bad.cuda-13.2-iq"]


def test_what_is_acknowledged_passes_with_its_reason(context: Context, tmp_path: Path) -> None:
    bad(tmp_path, acknowledge={"cuda-13.2-iq": "measured: the tensors are patched"})
    outcome = run_check(at(context, tmp_path), flags.Check("test"))
    assert outcome.exit == 0
    assert "acknowledged: cuda-13.2-iq: " in outcome.text
    assert "measured: the tensors are patched" in outcome.text
    loaded = load_and_check(tmp_path / "test.yaml")
    said: list[tuple[str, object]] = []

    class Record:
        def fact(self, name: str, value: object) -> None:
            said.append((name, value))

    note(context, loaded, known_bad(loaded), Record())
    ((name, value),) = said
    assert name == "known_bad"
    assert "acknowledged: measured: the tensors are patched" in json.dumps(value)


def test_a_header_says_more_than_a_name(context: Context, tmp_path: Path) -> None:
    """A mixed quantisation whose file is named after its main type."""
    path = write_recipe(tmp_path, data(build=CUDA, weights={"model": {"path": "model.gguf"}}))
    loaded = load(path)
    (vague,) = known_bad(loaded)
    assert vague.verdict is Verdict.UNKNOWN
    assert "not known: quantisation" in vague.observed
    assert warnings([vague])[0].startswith("warning: cuda-13.2-iq: perhaps")
    refuse(loaded, (vague,))
    model = tmp_path / "model.gguf"
    good = gguf_bytes(llama_metadata(), [Q4_0])
    model.write_bytes(good)
    types = types_on_disk([[str(model)]])
    assert types == {"Q4_0"}
    assert known_bad(loaded, types=types) == ()
    mixed = [Q4_0, IQ3_S]
    model.write_bytes(gguf_bytes(llama_metadata(), mixed))
    found = known_bad(loaded, types=types_on_disk([[str(model)]]))
    assert [c.verdict for c in found] == [Verdict.FAILED]
    assert combination_faults(loaded, found)[0].line
    model.write_bytes(good[:40])
    assert types_on_disk([[str(model)], [], [str(tmp_path / "none")]]) == frozenset()


def test_the_toolkit_that_was_found_counts_not_only_the_one_asked_for(tmp_path: Path) -> None:
    """`version: "13"` is met by 13.2.86, which the recipe's own words do not show."""
    build = {**CUDA, "cuda": {"version": "13.0"}}
    loaded = load(
        write_recipe(tmp_path, data(build=build, weights={"model": {"path": "m-IQ3_S.gguf"}}))
    )
    assert known_bad(loaded) == ()
    assert [c.verdict for c in known_bad(loaded, toolkit="13.2.86")] == [Verdict.FAILED]


@pytest.mark.parametrize(
    ("cuda", "key", "words"),
    [
        ('{version: "13"}', "version", "is not a toolkit version"),
        ('{version: "13.0", provide: pypi, path: /opt/cuda}', "path", "leave it out with provide"),
    ],
)
def test_faults_of_cuda_stand_at_their_key(cuda: str, key: str, words: str, tmp_path: Path) -> None:
    path = write_recipe(tmp_path, data())
    text = json.dumps(data(name="test"))
    line = f"build: {{cuda: {cuda}}}"
    over = tmp_path / "over.yaml"
    path.write_text(text)
    over.write_text(f"include: test.yaml\n{line}\n")
    with pytest.raises(RecipeError) as error:
        load(over)
    (fault,) = error.value.faults
    assert words in fault.message
    assert fault.message.startswith(f"build.cuda.{key}: ")
    assert (fault.line, fault.column) == (2, line.index(f"{key}: ") + len(key) + 3)
