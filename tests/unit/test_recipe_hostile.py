# ruff: noqa: E501 - tables
"""Whatever a file holds: a recipe comes out, or a RecipeError with places. Never anything else."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bakehouse.errors import RecipeError
from bakehouse.recipe.loader import LoadedRecipe, load
from bakehouse.redact import clean
from tests.support.recipe_text import GOOD, write

ANYTHING = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
FULL = (Path(__file__).resolve().parents[2] / "recipes" / "smollm2-cpu.yaml").read_text()


def judged(folder: Path, content: str | bytes, overrides: tuple[str, ...] = ()) -> None:
    path = write(
        folder, content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    )
    try:
        assert isinstance(load(path, overrides), LoadedRecipe)
    except RecipeError as error:
        seen = error.faults
    else:
        return
    assert seen
    for fault in seen:
        assert fault.file
        assert fault.line > 0 or fault.file.startswith("--set")
        assert clean(str(fault), one_line=True) == str(fault)


@ANYTHING
@given(st.binary(max_size=200))
@example(b"\xef\xbb\xbf")
@example(b"\x00")
@example(b"\xff\xfea\x00")
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    judged(tmp_path, content)


@ANYTHING
@given(st.text(st.sampled_from("ab1:-[]{},&*!|>'\"%@`#?~<.\n \t\r\\u08x\u2028\x85é"), max_size=60))
def test_any_text_of_yaml_signs(tmp_path: Path, content: str) -> None:
    judged(tmp_path, content)


PIECES = st.sampled_from([
    "null", "[]", "{}", "true", "0", "-1", "1e999", ".nan", "'", '"', "|", ">", "&a", "*a", "!x",
    "? ", ": ", "\n", "\t", "<<: ", "include: r.yaml\n", "include: [", "{{", "}}", "{% if %}", "#",
    "\\ud800", "\x00", "999999999999999999999999", "- - - ", "a: &b [*b]", "---\n", "%YAML 1.1\n",
    '"\\0"', '"\\ud800"', "1h", "4GiB", "..", "/", "~", "\u2028", "\ud800",
])  # fmt: skip


@ANYTHING
@given(st.lists(st.tuples(st.integers(0, len(FULL)), st.integers(0, 12), PIECES), max_size=4))
def test_a_good_recipe_cut_and_patched(tmp_path: Path, edits: list[tuple[int, int, str]]) -> None:
    text = FULL
    for place, length, piece in edits:
        text = text[:place] + piece + text[place + length :]
    judged(tmp_path, text)


VALUES = st.recursive(
    st.sampled_from(["null", "true", "1", "-1", "1.5", "x", "''", ".inf", "15m", "4GiB", "'{{ x'"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda v: f"[{', '.join(v)}]")
        | st.dictionaries(
            st.sampled_from(["a", "model", "git", "path", "command"]), inner, max_size=3
        ).map(lambda d: "{" + ", ".join(f"{k}: {v}" for k, v in d.items()) + "}")
    ),
    max_leaves=5,
)
KEYS = st.sampled_from([
    "schema", "name", "engine", "source", "source.archive", "source.git", "source.archive.sha256",
    "source.patches", "build", "build.cmake", "build.cmake.X", "build.cuda", "build.targets",
    "weights", "weights.model", "weights.drafter", "serve", "serve.command", "serve.context",
    "serve.port", "serve.env", "serve.vars", "serve.api_key", "serve.ready_timeout", "probe",
    "probe.suites", "probe.facts", "probe.facts.questions", "probe.facts.must_pass", "probe.request",
    "host", "host.memory_size", "image", "container", "secrets", "memory", "zzz", "include", "a.b",
])  # fmt: skip


@ANYTHING
@given(st.lists(st.tuples(KEYS, VALUES), max_size=4))
def test_any_override_of_any_key(tmp_path: Path, pairs: list[tuple[str, str]]) -> None:
    judged(tmp_path, FULL, tuple(f"{key}={value}" for key, value in pairs))


@ANYTHING
@given(st.text(max_size=30))
@example("a=\x00")
@example("a=\ud800")
@example("\x1b=1")
@example("a" * 5000 + "=1")
@example(".".join("a" * 2000) + "=1")
def test_any_override_text(tmp_path: Path, text: str) -> None:
    judged(tmp_path, GOOD, (text,))


@ANYTHING
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_template_in_a_recipe(tmp_path: Path, text: str) -> None:
    quoted = "'" + text.replace("'", "''") + "'"
    judged(tmp_path, GOOD[: GOOD.index("  command")] + f"  command: {quoted}\n")


def test_the_same_file_read_twice_is_the_same(tmp_path: Path) -> None:
    with suppress(RecipeError):
        path = write(tmp_path, FULL)
        assert load(path) == load(path)
