"""A `vllm serve` command: how it is read, what it must not hold, what is added, what is asked."""

from __future__ import annotations

import ast
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bakehouse.engines.vllm import flags, reach, server
from bakehouse.errors import HostError, RecipeError, UsageError
from bakehouse.lock import FilePin, Lock, WeightPin
from bakehouse.plan.container import inside, weight_mounts
from bakehouse.preflight.rules import faults as recipe_faults
from bakehouse.preflight.volumes import reaches, volumes
from bakehouse.recipe.faults import Origin
from bakehouse.recipe.model import Recipe
from bakehouse.serve.containers import refuse_remote
from tests.support.recipes import make_loaded
from tests.support.serving import Files

PLACE = Origin("recipes/x.yaml", 9, 5)
GOOD = ("vllm", "serve", "/weights/model", "--max-model-len", "2k")
DRAFTER = '{"method": "dflash", "model": "/weights/drafter", "num_speculative_tokens": 15}'


def recipe(**over: Any) -> Recipe:
    data = {
        "schema": 1, "name": "r", "engine": "vllm", "image": {"ref": {"x86_64": "a/b:1"}},
        "weights": {"model": {"path": "m"}}, "serve": {"command": "vllm serve"}, **over,
    }  # fmt: skip
    return Recipe.model_validate(data)


def lock(*paths: str) -> Lock:
    pins = tuple(FilePin(path=path, size=1, sha256="0" * 64) for path in paths)
    weights = {"model": WeightPin(origin="m/", files=pins)}
    return Lock(recipe="r", engine="vllm", wants="", weights=weights)


def faults(*argv: str, made: Recipe | None = None, pins: Lock | None = None) -> str:
    try:
        server.refuse(argv, made or recipe(), PLACE, pins)
    except RecipeError as error:
        return "\n".join(str(fault) for fault in error.faults)
    return ""


def test_a_command_is_read_as_the_engine_reads_it() -> None:
    read = flags.read(
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
    assert read.parsers == {"reasoning": "a", "tool": "b"}
    assert "--enforce-eager" in read.flags


@pytest.mark.parametrize("text", ["{", "[]", "1", '"ngram"', "null"])
def test_speculation_that_is_no_object_is_said(text: str) -> None:
    assert "--speculative-config: it is no JSON" in faults(*GOOD, "--speculative-config", text)


@given(st.lists(st.text(max_size=12), max_size=8))
def test_no_command_breaks_the_reader(words: list[str]) -> None:
    flags.read(("vllm", *words))
    faults("vllm", *words)


@pytest.mark.parametrize("flag", sorted(reach.NEVER))
def test_what_bakehouse_sets_is_refused_in_any_spelling(flag: str) -> None:
    assert f"must not hold {flag}" in faults(*GOOD, flag, "1")
    assert f"must not hold {flag}" in faults(*GOOD, f"--{flag[2:].replace('-', '_')}=1")


PACKAGE = Path(server.__file__).resolve().parents[2]
READS_FLAGS = (
    "engines/vllm/server.py", "engines/vllm/flags.py", "engines/vllm/reach.py",
    "engines/vllm/able.py", "engines/vllm/engine.py", "engines/vllm/evidence.py",
    "preflight/vllm.py",
)  # fmt: skip


def flags_named(path: str) -> set[str]:
    """Every flag that stands as a text of its own in a module."""
    words = (n.value for n in ast.walk(ast.parse((PACKAGE / path).read_text()))
             if isinstance(n, ast.Constant))  # fmt: skip
    return {w for w in words if isinstance(w, str) and w.startswith("--") and w[2:3].isalpha()
            and w.replace("-", "").isalnum()}  # fmt: skip


@pytest.mark.parametrize("flag", sorted(set().union(*map(flags_named, READS_FLAGS))))
def test_no_flag_that_is_judged_may_be_shortened(flag: str) -> None:
    """vLLM's parser takes any beginning of a flag: `--trust-remote`, `--api-k`."""
    for length in range(len("--x"), len(flag)):
        said = faults(*GOOD, flag[:length], "1")
        assert "may read as" in said or f"must not hold {flag[:length]}" in said or (
            flag[:length] in flags_known()
        ), flag[:length]  # fmt: skip


def flags_known() -> frozenset[str]:
    return frozenset({*reach.FLAGS, *server.JUDGED, *flags.SHORT})


@pytest.mark.parametrize("word", ["-t", "-n2", "-qfp8", "--api_k=x", "--spec.method", "-r1"])
def test_nor_in_any_other_spelling(word: str) -> None:
    assert "may read as" in faults(*GOOD, word, "1")


@pytest.mark.parametrize(
    "words",
    [
        ("-O3",), ("-tp", "2"), ("-dpl", "1"), ("--enforce-eager",), ("-cc.mode", "3"),
        ("--no-enable-prefix-caching",), ("--tokenizer-mode", "auto"), ("--seed", "1"),
        ("--config-format", "hf"), ("--model-impl", "vllm"), ("--disable-log-requests",),
    ],
)  # fmt: skip
def test_flags_that_are_whole_are_left_alone(words: tuple[str, ...]) -> None:
    assert faults(*GOOD, *words) == ""


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("serve", "/weights/model"), "not with 'vllm serve'"),
        (("vllm", "serve", "vllm", "serve", "/weights/model"), "which nothing pins"),
        (("python3", "-m", "vllm.entrypoints.openai.api_server"), "not with 'vllm serve'"),
        (("vllm", "serve", "--max-model-len", "1"), "names no model"),
        (("vllm", "serve", "org/name"), "serves 'org/name', which nothing pins"),
        (("vllm", "serve", "/weights/model/../../etc"), "which nothing pins"),
        ((*GOOD, "--tokenizer", "org/other"), "--tokenizer names 'org/other'"),
        ((*GOOD, "--load-format", "dummy"), "random numbers"),
        ((*GOOD, "--load-format", "pt"), "unpickles"),
        ((*GOOD, "--speculative-config", '{"num_speculative_tokens": 4}'), "names no method"),
        ((*GOOD, "--speculative-config", '{"method": "ngram"}'), "serve.speculation is not set"),
    ],
)
def test_what_cannot_be_served_as_it_stands(argv: tuple[str, ...], said: str) -> None:
    assert said in faults(*argv)


def test_a_drafter_that_would_be_fetched_inside_is_refused() -> None:
    wanted = recipe(serve={"command": "vllm serve", "speculation": "dflash"})
    named = DRAFTER.replace("/weights/drafter", "org/name-assistant")
    assert "would be fetched inside" in faults(*GOOD, "--speculative-config", named, made=wanted)


def test_a_drafter_that_drafts_nothing_is_refused() -> None:
    wanted = recipe(weights={"model": {"path": "m"}, "drafter": {"path": "d"}})
    assert "drafts with nothing" in faults(*GOOD, made=wanted)


def test_a_drafter_of_the_lock_is_taken() -> None:
    wanted = recipe(
        weights={"model": {"path": "m"}, "drafter": {"path": "d"}},
        serve={"command": "vllm serve", "speculation": "dflash"},
    )
    assert faults(*GOOD, "--speculative-config", DRAFTER, made=wanted) == ""


def test_remote_code_only_where_it_is_pinned() -> None:
    code = (*GOOD, "--trust-remote-code")
    assert "pins none of it" in faults(*code, pins=lock("model.safetensors"))
    assert faults(*code, pins=lock("model.safetensors", "modeling.py")) == ""
    assert faults(*code) == ""  # without a lock nothing can be said yet


@pytest.mark.parametrize("path", ["pytorch_model.bin", "a/x.pt", "training_args.pkl"])
def test_no_pickles(path: str) -> None:
    assert "Python unpickles" in faults(*GOOD, pins=lock("model.safetensors", path))


def test_what_is_added_and_what_is_asked() -> None:
    added, late = server.additions(recipe())
    assert added[late] == "~bakehouse-{nonce}"
    asked = server.features(recipe(), (*GOOD, *added), "/weights/model")
    assert (asked.name, asked.context, asked.speculation) == ("r", 2000, None)
    said = "\n".join(server.expectations(asked))
    assert "max_model_len 2000" in said


def test_each_pinned_file_is_mounted_by_itself() -> None:
    pins = lock(
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
    assert inside("model", lock("x.gguf")).path == "/weights/model/x.gguf"


@pytest.mark.parametrize(
    "text",
    [
        "/var/run/docker.sock:/var/run/docker.sock", "/run:/host", "/:/host", "/var/run/../run:/x",
        "cache:/weights/model", "cache:/weights", "cache:/", "cache", "a:b:c:d", "cache:x",
        "cache:/x:rx", "~/../../run/docker.sock:/s", "/proc:/p", "/proc/sys/kernel:/k:ro",
        "/sys:/s", "/dev:/dev", "a\n:/x", "-v:/x", "ü:/x", "x:/y",
        # Over what the image runs: that was proven able as it is.
        "vol:/usr/lib/python3", "vol:/usr", "vol:/etc/hosts", "vol:/proc", "vol:/sys/x", "vol:/dev",
        "vol:/bakehouse", "vol:/opt/venv", "vol:/lib64", "vol:/data/../usr/bin", "vol:/root",
        "vol:/root/.local", "vol:/x/lib/python3.12/site-packages", "vol:/home", "vol:/run/x",
    ],
)  # fmt: skip
def test_volumes_that_must_not_be(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    with pytest.raises(UsageError):
        volumes((text,), "/home/u/recipes")


@pytest.mark.parametrize("name", ["docker.sock", "of-a-name-of-its-own"])
def test_no_way_leads_to_a_socket(name: str, tmp_path: Path) -> None:
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


def test_two_volumes_in_one_place() -> None:
    with pytest.raises(UsageError, match="has the same target as 'aa:/x'"):
        volumes(("aa:/x", "bb:/x/"), "/")


@pytest.mark.parametrize(
    ("container", "said"),
    [
        ({"volumes": ["/:/host"]}, "own socket"), ({"volumes": ["/sys:/s"]}, "kernel"),
        ({"volumes": ["x"]}, "not a volume"), ({"gpus": "--privileged"}, "which GPUs"),
        ({"gpus": ""}, "which GPUs"), ({"gpus": "0"}, "which GPUs"),
    ],
)  # fmt: skip
def test_check_names_what_no_container_gets(
    container: dict[str, Any], said: str, tmp_path: Path
) -> None:
    loaded = make_loaded(
        tmp_path, engine="vllm", source=None, image={"ref": {"x86_64": "a/b:1"}},
        container=container, serve={"command": " ".join(GOOD)},
    )  # fmt: skip
    (fault,) = recipe_faults(loaded)
    assert said in fault.message
    assert fault.line > 0


def test_volumes_that_may_be() -> None:
    named, kept, own = volumes(
        ("vllm-cache:/root/.cache", "../c:/c:ro", "/data/x:/x"), "/r/recipes"
    )
    assert (named.volume, named.read_only, named.source) == (True, False, "vllm-cache")
    assert (kept.volume, kept.read_only, kept.source) == (False, True, "/r/c")
    assert (own.source, own.target, own.read_only) == ("/data/x", "/x", False)


@pytest.mark.parametrize("host", ["tcp://10.1.2.3:2376", "ssh://me@spark", "http://[fd00::1]:2375"])
def test_an_engine_on_another_machine_is_refused(host: str) -> None:
    with pytest.raises(HostError, match="another machine"):
        refuse_remote(host)


@pytest.mark.parametrize(
    "host",
    [
        "unix:///var/run/docker.sock",
        "tcp://127.0.0.1:2375",
        "tcp://localhost:2375",
        "",
        "http://[::1]:1",
    ],
)
def test_an_engine_on_this_machine_is_taken(host: str) -> None:
    refuse_remote(host)
