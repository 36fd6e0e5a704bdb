"""What the suite `fluency` makes of several texts, each as a server might have written it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from bakehouse.probe.client import JsonResponse
from bakehouse.probe.models import Endpoint, SuiteInput, SuiteProof
from bakehouse.probe.suites.fluency import BEGUN, SPARE, TASKS, Wrote, judge
from bakehouse.recipe.models import Fluency, Probe

GOOD = (
    "Bread is made from flour, water, salt and yeast. The dough rests until it has risen, is "
    "shaped by hand, and then baked in a hot oven until its crust is brown."
)
LOOP = "The sea is a vast and mysterious realm that exists on the surface of the planet. " * 4
BROKEN = ("GGGGGGGGGGGGGGGGGGGGGGGGGGGG", "<|im_start|>assistant The bread is good, my friend.", "")


def judged(*texts: str, wanted: int = 1) -> SuiteProof:
    said = [
        JsonResponse(content=text, finish_reason="stop", tokens=64, http_status=200)
        for text in texts
    ]
    given = SuiteInput(Endpoint("http://x"), Probe(fluency=Fluency(texts=wanted)))
    wrote = (Wrote(task, one, 64) for task, one in zip(TASKS, said, strict=False))
    return judge(tuple(wrote), given)


def test_a_good_text_is_fluent() -> None:
    assert judged(GOOD).verdict == "true"


def test_one_loop_beside_a_good_text_is_what_a_small_model_does() -> None:
    proof = judged(LOOP, GOOD)
    assert proof.verdict == "true"
    assert "1 repeated itself" in proof.summary
    assert [a.verdict for a in proof.answers] == ["wrong", "right"]


@pytest.mark.parametrize("texts", [(LOOP,), (LOOP, LOOP), (GOOD, LOOP)])
def test_fewer_good_texts_than_wanted_are_not_enough(texts: tuple[str, ...]) -> None:
    wanted = 2 if GOOD in texts else 1
    assert judged(*texts, wanted=wanted).verdict == "wrong"


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_worse_than_a_loop_is_never_forgiven(text: str) -> None:
    assert judged(text, GOOD).verdict == "wrong"


def test_there_is_always_a_task_to_spare() -> None:
    assert len(TASKS) == len(BEGUN)
    assert Fluency(texts=len(TASKS) - SPARE).texts
    with pytest.raises(ValidationError):
        Fluency(texts=len(TASKS) - SPARE + 1)
