"""Which Docker Engine is meant: DOCKER_HOST, DOCKER_CONTEXT, or the context that is in use.

Read here and not by the SDK, which looks only at this process's own environment and takes a context
that does not exist for none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bakehouse.errors import HostError
from bakehouse.redact import without_credentials

DEFAULT = "unix:///var/run/docker.sock"
SCHEMES = ("unix", "tcp", "http", "https", "ssh")


@dataclass(frozen=True)
class Endpoint:
    """Where an engine listens. `tls` is the folder of ca.pem, cert.pem and key.pem."""

    host: str
    origin: str
    """Who says so, for messages."""
    tls: Path | None = None
    verify: bool = True


def config_file(environment: Mapping[str, str]) -> Path:
    """The Docker command line's configuration: contexts and credentials."""
    folder = environment.get("DOCKER_CONFIG")
    home = Path(environment.get("HOME") or "/")
    return (Path(folder) if folder else home / ".docker") / "config.json"


def read_config(environment: Mapping[str, str]) -> dict[str, Any]:
    """The configuration, or nothing where there is none. Raises HostError where it is damaged."""
    path = config_file(environment)
    try:
        data = json.loads(path.read_text(errors="replace"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise HostError(
            "the Docker configuration cannot be read",
            where=f"{path}: {getattr(error, 'strerror', None) or 'it is not JSON'}",
            hint="mend the file, or name another folder in DOCKER_CONFIG",
            id="docker-config",
        ) from None
    return data if isinstance(data, dict) else {}


def find_endpoint(environment: Mapping[str, str]) -> Endpoint:
    """Say where the engine is, as the Docker command line would. Raises HostError."""
    if host := environment.get("DOCKER_HOST", "").strip():
        folder = environment.get("DOCKER_CERT_PATH")
        verify = bool(environment.get("DOCKER_TLS_VERIFY"))
        wanted = bool(folder) or verify
        tls = Path(folder) if folder else config_file(environment).parent
        return _sound(Endpoint(host, "DOCKER_HOST", tls if wanted else None, verify))
    name = environment.get("DOCKER_CONTEXT", "").strip()
    origin = "DOCKER_CONTEXT"
    if not name:
        name = str(read_config(environment).get("currentContext") or "default")
        origin = f"currentContext in {config_file(environment)}"
    if name == "default":
        return Endpoint(DEFAULT, "the default context")
    return _context(environment, name, origin)


def _context(environment: Mapping[str, str], name: str, origin: str) -> Endpoint:
    folder = config_file(environment).parent / "contexts"
    key = hashlib.sha256(name.encode()).hexdigest()
    meta = folder / "meta" / key / "meta.json"
    try:
        docker = json.loads(meta.read_text())["Endpoints"]["docker"]
        host = docker["Host"]
    except (OSError, ValueError, KeyError, TypeError):
        raise HostError(
            f"the Docker context '{name}' is not there, or names no engine",
            where=f"{origin}; looked at {meta}",
            hint="'docker context ls' shows those that there are; or set DOCKER_HOST",
            id="docker-context",
        ) from None
    tls = folder / "tls" / key / "docker"
    found = Endpoint(
        str(host), f"the context '{name}'", tls if tls.is_dir() else None,
        not docker.get("SkipTLSVerify", False),
    )  # fmt: skip
    return _sound(found)


def _sound(end: Endpoint) -> Endpoint:
    """Give back an endpoint whose address can be one. Raises HostError."""
    try:
        parts = urlsplit(end.host)
        named = bool(parts.path if parts.scheme == "unix" else parts.hostname)
        sound = parts.scheme in SCHEMES and named and parts.port != 0
    except ValueError:  # a port beyond 65535, half a bracket
        sound = False
    if sound:
        return end
    raise HostError(
        f"'{without_credentials(end.host)}' is no address of a Docker Engine", where=end.origin,
        id="docker-host", hint="write unix:///path/to/docker.sock, tcp://HOST:PORT or ssh://HOST",
    )  # fmt: skip
