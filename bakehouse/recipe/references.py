"""References to container images: parse one, and explain what is wrong with one.

Repository, tag and digest as in the OCI distribution specification (1.1, "Pulling manifests");
the registry as Docker reads it: the first part, if it has a dot or a colon or is `localhost`. An
image that only this engine has is named by its id, `sha256:…`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass

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
"""For editors; `faults` also finds ports that are too large and names that are too long."""

MAX_NAME = 255
MAX_TAG = 128
MAX_PORT = 65535
FORMS = "write NAME:TAG, REGISTRY/NAME:TAG or NAME@sha256:DIGEST, or sha256:ID for a local image"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/{2,}")


class BadReference(ValueError):
    """An invalid reference; `hint` gives the right form."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Reference:
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
    def wanted(self) -> str:
        """What to ask the registry for: the digest if there is one."""
        return self.digest or self.tag or "latest"


def parse(text: str) -> Reference:
    """Parse a reference; a name without a registry is Docker's, as with Docker itself."""
    registry, path, tag, digest = _split(text)
    if registry in (None, "docker.io", "index.docker.io"):
        registry = "docker.io"
        path = path if "/" in path else f"library/{path}"
    return Reference(str(registry), path, tag, digest or None)


def _split(text: str) -> tuple[str | None, str, str | None, str | None]:
    """Split into registry, repository, tag and digest; None for those that are not given."""
    name, at, digest = text.partition("@")
    first, slash, rest = name.partition("/")
    named = slash and ("." in first or ":" in first or first == "localhost")
    path, colon, tag = (rest if named else name).partition(":")
    return first if named else None, path, tag if colon else None, digest if at else None


def reference(text: str) -> str:
    """Validate a reference. Raises BadReference with everything that is wrong with it."""
    if found := list(faults(text)):
        raise BadReference(f"'{printable(text, 80)}' {', and '.join(found)}", _hint(text))
    return text


def faults(text: str) -> Iterator[str]:
    """List what is wrong with a reference, one error at a time."""
    strange = [c for c in dict.fromkeys(text) if c.isspace() or not ("!" <= c <= "~")]
    if strange:
        yield f"contains {_characters(strange)}, which no reference may"
    text = "".join(c for c in text if c not in strange)
    if scheme := _SCHEME.match(text):
        yield f"begins with '{scheme[0]}': a reference is not a URL"
        text = text[scheme.end() :]
    if _is_id(text):
        yield from _digest(text, "the id of a local image")
        return
    registry, path, tag, digest = _split(text)
    if registry is not None:
        yield from _host(registry)
    yield from _repository(path, registry)
    if tag is not None:
        yield from _tag(tag)
    if digest is not None:
        yield from _digest(digest, "a digest")


def _is_id(text: str) -> bool:
    return text.lower().startswith("sha256:") and "/" not in text and "@" not in text


def _host(registry: str) -> Iterator[str]:
    host, port = registry, None
    if ":" in registry.rpartition("]")[2]:
        host, _, port = registry.rpartition(":")
    if host.startswith("["):
        try:
            ipaddress.IPv6Address(host[1:-1] if host.endswith("]") else host)
        except ValueError:
            yield f"has the registry '{host}', which is not an IPv6 address in brackets"
    elif not host:
        yield "has no registry before the port"
    elif not re.fullmatch(rf"{_LABEL}(?:\.{_LABEL})*", host):
        yield f"has the registry '{host}', which is not a host name"
    if port is not None and not (re.fullmatch(_PORT, port) and int(port) <= MAX_PORT):
        seen = f"the port '{port}'" if port else "no port after the colon"
        yield f"has {seen}: a port is a number from 1 to {MAX_PORT}"


def _repository(path: str, registry: str | None) -> Iterator[str]:
    if not path:
        yield "has no repository"
        return
    if path != path.lower():
        yield f"has upper-case letters in the repository '{path}'" + (
            "" if registry else " (a registry has a dot or a port in its name)"
        )
    parts = path.lower().split("/")
    if not all(parts):
        yield f"has an empty part in the repository '{path}': one '/' too many"
    strange = [c for c in dict.fromkeys("".join(parts)) if not re.fullmatch("[a-z0-9._-]", c)]
    if strange:
        yield f"has {_characters(strange)} in the repository '{path}'"
    elif any(part and not re.fullmatch(_PART, part) for part in parts):
        yield (
            f"has a misplaced '.', '_' or '-' in the repository '{path}': they belong between "
            "letters or digits, one '.', at most two '_'"
        )
    if len(path) + len(registry or "") > MAX_NAME:
        yield f"has a name of more than {MAX_NAME} characters"
    if registry is None and re.fullmatch("[0-9a-f]{64}", path):
        yield "is an image id, not a name"


def _tag(tag: str) -> Iterator[str]:
    if not tag:
        yield "has no tag after the colon"
        return
    strange = [c for c in dict.fromkeys(tag) if not re.fullmatch("[A-Za-z0-9._-]", c)]
    if strange:
        yield f"has {_characters(strange)} in the tag '{printable(tag, 40)}'"
    elif tag[0] in ".-":
        yield f"has a tag that begins with '{tag[0]}'"
    if len(tag) > MAX_TAG:
        yield f"has a tag of {len(tag)} characters; the maximum is {MAX_TAG}"


def _digest(digest: str, what: str) -> Iterator[str]:
    kind, _, value = digest.partition(":")
    if kind.lower() != "sha256":
        yield f"has '{printable(digest, 40)}' as a digest: {what} is sha256: and 64 hex digits"
    elif not re.fullmatch("[0-9a-fA-F]{64}", value):
        found = f"{len(value)} characters"
        yield f"has a digest of {found} after sha256: {what} has 64 hex digits there"
    elif digest != digest.lower():
        yield f"has upper-case letters in its digest: {what} has lower-case hex digits"


def _characters(found: list[str]) -> str:
    names = {" ": "a space", "\t": "a tab", "\n": "a line break"}
    return ", ".join(names.get(c, f"'{printable(c)}'") for c in found[:4])


def _hint(text: str) -> str:
    """Suggest the reference that was probably meant; the valid forms if that is unclear."""
    meant = _SCHEME.sub("", text.strip(), count=1)
    if re.fullmatch("[0-9a-f]{64}", meant):
        meant = f"sha256:{meant}"
    if _is_id(meant):
        made = meant.lower()
    else:
        registry, path, tag, digest = _split(meant)
        path = re.sub("/+", "/", path).strip("/").lower()
        made = f"{registry}/{path}" if registry is not None else path
        made += f":{tag or 'TAG'}" if tag is not None else ""
        made += f"@{digest.lower()}" if digest is not None else ""
    return FORMS if any(faults(made)) else f"write {made}"
