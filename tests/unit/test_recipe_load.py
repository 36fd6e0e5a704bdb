# ruff: noqa: E501 - tables of texts and what is said about them
"""Includes, overrides, the model's faults: each at its place, each once, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from bakehouse.errors import NotFound
from bakehouse.recipe import model
from bakehouse.recipe.explain import stand_in
from bakehouse.recipe.load import find, load, names
from tests.support.recipe_text import GOOD, faults, lines, loaded, write


def one(folder: Path, text: str, overrides: tuple[str, ...] = ()) -> str:
    """Give the only fault."""
    found = lines(faults(folder, text, overrides), folder)
    assert len(found) == 1, found
    return found[0]


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) == 1
    return GOOD.replace(old, new)


# Includes


def test_maps_merge_lists_replace_null_deletes_and_places_survive(tmp_path: Path) -> None:
    write(
        tmp_path, GOOD + "  port: 1000\n  vars: {a: [1, 2], b: x}\nsecrets: [A, B]\n", "base.yaml"
    )
    made = loaded(
        tmp_path,
        "include: base.yaml\nname: other\nserve:\n  port: null\n  vars: {a: [3]}\nsecrets: [C]\n",
    )
    recipe = made.recipe
    assert (recipe.name, recipe.serve.port, recipe.secrets) == ("other", 8080, ("C",))
    assert recipe.serve.vars == {"a": [3], "b": "x"}
    assert made.files == (tmp_path / "r.yaml", tmp_path / "base.yaml")
    assert made.folder == tmp_path
    places = {p: (Path(o.file).name, o.line, o.column) for p, o in made.places.items()}
    assert places["serve", "context"] == ("base.yaml", 10, 12)
    assert places["serve", "vars", "a", 0] == ("r.yaml", 5, 14)
    assert places["serve", "vars", "b"] == ("base.yaml", 15, 24)
    assert ("serve", "port") not in places


def test_the_later_include_wins_and_the_file_wins_over_all(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "a.yaml")
    write(tmp_path, "name: b\nserve: {port: 1, slots: 2}\n", "b.yaml")
    made = loaded(tmp_path, "include: [a.yaml, b.yaml]\nserve: {slots: 3}\n")
    assert (made.recipe.name, made.recipe.serve.port, made.recipe.serve.slots) == ("b", 1, 3)


def test_null_in_a_later_include_deletes(tmp_path: Path) -> None:
    write(tmp_path, GOOD + "  port: 1\n", "a.yaml")
    write(tmp_path, "serve: {port: null}\n", "b.yaml")
    assert loaded(tmp_path, "include: [a.yaml, b.yaml]\n").recipe.serve.port == 8080


def test_includes_are_relative_to_the_file_that_says_them(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "deep/er/base.yaml")
    write(tmp_path, "include: er/base.yaml\n", "deep/mid.yaml")
    made = loaded(tmp_path, "include: deep/mid.yaml\n")
    assert [p.name for p in made.files] == ["r.yaml", "mid.yaml", "base.yaml"]


def test_a_diamond_is_no_loop(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "d.yaml")
    write(tmp_path, "include: d.yaml\n", "b.yaml")
    write(tmp_path, "include: d.yaml\nname: c\n", "c.yaml")
    assert loaded(tmp_path, "include: [b.yaml, c.yaml]\n").recipe.name == "c"


def test_a_loop_names_its_chain(tmp_path: Path) -> None:
    write(tmp_path, "include: b.yaml\n", "a.yaml")
    write(tmp_path, "name: x\ninclude:\n  - r.yaml\n", "b.yaml")
    place, _, chain = one(tmp_path, "include: a.yaml\n").partition(": include loop: ")
    assert place == "b.yaml:3:5"
    assert [Path(p).name for p in chain.split(" -> ")] == ["r.yaml", "a.yaml", "b.yaml", "r.yaml"]


def test_a_loop_through_a_link_is_a_loop(tmp_path: Path) -> None:
    (tmp_path / "link.yaml").symlink_to(tmp_path / "r.yaml")
    assert "include loop" in one(tmp_path, "include: link.yaml\n")


def test_a_missing_include_names_its_chain_and_nothing_is_missing_for_it(tmp_path: Path) -> None:
    write(tmp_path, "include: gone.yaml\n", "a.yaml")
    found = one(tmp_path, "include: a.yaml\nname: x\n")
    assert found.startswith("a.yaml:1:10: there is no file 'gone.yaml', included by r.yaml -> ")


def test_faults_elsewhere_are_still_found_when_an_include_is_broken(tmp_path: Path) -> None:
    write(tmp_path, "a: [\n", "a.yaml")
    write(tmp_path, "b: {b: 1, b: 2}\n", "b.yaml")
    text = "include: [a.yaml, b.yaml]\nserve: {prt: 1, slots: many}\n"
    starts = [line.split(": ")[0] for line in lines(faults(tmp_path, text), tmp_path)]
    assert starts[0].startswith("a.yaml:")
    assert starts[1:] == ["b.yaml:1:1", "b.yaml:1:11", "r.yaml:2:9", "r.yaml:2:24"]


@pytest.mark.parametrize("value", ["5", "{a: b}", "[[a]]", "''", "[a.yaml, true]", '"\\0"'])
def test_an_include_that_is_no_path(tmp_path: Path, value: str) -> None:
    write(tmp_path, "name: x\n", "a.yaml")
    found = lines(faults(tmp_path, f"include: {value}\n"), tmp_path)
    assert found
    assert all(line.startswith("r.yaml:1:") for line in found)


def test_includes_that_multiply_are_stopped(tmp_path: Path) -> None:
    for i in range(12):
        write(tmp_path, f"include: [f{i + 1}.yaml, f{i + 1}.yaml]\n", f"f{i}.yaml")
    write(tmp_path, GOOD, "f12.yaml")
    assert "too many includes" in str(faults(tmp_path, "include: f0.yaml\n")[0])


# Overrides


def test_overrides_win_and_are_validated_like_the_file(tmp_path: Path) -> None:
    made = loaded(
        tmp_path, GOOD, ("serve.context=65536", "serve.ready_timeout=15m", "host.arch=x86_64")
    )
    assert made.recipe.serve.context == 65536
    assert made.recipe.serve.ready_timeout == 900
    assert made.recipe.host.arch == "x86_64"
    assert made.origin("serve", "context").file == "--set serve.context"
    assert made.origin("serve", "command").line == 11


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("serve.contxt=1", "--set serve.contxt: unknown key serve.contxt (did you mean context?)"),
        ("serve.context=x", "--set serve.context: serve.context: 'x' is text, a number is wanted"),
        ("serve.context", "--set serve.context: this is not KEY=VALUE (write --set KEY.KEY=VALUE"),
        ("=1", "--set =1: this is not KEY=VALUE"),
        ("serve..x=1", "--set serve..x=1: this is not KEY=VALUE"),
        ("include=x.yaml", "--set include: include cannot be set here"),
        ("name.x=1", "--set name.x: name is the text 'small', not a map (--set name=VALUE)"),
        ("serve.vars=[", "--set serve.vars: expected the node content"),
        ("serve.vars.x=a: b: c", "--set serve.vars.x: a colon and a space make a key"),
        ("weights.model.path=*.gguf", "--set weights.model.path: *.gguf names no anchor (put text"),
        ("name=!x y", "--set name: tags such as !x are not used here"),
        ("name=a\n---\nb", "--set name: a second YAML document starts here"),
        ("serve.vars={a: 1, a: 2}", "--set serve.vars: the key 'a' stands here again (given twice)"),
        ("serve=null", "serve is missing (it is a map with command, host,"),
        ("name='a\0b'", "--set name: the character U+0000 may not stand in YAML"),
    ],
)  # fmt: skip
def test_a_wrong_override(tmp_path: Path, override: str, wanted: str) -> None:
    assert wanted in one(tmp_path, GOOD, (override,))


def test_a_list_cannot_be_indexed(tmp_path: Path) -> None:
    found = one(tmp_path, GOOD + "probe: {suites: [facts]}\n", ("probe.suites.0=facts",))
    assert found == (
        "--set probe.suites.0: probe.suites is a list, and a list cannot be indexed "
        "(set the whole list: --set probe.suites='[...]')"
    )


def test_an_override_deletes_with_null_and_merges_maps(tmp_path: Path) -> None:
    text = GOOD + "  port: 1\n  vars: {a: 1, b: 2}\n"
    made = loaded(tmp_path, text, ("serve.port=", "serve.vars={b: null, c: 3}"))
    assert made.recipe.serve.port == 8080
    assert made.recipe.serve.vars == {"a": 1, "c": 3}


def test_a_missing_key_is_placed_in_the_file_even_beside_an_override(tmp_path: Path) -> None:
    text = changed("engine: llama.cpp\n", "")
    assert one(tmp_path, text, ("serve.port=1",)).startswith("r.yaml:1:1: engine is missing")


# The model


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        ("context: 2048", "contxt: 2048", "r.yaml:10:3: unknown key serve.contxt (did you mean context?)"),
        ("name: small", "nam: small", "r.yaml:2:1: unknown key nam (did you mean name?)"),
        ("context: 2048", "context: 2048\n  zzz: 1", "r.yaml:11:3: unknown key serve.zzz (serve takes command,"),
        ("schema: 1", "schema: 2", "r.yaml:1:9: schema: the number 2 is not 1"),
        ("schema: 1", 'schema: "1"', "r.yaml:1:9: schema: the text '1' is not 1"),
        ("schema: 1\n", "", "r.yaml:1:1: schema is missing"),
        ("name: small", "name: true", "r.yaml:2:7: name: true is a boolean here; write 'true' in quotes"),
        ("name: small", "name: [a]", "r.yaml:2:7: name: a list stands where text is wanted"),
        ("name: small", "name: Small One", "r.yaml:2:7: name: a name has lower-case letters"),
        ("llama.cpp", "llama.ccp", "r.yaml:3:9: engine: the text 'llama.ccp' is not one of llama.cpp, vllm (did you mean llama.cpp?)"),
        ("context: 2048", "context: lots", "r.yaml:10:12: serve.context: 'lots' is text, a number is wanted"),
        ("context: 2048", "context: 0", "r.yaml:10:12: serve.context: the number 0 is too small; at least 1"),
        ("context: 2048", "context: 2.5", "r.yaml:10:12: serve.context: the number 2.5 stands where a whole number is wanted"),
        ("context: 2048", "context: .inf", "r.yaml:10:12: serve.context:"),
        ("context: 2048", "context: .nan", "r.yaml:10:12: serve.context:"),
        ("context: 2048", f"context: {10**80}", "is too large; at most"),
        ("context: 2048", "context: 10\n  context_max: 5", "r.yaml:10:12: serve.context: context 10 is above"),
        ("context: 2048", "flash_attn: true\n  context: 1", "r.yaml:10:15: serve.flash_attn: the boolean true is not one of on, off, auto"),
        ("context: 2048", "ready_timeout: 15\n  context: 1", "'15' is not a duration; write a unit"),
        ("context: 2048", "ready_timeout: 0s\n  context: 1", "'0s' is not above 0"),
        ("context: 2048", "ready_timeout: 999999999h\n  context: 1", "is not above 0 and at most a year"),
        ("context: 2048", "vars: {x: .inf}\n  context: 1", "r.yaml:10:13: serve.vars.x: .inf is not a finite number"),
        ("context: 2048", "env: {1A: x}\n  context: 1", "r.yaml:10:9: serve.env.1A: a name has letters"),
        ("context: 2048", "env: {A: true}\n  context: 1", "r.yaml:10:12: serve.env.A: true is a boolean"),
        ("context: 2048", "env: [A]\n  context: 1", "r.yaml:10:8: serve.env: a list stands where a map"),
        ("name: small", "name: small\nhost: {memory_size: 12 parsecs}", "'12 parsecs' is not a size"),
        ("name: small", "name: small\nhost: {compute_capability: 12.1}", 'quote it: "12.1"'),
        ("name: small", "name: small\nhost: 5", "r.yaml:3:7: host: the number 5 stands where a map is wanted"),
        ("name: small", "name: small\nbuild: {cuda: {version: 13.0}}", 'r.yaml:3:25: build.cuda.version: the version 13.0 is read as a number; quote it: "13.0"'),
        ("name: small", "name: small\nbuild: {cmake: {A B: 1}}", "r.yaml:3:17: build.cmake.A B: a name has letters"),
        ("name: small", "name: small\nbuild: {cmake: {A: [1]}}", "r.yaml:3:20: build.cmake.A: a CMake definition is text"),
        ("name: small", "name: small\nprobe: {suites: []}", "a list with nothing in it; at least 1 wanted"),
        ("name: small", "name: small\nprobe: {suites: [fatcs]}", "probe.suites[0]: the text 'fatcs' is not"),
        ("name: small", "name: small\nprobe: {facts: {questions: [{ask: x}]}}", "r.yaml:3:29: probe.facts.questions[0].answers is missing"),
        ("name: small", "name: small\nprobe: {facts: {questions: [{ask: x, answers: ['.']}]}}", "anything would match"),
        ("8a8d0bcc4d5fdf024c457526245bec4bc3a12adc", "8a8d0bcc", "r.yaml:6:11: source.commit: commit '8a8d0bcc' is abbreviated"),
        ("8a8d0bcc4d5fdf024c457526245bec4bc3a12adc", "main", "r.yaml:6:11: source.commit: commit 'main' is malformed"),
        ("  commit: 8a8d0bcc4d5fdf024c457526245bec4bc3a12adc\n", "", "r.yaml:4:1: source: a git source needs a commit"),
        ("git: https://example.org/engine.git", "git: https://u:secret@example.org/e", "may not stand in a recipe's URL"),
        ("git: https://example.org/engine.git", "gti: https://example.org/engine.git", "r.yaml:5:3: unknown key source.gti (did you mean git?)"),
        ("{path: model.gguf}", "{path: a, url: b}", "r.yaml:8:3: weights.model: give exactly one of hub, pypi, url and path"),
        ("{path: model.gguf}", "{hub: nobody, files: '*'}", "r.yaml:8:16: weights.model.hub: write owner/name"),
        ("{path: model.gguf}", "{hub: a/b, files: ../x}", "weights.model.files: the path must stay inside"),
        ("{path: model.gguf}", "5", "r.yaml:8:10: weights.model: the number 5 stands where a map is wanted"),
        ("weights:\n  model: {path: model.gguf}\n", "", "r.yaml:1:1: weights is missing (it is a map with model, drafter, projector)"),
        ("engine: llama.cpp", "engine: vllm", "r.yaml:5:3: source: engine vllm takes image and container, not source"),
    ],
)  # fmt: skip
def test_one_mistake_gives_one_message_at_its_place(
    tmp_path: Path, old: str, new: str, wanted: str
) -> None:
    found = one(tmp_path, changed(old, new))
    assert wanted in found
    assert "secret" not in found


def test_commit_of_digits_alone_stays_text(tmp_path: Path) -> None:
    commit = "0123456789" * 4
    made = loaded(tmp_path, changed("8a8d0bcc4d5fdf024c457526245bec4bc3a12adc", commit))
    assert made.recipe.source is not None
    assert made.recipe.source.commit == commit
    exponent = "1234567e" + "8" * 32
    made = loaded(tmp_path, changed("8a8d0bcc4d5fdf024c457526245bec4bc3a12adc", exponent))
    assert made.recipe.source is not None
    assert made.recipe.source.commit == exponent


def test_words_of_yaml_1_1_stay_words(tmp_path: Path) -> None:
    text = changed("context: 2048", "context: 1\n  flash_attn: on\n  vars: {a: yes, b: off}")
    serve = loaded(tmp_path, text).recipe.serve
    assert serve.flash_attn == "on"
    assert serve.vars == {"a": "yes", "b": "off"}


def test_rules_over_several_keys_speak_beside_other_faults(tmp_path: Path) -> None:
    text = changed("context: 2048", "context: 10\n  context_max: 5\n  port: x\n  slots: 0\n  zz: 1")
    found = lines(faults(tmp_path, text), tmp_path)
    assert [line.split(":")[1] for line in found] == ["10", "12", "13", "14"]


def test_a_misspelled_key_is_judged_as_the_key_that_was_meant(tmp_path: Path) -> None:
    text = changed("  command: |\n", "  comand: |\n").replace("serve.context", "serve.contxt")
    found = lines(faults(tmp_path, text), tmp_path)
    assert found[0].startswith("r.yaml:11:3: unknown key serve.comand (did you mean command?)")
    assert found[1].startswith("r.yaml:13:11: 'serve.contxt' is not defined")
    assert len(found) == 2


def test_template_faults_come_with_the_others(tmp_path: Path) -> None:
    text = changed("-c {{ serve.context }}", "-c {{ serve.contxt }} {{ oops }}\n    '{{ server }}")
    found = lines(faults(tmp_path, "zzz: 1\n" + text), tmp_path)
    assert [line.split(": ")[0] for line in found] == ["r.yaml:1:1", "r.yaml:14:11", "r.yaml:14:30"]


def test_messages_never_carry_control_characters(tmp_path: Path) -> None:
    text = changed("name: small", 'name: "\\e[31m\\u202e\\n"\n"\\e]0;x\\a": 1')
    for fault in faults(tmp_path, text):
        assert str(fault).isprintable()


MODELS = [v for v in vars(model).values() if isinstance(v, type) and issubclass(v, BaseModel)]


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_every_required_key_has_a_stand_in_that_is_right(kind: type[BaseModel]) -> None:
    required = [f.alias or n for n, f in kind.model_fields.items() if f.is_required()]
    data = {key: stand_in(kind, key) for key in required}
    try:
        kind.model_validate(data)
    except ValidationError as error:
        wrong = {e["loc"][0] for e in error.errors() if e["loc"]}
        assert not wrong, f"explain.STAND_INS needs {kind.__name__}.{wrong.pop()}"


# Finding


def test_find_takes_names_and_paths(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, "glm-text.yaml")
    write(tmp_path, "a: 1\n", "_part.yaml")
    write(tmp_path, "a: 1\n", ".hidden.yaml")
    assert names(tmp_path) == ("glm-text",)
    assert find("glm-text", tmp_path) == path
    assert find(str(path), Path("/nowhere")) == path
    assert load(find("glm-text", tmp_path)).recipe.name == "small"


@pytest.mark.parametrize("name", ["glm-txt", "./glm-txt.yaml", "glm-txt.yml", "some/glm_text.yaml"])
def test_an_absent_recipe_names_near_ones(tmp_path: Path, name: str) -> None:
    write(tmp_path, GOOD, "glm-text.yaml")
    with pytest.raises(NotFound) as caught:
        find(name, tmp_path)
    assert caught.value.hint == "did you mean glm-text?"
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("name", ["", "..", "x\0y", "\x1b[31m", "a" * 300, "/", "."])
def test_absurd_names_are_not_found(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotFound) as caught:
        load(find(name, tmp_path)) if name != "/" else find("/nonexistent/", tmp_path)
    assert caught.value.what.isprintable()
