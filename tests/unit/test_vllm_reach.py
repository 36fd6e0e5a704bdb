"""What flags and variables reach for: nothing that no lock pins, whichever flag names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bakehouse.engines.vllm import environment, flags, reach, server
from bakehouse.engines.vllm.reached import Pinned
from bakehouse.preflight import vllm
from bakehouse.preflight.rules import faults as recipe_faults
from tests.support.recipes import make_loaded
from tests.unit.test_vllm_server import GOOD, faults, lock, recipe

DATA = Path(__file__).resolve().parents[1] / "data" / "vllm" / "flags-0.32.txt"
ROWS = [line.split() for line in DATA.read_text().splitlines() if not line.startswith("#")]
KINDS = {name: kind for name, kind, *_ in ROWS}
BOX = {"volumes": ["extras:/extras", "../own:/own:ro"]}
HOSTILE = (
    "org/name", "https://example.org/x", "s3://bucket/x", "/etc/passwd", "~/x", "./x",
    "/weights/../etc/x", "/weights/model/../../x", "/weights/other/x", "//weights/model",
    "/weights", "/extras/../etc", "/extras2/x",
)  # fmt: skip
FREE = {name for name, rule in reach.FLAGS.items() if rule.kind == "free"}
"""Flags whose text names nothing that is opened: each is in the table for that."""


def test_the_reader_knows_the_engines_own_spellings() -> None:
    for name, _, several, *others in ROWS:
        for other in others:
            if other.startswith("-") and not other.startswith("--no-"):
                assert flags.spelling(other) == name, other
        assert (name in flags.SEVERAL) == (several == "several" or name == "--middleware"), name


def test_every_whole_flag_of_the_engine_is_taken_for_whole() -> None:
    judged = (*reach.FLAGS, *server.JUDGED)
    for name, _, _, *others in ROWS:
        for one in (name, *(o for o in others if o.startswith("--"))):
            assert flags.shortened(flags.spelling(one), judged) is None, one


def test_the_table_names_flags_of_the_engine() -> None:
    of_older = {
        "--quantization-param-path", "--qlora-adapter-name-or-path", "--speculative-model",
        "--prompt-adapters",
    }  # fmt: skip
    assert set(reach.FLAGS) - of_older <= set(KINDS)


@pytest.mark.parametrize("flag", sorted(n for n, k in KINDS.items() if k in ("text", "json")))
def test_no_flag_names_what_nothing_pins(flag: str) -> None:
    """As text, as JSON, deep in it, key by key; every flag that takes text or JSON."""
    if flag in FREE:
        return
    of_image = reach.FLAGS.get(flag, reach.ELSEWHERE).kind == "image"
    shown = flags.spelling(flag).partition(".")[0]
    for text in HOSTILE:
        if of_image and text in ("/etc/passwd", "/extras2/x"):
            continue
        deep = json.dumps({"a": [{"b": text}]})
        ways: tuple[tuple[str, ...], ...] = (
            (flag, text), (flag, deep), (f"{flag}={text}",), (f"{flag}.a", text),
        )  # fmt: skip
        if flag in ("--lora-modules", "--prompt-adapters"):
            named = json.dumps({"name": "a", "path": text})
            ways = ((flag, f"a={text}"), (flag, named), (flag, "a=/extras/x", f"b={text}"))
        for words in ways:
            said = faults(*GOOD, *words, made=recipe(container=BOX))
            assert shown in said, words


@pytest.mark.parametrize(
    "flag", sorted(name for name, rule in reach.FLAGS.items() if rule.kind in ("pinned", "image"))
)
def test_what_is_pinned_or_mounted_may_be_named(flag: str) -> None:
    made, pins = recipe(container=BOX), lock("a/b.json", "model.safetensors")
    for text in ("/weights/model", "/weights/model/a", "/weights/model/a/b.json", "/own/x.jinja",
                 "/extras"):  # fmt: skip
        assert faults(*GOOD, flag, text, made=made, pins=pins) == "", text
    for text in ("/weights/model/c", "/weights/model/a/b", "/weights/drafter"):
        assert "which nothing pins" in faults(*GOOD, flag, text, made=made, pins=pins), text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--chat-template", "/vllm-workspace/examples/x.jinja"), ""),
        (("--chat-template", "{{ messages }}"), ""),
        (("--chat-template", "x.jinja"), "nothing pins"),
        (("--generation-config", "vllm"), ""),
        (("--generation-config", "/weights/model"), ""),
        (("--generation-config", "gpt2"), "nothing pins|it takes auto, vllm"),
        (("--tokenizer", "gpt2"), "names 'gpt2', which nothing pins"),
        (("--load-format", "fastsafetensors"), ""),
        (("--load-format", "pt"), "unpickles"),
        (("--load-format", "dummy"), "random numbers"),
        (("--load-format", "tensorizer"), "takes the model from a place"),
        (("--load-format", "my-plugin"), "it takes auto"),
        (("--distributed-executor-backend", "a.b.Executor"), "it takes mp"),
        (("--compilation-config", '{"backend": "my.module.compile"}'), "it takes inductor"),
        (("-cc.backend", "my.module.compile"), "it takes inductor"),
        (("--compilation-config", '{"backend": "inductor", "level": 3}'), ""),
        (("--compilation-config", '{"inductor_passes": {"a": "m.f"}}'), "must not set"),
        (("--hf-overrides", '{"auto_map": {"AutoConfig": "c.C"}}'), "must not set"),
        (("--hf-overrides", '{"rope_parameters": {"rope_type": "default"}}'), ""),
        (("--kv-transfer-config", '{"kv_connector_module_path": "m"}'), "must not set"),
        (("--kv-transfer-config", '{"kv_connector": "OffloadingConnector"}'), ""),
        (("--model-class-overrides", '{"A": "m:C"}'), "must not hold"),
        (("--logits-processors", "m:C"), "must not hold"),
        (("-dpa", "10.0.0.1"), "must not hold --data-parallel-address"),
        (("--reasoning-config", '{"reasoning_end_str": "</think>"}'), ""),
        (("--ignore-patterns", "original/**/*", "x/*"), ""),
        (("--lora-target-modules", "o_proj", "qkv_proj"), ""),
        (("--lora-modules", "a=/weights/model/lora", "b=/own/b"), ""),
        (("--default-chat-template-kwargs", '{"revision": "a/b"}'), ""),
        (("--tool-server", "demo"), "must not hold"),
        (("--otlp-traces-endpoint", "http://127.0.0.1:4317"), ""),
        (("--additional-config", "{not json/x"), "nothing pins"),
    ],
)  # fmt: skip
def test_words_keys_and_classes(words: tuple[str, ...], said: str) -> None:
    found = faults(*GOOD, *words, made=recipe(container=BOX))
    assert found == "" if not said else any(one in found for one in said.split("|")), found


@pytest.mark.parametrize(
    ("key", "value"),
    [("rejection_sample_method", "synthetic"), ("synthetic_acceptance_length", 3.0),
     ("draft_load_config", {"load_format": "pt"}), ("revision", "abc"), ("method", "custom_class")],
)  # fmt: skip
def test_speculation_that_is_made_up_or_unpinned(key: str, value: Any) -> None:
    wanted = recipe(
        weights={"model": {"path": "m"}, "drafter": {"path": "d"}},
        serve={"command": "vllm serve", "speculation": "dflash"},
    )
    good = {"method": "dflash", "model": "/weights/drafter", "num_speculative_tokens": 4}
    assert faults(*GOOD, "--speculative-config", json.dumps(good), made=wanted) == ""
    bad = json.dumps({**good, key: value})
    said = faults(*GOOD, "--speculative-config", bad, made=wanted)
    assert "--speculative-config" in said
    assert key in said or str(value) in said


# The environment


def unset(env: dict[str, str]) -> list[str]:
    there = Pinned(recipe(container=BOX))
    return [name for name, _ in environment.judge(env, there)]


@pytest.mark.parametrize("name", sorted(environment.REFUSED))
def test_variables_that_are_refused_and_why(name: str) -> None:
    (found,) = environment.judge({name: "1"}, Pinned(recipe()))
    assert found[0] == name
    assert found[1][1]
    assert unset({name: ""}) == []


@pytest.mark.parametrize("name", sorted(environment.OF_THE_IMAGE))
def test_code_of_the_image_alone(name: str) -> None:
    assert unset({name: "/usr/lib/x.so"}) == []
    for value in ("x.so", "/extras/x.so", "/weights/model/x.so", "/usr/../own/x.so", "./x"):
        assert unset({name: value}) == [name], value
        assert unset({name: f"/usr/lib/a.so:{value}"}) == [name], value


@pytest.mark.parametrize(
    ("name", "value"),
    [("HF_HUB_OFFLINE", "0"), ("HF_HUB_OFFLINE", ""), ("TRANSFORMERS_OFFLINE", "no"),
     ("MODELSCOPE_API_TOKEN", "x"), ("WANDB_API_KEY", "x"), ("AWS_SECRET_ACCESS_KEY", "x"),
     ("AWS_ACCESS_KEY_ID", "x"), ("PYTHONPATH", ":/usr/lib"), ("LD_PRELOAD", "/usr/a.so x.so")],
)  # fmt: skip
def test_more_that_must_not_be(name: str, value: str) -> None:
    assert unset({name: value}) == [name]


@pytest.mark.parametrize(
    "name", ["VLLM_CPU_KVCACHE_SPACE", "VLLM_MAX_STOP_STRINGS", "NCCL_DEBUG", "HF_HOME",
             "VLLM_MXFP4_BACKEND", "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD", "TORCHDYNAMO_DISABLE"]
)  # fmt: skip
def test_the_rest_may_be_set(name: str) -> None:
    assert unset({name: "/some/where"}) == []


@pytest.mark.parametrize("room", ["container", "serve"])
def test_check_names_the_variable_at_its_own_place(room: str, tmp_path: Path) -> None:
    bad = {"env": {"NCCL_DEBUG": "INFO", "HF_ENDPOINT": "http://127.0.0.1:1"}}
    serve = {"command": " ".join(GOOD), **(bad if room == "serve" else {})}
    loaded = make_loaded(
        tmp_path, engine="vllm", source=None, image={"ref": {"x86_64": "a/b:1"}},
        container=bad if room == "container" else {}, serve=serve,
    )  # fmt: skip
    (fault,) = recipe_faults(loaded)
    assert f"{room}.env must not hold HF_ENDPOINT" in fault.message
    text = Path(loaded.path).read_text().splitlines()
    assert "HF_ENDPOINT" in text[fault.line - 1]


def test_conflicts_are_those_of_both_rooms() -> None:
    made = recipe(container={"env": {"VLLM_USE_MODELSCOPE": "1"}},
                  serve={"command": "x", "env": {"LD_PRELOAD": "x.so"}})  # fmt: skip
    keys = [c.keys for c in vllm.conflicts(made, flags.read(GOOD))]
    assert keys == [("container", "env", "VLLM_USE_MODELSCOPE"), ("serve", "env", "LD_PRELOAD")]
