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
"""For editors; `faults` also checks the size of ports and the length of names."""

LONGEST_NAME = 255
LAST_PORT = 65535
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
    if _is_id(text):
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


def _is_id(text: str) -> bool:
    return text.lower().startswith("sha256:") and "/" not in text and "@" not in text


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
    elif _is_id(text):
        made = text.lower()
    else:
        registry, path, tag, digest = _split(text)
        path = re.sub("/+", "/", path).strip("/").lower()
        made = f"{registry}/{path}" if registry is not None else path
        made += f":{tag or 'TAG'}" if tag is not None else ""
        made += f"@{digest.lower()}" if digest is not None else ""
    return FORMS if any(faults(made)) else f"write {made}"
