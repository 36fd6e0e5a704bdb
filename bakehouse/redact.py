"""Hides secrets, and escapes control characters of untrusted text.

Everything that is written to a record, a log or a stream goes through a `Redactor`; everything that
came from a server, a log or a listing goes through `clean` before a person sees it.
"""

from __future__ import annotations

import base64
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, quote_plus

HIDDEN = "[hidden]"

ALWAYS = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN", "GITHUB_TOKEN", "GH_TOKEN",
    "GITLAB_TOKEN", "OPENAI_API_KEY", "VLLM_API_KEY", "LLAMA_API_KEY", "DOCKER_AUTH_CONFIG",
)  # fmt: skip
"""Variables that always hold a secret."""

_SECRET_NAME = re.compile(
    r"(?i)(?:^|_)(?:token|secret|password|passwd|api_?key|access_key|credentials?)$"
)
_SECRET_HEADERS = {"authorization", "proxy-authorization", "cookie", "set-cookie", "x-api-key"}
_SECRET_FLAGS = {"--api-key", "--hf-token", "--token", "--password"}
"""The word after one of these is hidden in a list."""
_SHORT = 8
"""A shorter secret is hidden only as a whole word, so that ordinary text survives."""

_SHAPES = re.compile(
    r"(?P<keep>\bauthorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic)\s+)?"
    r"|\bbearer\s+(?=\S*\d))(?:[A-Za-z0-9._~+/=-]{8,})"
    r"|(?P<scheme>\bhttps?://|\b[a-z][a-z0-9+.-]*://(?=[^\s/@'\"]*:))[^\s/@'\"]+@"
    r"|(?P<query>[?&](?:[\w.%-]*[-_.])?"
    r"(?:token|sig|signature|password|secret|api[-_]?key|credential)=)"
    r"[^\s&#'\"]+"
    r"|\bhf_[A-Za-z0-9]{16,}"
    r"|\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})",
    re.IGNORECASE,
)
"""Secrets recognised by their shape: authorization values, passwords in URLs (a user alone only
where it may be a token, not in ssh://git@host), tokens in a URL's query, well-known tokens."""


def clean(text: str, *, one_line: bool = False) -> str:
    r"""Escape what could control a terminal or hide text: `\x1b`, `\u202e`.

    Line feeds and tabs stay, unless `one_line`. Bidirectional controls, other invisible format
    characters, line separators and lone surrogates are escaped as control characters are.
    """
    if text.isascii() and text.isprintable():
        return text
    keep = "" if one_line else "\n\t"
    return "".join(c if c in keep or c in _JOINERS or _harmless(c) else _escape(c) for c in text)


_JOINERS = "\u200c\u200d"
"""Needed to write Persian, Hindi and many emoji."""


def _harmless(char: str) -> bool:
    return char == " " or unicodedata.category(char) not in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def _escape(char: str) -> str:
    named = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(char)
    code = ord(char)
    return named or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


def without_credentials(text: str) -> str:
    """Clean untrusted text, such as a URL, and hide secrets recognised by their shape.

    For code without a context; all output passes the context's `Redactor` as well, which knows the
    secrets themselves.
    """
    return clean(_SHAPES.sub(_hide_shape, text))


def secret_values(environment: Mapping[str, str], names: Iterable[str] = ()) -> tuple[str, ...]:
    """Values of secret variables: of `names`, of well-known ones, and of names such as X_TOKEN.

    A variable that only looks secret by its name counts from 8 characters on.
    """
    sure = {*ALWAYS, *names}
    values = {
        value.strip()
        for name, value in environment.items()
        if name in sure or (_SECRET_NAME.search(name) and len(value.strip()) >= _SHORT)
    }
    return tuple(sorted(v for v in values if v))


class Redactor:
    """Replaces secrets by `[hidden]`, in every encoding that is used for them."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self.secrets: tuple[str, ...] = ()
        self._pattern: re.Pattern[str] | None = None
        self.add(*secrets)

    def add(self, *secrets: str) -> None:
        """Hide these as well from now on."""
        known = {*self.secrets, *(s.strip() for s in secrets if s.strip())}
        if known == set(self.secrets):
            return
        self.secrets = tuple(sorted(known))
        spellings = {spelling for secret in self.secrets for spelling in _spellings(secret)}
        # The longest first, so that a secret which contains another one is hidden whole.
        ordered = sorted(spellings, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(_as_pattern, ordered)))

    def text(self, text: str) -> str:
        """Give the text without secrets."""
        if self._pattern:
            text = self._pattern.sub(HIDDEN, text)
        return _SHAPES.sub(_hide_shape, text)

    def data(self, value: Any) -> Any:
        """Give a copy of plain data without secrets, in keys and values at any depth."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                self.text(str(k)): HIDDEN
                if isinstance(v, str) and str(k).lower() in _SECRET_HEADERS
                else self.data(v)
                for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [
                HIDDEN
                if isinstance(item, str) and str(before).lower() in _SECRET_FLAGS
                else self.data(item)
                for before, item in zip((None, *value), value, strict=False)
            ]
        return value


def _hide_shape(found: re.Match[str]) -> str:
    if found["scheme"]:
        return f"{found['scheme']}{HIDDEN}@"
    return f"{found['keep'] or found['query'] or ''}{HIDDEN}"


def _spellings(secret: str) -> set[str]:
    """As it is, inside JSON, inside a URL, and as base64 (alone, and after a user's colon)."""
    plain = {
        secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1],
        quote(secret, safe=""), quote(secret), quote_plus(secret), repr(secret)[1:-1],
    }  # fmt: skip
    if len(secret) >= _SHORT:
        plain.add(base64.b64encode(secret.encode(errors="replace")).decode().rstrip("="))
    return {spelling for spelling in plain if spelling}


def _as_pattern(spelling: str) -> str:
    escaped = re.escape(spelling)
    return escaped if len(spelling) >= _SHORT else rf"(?<!\w){escaped}(?!\w)"
