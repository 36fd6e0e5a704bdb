"""What a recipe's command may hold, what is added to it, what it asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from bakehouse.base import to_json
from bakehouse.context import Context
from bakehouse.engines.llamacpp import server
from bakehouse.engines.llamacpp.engine import ON_THE_CPU
from bakehouse.errors import RecipeError, UsageError
from bakehouse.lock import Lock
from bakehouse.ports.process import environment
from bakehouse.preflight.address import bind_address
from bakehouse.recipe.faults import Origin
from bakehouse.serve.proof import signature_check
from tests.support.serving import make_plan, recipe

PLACE = Origin("recipes/x.yaml", 9, 5)
COMMAND = ("/b/llama-server", "-m", "/w/x.gguf")


@pytest.mark.parametrize("flag", sorted(server.OWNED))
def test_an_owned_flag_is_refused_and_the_error_says_what_to_do(flag: str) -> None:
    with pytest.raises(RecipeError) as caught:
        server.refuse((*COMMAND, flag, "1"), recipe(), PLACE)
    (fault,) = caught.value.faults
    assert fault.message == f"serve.command must not hold {flag}"
    assert fault.hint == server.OWNED[flag]
    assert str(fault).startswith("recipes/x.yaml:9:5: ")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("argument", "flag"),
    [
        ("--port=1", "--port"),
        ("--api_key", "--api-key"),
        ("--api_key=s3cret", "--api-key"),
        ("--models_dir", "--models-dir"),
    ],
)
def test_other_spellings_of_an_owned_flag_are_refused(argument: str, flag: str) -> None:
    with pytest.raises(RecipeError) as caught:
        server.refuse((*COMMAND, argument), recipe(), PLACE)
    assert caught.value.faults[0].message.endswith(flag)
    assert "s3cret" not in str(caught.value.where)


def test_all_faults_of_a_command_are_named_at_once() -> None:
    bad = recipe(serve={"env": {"LLAMA_ARG_PORT": "1", "HF_TOKEN": "x", "OK": "1"}})
    with pytest.raises(RecipeError) as caught:
        server.refuse(("/b/llama-server", "--port", "1", "-np", "2", "-lv", "1"), bad, PLACE)
    said = " ".join(f.message for f in caught.value.faults)
    for part in ("--port", "-np", "-lv", "LLAMA_ARG_PORT", "HF_TOKEN", "names no model"):
        assert part in said
    assert " OK" not in said


def test_text_that_looks_like_a_flag_is_let_through_behind_a_free_text_flag() -> None:
    command = (*COMMAND, "--chat-template", "--port", "--temp", "0.5", "-")
    server.refuse(command, recipe(), PLACE)
    assert server.flags(command) == (
        ("-m", "/w/x.gguf"), ("--chat-template", "--port"), ("--temp", "0.5"),
    )  # fmt: skip


def test_the_recipes_own_verbosity_stays() -> None:
    made, _ = server.additions(
        (*COMMAND, "-lv", "5"), name="n", host="::1", port=0, slots=1, key_file=None
    )
    assert "--verbosity" not in made


def test_the_nonce_is_filled_only_where_the_plan_put_it(context: Context) -> None:
    plan, *_ = make_plan(context, ("/b/{nonce}", "-m", "{nonce}{port}"), "{nonce}", "n")
    argv = plan.command("abc")
    assert argv[:3] == ("/b/{nonce}", "-m", "{nonce}{port}")
    assert argv[3:5] == ("--alias", "n,~bakehouse-abc")
    assert [i for i, text in enumerate(argv) if "abc" in text] == [4]


def test_the_plan_of_a_server_is_as_recorded(context: Context) -> None:
    plan, *_ = make_plan(
        context, COMMAND, "/w/x.gguf", "golden", port=8123, slots=2, env={"GGML_CUDA_X": "1"},
        api_key={"env": "KEY"}, context=4096, flash_attn="on", gpu_layers=99,
        speculation="draft-mtp",
    )  # fmt: skip
    golden = Path(__file__).parents[1] / "golden" / "serve-plan.json"
    made = to_json(plan).replace(str(context.places.servers), "SERVERS")
    assert made == golden.read_text()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "[2001:db8::1]"])
def test_an_address_that_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(UsageError, match="API key"):
        bind_address(host, has_key=False)
    assert bind_address(host, has_key=True) == host.strip("[]")


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1,0.0.0.0", "/tmp/x.sock", "", "1"])
def test_what_is_no_address_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="no IP address"):
        bind_address(host, has_key=True)


def test_nothing_of_the_users_environment_reaches_the_server() -> None:
    user = {"LLAMA_ARG_PORT": "1", "AIP_MODE": "PREDICTION", "HF_TOKEN": "t", "LD_PRELOAD": "x",
            "XDG_CONFIG_HOME": "/home/u/.config", "CUDA_VISIBLE_DEVICES": "3"}  # fmt: skip
    assert not user.keys() & environment({}, user).keys()


def features(*command: str, **serve: object) -> server.Features:
    lock = Lock(recipe="n", engine="llama.cpp", wants="", weights={})
    return server.features(recipe("n", serve), lock, (*COMMAND, *command), "/w/x.gguf")


def test_what_the_command_asks_for_is_asked_of_the_server() -> None:
    asked = features("-c", "2048", "-ngl", "99", "-fa", "on", "--spec-type", "ngram-simple")
    assert (asked.context, asked.gpu_layers, asked.flash_attn) == (2048, 99, "on")
    assert asked.speculation == "ngram-simple"


def test_what_nobody_asked_for_is_not_judged() -> None:
    asked = features("-c", "0", "-ngl", "auto", "-fa", "auto", "--spec-type", "none")
    assert (asked.context, asked.gpu_layers, asked.flash_attn) == (None, None, None)
    assert asked.speculation is None
    assert asked.build_info is None


@pytest.mark.parametrize(
    ("command", "layers", "on_the_cpu"),
    [((), 0, True), (("-ngl", "0"), None, True), (("--gpu-layers", "0"), None, True),
     ((), None, False), ((), 99, False), (("-ngl", "99"), None, False)],
)  # fmt: skip
def test_no_layer_on_the_gpu_can_be_what_is_asked_for(
    command: tuple[str, ...], layers: int | None, on_the_cpu: bool
) -> None:
    assert features(*command, gpu_layers=layers).cpu is on_the_cpu


def test_a_log_that_says_what_was_asked_for_shows_no_fault() -> None:
    lines = ["load_tensors: offloaded 0/31 layers to GPU", "main: model loaded"]
    assert signature_check(lines, "llama.cpp").verdict == "failed"
    assert signature_check(lines, "llama.cpp", ON_THE_CPU).passed
    assert not signature_check(
        [*lines, "CUDA error: invalid argument"], "llama.cpp", ON_THE_CPU
    ).passed


def test_a_drafter_without_a_type_is_speculation_that_is_asked_for() -> None:
    assert features("-md", "/w/d.gguf").speculation == "draft"
    assert features("-ngl", "all").gpu_layers == 10**6
    assert features("-c", "1024", context=512).context == 512


def test_expectations_name_each_feature() -> None:
    asked = replace_all(features("-c", "2048", "-fa", "off"))
    said = "\n".join(server.expectations(asked))
    for word in ("nonce", "health", "2048 tokens", "flash attention off", "multimodal"):
        assert word in said


def replace_all(asked: server.Features) -> server.Features:
    return asked.model_copy(update={"multimodal": True})
