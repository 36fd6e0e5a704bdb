"""What a recipe's command may hold, what is added to it, what it asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from bakehouse.context import Context
from bakehouse.engines.llamacpp import command as llama_command
from bakehouse.engines.llamacpp.engine import ON_THE_CPU
from bakehouse.errors import RecipeError, UsageError
from bakehouse.lock import Lock
from bakehouse.models import to_json
from bakehouse.preflight.rules import bind_address
from bakehouse.recipe.types import Origin
from bakehouse.server.verification import signature_check
from bakehouse.system.process import environment
from tests.support.serving import make_plan, recipe

PLACE = Origin("recipes/x.yaml", 9, 5)
COMMAND = ("/b/llama-server", "-m", "/w/x.gguf")


def test_command_owned_flags_are_refused() -> None:
    for flag in sorted(llama_command.OWNED):
        with pytest.raises(RecipeError) as caught:
            llama_command.refuse((*COMMAND, flag, "1"), recipe(), PLACE)
        (fault,) = caught.value.faults
        assert fault.message == f"serve.command must not hold {flag}"
        assert fault.hint == llama_command.OWNED[flag]
        assert str(fault).startswith("recipes/x.yaml:9:5: ")
        assert caught.value.exit_code == 2


def test_command_other_spellings_of_owned_flags_are_refused() -> None:
    rows = [
        ("--port=1", "--port"),
        ("--api_key", "--api-key"),
        ("--api_key=s3cret", "--api-key"),
        ("--models_dir", "--models-dir"),
    ]
    for argument, flag in rows:
        with pytest.raises(RecipeError) as caught:
            llama_command.refuse((*COMMAND, argument), recipe(), PLACE)
        assert caught.value.faults[0].message.endswith(flag)
        assert "s3cret" not in str(caught.value.where)


def test_command_faults_are_reported_together() -> None:
    bad = recipe(serve={"env": {"LLAMA_ARG_PORT": "1", "HF_TOKEN": "x", "OK": "1"}})
    with pytest.raises(RecipeError) as caught:
        llama_command.refuse(("/b/llama-server", "--port", "1", "-np", "2", "-lv", "1"), bad, PLACE)
    said = " ".join(f.message for f in caught.value.faults)
    for part in ("--port", "-np", "-lv", "LLAMA_ARG_PORT", "HF_TOKEN", "names no model"):
        assert part in said
    assert " OK" not in said


def test_command_free_text_may_look_like_a_flag() -> None:
    command = (*COMMAND, "--chat-template", "--port", "--temp", "0.5", "-")
    llama_command.refuse(command, recipe(), PLACE)
    assert llama_command.flags(command) == (
        ("-m", "/w/x.gguf"), ("--chat-template", "--port"), ("--temp", "0.5"),
    )  # fmt: skip


def test_command_keeps_its_verbosity() -> None:
    made, _ = llama_command.additions(
        (*COMMAND, "-lv", "5"), recipe(), host="::1", port=0, key_file=None
    )
    assert "--verbosity" not in made


def test_command_nonce_is_filled_only_in_the_alias(context: Context) -> None:
    plan, *_ = make_plan(context, ("/b/{nonce}", "-m", "{nonce}{port}"), "{nonce}", "n")
    argv = plan.command("abc")
    assert argv[:3] == ("/b/{nonce}", "-m", "{nonce}{port}")
    assert argv[3:5] == ("--alias", "n,~bakehouse-abc")
    assert [i for i, text in enumerate(argv) if "abc" in text] == [4]


def test_serve_plan_golden(context: Context) -> None:
    plan, *_ = make_plan(
        context, COMMAND, "/w/x.gguf", "golden", port=8123, slots=2, env={"GGML_CUDA_X": "1"},
        api_key={"env": "KEY"}, context=4096, flash_attn="on", gpu_layers=99,
        speculation="draft-mtp",
    )  # fmt: skip
    golden = Path(__file__).parents[1] / "golden" / "serve-plan.json"
    made = to_json(plan).replace(str(context.places.servers), "SERVERS")
    assert made == golden.read_text()


def test_address_that_is_not_loopback_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "[2001:db8::1]"):
        with pytest.raises(UsageError, match="API key"):
            bind_address(host, has_key=False)
        assert bind_address(host, has_key=True) == host.strip("[]")


def test_address_must_be_an_ip_address() -> None:
    for host in ("example.com", "127.0.0.1,0.0.0.0", "/tmp/x.sock", "", "1"):
        with pytest.raises(UsageError, match="not an IP address"):
            bind_address(host, has_key=True)


def test_serve_environment_is_not_inherited() -> None:
    user = {"LLAMA_ARG_PORT": "1", "AIP_MODE": "PREDICTION", "HF_TOKEN": "t", "LD_PRELOAD": "x",
            "XDG_CONFIG_HOME": "/home/u/.config", "CUDA_VISIBLE_DEVICES": "3"}  # fmt: skip
    assert not user.keys() & environment({}, user).keys()


def features(*command: str, **serve: object) -> llama_command.Features:
    lock = Lock(recipe="n", engine="llama.cpp", wants="", weights={})
    return llama_command.features(recipe("n", serve), lock, (*COMMAND, *command), "/w/x.gguf")


def test_features_follow_the_command() -> None:
    asked = features("-c", "2048", "-ngl", "99", "-fa", "on", "--spec-type", "ngram-simple")
    assert (asked.context, asked.gpu_layers, asked.flash_attn) == (2048, 99, "on")
    assert asked.speculation == "ngram-simple"


def test_features_not_requested_are_not_checked() -> None:
    asked = features("-c", "0", "-ngl", "auto", "-fa", "auto", "--spec-type", "none")
    assert (asked.context, asked.gpu_layers, asked.flash_attn) == (None, None, None)
    assert asked.speculation is None
    assert asked.build_info is None


def test_command_without_gpu_layers_runs_on_the_cpu() -> None:
    rows: list[tuple[tuple[str, ...], int | None, bool]] = [
        ((), 0, True), (("-ngl", "0"), None, True), (("--gpu-layers", "0"), None, True),
        ((), None, False), ((), 99, False), (("-ngl", "99"), None, False),
    ]  # fmt: skip
    found = [features(*command, gpu_layers=layers).cpu for command, layers, _ in rows]
    assert found == [cpu for _, _, cpu in rows]


def test_log_on_the_cpu_is_no_fault_if_requested() -> None:
    lines = ["load_tensors: offloaded 0/31 layers to GPU", "main: model loaded"]
    assert signature_check(lines, "llama.cpp").verdict == "failed"
    assert signature_check(lines, "llama.cpp", ON_THE_CPU).passed
    assert not signature_check(
        [*lines, "CUDA error: invalid argument"], "llama.cpp", ON_THE_CPU
    ).passed


def test_features_drafter_without_a_type_is_speculation() -> None:
    assert features("-md", "/w/d.gguf").speculation == "draft"
    assert features("-ngl", "all").gpu_layers == 10**6
    assert features("-c", "1024", context=512).context == 512


def test_features_as_text() -> None:
    asked = replace_all(features("-c", "2048", "-fa", "off"))
    said = "\n".join(llama_command.expectations(asked))
    for word in ("nonce", "health", "2048 tokens", "flash attention off", "multimodal"):
        assert word in said


def replace_all(asked: llama_command.Features) -> llama_command.Features:
    return asked.model_copy(update={"multimodal": True})
