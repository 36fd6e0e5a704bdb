# ruff: noqa: E501 - tables of texts and what is said about them
"""Includes, overrides, the model's faults: each at its place, each once, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from bakehouse.errors import NotFound
from bakehouse.recipe.loader import find, load, names
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


def test_include_merges_maps_replaces_lists_and_deletes_nulls(tmp_path: Path) -> None:
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


def test_include_order_later_wins_and_the_file_over_all(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "a.yaml")
    write(tmp_path, "name: b\nserve: {port: 1, slots: 2}\n", "b.yaml")
    made = loaded(tmp_path, "include: [a.yaml, b.yaml]\nserve: {slots: 3}\n")
    assert (made.recipe.name, made.recipe.serve.port, made.recipe.serve.slots) == ("b", 1, 3)


def test_include_null_in_a_later_file_deletes(tmp_path: Path) -> None:
    write(tmp_path, GOOD + "  port: 1\n", "a.yaml")
    write(tmp_path, "serve: {port: null}\n", "b.yaml")
    assert loaded(tmp_path, "include: [a.yaml, b.yaml]\n").recipe.serve.port == 8080


def test_include_is_relative_to_its_file(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "deep/er/base.yaml")
    write(tmp_path, "include: er/base.yaml\n", "deep/mid.yaml")
    made = loaded(tmp_path, "include: deep/mid.yaml\n")
    assert [p.name for p in made.files] == ["r.yaml", "mid.yaml", "base.yaml"]


def test_include_diamond_is_allowed(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "d.yaml")
    write(tmp_path, "include: d.yaml\n", "b.yaml")
    write(tmp_path, "include: d.yaml\nname: c\n", "c.yaml")
    assert loaded(tmp_path, "include: [b.yaml, c.yaml]\n").recipe.name == "c"


def test_include_loop_names_its_chain(tmp_path: Path) -> None:
    write(tmp_path, "include: b.yaml\n", "a.yaml")
    write(tmp_path, "name: x\ninclude:\n  - r.yaml\n", "b.yaml")
    place, _, chain = one(tmp_path, "include: a.yaml\n").partition(": include loop: ")
    assert place == "b.yaml:3:5"
    assert [Path(p).name for p in chain.split(" -> ")] == ["r.yaml", "a.yaml", "b.yaml", "r.yaml"]


def test_include_loop_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link.yaml").symlink_to(tmp_path / "r.yaml")
    assert "include loop" in one(tmp_path, "include: link.yaml\n")


def test_include_not_found_names_its_chain(tmp_path: Path) -> None:
    write(tmp_path, "include: gone.yaml\n", "a.yaml")
    found = one(tmp_path, "include: a.yaml\nname: x\n")
    assert found.startswith("a.yaml:1:10: file 'gone.yaml' not found, included by r.yaml -> ")


def test_include_broken_hides_no_other_faults(tmp_path: Path) -> None:
    write(tmp_path, "a: [\n", "a.yaml")
    write(tmp_path, "b: {b: 1, b: 2}\n", "b.yaml")
    text = "include: [a.yaml, b.yaml]\nserve: {prt: 1, slots: many}\n"
    starts = [line.split(": ")[0] for line in lines(faults(tmp_path, text), tmp_path)]
    assert starts[0].startswith("a.yaml:")
    assert starts[1:] == ["b.yaml:1:1", "b.yaml:1:11", "r.yaml:2:9", "r.yaml:2:24"]


def test_include_must_be_a_path(tmp_path: Path) -> None:
    write(tmp_path, "name: x\n", "a.yaml")
    for value in ("5", "{a: b}", "[[a]]", "''", "[a.yaml, true]", '"\\0"'):
        found = lines(faults(tmp_path, f"include: {value}\n"), tmp_path)
        assert found, value
        assert all(line.startswith("r.yaml:1:") for line in found), found


def test_include_count_is_limited(tmp_path: Path) -> None:
    for i in range(12):
        write(tmp_path, f"include: [f{i + 1}.yaml, f{i + 1}.yaml]\n", f"f{i}.yaml")
    write(tmp_path, GOOD, "f12.yaml")
    assert "too many includes" in str(faults(tmp_path, "include: f0.yaml\n")[0])


# Overrides


def test_set_wins_and_is_validated(tmp_path: Path) -> None:
    made = loaded(
        tmp_path, GOOD, ("serve.context=65536", "serve.ready_timeout=15m", "host.arch=x86_64")
    )
    assert made.recipe.serve.context == 65536
    assert made.recipe.serve.ready_timeout == 900
    assert made.recipe.host.arch == "x86_64"
    assert made.origin("serve", "context").file == "--set serve.context"
    assert made.origin("serve", "command").line == 11


WRONG_OVERRIDES = {
    'serve.contxt=1': '--set serve.contxt: unknown key serve.contxt (did you mean context?)',
    'serve.context=x': "--set serve.context: serve.context: expected a number, got the text 'x'",
    'serve.context': '--set serve.context: this is not KEY=VALUE (write --set KEY.KEY=VALUE',
    '=1': '--set =1: this is not KEY=VALUE',
    'serve..x=1': '--set serve..x=1: this is not KEY=VALUE',
    'include=x.yaml': '--set include: --set cannot change include',
    'name.x=1': "--set name.x: name is the text 'small', not a map (--set name=VALUE)",
    'serve.vars=[': '--set serve.vars: expected the node content',
    'serve.vars.x=a: b: c': '--set serve.vars.x: a colon and a space make a key',
    'weights.model.path=*.gguf': "--set weights.model.path: found undefined alias '.gguf' (quote text",
    'name=!x y': '--set name: tags such as !x are not supported',
    'name=a\n---\nb': '--set name: a second YAML document starts here',
    'serve.vars={a: 1, a: 2}': "--set serve.vars: duplicate key 'a' (given twice)",
    'serve=null': 'serve is missing (it is a map with command, host,',
    "name='a\x00b'": '--set name: YAML does not allow the character U+0000',
}  # fmt: skip


def test_set_names_what_is_wrong(tmp_path: Path) -> None:
    found = {text: one(tmp_path, GOOD, (text,)) for text in WRONG_OVERRIDES}
    assert not {t: found[t] for t, wanted in WRONG_OVERRIDES.items() if wanted not in found[t]}


def test_set_cannot_index_a_list(tmp_path: Path) -> None:
    found = one(tmp_path, GOOD + "probe: {suites: [facts]}\n", ("probe.suites.0=facts",))
    assert found == (
        "--set probe.suites.0: probe.suites is a list, and a list cannot be indexed "
        "(set the whole list: --set probe.suites='[...]')"
    )


def test_set_null_deletes_and_maps_merge(tmp_path: Path) -> None:
    text = GOOD + "  port: 1\n  vars: {a: 1, b: 2}\n"
    made = loaded(tmp_path, text, ("serve.port=", "serve.vars={b: null, c: 3}"))
    assert made.recipe.serve.port == 8080
    assert made.recipe.serve.vars == {"a": 1, "c": 3}


def test_set_does_not_move_a_missing_key(tmp_path: Path) -> None:
    text = changed("engine: llama.cpp\n", "")
    assert one(tmp_path, text, ("serve.port=1",)).startswith("r.yaml:1:1: engine is missing")


# The model


FAULTS = [
    ('context: 2048', 'contxt: 2048', 'r.yaml:10:3: unknown key serve.contxt (did you mean context?)'),
    ('name: small', 'nam: small', 'r.yaml:2:1: unknown key nam (did you mean name?)'),
    ('context: 2048', 'context: 2048\n  zzz: 1', 'r.yaml:11:3: unknown key serve.zzz (serve takes command,'),
    ('schema: 1', 'schema: 2', 'r.yaml:1:9: schema: the number 2 is not 1'),
    ('schema: 1', 'schema: "1"', "r.yaml:1:9: schema: the text '1' is not 1"),
    ('schema: 1\n', '', 'r.yaml:1:1: schema is missing'),
    ('name: small', 'name: true', "r.yaml:2:7: name: true is a boolean; write 'true' in quotes"),
    ('name: small', 'name: [a]', 'r.yaml:2:7: name: expected text, got a list'),
    ('name: small', 'name: Small One', 'r.yaml:2:7: name: a name has lower-case letters'),
    ('llama.cpp', 'llama.ccp', "r.yaml:3:9: engine: the text 'llama.ccp' is not one of llama.cpp, vllm (did you mean llama.cpp?)"),
    ('context: 2048', 'context: lots', "r.yaml:10:12: serve.context: expected a number, got the text 'lots'"),
    ('context: 2048', 'context: 0', 'r.yaml:10:12: serve.context: the number 0 is too small; at least 1'),
    ('context: 2048', 'context: 2.5', 'r.yaml:10:12: serve.context: expected a whole number, got the number 2.5'),
    ('context: 2048', 'context: .inf', 'r.yaml:10:12: serve.context:'),
    ('context: 2048', 'context: .nan', 'r.yaml:10:12: serve.context:'),
    ('context: 2048', 'context: 100000000000000000000000000000000000000000000000000000000000000000000000000000000', 'is too large; at most'),
    ('context: 2048', 'context: 10\n  context_max: 5', 'r.yaml:10:12: serve.context: context 10 is above'),
    ('context: 2048', 'flash_attn: true\n  context: 1', 'r.yaml:10:15: serve.flash_attn: the boolean true is not one of on, off, auto'),
    ('context: 2048', 'ready_timeout: 15\n  context: 1', "'15' is not a duration; write a unit"),
    ('context: 2048', 'ready_timeout: 0s\n  context: 1', "'0s' is not above 0"),
    ('context: 2048', 'ready_timeout: 999999999h\n  context: 1', 'is not above 0 and at most a year'),
    ('context: 2048', 'vars: {x: .inf}\n  context: 1', 'r.yaml:10:13: serve.vars.x: .inf is not a finite number'),
    ('context: 2048', 'env: {1A: x}\n  context: 1', 'r.yaml:10:9: serve.env.1A: a name has letters'),
    ('context: 2048', 'env: {A: true}\n  context: 1', 'r.yaml:10:12: serve.env.A: true is a boolean'),
    ('context: 2048', 'env: [A]\n  context: 1', 'r.yaml:10:8: serve.env: expected a map, got a list'),
    ('name: small', 'name: small\nhost: {memory_size: 12 parsecs}', "'12 parsecs' is not a size"),
    ('name: small', 'name: small\nhost: {compute_capability: 12.1}', 'this version is read as the number 12.1; quote it'),
    ('name: small', 'name: small\nhost: 5', 'r.yaml:3:7: host: expected a map, got the number 5'),
    ('name: small', 'name: small\nbuild: {cuda: {version: 13.0}}', 'r.yaml:3:25: build.cuda.version: this version is read as the number 13.0; quote it'),
    ('name: small', 'name: small\nbuild: {cmake: {A B: 1}}', 'r.yaml:3:17: build.cmake.A B: a name has letters'),
    ('name: small', 'name: small\nbuild: {cmake: {A: [1]}}', 'r.yaml:3:20: build.cmake.A: a CMake definition is text'),
    ('name: small', 'name: small\nprobe: {suites: []}', 'a list with too few items; at least 1 required'),
    ('name: small', 'name: small\nprobe: {suites: [fatcs]}', "probe.suites[0]: the text 'fatcs' is not"),
    ('name: small', 'name: small\nprobe: {facts: {questions: [{ask: x}]}}', 'r.yaml:3:29: probe.facts.questions[0].answers is missing'),
    ('name: small', "name: small\nprobe: {facts: {questions: [{ask: x, answers: ['.']}]}}", 'anything would match'),
    ('8a8d0bcc4d5fdf024c457526245bec4bc3a12adc', '8a8d0bcc', "r.yaml:6:11: source.commit: commit '8a8d0bcc' is abbreviated"),
    ('8a8d0bcc4d5fdf024c457526245bec4bc3a12adc', 'main', "r.yaml:6:11: source.commit: commit 'main' is malformed"),
    ('  commit: 8a8d0bcc4d5fdf024c457526245bec4bc3a12adc\n', '', 'r.yaml:4:1: source: a git source needs a commit'),
    ('git: https://example.org/engine.git', 'git: https://u:secret@example.org/e', 'must not contain a user, password or token'),
    ('git: https://example.org/engine.git', 'gti: https://example.org/engine.git', 'r.yaml:5:3: unknown key source.gti (did you mean git?)'),
    ('{path: model.gguf}', '{path: a, url: b}', 'r.yaml:8:3: weights.model: give exactly one of hub, pypi, url and path'),
    ('{path: model.gguf}', "{hub: nobody, files: '*'}", 'r.yaml:8:16: weights.model.hub: write owner/name'),
    ('{path: model.gguf}', '{hub: a/b, files: ../x}', 'weights.model.files: the path must stay inside'),
    ('{path: model.gguf}', '5', 'r.yaml:8:10: weights.model: expected a map, got the number 5'),
    ('weights:\n  model: {path: model.gguf}\n', '', 'r.yaml:1:1: weights is missing (it is a map with model, drafter, projector)'),
    ('engine: llama.cpp', 'engine: vllm', 'r.yaml:5:3: source: engine vllm takes image and container, not source'),
    ('8a8d0bcc4d5fdf024c457526245bec4bc3a12adc', '1234567', 'r.yaml:6:11: source.commit: this is read as the number 1234567; quote it'),
    ('8a8d0bcc4d5fdf024c457526245bec4bc3a12adc', '1234567890123456789012345678901234567890', 'quote it to make it text'),
    ('8a8d0bcc4d5fdf024c457526245bec4bc3a12adc', '0123456789012345678901234567890123456789', 'has leading zeros (quote it: '),
]  # fmt: skip
"""Text to replace in a good recipe, its replacement, and the one fault that follows."""


def test_recipe_fault_is_reported_once_at_its_place(tmp_path: Path) -> None:
    found = [(wanted, one(tmp_path, changed(old, new))) for old, new, wanted in FAULTS]
    assert not [(wanted, line) for wanted, line in found if wanted not in line]
    assert "secret" not in str(found)


def test_recipe_text_of_digits_may_be_quoted(tmp_path: Path) -> None:
    commit = "0123456789" * 4
    made = loaded(tmp_path, changed("8a8d0bcc4d5fdf024c457526245bec4bc3a12adc", f"'{commit}'"))
    assert made.recipe.source is not None
    assert made.recipe.source.commit == commit
    env = loaded(tmp_path, GOOD + "  env: {A: 1, B: x}\n").recipe.serve.env
    assert env == {"A": "1", "B": "x"}


def test_recipe_on_and_yes_are_words(tmp_path: Path) -> None:
    text = changed("context: 2048", "context: 1\n  flash_attn: on\n  vars: {a: yes, b: off}")
    serve = loaded(tmp_path, text).recipe.serve
    assert serve.flash_attn == "on"
    assert serve.vars == {"a": "yes", "b": "off"}


def test_recipe_reports_field_faults_together_and_rules_after_them(tmp_path: Path) -> None:
    text = changed("context: 2048", "context: 10\n  context_max: 5\n  port: x\n  slots: 0\n  zz: 1")
    found = lines(faults(tmp_path, text), tmp_path)
    assert [line.split(":")[1] for line in found] == ["12", "13", "14"]


def test_recipe_misspelled_key_is_not_missing_too(tmp_path: Path) -> None:
    found = one(tmp_path, changed("  command: |\n", "  comand: |\n"))
    assert found.startswith("r.yaml:11:3: unknown key serve.comand (did you mean command?)")


def test_recipe_reports_template_syntax_with_other_faults(tmp_path: Path) -> None:
    text = "zzz: 1\n" + changed("-c {{ serve.context }}", "-c {{ serve.context | zz }}")
    found = lines(faults(tmp_path, text), tmp_path)
    assert [line.split(": ")[0] for line in found] == ["r.yaml:1:1", "r.yaml:14:27"]


def test_recipe_command_is_rendered_at_load(tmp_path: Path) -> None:
    assert loaded(tmp_path, GOOD).command == (
        "/build/bin/llama-server", "-m", "/weights/model/model.gguf", "-c", "2048",
    )  # fmt: skip


def test_recipe_messages_escape_control_characters(tmp_path: Path) -> None:
    text = changed("name: small", 'name: "\\e[31m\\u202e\\n"\n"\\e]0;x\\a": 1')
    for fault in faults(tmp_path, text):
        assert str(fault).isprintable()


# Finding


def test_recipe_is_found_by_name_or_path(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, "glm-text.yaml")
    write(tmp_path, "a: 1\n", "_part.yaml")
    write(tmp_path, "a: 1\n", ".hidden.yaml")
    assert names(tmp_path) == ("glm-text",)
    assert find("glm-text", tmp_path) == path
    assert find(str(path), Path("/nowhere")) == path
    assert load(find("glm-text", tmp_path)).recipe.name == "small"


def test_recipe_not_found_suggests_similar_names(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "glm-text.yaml")
    for name in ("glm-txt", "./glm-txt.yaml", "glm-txt.yml", "some/glm_text.yaml"):
        with pytest.raises(NotFound) as caught:
            find(name, tmp_path)
        assert caught.value.hint == "did you mean glm-text?"
        assert caught.value.exit_code == 3


def test_recipe_absurd_names_are_not_found(tmp_path: Path) -> None:
    for name in ("", "..", "x\0y", "\x1b[31m", "a" * 300, "/nonexistent/", "."):
        with pytest.raises(NotFound) as caught:
            find(name, tmp_path)
        assert caught.value.what.isprintable()
