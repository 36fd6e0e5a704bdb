# ruff: noqa: E501 - tables
"""`recipes`, `show` and `check`: what they say, to people and to scripts."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bakehouse import flags
from bakehouse.commands.recipes import run_check, run_recipes, run_show
from bakehouse.context import Context
from bakehouse.errors import NotFound, RecipeError
from bakehouse.paths import Places
from bakehouse.recipe.export import resolved, to_yaml
from bakehouse.recipe.loader import load
from tests.support.recipe_text import GOOD, write

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"


def context_for(folder: Path, **environment: str) -> Context:
    return Context(Places(folder / "c", folder / "s"), recipes=folder, environment=environment)


def test_check_dozen_faults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(GOLDEN)
    outcome = run_check(context_for(tmp_path), flags.Check("./dozen-faults.yaml"))
    assert outcome.exit == 2
    golden = GOLDEN / "dozen-faults.txt"
    if os.environ.get("BAKEHOUSE_WRITE_GOLDEN"):
        golden.write_text(outcome.text + "\n")
    assert outcome.text + "\n" == golden.read_text()
    assert len(outcome.result["recipes"][0]["faults"]) >= 12


def test_check_accepts_shipped_recipes(context: Context) -> None:
    outcome = run_check(context, flags.Check())
    assert outcome.exit == 0, outcome.text
    assert all(c.passed for c in outcome.checks)
    for row in run_recipes(context, flags.Recipes()).result["recipes"]:
        assert row["loads"]
        first = (ROOT / "recipes" / f"{row['name']}.yaml").read_text().splitlines()[0]
        assert first == "# yaml-language-server: $schema=recipe.schema.json"
        assert load(ROOT / "recipes" / f"{row['name']}.yaml").recipe.name == row["name"]


def test_check_reports_every_recipe(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "good.yaml")
    write(tmp_path, GOOD.replace("context: 2048", "contxt: 2048"), "bad.yaml")
    write(tmp_path, GOOD, "twin.yaml")
    outcome = run_check(context_for(tmp_path), flags.Check())
    assert outcome.exit == 2
    verdicts = {c.id: (c.verdict.value, c.observed) for c in outcome.checks}
    assert verdicts == {
        "recipe.bad": ("failed", "1 fault"),
        "recipe.good": ("passed", "no faults"),
        "recipe.twin": ("failed", "1 fault"),
    }
    assert "twin.yaml:2:7: name: " in outcome.text
    assert outcome.text.endswith("3 recipes, 2 faults")
    data = json.loads(json.dumps(outcome.result))
    fault = data["recipes"][0]["faults"][0]
    assert fault["line"] == 10
    assert fault["hint"] == "did you mean context?"


def test_check_takes_overrides_and_names(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "good.yaml")
    ctx = context_for(tmp_path)
    assert run_check(ctx, flags.Check("good", ("serve.context=4",))).exit == 0
    assert run_check(ctx, flags.Check("good", ("serve.contxt=4",))).exit == 2
    with pytest.raises(NotFound):
        run_check(ctx, flags.Check("goo"))
    with pytest.raises(NotFound):
        run_check(context_for(tmp_path / "empty"), flags.Check())


def test_recipes_lists_all(tmp_path: Path) -> None:
    assert run_recipes(context_for(tmp_path), flags.Recipes()).result == {"recipes": []}
    write(tmp_path, GOOD + 'experimental: true\ndescription: "a \\e[31m thing"\n', "good.yaml")
    write(tmp_path, "a: [", "bad.yaml")
    write(tmp_path, "{}", "good.lock.json")
    outcome = run_recipes(context_for(tmp_path), flags.Recipes())
    rows = {row["name"]: row for row in outcome.result["recipes"]}
    assert rows["good"]["loads"]
    assert rows["good"]["locked"]
    assert rows["good"]["engine"] == "llama.cpp"
    assert not rows["bad"]["loads"]
    assert rows["bad"]["faults"] == "1 fault"
    assert "\x1b" not in outcome.text
    assert "experimental: a " in outcome.text


def test_show_names_the_origin_of_values(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "base.yaml")
    write(tmp_path, "include: base.yaml\nname: top\n", "top.yaml")
    outcome = run_show(context_for(tmp_path), flags.Show("top", ("serve.port=1",)))
    sources = outcome.result["sources"]
    assert sources["name"].endswith("top.yaml:2:7")
    assert sources["serve.context"].endswith("base.yaml:10:12")
    assert sources["serve.port"] == "--set serve.port"
    assert sources["serve.ready_timeout"] == "default"
    assert outcome.result["recipe"]["serve"]["ready_timeout"] == "600s"
    assert re.search(r"(?m)^  port: 1 +# --set serve.port$", outcome.text)
    assert outcome.result["set"] == ["--set serve.port"]


def shown_again(folder: Path, env: dict[str, str]) -> None:
    """Write a recipe with these texts as `show` does, load it, and compare."""
    first = load(write(folder, GOOD + "  ready_timeout: 1h30m\nhost: {memory_size: 4GiB}\n"))
    serve = first.recipe.serve.model_copy(update={"env": env, "vars": {"deep": [env]}})
    made = replace(first, recipe=first.recipe.model_copy(update={"serve": serve}))
    text = to_yaml(made, resolved(made))
    assert load(write(folder, text, "again.yaml")).recipe == made.recipe, text


def test_show_output_loads_to_the_same_recipe(tmp_path: Path) -> None:
    texts = [
        "on", "13.0", "null", "1e5", " lead", "tab\there", "a: b", "# no", "two\nlines\n", "x \ny",
        "", "é€😀", "'q' \"q\"", "\n\n", "*x", "0o17", "~", "x\u2028y", "\u0085", "true", "- a",
        "2001-01-01", "{{ x }}", "1_000", "\ttab", "a\n\nb\n\n", "---", "...\n", "=", "<<", "%x",
        "x" * 500, "\x7f\x1b", "  two\n three", "a\n\tb\n", "@y", "a #b", "?", "a\rb", "\ufeff",
        "a\n b\n", "a\n\n", "\na", "!t", "&a", "|", ">", "a:", "[", "}", ",", "`", "\u200e", "y" * 99 + " z",
    ]  # fmt: skip
    shown_again(tmp_path, {f"V{number}": text for number, text in enumerate(texts)})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30))
def test_show_keeps_any_text(tmp_path: Path, text: str) -> None:
    shown_again(tmp_path, {"A": text, "B": f"{text}\n{text}\n"})


def test_show_keeps_shipped_recipes(context: Context, tmp_path: Path) -> None:
    for row in run_recipes(context, flags.Recipes()).result["recipes"]:
        text = run_show(context, flags.Show(row["name"])).text
        again = load(write(tmp_path, text)).recipe
        assert again == load(context.recipes / f"{row['name']}.yaml").recipe


def test_show_hides_secrets(tmp_path: Path) -> None:
    text = GOOD + "  env: {MY_API_KEY: topsecret123, PLAIN: visible}\nsecrets: [VAULT]\n"
    text = text.replace("name: small", "name: small\ndescription: holds vaultvalue9 inside")
    write(tmp_path, text, "r.yaml")
    outcome = run_show(context_for(tmp_path, VAULT="vaultvalue9"), flags.Show("r"))
    everything = outcome.text + json.dumps(outcome.result)
    assert "topsecret123" not in everything
    assert "vaultvalue9" not in everything
    assert "visible" in everything


def test_show_refuses_a_bad_recipe(tmp_path: Path) -> None:
    write(tmp_path, "a: [", "r.yaml")
    with pytest.raises(RecipeError):
        run_show(context_for(tmp_path), flags.Show("r"))
