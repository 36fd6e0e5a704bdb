"""References to container images: the grammar, and in words what is wrong with one that breaks it.

Repository, tag and digest as in the OCI distribution specification (1.1, "Pulling manifests");
the registry before them as Docker reads it: the first part is one where it holds a dot or a colon,
or is `localhost`. An image that only this engine has is named by its id, `sha256:…`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from bakehouse.recipe.faults import printable

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_PORT = "[1-9][0-9]{0,4}"
_REGISTRY = (
    rf"(?:(?:localhost|{_LABEL}(?:\.{_LABEL})+|\[[0-9A-Fa-f:.]+\])(?::{_PORT})?|{_LABEL}:{_PORT})"
)
_PART = "[a-z0-9]+(?:(?:[.]|__?|-+)[a-z0-9]+)*"
_TAG = "[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_DIGEST = "sha256:[0-9a-f]{64}"
PATTERN = rf"(?:{_REGISTRY}/)?{_PART}(?:/{_PART})*(?::{_TAG})?(?:@{_DIGEST})?|{_DIGEST}"
"""What editors check; `faults` also sees ports that are too large and names that are too long."""

LONGEST_NAME = 255
LONGEST_TAG = 128
LAST_PORT = 65535
FORMS = "write NAME:TAG, REGISTRY/NAME:TAG or NAME@sha256:DIGEST, or sha256:ID for a local image"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/{2,}")


class BadReference(ValueError):
    """A reference that breaks the grammar; `hint` gives the right form."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def reference(text: str) -> str:
    """Give a reference back. Raises BadReference with everything that is wrong with it."""
    if found := list(faults(text)):
        raise BadReference(f"'{printable(text, 80)}' {', and '.join(found)}", _hint(text))
    return text


def faults(text: str) -> Iterator[str]:
    """Say what is wrong with a reference, one thing at a time; nothing where it is right."""
    strange = [c for c in dict.fromkeys(text) if c.isspace() or not ("!" <= c <= "~")]
    if strange:
        yield f"holds {_characters(strange)}, which no reference has"
    text = "".join(c for c in text if c not in strange)
    if scheme := _SCHEME.match(text):
        yield f"begins with '{scheme[0]}': a reference is no URL"
        text = text[scheme.end() :]
    if _is_id(text):
        yield from _digest(text, "a local image's id")
        return
    name, at, digest = text.partition("@")
    registry, path = _registry(name)
    path, colon, tag = path.partition(":")
    if registry is not None:
        yield from _host(registry)
    yield from _repository(path, registry)
    if colon:
        yield from _tag(tag)
    if at:
        yield from _digest(digest, "what stands behind '@'")


def _is_id(text: str) -> bool:
    return text.lower().startswith("sha256:") and "/" not in text and "@" not in text


def _registry(name: str) -> tuple[str | None, str]:
    """Take the registry off a name, where it has one."""
    first, slash, rest = name.partition("/")
    named = slash and ("." in first or ":" in first or first == "localhost")
    return (first, rest) if named else (None, name)


def _host(registry: str) -> Iterator[str]:
    host, _, port = registry.rpartition(":") if _has_port(registry) else (registry, "", None)
    if host.startswith("["):
        try:
            ipaddress.IPv6Address(host[1:-1] if host.endswith("]") else host)
        except ValueError:
            yield f"names the registry '{host}', which is no IPv6 address in brackets"
    elif not re.fullmatch(rf"{_LABEL}(?:\.{_LABEL})*", host):
        yield (
            f"names the registry '{host}', which is no host name"
            if host
            else "names no registry before its port"
        )
    if port is not None and not (re.fullmatch(_PORT, port) and int(port) <= LAST_PORT):
        seen = f"the port '{port}'" if port else "no port behind the colon"
        yield f"gives the registry {seen}: a port is a number from 1 to {LAST_PORT}"


def _has_port(registry: str) -> bool:
    return ":" in registry.rpartition("]")[2]


def _repository(path: str, registry: str | None) -> Iterator[str]:
    if not path:
        yield "names no repository"
        return
    if path != path.lower():
        yield f"has upper-case letters in the repository '{path}'" + (
            "" if registry else " (a registry has a dot or a port in its name)"
        )
    parts = path.lower().split("/")
    if not all(parts):
        yield f"has an empty part in the repository '{path}': a '/' too many"
    strange = [c for c in dict.fromkeys("".join(parts)) if not re.fullmatch("[a-z0-9._-]", c)]
    if strange:
        yield f"has {_characters(strange)} in the repository '{path}'"
    elif any(part and not re.fullmatch(_PART, part) for part in parts):
        yield (
            f"has a '.', '_' or '-' in the wrong place in the repository '{path}': each stands "
            "between letters or digits, a '.' alone, at most two '_'"
        )
    if len(path) + len(registry or "") > LONGEST_NAME:
        yield f"has a name of more than {LONGEST_NAME} characters"
    if registry is None and re.fullmatch("[0-9a-f]{64}", path):
        yield "is an image's id and no name"


def _tag(tag: str) -> Iterator[str]:
    if not tag:
        yield "has nothing behind the colon, where the tag stands"
        return
    strange = [c for c in dict.fromkeys(tag) if not re.fullmatch("[A-Za-z0-9._-]", c)]
    if strange:
        yield f"has {_characters(strange)} in the tag '{printable(tag, 40)}'"
    elif tag[0] in ".-":
        yield f"has a tag that begins with '{tag[0]}'"
    if len(tag) > LONGEST_TAG:
        yield f"has a tag of {len(tag)} characters; {LONGEST_TAG} are allowed"


def _digest(digest: str, what: str) -> Iterator[str]:
    kind, _, value = digest.partition(":")
    if kind.lower() != "sha256":
        yield f"has '{printable(digest, 40)}' for a digest: {what} is sha256: and 64 hex digits"
        return
    if not re.fullmatch("[0-9a-fA-F]*", value):
        yield f"has a digest that is not of hex digits: {what} is sha256: and 64 of them"
    elif len(value) != 64:
        yield f"has a digest of {len(value)} hex digits: {what} has 64"
    elif digest != digest.lower():
        yield f"has upper-case letters in {what}: hex digits are lower-case there"


def _characters(found: list[str]) -> str:
    names = {" ": "a space", "\t": "a tab", "\n": "a line break"}
    return ", ".join(names.get(c, f"'{printable(c)}'") for c in found[:4])


def _hint(text: str) -> str:
    """Give the form that was probably meant, where it is one; the forms that there are if not."""
    meant = text.strip()
    if scheme := _SCHEME.match(meant):
        meant = meant[scheme.end() :]
    if re.fullmatch("[0-9a-f]{64}", meant):
        meant = f"sha256:{meant}"
    if _is_id(meant):
        made = meant.lower()
    else:
        name, at, digest = meant.partition("@")
        registry, path = _registry(name)
        path, colon, tag = path.partition(":")
        path = re.sub("/+", "/", path).strip("/").lower()
        made = f"{registry}/{path}" if registry is not None else path
        made += f":{tag or 'TAG'}" if colon else ""
        made += f"@{digest.lower()}" if at else ""
    return FORMS if any(faults(made)) else f"write {made}"
