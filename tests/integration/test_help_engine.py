"""The real llama-server's --help: read whole, and every flag that Bakehouse emits is in it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from bakehouse.context import Context
from bakehouse.engines.llamacpp import command
from bakehouse.engines.llamacpp.command import Help, check_flags
from bakehouse.models import Verdict, not_passed
from bakehouse.paths import Places
from bakehouse.recipe.loader import load, names
from bakehouse.recipe.template import render, trial_variables
from bakehouse.server.session import ask_help
from tests.support.serving import recipe

pytestmark = [pytest.mark.integration, pytest.mark.engine]
RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture(scope="module")
def known(llama_server: Path, tmp_path_factory: pytest.TempPathFactory) -> Help:
    folder = tmp_path_factory.mktemp("help")
    ctx = Context(Places(folder, folder), recipes=RECIPES)
    kept = folder / "kept.txt"
    found = ask_help(ctx, str(llama_server), kept)
    assert found.complete
    assert kept.is_file()
    assert ask_help(ctx, "/nonexistent", kept) == found
    return found


def test_help_text_is_read_whole(known: Help, llama_server: Path) -> None:
    """The shell completion that the server prints lists the same flags, negated ones left out."""
    argv = (llama_server, "--completion-bash")
    text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    found = re.search(r'opts="([^"]*)"', text)
    assert found
    wanted = {command.spelling(flag) for flag in found[1].split()}
    assert len(wanted) > 300
    assert wanted - known.entries.keys() == set()
    assert all(flag.startswith(("--no-", "-n")) for flag in known.entries.keys() - wanted)


def test_help_lists_every_flag_that_bakehouse_adds(known: Help) -> None:
    added, _ = command.additions(("s",), recipe("r"), host="127.0.0.1", port=1, key_file="/run/key")
    assert not_passed(check_flags(("s", *added), known, "--help")) == ()


@pytest.mark.parametrize("name", names(RECIPES))
def test_help_lists_every_flag_of_the_shipped_recipes(known: Help, name: str) -> None:
    loaded = load(RECIPES / f"{name}.yaml")
    if loaded.recipe.engine != "llama.cpp":
        pytest.skip("another engine")
    origin = loaded.origin("serve", "command")
    argv = render(loaded.recipe.serve.command, trial_variables(loaded.recipe), origin=origin)
    assert not_passed(check_flags(argv, known, "--help")) == ()


def test_help_names_flags_that_are_refused_or_looked_for(
    known: Help,
) -> None:
    """A flag of ours that no build has would never be found in a command."""
    ours = {*command.OWNED, *command.FREE_TEXT, *command.VERBOSITY}
    assert {flag for flag in ours if flag not in known.entries} == set()


def test_help_check_refuses_removed_and_misspelled_flags_as_the_server_does(
    known: Help, llama_server: Path
) -> None:
    for flag in ("--draft-max", "--draft-n-max", "--ctx-size=64", "--spec-ngram-size-n"):
        (one,) = check_flags(("s", flag, "3"), known, "--help")
        assert one.verdict is Verdict.FAILED, flag
        done = subprocess.run((llama_server, flag, "3"), capture_output=True, check=False)
        assert done.returncode == 1
