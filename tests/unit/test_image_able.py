"""A real image's answer (vLLM 0.32, its tables shortened), compared with what recipes need."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bakehouse.engines.base import RequiredCapabilities
from bakehouse.engines.vllm.image_probe import (
    ImageCapabilities,
    Unreadable,
    check_image,
    draft_names,
    names_of,
    nearest,
    parse_answer,
    require_capabilities,
    required_capabilities,
)
from bakehouse.engines.vllm.scripts import query_capabilities
from bakehouse.errors import BuildFailed
from bakehouse.models import Verdict
from bakehouse.recipe.models import Recipe
from tests.support.recipes import recipe_data

DATA = Path(__file__).resolve().parents[1] / "data" / "images" / "vllm-0.32-able.json"
FOUND = ImageCapabilities.model_validate_json(DATA.read_bytes())
GLIMMER = "MuseGlimmerForConditionalGeneration"


VLLM = Recipe.model_validate(
    recipe_data(
        engine="vllm", source=None, image={"ref": {"x86_64": "a/b:1"}},
        weights={"model": {"path": "m"}, "drafter": {"path": "d"}},
        host={"compute_capability": "12.1"},
    )
)  # fmt: skip


def verdicts(
    found: ImageCapabilities, needs: RequiredCapabilities, **architectures: str
) -> dict[str, Verdict]:
    checks = check_image(
        found, needs, {role: (name,) for role, name in architectures.items()}, "image"
    )
    return {one.id: one.verdict for one in checks}


def test_image_with_everything_passes() -> None:
    needs = RequiredCapabilities(
        reasoning_parser="muse_glimmer", tool_parser="hermes", speculation="dflash"
    )
    found = verdicts(FOUND, needs, model=GLIMMER, drafter="MuseGlimmerAssistantModel")
    assert set(found) == {
        "image.model", "image.drafter", "image.reasoning-parser", "image.tool-parser",
        "image.speculation",
    }  # fmt: skip
    assert set(found.values()) == {Verdict.PASSED}


def test_image_without_an_architecture_names_similar_ones() -> None:
    gone = {k: v for k, v in (FOUND.architectures or {}).items() if "Glimmer" not in k}
    older = FOUND.model_copy(update={"architectures": {**gone, "MuseGlimmaForCausalLM": "m:x"}})
    (one,) = check_image(older, RequiredCapabilities(), {"model": (GLIMMER,)}, "image")
    assert one.verdict is Verdict.FAILED
    assert "MuseGlimmaForCausalLM" in one.observed
    assert "vLLM 0.32.0" in one.observed


def test_image_with_only_the_fallback_fails() -> None:
    for name in ("SmolLM3ForCausalLM", "TransformersForCausalLM"):
        (one,) = check_image(FOUND, RequiredCapabilities(), {"model": (name,)}, "image")
        assert one.verdict is Verdict.FAILED
        assert "Transformers fallback" in one.observed
    assert not FOUND.falls_back("LlamaForCausalLM")


def test_image_without_a_needed_package_fails() -> None:
    """Registered, and it dies while it is inspected: 'failed to be inspected', says the engine."""
    why = "No module named 'torchvision'"
    lame = FOUND.model_copy(update={"lacking": {GLIMMER: why}})
    (one,) = check_image(lame, RequiredCapabilities(), {"model": (GLIMMER,)}, "image")
    assert one.verdict is Verdict.FAILED
    assert why in one.observed
    with pytest.raises(BuildFailed) as caught:
        require_capabilities(lame, RequiredCapabilities(), {"model": (GLIMMER,)}, "image")
    assert "image.mods" in str(caught.value.hint)
    other = check_image(lame, RequiredCapabilities(), {"model": ("LlamaForCausalLM",)}, "image")
    assert [c.verdict for c in other] == [Verdict.PASSED]


def test_image_query_imports_every_possible_name() -> None:
    roles = {"model": (GLIMMER,), "drafter": ("MuseGlimmerAssistantModel",)}
    assert names_of(roles, RequiredCapabilities(speculation="dflash")) == (
        GLIMMER, "DFlashMuseGlimmerAssistantModel", "MuseGlimmerAssistantModel",
    )  # fmt: skip


def test_required_architectures_come_from_hf_overrides() -> None:
    rows: dict[str, dict[str, tuple[str, ...]]] = {
        '{"architectures": ["A", "B"]}': {"model": ("A", "B")},
        "{}": {}, "[1]": {}, "{": {}, '{"architectures": "A"}': {}, '{"architectures": []}': {},
    }  # fmt: skip
    command = ("vllm", "serve", "/weights/model", "--hf-overrides")
    found = {word: required_capabilities(VLLM, (*command, word)).overridden for word in rows}
    assert found == rows


def test_image_version_does_not_matter() -> None:
    higher = FOUND.model_copy(
        update={"architectures": {"LlamaForCausalLM": "m:x"}, "versions": {"vllm": "9.9.9"}}
    )
    assert verdicts(higher, RequiredCapabilities(), model=GLIMMER) == {
        "image.model": Verdict.FAILED
    }


def test_image_that_lacks_or_does_not_report_a_feature() -> None:
    for name in ("reasoning_parser", "tool_parser", "speculation"):
        needs = RequiredCapabilities.model_validate({name: "nope"})
        id_ = f"image.{name.replace('_', '-')}"
        assert verdicts(FOUND, needs) == {id_: Verdict.FAILED}
        silent = ImageCapabilities(errors={"architectures": "ImportError: x"})
        unknown = {"image.model": Verdict.UNKNOWN, id_: Verdict.UNKNOWN}
        assert verdicts(silent, needs, model=GLIMMER) == unknown


def test_image_for_a_compute_capability() -> None:
    rows = [
        ("sm_80 sm_90 sm_120", "12.1", "passed"),  # the same major number
        ("sm_80 sm_121a", "12.1", "passed"),
        ("sm_80 sm_120a", "12.1", "failed"),  # only for that very architecture
        ("sm_80 sm_90", "12.1", "failed"),
        ("sm_80 compute_90", "12.1", "passed"),  # PTX
        ("sm_100 compute_120", "9.0", "failed"),
        ("sm_80", "8.9", "passed"),
    ]
    for flags, wanted, verdict in rows:
        cuda = {"version": "13.0", "architectures": flags.split()}
        found = ImageCapabilities.model_validate({"cuda": cuda})
        needs = RequiredCapabilities(compute_capability=wanted)
        assert verdicts(found, needs) == {"image.cuda": verdict}, flags


def test_image_with_torch_without_cuda() -> None:
    assert verdicts(ImageCapabilities(), RequiredCapabilities(compute_capability="9.0")) == {
        "image.cuda": Verdict.FAILED
    }
    unsaid = ImageCapabilities.model_validate({"cuda": {"version": "13.0"}})
    assert verdicts(unsaid, RequiredCapabilities(compute_capability="9.0")) == {
        "image.cuda": Verdict.UNKNOWN
    }


def test_drafter_names_as_vllm_rewrites_them() -> None:
    assert draft_names("LlamaForCausalLM", "eagle3") == (
        "Eagle3LlamaForCausalLM",
        "LlamaForCausalLM",
    )
    assert draft_names("LlamaForCausalLMEagle3", "eagle3") == ("LlamaForCausalLMEagle3",)
    assert draft_names("Qwen3ForCausalLM", "draft_model") == ("Qwen3ForCausalLM",)
    assert draft_names("MuseGlimmerAssistantModel", "dflash")[0].startswith("DFlashMuse")


def test_nearest_names_begin_alike() -> None:
    known = ["MuseGlimmerForCausalLM", "MuseGlintForCausalLM", "LlamaForCausalLM"]
    assert nearest(GLIMMER, known)[0] == "MuseGlimmerForCausalLM"
    assert nearest("zzz", known) == []


def test_image_answer_is_found_between_noise() -> None:
    mark = "BAKEHOUSE-1"
    assert parse_answer(f"noise {{}} \n{mark}{DATA.read_text()}{mark}\nmore", mark) == FOUND
    for bad in ("", "noise", f"{mark}", f"{mark}{{{mark}", f"{mark}[]{mark}", f"{mark}{{}}"):
        with pytest.raises(Unreadable):
            parse_answer(bad, mark)


def test_required_capabilities_of_a_command() -> None:
    recipe = VLLM
    argv = ("vllm", "serve", "/m", "--reasoning-parser=a", "--tool-call-parser", "b",
            "--speculative-config", '{"method": "dflash", "model": "/d"}')  # fmt: skip
    assert required_capabilities(recipe, argv) == RequiredCapabilities(
        roles=("model", "drafter"), reasoning_parser="a", tool_parser="b", speculation="dflash",
        compute_capability="12.1",
    )  # fmt: skip
    plain = required_capabilities(
        recipe, ("vllm", "serve", "/m", "--speculative-config", '{"model": "/d"}')
    )
    assert plain.speculation == "draft_model"


def test_query_script_answers_without_vllm() -> None:
    argv = [sys.executable, "-I", "-c", Path(query_capabilities.__file__).read_text(), "MARK"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    able = parse_answer(done.stdout, "MARK")
    assert able.architectures is None
    assert "vllm" in able.errors["architectures"]


def test_query_script_reads_vllms_registries(tmp_path: Path) -> None:
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
    text = Path(query_capabilities.__file__).read_text()
    argv = [sys.executable, "-c", text, "MARK", "A", "B", "I", "Z"]
    env = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60, env=env)
    able = parse_answer(done.stdout, "MARK")
    assert able.version == "0.0.1"
    assert able.architectures == {"A": "m:C", "B": "?:?", "I": "vllm.gone:I"}
    assert able.lacking == {"A": "No module named 'm'"}
    assert (able.fallbacks, able.reasoning_parsers) == (("T",), ("r1",))
    assert (able.tool_parsers, able.speculation) == (("t1",), ("eagle", "ngram"))
    assert json.loads(done.stdout.split("MARK")[1])["versions"]["python"]
