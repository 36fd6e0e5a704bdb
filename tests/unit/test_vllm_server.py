"""vLLM: how a command is parsed and checked, what is added to it; volumes of its container."""

from __future__ import annotations

import ast
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bakehouse.engines.base import Answer, engine_of
from bakehouse.engines.vllm import command, engine
from bakehouse.errors import HostError, UsageError
from bakehouse.plan.serve import inside, weight_mounts
from bakehouse.preflight.rules import faults as recipe_faults
from bakehouse.preflight.rules import reaches, volumes
from bakehouse.server.containers import refuse_remote
from tests.support.recipes import make_loaded
from tests.support.serving import Files
from tests.support.vllm_commands import GOOD, command_faults, vllm_lock, vllm_recipe

DRAFTER = '{"method": "dflash", "model": "/weights/drafter", "num_speculative_tokens": 15}'


def test_command_is_parsed_as_the_engine_does() -> None:
    read = command.parse(
        ("vllm", "serve", "/weights/model", "--max_model_len=32k", "-tp", "2", "--enforce-eager",
         "--max-num-seqs", "4", "--max-num-seqs", "8", "--speculative-config.method", "ngram",
         "--spec-tokens", "4", "--reasoning-parser", "a", "--tool-call-parser=b")
    )  # fmt: skip
    assert read.program == ("vllm", "serve")
    assert read.model == "/weights/model"
    assert read.number("--max-model-len") == 32_000
    assert read.number("--tensor-parallel-size") == 2
    assert read.number("--max-num-seqs") == 8
    assert (read.method, read.draft_tokens, read.drafter) == ("ngram", 4, None)
    assert (read.text("--reasoning-parser"), read.text("--tool-call-parser")) == ("a", "b")
    assert "--enforce-eager" in read.flags


@given(st.lists(st.text(max_size=12), max_size=8))
def test_command_of_any_words_is_parsed(words: list[str]) -> None:
    command.parse(("vllm", *words))
    command_faults("vllm", *words)


def test_command_refuses_flags_that_bakehouse_sets() -> None:
    for flag in command.NEVER:
        assert f"must not set {flag}" in command_faults(*GOOD, flag, "1")
        underscored = f"--{flag[2:].replace('-', '_')}=1"
        assert f"must not set {flag}" in command_faults(*GOOD, underscored)


PACKAGE = Path(engine.__file__).resolve().parents[2]
READS_FLAGS = (
    "engines/vllm/command.py", "engines/vllm/image_probe.py",
    "engines/vllm/engine.py", "engines/vllm/engine.py", "engines/vllm/engine.py",
)  # fmt: skip


def flags_in(path: str) -> set[str]:
    """Every flag that is a string of its own in a module."""
    words = (n.value for n in ast.walk(ast.parse((PACKAGE / path).read_text()))
             if isinstance(n, ast.Constant))  # fmt: skip
    return {w for w in words if isinstance(w, str) and w.startswith("--") and w[2:3].isalpha()
            and w.replace("-", "").isalnum()}  # fmt: skip


def test_command_refuses_abbreviated_flags() -> None:
    """vLLM's parser takes any beginning of a flag: `--trust-remote`, `--api-k`."""
    known = {*command.FLAGS, *engine.JUDGED, *command.SHORT}
    read = set().union(*map(flags_in, READS_FLAGS))
    short = {flag[:length] for flag in read for length in range(len("--x"), len(flag))} - known
    taken = [one for one in sorted(short) if "may read as" not in command_faults(*GOOD, one, "1")]
    assert len(short) > 300
    assert taken == []
    for word in ("-t", "-n2", "-qfp8", "--api_k=x", "--spec.method", "-r1"):
        assert "may read as" in command_faults(*GOOD, word, "1"), word


def test_command_takes_whole_flags() -> None:
    for words in (
        ("-O3",), ("-tp", "2"), ("-dpl", "1"), ("--enforce-eager",), ("-cc.mode", "3"),
        ("--no-enable-prefix-caching",), ("--tokenizer-mode", "auto"), ("--seed", "1"),
        ("--config-format", "hf"), ("--model-impl", "vllm"), ("--disable-log-requests",),
    ):  # fmt: skip
        assert command_faults(*GOOD, *words) == "", words


def test_command_that_cannot_be_served() -> None:
    rows: list[tuple[tuple[str, ...], str]] = [
        (("serve", "/weights/model"), "not with 'vllm serve'"),
        (("vllm", "serve", "vllm", "serve", "/weights/model"), "which is not pinned"),
        (("vllm", "serve", "/weights/model", "more"), "'more', which belongs to no flag"),
        (("vllm", "serve", "--max-model-len", "1"), "names no model"),
        (("vllm", "serve", "org/name"), "serves 'org/name', which is not pinned"),
        (("vllm", "serve", "/weights/model/../../etc"), "which is not pinned"),
        ((*GOOD, "--tokenizer", "org/other"), "--tokenizer names 'org/other'"),
        ((*GOOD, "--load-format", "dummy"), "random numbers"),
        ((*GOOD, "--load-format", "pt"), "unpickles"),
        ((*GOOD, "--speculative-config", "{"), "--speculative-config: invalid JSON"),
        ((*GOOD, "--speculative-config", "[]"), "--speculative-config: not a JSON object"),
        ((*GOOD, "--speculative-config", "null"), "--speculative-config: not a JSON object"),
        ((*GOOD, "--speculative-config", '{"num_speculative_tokens": 4}'), "names no method"),
        ((*GOOD, "--speculative-config", '{"method": "ngram"}'), "serve.speculation is not set"),
    ]  # fmt: skip
    got = [(command_faults(*argv), text) for argv, text in rows]
    assert [(found, text) for found, text in got if text not in found] == []


def test_drafter_is_pinned_and_used() -> None:
    serve = {"command": "vllm serve", "speculation": "dflash"}
    both = {"model": {"path": "m"}, "drafter": {"path": "d"}}
    recipe = vllm_recipe(weights=both, serve=serve)
    assert command_faults(*GOOD, "--speculative-config", DRAFTER, recipe=recipe) == ""
    assert "does not use it" in command_faults(*GOOD, recipe=vllm_recipe(weights=both))
    fetched = DRAFTER.replace("/weights/drafter", "org/name-assistant")
    said = command_faults(*GOOD, "--speculative-config", fetched, recipe=vllm_recipe(serve=serve))
    assert "the drafter 'org/name-assistant', which is not pinned" in said


def test_remote_code_must_be_pinned() -> None:
    code = (*GOOD, "--trust-remote-code")
    assert "pins no .py file" in command_faults(*code, lock=vllm_lock("model.safetensors"))
    pinned = vllm_lock("model.safetensors", "modeling.py")
    assert command_faults(*code, lock=pinned) == ""
    assert command_faults(*code) == "", "without a lock it is unknown"


def test_pickles_are_refused() -> None:
    for path in ("pytorch_model.bin", "a/x.pt", "training_args.pkl"):
        lock = vllm_lock("model.safetensors", path)
        assert "can run code" in command_faults(*GOOD, lock=lock), path


def test_features_come_from_recipe_and_command() -> None:
    vllm = engine_of("vllm")
    added, late = vllm.additions(GOOD, vllm_recipe(), host="", port=0, key_file=None)
    assert added[late] == "~bakehouse-{nonce}"
    asked = vllm.features(vllm_recipe(), vllm_lock(), (*GOOD, *added), "/weights/model")
    assert (asked.name, asked.context, asked.speculation) == ("r", 2000, None)
    assert "max_model_len 2000" in "\n".join(vllm.expectations(asked))
    more = ("--dtype", "half", "--kv-cache-dtype", "fp8",
            "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}',
            "--model-impl", "transformers")  # fmt: skip
    asked = vllm.features(vllm_recipe(), vllm_lock(), (*GOOD, *more), "/weights/model")
    said = "\n".join(vllm.expectations(asked))
    for part in ("dtype half", "KV cache fp8", "speculation with ngram, 4 tokens"):
        assert f"the log shows {part}" in said
    assert vllm.expected_signatures(asked) == {"transformers-fallback"}
    answers = {path: Answer(200, {}, "") for path in vllm.evidence}
    assert not [one for one in vllm.check_features(asked, answers, []) if one.passed]


def test_container_mounts_each_pinned_file() -> None:
    pins = vllm_lock(
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    )
    here = tuple(f"/home/u/m/{pin.path}" for pin in pins.weights["model"].files)
    mounts = weight_mounts(pins, {"model": Files(here[1], "/home/u/m", here)})
    assert [m.target for m in mounts] == [f"/weights/model/{p.path}" for p in
                                          pins.weights["model"].files]  # fmt: skip
    assert all(m.read_only for m in mounts)
    seen = inside("model", pins)
    assert (seen.path, seen.first) == (
        "/weights/model", "/weights/model/model-00001-of-00002.safetensors",
    )  # fmt: skip
    assert inside("model", vllm_lock("x.gguf")).path == "/weights/model/x.gguf"


def refused(*texts: str) -> bool:
    try:
        volumes(texts, "/home/u/recipes")
    except UsageError:
        return True
    return False


def test_volumes_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    bad = (
        "/var/run/docker.sock:/var/run/docker.sock", "/run:/host", "/:/host", "/var/run/../run:/x",
        "cache:/weights/model", "cache:/weights", "cache:/", "cache", "a:b:c:d", "cache:x",
        "cache:/x:rx", "~/../../run/docker.sock:/s", "/proc:/p", "/proc/sys/kernel:/k:ro",
        "/sys:/s", "/dev:/dev", "a\n:/x", "-v:/x", "ü:/x", "x:/y",
        # They would hide files of the image, which was verified as it is.
        "vol:/usr/lib/python3", "vol:/usr", "vol:/etc/hosts", "vol:/proc", "vol:/sys/x", "vol:/dev",
        "vol:/bakehouse", "vol:/opt/venv", "vol:/lib64", "vol:/data/../usr/bin", "vol:/root",
        "vol:/root/.local", "vol:/x/lib/python3.12/site-packages", "vol:/home", "vol:/run/x",
    )  # fmt: skip
    assert [text for text in bad if not refused(text)] == []
    with pytest.raises(UsageError, match="has the same target as 'aa:/x'"):
        volumes(("aa:/x", "bb:/x/"), "/")


@pytest.mark.parametrize("name", ["docker.sock", "of-a-name-of-its-own"])
def test_volumes_cannot_reach_the_docker_socket(name: str, tmp_path: Path) -> None:
    """By its name, by its folder, by links to either, by a relative path."""
    home = tmp_path / "deep" / "down"
    home.mkdir(parents=True)
    where = home / name
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(where))
        (tmp_path / "link").symlink_to(where)
        (tmp_path / "folder").symlink_to(home)
        for path in (where, tmp_path / "link"):
            assert "own socket" in str(reaches(str(path)))
            with pytest.raises(UsageError, match="own socket"):
                volumes((f"{path}:/x",), "/")
        for path in (home, tmp_path / "folder", home.parent, tmp_path):
            assert "own socket" in str(reaches(str(path), [str(where)]))
        with pytest.raises(UsageError, match="own socket"):
            volumes((f"../{name}:/x",), str(home / "recipes"))
    (tmp_path / "other").mkdir()
    assert reaches(str(tmp_path / "other"), [str(where)]) is None


@pytest.mark.parametrize(
    ("container", "said"),
    [
        ({"volumes": ["/:/host"]}, "own socket"), ({"volumes": ["/sys:/s"]}, "kernel"),
        ({"volumes": ["x"]}, "not a volume"), ({"gpus": "--privileged"}, "which GPUs"),
        ({"gpus": ""}, "which GPUs"), ({"gpus": "0"}, "which GPUs"),
    ],
)  # fmt: skip
def test_container_settings_that_are_refused(
    container: dict[str, Any], said: str, tmp_path: Path
) -> None:
    loaded = make_loaded(
        tmp_path, engine="vllm", source=None, image={"ref": {"x86_64": "a/b:1"}},
        container=container, serve={"command": " ".join(GOOD)},
    )  # fmt: skip
    (fault,) = recipe_faults(loaded)
    assert said in fault.message
    assert fault.line > 0


def test_volumes_that_are_mounted() -> None:
    named, kept, own = volumes(
        ("vllm-cache:/root/.cache", "../c:/c:ro", "/data/x:/x"), "/r/recipes"
    )
    assert (named.volume, named.read_only, named.source) == (True, False, "vllm-cache")
    assert (kept.volume, kept.read_only, kept.source) == (False, True, "/r/c")
    assert (own.source, own.target, own.read_only) == ("/data/x", "/x", False)


def test_docker_engine_must_be_on_this_machine() -> None:
    for host in ("tcp://10.1.2.3:2376", "ssh://me@spark", "http://[fd00::1]:2375"):
        with pytest.raises(HostError, match="another machine"):
            refuse_remote(host)
    for host in ("unix:///var/run/docker.sock", "tcp://127.0.0.1:2375", "tcp://localhost:2375", "",
                 "http://[::1]:1"):  # fmt: skip
        refuse_remote(host)
