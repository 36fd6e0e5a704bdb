"""References to images: the grammar of the OCI distribution specification, and what breaks it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bakehouse.recipe import types
from bakehouse.recipe.types import BadReference, parse, reference
from tests.support.recipe_text import faults, lines, loaded

HEX = "0123456789abcdef" * 4
RECIPE = """\
schema: 1
name: small
engine: vllm
image:
  ref: {x86_64: REF}
weights:
  model: {path: model}
serve:
  command: "{{ server }} serve {{ weights.model.path }}"
"""
GOOD = (
    "debian", "vllm/vllm-openai:muse-glimmer-arm64-cu130", "ghcr.io/o/l:x", "localhost/a",
    "localhost:5000/a", "127.0.0.1:5000/a/b:t", "GHCR.io/a/b", "host:1/a", "[::1]:5000/a/b:1",
    f"nvcr.io/a@sha256:{HEX}", f"a/b:t@sha256:{HEX}", f"sha256:{HEX}", "a__b/c--d.e:_x", "sha256",
    "a/sha256:1", f"h:65535/{'a' * 200}:{'T' * 128}",
)  # fmt: skip


def test_reference_accepts_the_grammar(tmp_path: Path) -> None:
    for text in GOOD:
        assert reference(text) == text
        assert re.fullmatch(types.PATTERN, text), text
        made = loaded(tmp_path, RECIPE.replace("REF", f"'{text}'"))
        assert made.recipe.images == {"image": {"x86_64": text}}


def test_reference_is_parsed_as_docker_does() -> None:
    rows = {
        "debian": ("docker.io/library/debian", "latest"),
        "index.docker.io/debian": ("docker.io/library/debian", "latest"),
        "vllm/vllm-openai:v1": ("docker.io/vllm/vllm-openai", "v1"),
        "ghcr.io/o/l:x": ("ghcr.io/o/l", "x"),
        "localhost:5000/a": ("localhost:5000/a", "latest"),
        "127.0.0.1:5000/a/b:t": ("127.0.0.1:5000/a/b", "t"),
        f"nvcr.io/a@sha256:{HEX}": ("nvcr.io/a", f"sha256:{HEX}"),
        f"a/b:t@sha256:{HEX}": ("docker.io/a/b", f"sha256:{HEX}"),
    }
    assert {text: (parse(text).name, parse(text).tag_or_digest) for text in rows} == rows


BAD = [
    ("UPPER/x:1", "upper-case letters in the repository 'UPPER/x'", "write upper/x:1"),
    ("h:99999/x:1", "the port '99999'", ""),
    ("h:0/x:1", "the port '0'", ""),
    ("h:/x:1", "the port ''", ""),
    ("host:abc/x:1", "the port 'abc'", ""),
    (":5000/x:1", "the registry ''", ""),
    ("a_b.c/x:1", "the registry 'a_b.c', which is not a host name", ""),
    ("-a.b/x:1", "the registry '-a.b', which is not a host name", ""),
    ("[::g]:1/x", "not an IPv6 address in brackets", ""),
    ("a/b:", "an invalid tag ''", "write a/b:TAG"),
    ("a/b:-t", "an invalid tag '-t'", ""),
    ("a/b:v1/x", "an invalid tag 'v1/x'", ""),
    ("a/b:1:2", "an invalid tag '1:2'", ""),
    (f"a/b:{'t' * 129}", "an invalid tag 'ttt", ""),
    ("a/b@sha256:abc", "with 3 characters after the colon", ""),
    (f"a/b@sha256:{HEX}0", "with 65 characters after the colon", ""),
    (f"a/b@sha256:{HEX.upper()}", "64 lower-case hex digits", f"write a/b@sha256:{HEX}"),
    (f"a/b@sha256:{'g' * 64}", "64 lower-case hex digits", ""),
    (f"a/b@sha512:{HEX}{HEX}", "it is sha256: and 64 lower-case hex digits", ""),
    (f"a/b@{HEX}", "it is sha256: and 64 lower-case hex digits", ""),
    ("a/b@", "the digest ''", ""),
    ("user@ghcr.io/a:1", "the digest 'ghcr.io/a:1'", ""),
    ("sha256:abc", "with 3 characters after the colon", ""),
    (HEX, "is an image's id, not a name", f"write sha256:{HEX}"),
    ("a b:1", "contains a space", ""),
    (" a:1", "contains a space", "write a:1"),
    ("a\tb", "contains a tab", ""),
    ("a/b:1\nc", "contains a line break", ""),
    ("a/b\x1b[31m", "no reference has", ""),
    ("а/b:1", "no reference has", ""),
    ("https://ghcr.io/x/y:1", "begins with 'https://': a reference is not a URL",
     "write ghcr.io/x/y:1"),
    ("docker:///x:1", "begins with 'docker:///'", "write x:1"),
    ("/a/b:1", "an invalid repository", "write a/b:1"),
    ("a//b", "an invalid repository", "write a/b"),
    ("ghcr.io/", "names no repository", ""),
    (":1", "names no repository", ""),
    ("a/../b:1", "an invalid repository", ""),
    ("a/-b", "an invalid repository", ""),
    ("a___b", "an invalid repository", ""),
    ("a/$TAG", "upper-case letters in the repository", ""),
    ("a/{{ x }}", "an invalid repository", ""),
    (f"a/{'b' * 256}", "more than 255 characters", ""),
]  # fmt: skip


def test_reference_fault_is_reported_once_at_its_place(tmp_path: Path) -> None:
    wrong = []
    for text, said, hint in BAD:
        written = text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n")
        quoted = f'"{written}"'.replace("\x1b", "\\e")
        (one,) = lines(faults(tmp_path, RECIPE.replace("REF", quoted)), tmp_path)
        at = one.startswith("r.yaml:5:17: image.ref.x86_64: '")
        if not at or said not in one or f"({hint or types.FORMS})" not in one:
            wrong.append((text, said, one))
    assert not wrong


def test_reference_faults_are_reported_together() -> None:
    with pytest.raises(BadReference) as caught:
        reference("https://GHCR.io/Some//x:")
    for said in ("not a URL", "upper-case", "invalid tag"):
        assert said in str(caught.value)
    assert caught.value.hint == "write GHCR.io/some/x:TAG"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("image", "image:\n  ref: {x86_64: 'a b', aarch64: 'UP/x'}\n"),
        ("build",
         "build: {where: docker, bases: {builder: {x86_64: 'a b'}, runtime: {x86_64: 'a:'}}}\n"),
    ],
)  # fmt: skip
def test_reference_faults_do_not_make_a_map_empty(key: str, text: str, tmp_path: Path) -> None:
    engine = "vllm" if key == "image" else "llama.cpp"
    source = "" if key == "image" else (
        "source: {git: 'https://h/x', commit: 8a8d0bcc4d5fdf024c457526245bec4bc3a12adc}\n"
    )  # fmt: skip
    recipe = RECIPE.replace("image:\n  ref: {x86_64: REF}\n", text + source)
    found = faults(tmp_path, recipe.replace("engine: vllm", f"engine: {engine}"))
    assert len(found) == 2, found
    assert not any("too few" in str(one) for one in found)


def test_reference_map_must_not_be_empty(tmp_path: Path) -> None:
    (one,) = faults(tmp_path, RECIPE.replace("{x86_64: REF}", "{}"))
    assert "a map with too few items" in str(one)


TEXTS = st.text(alphabet="aA0/:@._-[] \n$", max_size=24) | st.text(max_size=12)


@given(TEXTS)
def test_reference_rule_and_pattern_agree(text: str) -> None:
    fits = re.fullmatch(types.PATTERN, text) is not None
    right = not list(types.faults(text))
    if right:
        assert fits
        at = parse(text)
        assert at.repository
        assert re.fullmatch("[a-z0-9._/-]+", at.repository)
    elif fits:  # what a pattern for an editor does not see
        said = " ".join(types.faults(text))
        assert "port" in said or "IPv6" in said or "255" in said or "image's id" in said
