"""What a real image said (vLLM 0.32, its tables shortened), held against what recipes need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bakehouse.build.able import require_able
from bakehouse.checks import Verdict
from bakehouse.engines.vllm import question
from bakehouse.engines.vllm.able import (
    Able,
    Unreadable,
    draft_names,
    judge,
    names_of,
    nearest,
    parse,
)
from bakehouse.engines.vllm.asks import asks_of
from bakehouse.errors import BuildFailed
from bakehouse.plan.types import Asks
from bakehouse.recipe.model import Recipe
from tests.support.recipes import recipe_data

DATA = Path(__file__).resolve().parents[1] / "data" / "images" / "vllm-0.32-able.json"
ABLE = Able.model_validate_json(DATA.read_bytes())
GLIMMER = "MuseGlimmerForConditionalGeneration"


VLLM = Recipe.model_validate(
    recipe_data(
        engine="vllm", source=None, image={"ref": {"x86_64": "a/b:1"}},
        weights={"model": {"path": "m"}, "drafter": {"path": "d"}},
        host={"compute_capability": "12.1"},
    )
)  # fmt: skip


def verdicts(able: Able, asks: Asks, **architectures: str) -> dict[str, Verdict]:
    checks = judge(able, asks, {role: (name,) for role, name in architectures.items()}, "image")
    return {one.id: one.verdict for one in checks}


def test_what_is_there_passes() -> None:
    asks = Asks(reasoning_parser="muse_glimmer", tool_parser="hermes", speculation="dflash")
    found = verdicts(ABLE, asks, model=GLIMMER, drafter="MuseGlimmerAssistantModel")
    assert set(found) == {
        "image.model", "image.drafter", "image.reasoning-parser", "image.tool-parser",
        "image.speculation",
    }  # fmt: skip
    assert set(found.values()) == {Verdict.PASSED}


def test_an_absent_architecture_names_its_neighbours_and_the_version() -> None:
    gone = {k: v for k, v in (ABLE.architectures or {}).items() if "Glimmer" not in k}
    older = ABLE.model_copy(update={"architectures": {**gone, "MuseGlimmaForCausalLM": "m:x"}})
    (one,) = judge(older, Asks(), {"model": (GLIMMER,)}, "image")
    assert one.verdict is Verdict.FAILED
    assert "MuseGlimmaForCausalLM" in one.observed
    assert "vLLM 0.32.0" in one.observed


def test_the_fallback_is_named_and_is_no_support() -> None:
    for name in ("SmolLM3ForCausalLM", "TransformersForCausalLM"):
        (one,) = judge(ABLE, Asks(), {"model": (name,)}, "image")
        assert one.verdict is Verdict.FAILED
        assert "Transformers fallback" in one.observed
    assert not ABLE.falls_back("LlamaForCausalLM")


def test_code_that_needs_a_package_that_is_not_there_is_no_support() -> None:
    """Registered, and it dies while it is inspected: 'failed to be inspected', says the engine."""
    why = "No module named 'torchvision'"
    lame = ABLE.model_copy(update={"lacking": {GLIMMER: why}})
    (one,) = judge(lame, Asks(), {"model": (GLIMMER,)}, "image")
    assert one.verdict is Verdict.FAILED
    assert why in one.observed
    with pytest.raises(BuildFailed) as caught:
        require_able(lame, Asks(), {"model": (GLIMMER,)}, "image")
    assert "image.mods" in str(caught.value.hint)
    other = judge(lame, Asks(), {"model": ("LlamaForCausalLM",)}, "image")
    assert [c.verdict for c in other] == [Verdict.PASSED]


def test_the_names_that_are_imported() -> None:
    roles = {"model": (GLIMMER,), "drafter": ("MuseGlimmerAssistantModel",)}
    assert names_of(roles, Asks(speculation="dflash")) == (
        GLIMMER, "DFlashMuseGlimmerAssistantModel", "MuseGlimmerAssistantModel",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("word", "found"),
    [('{"architectures": ["A", "B"]}', {"model": ("A", "B")}), ("{}", {}), ("[1]", {}), ("{", {}),
     ('{"architectures": "A"}', {}), ('{"architectures": []}', {})],
)  # fmt: skip
def test_an_architecture_that_the_command_names_is_the_one_that_is_asked_for(
    word: str, found: dict[str, tuple[str, ...]]
) -> None:
    argv = ("vllm", "serve", "/weights/model", "--hf-overrides", word)
    assert asks_of(VLLM, argv).overridden == found


def test_a_higher_version_helps_nothing() -> None:
    higher = ABLE.model_copy(
        update={"architectures": {"LlamaForCausalLM": "m:x"}, "versions": {"vllm": "9.9.9"}}
    )
    assert verdicts(higher, Asks(), model=GLIMMER) == {"image.model": Verdict.FAILED}


@pytest.mark.parametrize(
    ("asks", "id_"),
    [
        (Asks(reasoning_parser="nope"), "image.reasoning-parser"),
        (Asks(tool_parser="nope"), "image.tool-parser"),
        (Asks(speculation="nope"), "image.speculation"),
    ],
)
def test_what_an_image_lacks_and_what_it_does_not_say(asks: Asks, id_: str) -> None:
    assert verdicts(ABLE, asks) == {id_: Verdict.FAILED}
    silent = Able(errors={"architectures": "ImportError: x"})
    assert verdicts(silent, asks, model=GLIMMER) == {
        "image.model": Verdict.UNKNOWN, id_: Verdict.UNKNOWN,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "wanted", "verdict"),
    [
        ("sm_80 sm_90 sm_120", "12.1", Verdict.PASSED),  # the same major number
        ("sm_80 sm_121a", "12.1", Verdict.PASSED),
        ("sm_80 sm_120a", "12.1", Verdict.FAILED),  # only for that very architecture
        ("sm_80 sm_90", "12.1", Verdict.FAILED),
        ("sm_80 compute_90", "12.1", Verdict.PASSED),  # PTX
        ("sm_100 compute_120", "9.0", Verdict.FAILED),
        ("sm_80", "8.9", Verdict.PASSED),
    ],
)
def test_compute_capability(flags: str, wanted: str, verdict: Verdict) -> None:
    cuda = {"version": "13.0", "architectures": flags.split()}
    able = Able.model_validate({"cuda": cuda})
    assert verdicts(able, Asks(compute_capability=wanted)) == {"image.cuda": verdict}


def test_torch_without_cuda() -> None:
    assert verdicts(Able(), Asks(compute_capability="9.0")) == {"image.cuda": Verdict.FAILED}
    unsaid = Able.model_validate({"cuda": {"version": "13.0"}})
    assert verdicts(unsaid, Asks(compute_capability="9.0")) == {"image.cuda": Verdict.UNKNOWN}


def test_drafters_are_known_by_another_name() -> None:
    assert draft_names("LlamaForCausalLM", "eagle3") == (
        "Eagle3LlamaForCausalLM",
        "LlamaForCausalLM",
    )
    assert draft_names("LlamaForCausalLMEagle3", "eagle3") == ("LlamaForCausalLMEagle3",)
    assert draft_names("Qwen3ForCausalLM", "draft_model") == ("Qwen3ForCausalLM",)
    assert draft_names("MuseGlimmerAssistantModel", "dflash")[0].startswith("DFlashMuse")


def test_the_nearest_names_begin_alike() -> None:
    known = ["MuseGlimmerForCausalLM", "MuseGlintForCausalLM", "LlamaForCausalLM"]
    assert nearest(GLIMMER, known)[0] == "MuseGlimmerForCausalLM"
    assert nearest("zzz", known) == []


def test_an_answer_is_found_between_noise() -> None:
    mark = "BAKEHOUSE-1"
    assert parse(f"noise {{}} \n{mark}{DATA.read_text()}{mark}\nmore", mark) == ABLE
    for bad in ("", "noise", f"{mark}", f"{mark}{{{mark}", f"{mark}[]{mark}", f"{mark}{{}}"):
        with pytest.raises(Unreadable):
            parse(bad, mark)


def test_what_a_command_asks_for() -> None:
    recipe = VLLM
    argv = ("vllm", "serve", "/m", "--reasoning-parser=a", "--tool-call-parser", "b",
            "--speculative-config", '{"method": "dflash", "model": "/d"}')  # fmt: skip
    assert asks_of(recipe, argv) == Asks(
        roles=("model", "drafter"), reasoning_parser="a", tool_parser="b", speculation="dflash",
        compute_capability="12.1",
    )  # fmt: skip
    plain = asks_of(recipe, ("vllm", "serve", "/m", "--speculative-config", '{"model": "/d"}'))
    assert plain.speculation == "draft_model"


def test_the_question_answers_even_where_there_is_no_vllm() -> None:
    argv = [sys.executable, "-I", "-c", Path(question.__file__).read_text(), "MARK"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    able = parse(done.stdout, "MARK")
    assert able.architectures is None
    assert "vllm" in able.errors["architectures"]


def test_the_question_reads_what_vllm_has(tmp_path: Path) -> None:
    """Stand-ins of the modules that are asked, in both shapes that vLLM has had."""
    files = {
        "vllm/__init__.py": "__version__ = '0.0.1'\nprint('noise')\n",
        "vllm/model_executor/__init__.py": "",
        "vllm/model_executor/models/__init__.py": "",
        "vllm/model_executor/models/registry.py": (
            "class R:\n def __init__(s, m, c): s.module_name, s.class_name = m, c\n"
            "class ModelRegistry:\n"
            " models = {'A': R('m', 'C'), 'B': object(), 'I': R('vllm.gone', 'I')}\n"
            " get_supported_archs = classmethod(lambda c: c.models.keys())\n"
            "_TRANSFORMERS_BACKEND_MODELS = {'T': ('transformers', 'T')}\n"
        ),
        "vllm/reasoning/__init__.py": (
            "class ReasoningParserManager:\n reasoning_parsers = {'r1': 1}\n"
        ),
        "vllm/tool_parsers/__init__.py": (
            "class ToolParserManager:\n tool_parsers = {}\n lazy_parsers = {'t1': 1}\n"
        ),
        "vllm/config/__init__.py": "",
        "vllm/config/speculative.py": (
            "from typing import Literal\nE = Literal['eagle']\n"
            "SpeculativeMethod = Literal['ngram', E]\n"
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    text = Path(question.__file__).read_text()
    argv = [sys.executable, "-c", text, "MARK", "A", "B", "I", "Z"]
    env = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60, env=env)
    able = parse(done.stdout, "MARK")
    assert able.claimed == "0.0.1"
    assert able.architectures == {"A": "m:C", "B": "?:?", "I": "vllm.gone:I"}
    assert able.lacking == {"A": "No module named 'm'"}
    assert (able.fallbacks, able.reasoning_parsers) == (("T",), ("r1",))
    assert (able.tool_parsers, able.speculation) == (("t1",), ("eagle", "ngram"))
    assert json.loads(done.stdout.split("MARK")[1])["versions"]["python"]
