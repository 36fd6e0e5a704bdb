"""vLLM's allowlist: no flag and no variable may name anything that is not pinned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bakehouse.engines.vllm import command, engine
from bakehouse.engines.vllm import engine as vllm
from bakehouse.preflight.rules import faults as recipe_faults
from tests.support.recipes import make_loaded
from tests.support.vllm_commands import GOOD, command_faults, vllm_lock, vllm_recipe

DATA = Path(__file__).resolve().parents[1] / "data" / "vllm" / "flags-0.32.txt"
ROWS = [line.split() for line in DATA.read_text().splitlines() if not line.startswith("#")]
KINDS = {name: kind for name, kind, *_ in ROWS}
BOX = {"volumes": ["extras:/extras", "../own:/own:ro"]}
HOSTILE = (
    "org/name", "https://example.org/x", "s3://bucket/x", "/etc/passwd", "~/x", "./x",
    "/weights/../etc/x", "/weights/model/../../x", "/weights/other/x", "//weights/model",
    "/weights", "/extras/../etc", "/extras2/x",
)  # fmt: skip


def test_flags_table_matches_the_engines_help() -> None:
    of_older = {
        "--quantization-param-path", "--qlora-adapter-name-or-path", "--speculative-model",
        "--prompt-adapters",
    }  # fmt: skip
    assert set(command.FLAGS) - of_older <= set(KINDS)
    judged = (*command.FLAGS, *engine.JUDGED)
    for name, _, several, *others in ROWS:
        assert (name in command.SEVERAL) == (several == "several" or name == "--middleware"), name
        for other in others:
            if other.startswith("-") and not other.startswith("--no-"):
                assert command.spelling(other) == name, other
        for one in (name, *(o for o in others if o.startswith("--"))):
            assert command.shortened(command.spelling(one), judged) is None, one


def spellings(flag: str, text: str) -> Iterator[tuple[str, ...]]:
    """A value as text, as JSON, deep in it, key by key."""
    if flag in ("--lora-modules", "--prompt-adapters"):
        yield flag, f"a={text}"
        yield flag, json.dumps({"name": "a", "path": text})
        yield flag, "a=/extras/x", f"b={text}"
    else:
        yield flag, text
        yield flag, json.dumps({"a": [{"b": text}]})
        yield (f"{flag}={text}",)
        yield f"{flag}.a", text


def test_flags_cannot_name_what_is_not_pinned() -> None:
    """Every flag of the engine that takes text or JSON, except those that open nothing."""
    taken, recipe = [], vllm_recipe(container=BOX)
    for flag in (name for name, kind in KINDS.items() if kind in ("text", "json")):
        kind = command.FLAGS.get(flag, command.ELSEWHERE).kind
        shown = command.spelling(flag).partition(".")[0]
        for text in () if kind == "free" else HOSTILE:
            if kind == "image" and text in ("/etc/passwd", "/extras2/x"):
                continue
            taken += [w for w in spellings(flag, text)
                      if shown not in command_faults(*GOOD, *w, recipe=recipe)]  # fmt: skip
    assert taken == []


def test_flags_may_name_pinned_and_mounted_paths() -> None:
    recipe, lock = vllm_recipe(container=BOX), vllm_lock("a/b.json", "model.safetensors")
    good = ("/weights/model", "/weights/model/a", "/weights/model/a/b.json", "/own/x.jinja",
            "/extras")  # fmt: skip
    bad = ("/weights/model/c", "/weights/model/a/b", "/weights/drafter")
    wrong = []
    for flag in (name for name, rule in command.FLAGS.items() if rule.kind in ("pinned", "image")):
        for text in (*good, *bad):
            said = command_faults(*GOOD, flag, text, recipe=recipe, lock=lock)
            if said != "" if text in good else "which is not pinned" not in said:
                wrong.append((flag, text, said))
    assert wrong == []


def test_flags_with_words_keys_and_classes() -> None:
    rows: list[tuple[tuple[str, ...], str]] = [
        (("--chat-template", "/vllm-workspace/examples/x.jinja"), ""),
        (("--chat-template", "{{ messages }}"), ""),
        (("--chat-template", "x.jinja"), "not pinned"),
        (("--generation-config", "vllm"), ""),
        (("--generation-config", "gpt2"), "use auto, vllm"),
        (("--load-format", "fastsafetensors"), ""),
        (("--load-format", "tensorizer"), "takes the model from a place"),
        (("--load-format", "my-plugin"), "use auto"),
        (("--distributed-executor-backend", "a.b.Executor"), "use mp"),
        (("--compilation-config", '{"backend": "my.module.compile"}'), "use inductor"),
        (("-cc.backend", "my.module.compile"), "use inductor"),
        (("--compilation-config", '{"backend": "inductor", "level": 3}'), ""),
        (("--compilation-config", '{"inductor_passes": {"a": "m.f"}}'), "must not set"),
        (("--hf-overrides", '{"auto_map": {"AutoConfig": "c.C"}}'), "must not set"),
        (("--hf-overrides", '{"rope_parameters": {"rope_type": "default"}}'), ""),
        (("--kv-transfer-config", '{"kv_connector": "OffloadingConnector"}'), ""),
        (("-dpa", "10.0.0.1"), "must not set --data-parallel-address"),
        (("--ignore-patterns", "original/**/*", "x/*"), ""),
        (("--lora-modules", "a=/weights/model/lora", "b=/own/b"), ""),
        (("--default-chat-template-kwargs", '{"revision": "a/b"}'), ""),
        (("--otlp-traces-endpoint", "http://127.0.0.1:4317"), ""),
        (("--additional-config", "{not json/x"), "not pinned"),
    ]  # fmt: skip
    recipe = vllm_recipe(container=BOX)
    got = [(command_faults(*GOOD, *words, recipe=recipe), text) for words, text in rows]
    assert [(f, text) for f, text in got if (text not in f if text else f)] == []


def test_flags_cannot_fake_or_unpin_speculation() -> None:
    recipe = vllm_recipe(
        weights={"model": {"path": "m"}, "drafter": {"path": "d"}},
        serve={"command": "vllm serve", "speculation": "dflash"},
    )
    good = {"method": "dflash", "model": "/weights/drafter", "num_speculative_tokens": 4}
    assert command_faults(*GOOD, "--speculative-config", json.dumps(good), recipe=recipe) == ""
    for key, value in {
        "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.0,
        "draft_load_config": {"load_format": "pt"}, "revision": "abc", "method": "custom_class",
    }.items():  # fmt: skip
        bad = json.dumps({**good, key: value})
        said = command_faults(*GOOD, "--speculative-config", bad, recipe=recipe)
        assert "--speculative-config" in said
        assert key in said or str(value) in said


# The environment


def refused(env: dict[str, str]) -> list[str]:
    pinned = command.Pinned(vllm_recipe(container=BOX))
    return [name for name, (message, hint) in command.check_variables(env, pinned)
            if name in message and hint]  # fmt: skip


def test_variables_that_are_refused() -> None:
    names = list(command.REFUSED_VARIABLES)
    assert refused(dict.fromkeys(names, "1")) == names
    assert refused(dict.fromkeys(names, "")) == []
    bad = (
        ("HF_HUB_OFFLINE", "0"), ("HF_HUB_OFFLINE", ""), ("TRANSFORMERS_OFFLINE", "no"),
        ("MODELSCOPE_API_TOKEN", "x"), ("WANDB_API_KEY", "x"), ("AWS_SECRET_ACCESS_KEY", "x"),
        ("AWS_ACCESS_KEY_ID", "x"), ("PYTHONPATH", ":/usr/lib"), ("LD_PRELOAD", "/usr/a.so x.so"),
    )  # fmt: skip
    assert [(name, value) for name, value in bad if refused({name: value}) != [name]] == []


def test_variables_that_name_code_must_name_the_images_own() -> None:
    names = list(command.IMAGE_VARIABLES)
    assert refused(dict.fromkeys(names, "/usr/lib/x.so")) == []
    for value in ("x.so", "/extras/x.so", "/weights/model/x.so", "/usr/../own/x.so", "./x"):
        assert refused(dict.fromkeys(names, value)) == names, value
        assert refused(dict.fromkeys(names, f"/usr/lib/a.so:{value}")) == names, value


def test_variables_that_are_not_listed_may_be_set() -> None:
    names = (
        "VLLM_CPU_KVCACHE_SPACE", "VLLM_MAX_STOP_STRINGS", "NCCL_DEBUG", "HF_HOME",
        "VLLM_MXFP4_BACKEND", "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD", "TORCHDYNAMO_DISABLE",
    )  # fmt: skip
    assert refused(dict.fromkeys(names, "/some/where")) == []


@pytest.mark.parametrize("section", ["container", "serve"])
def test_variables_are_reported_at_their_own_line(section: str, tmp_path: Path) -> None:
    bad = {"env": {"NCCL_DEBUG": "INFO", "HF_ENDPOINT": "http://127.0.0.1:1"}}
    serve = {"command": " ".join(GOOD), **(bad if section == "serve" else {})}
    loaded = make_loaded(
        tmp_path, engine="vllm", source=None, image={"ref": {"x86_64": "a/b:1"}},
        container=bad if section == "container" else {}, serve=serve,
    )  # fmt: skip
    (fault,) = recipe_faults(loaded)
    assert f"{section}.env must not set HF_ENDPOINT" in fault.message
    text = Path(loaded.path).read_text().splitlines()
    assert "HF_ENDPOINT" in text[fault.line - 1]


def test_variables_of_container_and_serve_are_checked() -> None:
    recipe = vllm_recipe(container={"env": {"VLLM_USE_MODELSCOPE": "1"}},
                         serve={"command": "x", "env": {"LD_PRELOAD": "x.so"}})  # fmt: skip
    keys = [c.keys for c in vllm.conflicts(recipe, command.parse(GOOD))]
    assert keys == [("container", "env", "VLLM_USE_MODELSCOPE"), ("serve", "env", "LD_PRELOAD")]
