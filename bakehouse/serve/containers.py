"""Containers of servers: made for a launch, found again by their labels, removed for certain.

A container carries its server's folder in a label as a process carries it in its environment, so
that one whose keeper is gone, or whose state file is, is found all the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from bakehouse.errors import BakehouseError, HostError, UsageError
from bakehouse.plan.serve import NONCE, SERVER, container_name
from bakehouse.plan.types import ServePlan
from bakehouse.ports.docker import ContainerFacts, Mount
from bakehouse.ports.docker_engine import REMEMBERED_S, RealDocker, find_endpoint
from bakehouse.ports.http import is_loopback
from bakehouse.preflight.volumes import reaches
from bakehouse.serve.processes import is_in, tree

MARKED = "in-a-container"
"""In the server's folder, while it is served from a container: the engine's address."""
LOOK_S = 5.0
"""Whoever only looks waits no longer for an engine's answer, in seconds."""
OOM_SCORE = 500
"""Where the machine's memory runs out, the kernel should take the server, not its neighbours."""
T = TypeVar("T")
_silent: dict[str, tuple[float, HostError]] = {}
ENGINE_VARIABLES = (
    "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY",
    "SSH_AUTH_SOCK",
)  # fmt: skip
"""What says which engine, handed on to the process that follows a container."""


@dataclass(frozen=True)
class Box:
    """One container of ours on one engine."""

    docker: RealDocker
    id: str
    inside_port: int
    image: str | None = None
    """Id of the image that it has to be of; None where that is not known."""

    def asked(self) -> ContainerFacts | None:
        """How it stands; None where it is gone. Raises HostError: the engine does not answer."""
        return self.docker.container(self.id)

    def facts(self) -> ContainerFacts | None:
        """How it stands; None where it is gone, or the engine is."""
        try:
            return self.asked()
        except HostError:
            return None

    def port(self) -> int | None:
        """The host's port that is published; None while it does not run."""
        found = self.facts()
        return found.ports.get(self.inside_port) if found and found.running else None

    def pids(self) -> tuple[int, ...]:
        """Its processes as this machine sees them; none where the engine runs elsewhere."""
        found = self.facts()
        if not found or not found.pid or not is_in(found.pid, found.id):
            return ()
        return tree(found.pid)


def engine_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Give the variables that say which engine is meant."""
    return {name: base[name] for name in ENGINE_VARIABLES if name in base}


def engine_at(host: str | None, *, patience: float | None = None) -> RealDocker:
    """Give the engine that a server was started on: its address is on record."""
    environment = dict(os.environ)
    if host and find_endpoint_host(environment) != host:
        environment["DOCKER_HOST"] = host
        return RealDocker(environment, patience=patience, origin="the server's state")
    return RealDocker(environment, patience=patience)


def ask(host: str | None, question: Callable[[RealDocker], T]) -> T:
    """Ask a server's engine something short. Raises HostError within seconds, also where it hangs.

    That nobody answered in time is remembered for a moment, so that the next one need not wait.
    """
    where = host or find_endpoint_host(os.environ)
    at, error = _silent.get(where, (0.0, None))
    if error and time.monotonic() - at < REMEMBERED_S:
        raise error
    try:
        return question(engine_at(host, patience=LOOK_S))
    except HostError as failed:
        if failed.id == "docker-timeout":
            _silent[where] = (time.monotonic(), failed)
        raise


def standing(container: str, host: str | None) -> ContainerFacts | None:
    """How a container stands; None where it is gone. Raises HostError: no engine answers."""
    return ask(host, lambda docker: docker.container(container))


def hanging() -> HostError | None:
    """The error of this environment's engine, where it was asked a moment ago and hangs."""
    at, error = _silent.get(find_endpoint_host(os.environ), (0.0, None))
    return error if time.monotonic() - at < REMEMBERED_S else None


def find_endpoint_host(environment: Mapping[str, str]) -> str:
    """Give the address of the engine that the environment means; empty where it is not clear."""
    try:
        return find_endpoint(environment).host
    except BakehouseError:
        return ""


def mark_engine(folder: Path, host: str) -> None:
    """Leave word that the server has a container, should its state be lost. Raises OSError."""
    (folder / MARKED).write_text(host)


def marked_engine(folder: Path) -> str | None:
    """Give the engine that was left word of: empty where it is not clear which; None: no word."""
    try:
        return (folder / MARKED).read_text().strip()
    except (OSError, ValueError):
        return None


def make(
    docker: RealDocker, plan: ServePlan, folder: Path, nonce: str, secret: tuple[str, str] | None
) -> str:
    """Make, and do not start, the container of one launch; give its id.

    A leftover of the same server is removed first. `secret` is a variable and its value. Raises
    HostError where the name is another's, or a file to mount is not there.
    """
    if plan.container is None:
        raise ValueError("this server runs in no container")
    name = container_name(folder.name)
    _take_name(docker, name, folder)
    command = plan.command(nonce)
    host = urlsplit(find_endpoint_host(getattr(docker, "environment", os.environ)))
    sockets = (host.path,) if host.scheme == "unix" and host.path else ()
    mounts = [_mount(mount, sockets) for mount in plan.container.mounts]
    spec = plan.container.model_copy(
        update={
            "name": name,
            "entrypoint": command[:1],
            "argv": command[1:],
            "mounts": tuple(mounts),
            "oom_score": OOM_SCORE,
            "labels": {**plan.container.labels, SERVER: str(folder), NONCE: nonce},
            "env": {**plan.container.env, **dict([secret] if secret else [])},
        }
    )
    return docker.create(spec)


def _mount(mount: Mount, sockets: tuple[str, ...]) -> Mount:
    """Have what is mounted: links followed, a folder made where the container is to write."""
    if mount.volume:
        return mount
    # A cache of the Hugging Face Hub holds links; inside, they would lead nowhere.
    source = os.path.realpath(mount.source)
    if why := reaches(source, sockets):
        raise UsageError(
            f"container.volumes: {mount.source} {why}", where=source, id="bad-volume",
            hint="mount the one folder that the server needs",
        )  # fmt: skip
    try:
        if not mount.read_only and not os.path.exists(source):
            Path(source).mkdir(parents=True)
    except OSError as error:
        raise HostError(
            f"what is to be mounted cannot be made: {error.strerror}", where=source,
            hint="make the folder, or name another under container.volumes", id="mount-missing",
        ) from None  # fmt: skip
    if not os.path.exists(source):
        raise HostError(
            f"what is to be mounted is not there: {source}", where=mount.target,
            hint="the engine would make an empty folder of it", id="mount-missing",
        )  # fmt: skip
    return mount.model_copy(update={"source": source})


def withdraw(docker: RealDocker, folder: Path, nonce: str) -> None:
    """Remove the container of a launch that came to nothing."""
    with suppress(BakehouseError):
        for one in docker.containers({SERVER: str(folder), NONCE: nonce}):
            docker.remove(one.id)


def _take_name(docker: RealDocker, name: str, folder: Path) -> None:
    """Have the name free: our own leftover goes, anybody else's container stays."""
    there = docker.container(name)
    if there is None:
        return
    if there.labels.get(SERVER) == str(folder):
        docker.remove(there.id)
        return
    whose = there.labels.get(SERVER)
    raise HostError(
        f"another container has the name {name}" + (f": that of {whose}" if whose else ""),
        where=f"container {there.id[:12]}, {there.state}",
        hint="see whose it is with 'docker ps --all', and remove it if nobody needs it",
        id="name-in-use",
    )


def find(folder: Path, host: str | None) -> tuple[ContainerFacts, ...]:
    """Give the containers of a server, by their label. Raises HostError: no engine answers."""
    return ask(host, lambda docker: docker.containers({SERVER: str(folder)}))


def refuse_remote(host: str) -> None:
    """Raise HostError for an engine on another machine: neither files nor ports are ours there."""
    parts = urlsplit(host)
    name = parts.hostname or ""
    if parts.scheme in ("tcp", "http", "https", "ssh") and not is_loopback(host):
        raise HostError(
            f"the Docker Engine is on another machine: {name}", where=host, id="docker-remote",
            hint="weights are mounted from this machine, and proven on its loopback: run Bakehouse "
            "on the engine's machine",
        )  # fmt: skip


def folders_with(servers: Path) -> set[Path]:
    """Give the server folders that labels of containers name, where an engine is at hand.

    Nobody without an engine waits: where there is no socket, nothing is asked or imported.
    """
    where = find_endpoint_host(os.environ)
    if where.startswith("unix://") and not os.path.exists(where.removeprefix("unix://")):
        return set()
    with suppress(BakehouseError):
        found = ask(None, lambda docker: docker.containers({SERVER: ""}))
        named = (Path(one.labels[SERVER]) for one in found)
        return {folder for folder in named if folder.parent == servers}
    return set()


def clear_questions() -> None:
    """Remove what killed runs left of their questions to images, where an engine is at hand."""
    where = find_endpoint_host(os.environ)
    if where.startswith("unix://") and not os.path.exists(where.removeprefix("unix://")):
        return
    with suppress(BakehouseError):
        ask(None, lambda docker: docker.clear_left())


def remove(found: Iterable[ContainerFacts], host: str | None) -> None:
    """Remove containers of ours, running or not."""
    docker = engine_at(host)
    for one in found:
        docker.remove(one.id)
