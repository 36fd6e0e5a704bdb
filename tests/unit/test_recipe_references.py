"""References to images: the grammar of the OCI distribution specification, and what breaks it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bakehouse.recipe import references
from bakehouse.recipe.references import BadReference, parse, reference
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


def test_reference_valid_ones_are_accepted(tmp_path: Path) -> None:
    for text in GOOD:
        assert reference(text) == text
        assert re.fullmatch(references.PATTERN, text)
    made = loaded(tmp_path, RECIPE.replace("REF", f"'{GOOD[1]}'"))
    assert made.recipe.images == {"image": {"x86_64": GOOD[1]}}


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
    assert {text: (parse(text).name, parse(text).wanted) for text in rows} == rows


BAD = [
    ("UPPER/x:1", "upper-case letters in the repository 'UPPER/x'", "write upper/x:1"),
    ("h:99999/x:1", "the port '99999'", ""),
    ("h:0/x:1", "the port '0'", ""),
    ("h:/x:1", "no port after the colon", ""),
    (":5000/x:1", "no registry before the port", ""),
    ("a_b.c/x:1", "the registry 'a_b.c', which is not a host name", ""),
    ("[::g]:1/x", "not an IPv6 address in brackets", ""),
    ("a/b:", "no tag after the colon", "write a/b:TAG"),
    ("a/b:-t", "a tag that begins with '-'", ""),
    ("a/b:v1/x", "'/' in the tag 'v1/x'", ""),
    (f"a/b:{'t' * 129}", "a tag of 129 characters; the maximum is 128", ""),
    ("a/b@sha256:abc", "a digest of 3 characters", ""),
    (f"a/b@sha256:{HEX}0", "a digest of 65 characters", ""),
    (f"a/b@sha256:{HEX.upper()}", "upper-case letters in its digest", f"write a/b@sha256:{HEX}"),
    (f"a/b@sha256:{'g' * 64}", "64 hex digits", ""),
    (f"a/b@sha512:{HEX}{HEX}", "is sha256: and 64 hex digits", ""),
    ("a/b@", "'' as a digest", ""),
    ("user@ghcr.io/a:1", "'ghcr.io/a:1' as a digest", ""),
    ("sha256:abc", "the id of a local image has 64", ""),
    (HEX, "is an image id, not a name", f"write sha256:{HEX}"),
    ("a b:1", "contains a space", ""),
    (" a:1", "contains a space", "write a:1"),
    ("a\tb", "contains a tab", ""),
    ("a/b:1\nc", "contains a line break", ""),
    ("a/b\x1b[31m", "which no reference may", ""),
    ("а/b:1", "which no reference may", ""),
    ("https://ghcr.io/x/y:1", "begins with 'https://': a reference is not a URL",
     "write ghcr.io/x/y:1"),
    ("docker:///x:1", "begins with 'docker:///'", "write x:1"),
    ("a//b", "one '/' too many", "write a/b"),
    ("ghcr.io/", "has no repository", ""),
    (":1", "has no repository", ""),
    ("a/../b:1", "a misplaced '.', '_' or '-'", ""),
    ("a___b", "a misplaced '.', '_' or '-'", ""),
    ("a/{{ x }}", "'{', '}' in the repository", ""),
    (f"a/{'b' * 256}", "more than 255 characters", ""),
]  # fmt: skip


def test_reference_errors_are_one_fault_each_at_their_place(tmp_path: Path) -> None:
    odd = []
    for text, said, hint in BAD:
        written = text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n")
        quoted = f'"{written}"'.replace("\x1b", "\\e")
        (one,) = lines(faults(tmp_path, RECIPE.replace("REF", quoted)), tmp_path)
        parts = ("r.yaml:5:17: image.ref.x86_64: '", said, f"({hint or references.FORMS})")
        if not all(part in one for part in parts):
            odd.append(one)
    assert odd == []


def test_reference_errors_are_all_listed() -> None:
    with pytest.raises(BadReference) as caught:
        reference("https://GHCR.io/Some//x:")
    for said in ("not a URL", "upper-case", "'/' too many", "after the colon"):
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
def test_reference_errors_do_not_make_a_map_empty(key: str, text: str, tmp_path: Path) -> None:
    engine = "vllm" if key == "image" else "llama.cpp"
    source = "" if key == "image" else (
        "source: {git: 'https://h/x', commit: 8a8d0bcc4d5fdf024c457526245bec4bc3a12adc}\n"
    )  # fmt: skip
    recipe = RECIPE.replace("image:\n  ref: {x86_64: REF}\n", text + source)
    found = faults(tmp_path, recipe.replace("engine: vllm", f"engine: {engine}"))
    assert len(found) == 2, found
    assert not any("nothing in it" in str(one) for one in found)


def test_reference_map_that_is_empty_is_refused(tmp_path: Path) -> None:
    (one,) = faults(tmp_path, RECIPE.replace("{x86_64: REF}", "{}"))
    assert "a map with nothing in it" in str(one)


TEXTS = st.text(alphabet="aA0/:@._-[] \n$", max_size=24) | st.text(max_size=12)


@given(TEXTS)
def test_reference_rules_pattern_and_parser_agree(text: str) -> None:
    fits = re.fullmatch(references.PATTERN, text) is not None
    right = not list(references.faults(text))
    if right:
        assert fits
        at = parse(text)
        assert at.repository
        assert re.fullmatch("[a-z0-9._/-]+", at.repository)
    elif fits:  # what a pattern for an editor does not see
        said = " ".join(references.faults(text))
        assert "port" in said or "IPv6" in said or "255" in said or "hex digits" in said
