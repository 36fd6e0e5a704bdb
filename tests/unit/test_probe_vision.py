"""The suite `vision`: images of a seed, answers held against what is on them, errors named."""

from __future__ import annotations

import base64
import hashlib
import io
from typing import Any

import pytest
from PIL import Image

from bakehouse.errors import NotCorrect, NotHealthy
from bakehouse.probe.client import JsonResponse
from bakehouse.probe.models import Endpoint, SuiteInput, SuiteProof
from bakehouse.probe.runner import conclude, explain
from bakehouse.probe.suites.base import run_suite
from bakehouse.probe.suites.vision import (
    COLOURS,
    SUITE,
    grade_colours,
    grade_reading,
    levenshtein,
    make,
    printed,
)
from bakehouse.recipe.models import Probe
from tests.support.tiny_model import Around, TinyModel

SEED = 11
LINE = "THE SILVER ROBOT READS SEVEN BLUE MAPS."


def judged(model: TinyModel, **vision: Any) -> SuiteProof:
    probe = Probe.model_validate({"vision": {"seed": SEED, **vision}})
    given = SuiteInput(Endpoint("http://127.0.0.1:1", "tiny", engine="llama.cpp"), probe)
    return run_suite(Around(model), SUITE, given)


def looks(messages: list[dict[str, Any]]) -> str:
    """What somebody with eyes says: reads pixels, and knows the line by its hash."""
    if isinstance(messages[-1]["content"], str):
        return "2 + 2 = 4"
    names = {value: name for name, value in COLOURS.items()}
    said = []
    for part in messages[-1]["content"]:
        if part["type"] != "image_url":
            continue
        data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
        image = Image.open(io.BytesIO(data))
        if image.size[0] > 64:
            assert data == make(SEED).printed.png
            return make(SEED).printed.truth
        pixel = image.getpixel((5, 5))
        assert isinstance(pixel, tuple)
        said.append(names[(int(pixel[0]), int(pixel[1]), int(pixel[2]))])
    return ", ".join(said).capitalize()


def sees(**more: Any) -> TinyModel:
    return TinyModel(**{"images": looks, **more})


def test_a_model_that_sees_passes_and_the_hashes_are_kept() -> None:
    proof = judged(sees())
    assert proof.verdict == "true"
    assert {c.verdict.value for c in proof.checks} == {"passed"}
    pictures = make(SEED)
    kept = proof.figures["images"]
    assert proof.figures["seed"] == SEED
    assert [k["sha256"] for k in kept] == [hashlib.sha256(p.png).hexdigest() for p in pictures.all]
    line = pictures.printed.truth.encode()
    assert kept[1]["truth_sha256"] == hashlib.sha256(line).hexdigest()
    assert [k["size"] for k in kept] == [[64, 64], [1200, 400], *[[64, 64]] * 3]


def test_without_a_seed_the_images_are_others_each_time() -> None:
    blind = TinyModel(images=lambda _: "red")
    seeds = {run["seed"] for run in (judged(blind, seed=None).figures for _ in range(3))}
    assert len(seeds) == 3


def test_a_seed_gives_the_same_images_and_another_seed_others() -> None:
    assert make(3) == make(3)
    assert make(3).printed.png != make(4).printed.png
    assert len({p.truth for p in make(3).several}) == 3
    assert make(3).printed.png.startswith(b"\x89PNG")


def test_print_keeps_inside_its_image() -> None:
    longest = "THE GOLDEN PAINTER CARRIES TWELVE PURPLE STONES."
    image = Image.open(io.BytesIO(printed(longest).png)).convert("L")
    ink = image.point(lambda v: 255 - v).getbbox()
    assert ink is not None
    assert ink[0] > 20
    assert ink[1] > 20
    assert ink[2] < 1180
    assert ink[3] < 380


def test_a_blind_model_is_wrong() -> None:
    proof = judged(TinyModel(images=lambda _: "The image is a mix of different colours"))
    assert proof.verdict == "wrong"
    assert isinstance(explain(conclude([proof]), "here"), NotCorrect)


def test_text_that_breaks_behind_an_image_is_wrong() -> None:
    def forgets(messages: list[dict[str, Any]]) -> str:
        return "red" if isinstance(messages[-1]["content"], str) else looks(messages)

    proof = judged(sees(images=forgets))
    failed = [c.id for c in proof.checks if not c.passed]
    assert failed == ["probe.vision.follow-up"]
    assert proof.verdict == "wrong"


def test_text_that_breaks_afterwards_is_wrong() -> None:
    proof = judged(sees(facts=lambda _: "GGGGGGGGGG"))
    assert [c.id for c in proof.checks if not c.passed] == ["probe.vision.text"]


def test_a_server_without_a_projector_is_unable() -> None:
    refuses = (400, {"error": {"message": "image input is not supported"}})
    proof = judged(TinyModel(capabilities=("completion",), images=lambda _: refuses))
    assert proof.verdict == "unable"
    assert "multimodal" in proof.summary
    assert isinstance(explain(conclude([proof]), "here"), NotHealthy)


BROKEN = (500, {"error": {"code": 500, "message": "failed to process speculative batch"}})
SILENT = (500, {"error": {"code": 500, "message": "Invalid input batch."}})


@pytest.mark.parametrize(
    ("answer", "speculates"), [(BROKEN, None), (SILENT, True)], ids=["by message", "by slots"]
)
def test_http_500_with_speculation_names_the_draft_context(
    answer: Any, speculates: bool | None
) -> None:
    proof = judged(TinyModel(images=lambda _: answer, speculates=speculates))
    assert proof.verdict == "unable"
    assert "HTTP 500 with speculation on, text is answered" in proof.summary
    assert "draft context" in proof.summary
    assert "--spec-type" in str(proof.hint)


def test_http_500_without_speculation_does_not_blame_it() -> None:
    proof = judged(TinyModel(images=lambda _: SILENT, speculates=False))
    assert proof.verdict == "unable"
    assert "draft" not in proof.summary
    assert "projector" in str(proof.hint)


def test_a_server_that_is_gone_is_unstable_and_lost() -> None:
    proof = judged(TinyModel(down=True))
    assert proof.verdict == "unstable"
    assert proof.lost


COLOUR_ROWS = [
    ("Red", ["red"], "right"),
    ("The image is **red**.", ["red"], "right"),
    ("<think>maybe blue</think>Red", ["red"], "right"),
    ("It is not blue, it is red", ["red"], "wrong"),
    ("red, green, blue, yellow, black, white", ["red"], "wrong"),
    ("reddish", ["red"], "wrong"),
    ("1. Red\n2. Blue\n3. White", ["red", "blue", "white"], "right"),
    ("Blue, red, white", ["red", "blue", "white"], "wrong"),
    ("Red, blue", ["red", "blue", "white"], "wrong"),
    ("", ["red"], "wrong"),
]


def test_vision_grades_colours_by_name_and_order() -> None:
    got = [
        (
            text,
            wanted,
            grade_colours(JsonResponse(content=text, finish_reason="stop"), wanted).verdict,
        )
        for text, wanted, _ in COLOUR_ROWS
    ]
    assert got == COLOUR_ROWS


READING_ROWS = [
    (LINE, 0, "right"),
    ("The image says:\n\n> THE SILVER ROBOT READS\n> SEVEN BLUE MAPS.", 2, "right"),
    (f'It reads "{LINE}"', 0, "right"),
    (LINE.capitalize(), 0, "right"),
    ("THE SILVER ROBOT READS\nSEVEN BLUE MAPS.", 0, "right"),
    (LINE.replace("SEVEN", "ELEVEN"), 0, "wrong"),
    (LINE.replace("MAPS", "MAP"), 0, "wrong"),
    (LINE.replace("MAPS", "MAP"), 1, "right"),
    (f"{'x ' * 400}{LINE}", 0, "wrong"),
    ("I cannot read it.", 3, "wrong"),
]


def test_vision_grades_a_reading_by_its_distance() -> None:
    got = [
        (
            text,
            most,
            grade_reading(JsonResponse(content=text, finish_reason="stop"), LINE, most).verdict,
        )
        for text, most, _ in READING_ROWS
    ]
    assert got == READING_ROWS


def test_only_thinking_is_no_answer() -> None:
    said = JsonResponse(content="<think>a red thing", finish_reason="length")
    assert grade_colours(said, ["red"]).verdict == "never started"
    assert grade_reading(JsonResponse(problem="HTTP 500"), LINE, 0).verdict == "unanswered"


def test_vision_measures_the_distance_to_the_nearest_piece() -> None:
    rows = [("", "abc", 0), ("abc", "", 3), ("abc", "xxabcxx", 0), ("abc", "xxacxx", 1)]
    rows.append(("ab", "ba", 1))
    assert [(wanted, text, levenshtein(wanted, text)) for wanted, text, _ in rows] == rows
