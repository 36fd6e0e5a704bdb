"""Messages of Docker Engines and registries, translated to errors by what to do about them."""

from __future__ import annotations

import grp
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from bakehouse.errors import BakehouseError, HostError, LockError, NotFound
from bakehouse.redact import without_credentials
from bakehouse.system.http import causes_of, is_loopback

_DIGEST_LOGIN = "log in with 'docker login', as an account that may read it"


@dataclass(frozen=True)
class Kind:
    """One kind of failure, recognised by a pattern in the message."""

    id: str
    error: type[BakehouseError]
    pattern: re.Pattern[str]
    what: str
    hint: str


def _kind(id: str, error: type[BakehouseError], pattern: str, what: str, hint: str) -> Kind:  # noqa: A002
    return Kind(id, error, re.compile(pattern, re.IGNORECASE), what, hint)


KINDS: tuple[Kind, ...] = (
    _kind(
        "disk-full", HostError, r"no space left on device|disk quota exceeded",
        "the engine's disk is full",
        "see 'docker system df'; remove unused images, or move the engine's data root",
    ),
    _kind(
        "image-platform", HostError,
        r"no matching manifest for|does not match the specified platform|exec format error|"
        r"image operating system .* cannot be used",
        "the image is not made for this machine's architecture",
        "name an image for it under image.ref in the recipe",
    ),
    _kind(
        "registry-limit", HostError, r"toomanyrequests|too many requests|rate limit|\b429\b",
        "too many requests to the registry from this address",
        "wait, or log in with 'docker login': accounts have higher limits",
    ),
    _kind(
        "registry-unauthorised", HostError,
        r"unauthorized|authentication required|denied: |access denied|no basic auth credentials|"
        r"may require 'docker login'|insufficient_scope|\b403 forbidden",
        "the registry denies this account access to the image, or does not have it",
        _DIGEST_LOGIN,
    ),
    _kind(
        "manifest-unknown", LockError, r"manifest unknown|manifest for .* not found|"
        r"not found: manifest|failed to resolve reference .* not found",
        "the registry no longer has what is pinned",
        "tags and digests vanish when registries are cleaned up: pin another with "
        "'invoke lock --update', or push the image to a registry of your own",
    ),
    _kind(
        "registry-tls", HostError, r"x509:|tls: |server gave http response to https",
        "the registry's certificate is not trusted, or it does not speak TLS",
        "fix the certificate, or list the registry in the engine's insecure-registries",
    ),
    _kind(
        "name-in-use", HostError, r"container name .* is already in use",
        "another container has this name",
        "find it with 'docker ps --all', and remove it if it is not needed",
    ),
    _kind(
        "port-in-use", HostError, r"port is already allocated|address already in use",
        "the port is taken on the engine's machine",
        "stop what holds it, or serve on another port: --port 0 takes a free one",
    ),
    _kind(
        "no-nvidia-runtime", HostError,
        r"could not select device driver|unknown or invalid runtime name: nvidia|"
        r"nvidia-container-cli|unresolvable cdi devices|cdi device injection failed",
        "the engine cannot give a container any GPU: it has no NVIDIA runtime",
        "install the NVIDIA Container Toolkit, then: nvidia-ctk runtime configure "
        "--runtime=docker, and restart the engine",
    ),
    _kind(
        "image-command", HostError,
        r"executable file not found|exec: .*: no such file or directory|"
        r"exec: .*: permission denied",
        "the image has no such command",
        "see what its entrypoint is with 'docker image inspect'",
    ),
    _kind(
        "mount-missing", HostError, r"bind source path does not exist|mount source path",
        "a folder that the container needs does not exist",
        "see container.volumes in the recipe; the path is the one on the engine's machine",
    ),
    _kind(
        "image-missing", NotFound, r"no such image|no such container",
        "the engine does not have it",
        "fetch it with 'invoke fetch', or build it with 'invoke build'",
    ),
    _kind(
        "network", HostError,
        r"no such host|connection refused|i/o timeout|network is unreachable|timeout exceeded|"
        r"connection reset|eof$|temporary failure in name resolution|tls handshake timeout|"
        r"request canceled|proxyconnect|server misbehaving",
        "the registry cannot be reached from the engine's machine",
        "check network and proxy of the engine (not of this shell), then try again",
    ),
)  # fmt: skip
"""Tried in this order: specific ones first."""


def explain(message: str, where: str) -> BakehouseError:
    """Make the error for a message of the engine."""
    said = without_credentials(message.strip())
    for kind in KINDS:
        if kind.pattern.search(message):
            return kind.error(
                f"{kind.what}: {said}" if said else kind.what,
                where=where, hint=kind.hint, id=kind.id,
            )  # fmt: skip
    return HostError(
        f"the Docker Engine refused: {said or 'no reason given'}",
        where=where,
        hint="see the engine's own log: journalctl -u docker",
        id="docker",
    )


def unreachable(error: BaseException, host: str, origin: str) -> HostError:
    """Make the error for an engine that does not answer, by the system's error."""
    where = f"{host} ({origin})"
    parts = urlsplit(host)
    if "paramiko" in str(error):
        return HostError(
            "an engine behind ssh needs another Python package", where=where, id="docker-ssh",
            hint="pip install paramiko, or forward the socket: "
            "ssh -NL /tmp/docker.sock:/var/run/docker.sock HOST",
        )  # fmt: skip
    for cause in causes_of(error):
        if isinstance(cause, PermissionError):
            group = "root"
            with suppress(OSError, KeyError, ValueError):
                group = grp.getgrgid(os.stat(parts.path).st_gid).gr_name
            what, id_ = "permission denied on the Docker socket", "docker-permission"
            hint = (
                f"sudo usermod -aG {'docker' if group == 'root' else group} $USER, then log in "
                "again; members of that group are as good as root"
            )
        elif isinstance(cause, FileExistsError):
            what, id_ = f"{parts.path} is not a socket", "docker-socket"
            hint = "remove it and restart the engine, or name the right socket in DOCKER_HOST"
        elif isinstance(cause, socket.gaierror):
            what, id_ = (
                f"unknown host of the Docker Engine: {parts.hostname}",
                "docker-host-unknown",
            )
            hint = (
                "fix the name where it is set (DOCKER_HOST, or: docker context ls), or the "
                "network's name service"
            )
        # A unix socket with a full queue does not time out, but fails at once with EAGAIN.
        elif isinstance(cause, TimeoutError | BlockingIOError) or "timed out" in str(cause):
            what, id_ = "the Docker Engine does not answer in time", "docker-timeout"
            hint = (
                "it or its machine hangs: see journalctl -u docker; restarting it "
                "(systemctl restart docker) ends its containers too"
            )
        elif "TLS" in type(cause).__name__ or "SSL" in type(cause).__name__:
            what, id_ = f"no trusted connection to the Docker Engine: {cause}", "docker-tls"
            hint = "see DOCKER_CERT_PATH: ca.pem, cert.pem and key.pem"
        else:
            continue
        return HostError(what, where=where, id=id_, hint=hint)
    near = parts.scheme == "unix" or is_loopback(host)
    start = "start it: " + ("" if os.geteuid() == 0 else "sudo ") + "systemctl start docker; or "
    return HostError(
        "no Docker Engine answers", where=where, id="docker-daemon",
        hint=(start if near else f"start it on {parts.hostname}, and check the firewall; or ")
        + "install it, see https://docs.docker.com/engine/install/; or name another in DOCKER_HOST",
    )  # fmt: skip
