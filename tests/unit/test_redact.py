"""Secrets never leave, and untrusted text never drives a terminal."""

from __future__ import annotations

import json
from urllib.parse import quote

from hypothesis import given
from hypothesis import strategies as st

from bakehouse.redact import HIDDEN, Redactor, clean, secret_values

SECRET = 'p@ss "w\\rd"/1é'


def test_redactor_hides_a_secret_in_every_spelling() -> None:
    rows = [
        SECRET,
        json.dumps({"k": SECRET}),
        f"https://host/?key={quote(SECRET, safe='')}",
        repr([SECRET]),
    ]
    for spelled in rows:
        hidden = Redactor([SECRET]).text(f"before {spelled} after")
        assert HIDDEN in hidden
        assert "ss" not in hidden.replace("https", "")


def test_redactor_hides_the_longest_secret_whole() -> None:
    assert Redactor(["abcdefgh", "abcdefgh-ijkl"]).text("x abcdefgh-ijkl y") == f"x {HIDDEN} y"


def test_redactor_hides_a_short_secret_only_as_a_word() -> None:
    assert Redactor(["test"]).text("the latest test") == f"the latest {HIDDEN}"


def test_redactor_recognises_secrets_by_shape() -> None:
    rows = [
        ("Authorization: Bearer abc.def-123", "abc.def-123"),
        ("curl -H 'authorization:Basic dXNlcjpwYXNz'", "dXNlcjpwYXNz"),
        ("fetching https://ghtoken@github.com/x", "ghtoken"),
        ("ssh://me:hunter2@host/x", "hunter2"),
        ("sent Bearer 0123456789abcdef", "0123456789"),
        ("git clone https://user:hunter2@example.org/x.git", "hunter2"),
        ("token hf_" + "a1B2" * 6 + " used", "a1B2"),
        ("ghp_" + "Z9" * 18, "Z9"),
        ("https://h/x.diff?token=hunter2", "hunter2"),
        ("https://h/x?a=1&X-Amz-Signature=hunter2&b=2", "hunter2"),
        ("https://h/x?private_token=hunter2#top", "hunter2"),
    ]
    for text, secret in rows:
        assert secret not in Redactor().text(text)


def test_redactor_leaves_ordinary_text_alone() -> None:
    rows = [
        "This is a basic concept of thermodynamics, and the bearer certificates are yours.",
        "see https://example.org/a@b?c=d and ssh://host/x",
        "https://example.org/?tokens=3&signatures=2&max_tokens=20&design=x and token=3",
        "Authorization: is a header; ssh://git@github.com/x/y.git; git@host:x",
        "hf_hub is a folder, ghp is a prefix",
        "commit 8a8d0bcc4d5fdf024c457526245bec4bc3a12adc sha256 " + "b179c952" * 8,
    ]
    for text in rows:
        assert Redactor(["a-real-secret"]).text(text) == text


def test_redactor_redacts_nested_data() -> None:
    data = {
        "argv": ["server", "--api-key", "anything", "--port", "1"],
        "deep": {"list": [1, None, True, 2.5, "say sesame-open"]},
        "headers": {"Authorization": "whatever", "Accept": "json"},
    }
    assert Redactor(["sesame-open"]).data(data) == {
        "argv": ["server", "--api-key", HIDDEN, "--port", "1"],
        "deep": {"list": [1, None, True, 2.5, f"say {HIDDEN}"]},
        "headers": {"Authorization": HIDDEN, "Accept": "json"},
    }


def test_secret_values_come_from_named_and_well_known_variables() -> None:
    environment = {
        "HF_TOKEN": "one", "MY_KEY_FOR_IT": "two", "SOME_API_KEY": "three-three",
        "DEBUG_TOKEN": "1", "PATH": "/bin", "EMPTY_SECRET": "", "GITHUB_TOKEN": " four\n",
    }  # fmt: skip
    found = secret_values(environment, ["MY_KEY_FOR_IT"])
    assert set(found) == {"one", "two", "three-three", "four"}


def test_clean_escapes_controls_and_keeps_all_languages() -> None:
    assert clean("\x1b[2J\x07\x9b\u202e\r\x00\x7f") == r"\x1b[2J\x07\x9b\u202e\r\x00\x7f"
    assert clean("Grüße 你好 नमस्ते می‌خواهم 👩‍🔬\n\tend") == "Grüße 你好 नमस्ते می‌خواهم 👩‍🔬\n\tend"
    assert clean("two\nlines", one_line=True) == r"two\nlines"
    assert clean("\ud800\u2028") == r"\ud800\u2028"


@given(st.text())
def test_clean_text_encodes_and_has_no_controls(text: str) -> None:
    cleaned = clean(text, one_line=True)
    cleaned.encode()
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in cleaned)


@given(st.lists(st.text(min_size=8), max_size=4), st.text())
def test_redactor_lets_no_long_secret_through(secrets: list[str], around: str) -> None:
    stripped = [s.strip() for s in secrets if len(s.strip()) >= 8]
    hidden = Redactor(stripped).text(f"{around} {' '.join(stripped)} {around}")
    assert not any(s in hidden.replace(HIDDEN, "\0") for s in stripped)
