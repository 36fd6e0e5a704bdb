"""Containers of servers: created for a launch, found by their labels, removed.

A container has its server's folder in a label, as a process has it in its environment: it is found
without its supervisor, and without its state file.
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
from bakehouse.preflight.rules import reaches
from bakehouse.server.processes import is_in, tree
from bakehouse.system.docker.client import REMEMBERED_S, DockerClient, find_endpoint
from bakehouse.system.docker.models import ContainerFacts, Mount
from bakehouse.system.http import is_loopback

MARKED = "in-a-container"
"""File in the server's folder that says it has a container; contains the engine's address."""
LOOK_S = 5.0
"""Seconds that a look at a server waits for the engine's answer."""
OOM_SCORE = 500
"""If memory runs out, the kernel should kill the server and not its neighbours."""
T = TypeVar("T")
_timeouts: dict[str, tuple[float, HostError]] = {}
ENGINE_VARIABLES = (
    "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY",
    "SSH_AUTH_SOCK",
)  # fmt: skip
"""Variables that select the engine, passed on to the follower."""


@dataclass(frozen=True)
class ContainerHandle:
    """One container of ours on one engine."""

    docker: DockerClient
    id: str
    inside_port: int
    image: str | None = None
    """Id of the image it has to be made from; None if that is not known."""

    def inspect(self) -> ContainerFacts | None:
        """Return its facts; None if it is gone. Raises HostError if the engine does not answer."""
        return self.docker.container(self.id)

    def port(self) -> int | None:
        """Return the published port of the host; None while it does not run."""
        with suppress(HostError):
            found = self.inspect()
            return found.ports.get(self.inside_port) if found and found.running else None
        return None

    def pids(self) -> tuple[int, ...]:
        """Return its processes as this machine sees them; none if they are on another machine."""
        with suppress(HostError):
            found = self.inspect()
            if found and found.pid and is_in(found.pid, found.id):
                return tree(found.pid)
        return ()


def engine_at(host: str | None, *, patience: float | None = None) -> DockerClient:
    """Connect to the engine that a server was started on, by the address in its state."""
    environment = dict(os.environ)
    if host and find_endpoint_host(environment) != host:
        environment["DOCKER_HOST"] = host
        return DockerClient(environment, patience=patience, origin="the server's state")
    return DockerClient(environment, patience=patience)


def ask(host: str | None, question: Callable[[DockerClient], T]) -> T:
    """Ask a server's engine a short question. Raises HostError within seconds, even if it hangs.

    A timeout is remembered for a moment, so that the next question need not wait.
    """
    where = host or find_endpoint_host(os.environ)
    at, error = _timeouts.get(where, (0.0, None))
    if error and time.monotonic() - at < REMEMBERED_S:
        raise error
    try:
        return question(engine_at(host, patience=LOOK_S))
    except HostError as failed:
        if failed.id == "docker-timeout":
            _timeouts[where] = (time.monotonic(), failed)
        raise


def recent_timeout() -> HostError | None:
    """Return the error of this environment's engine if a question just timed out."""
    at, error = _timeouts.get(find_endpoint_host(os.environ), (0.0, None))
    return error if time.monotonic() - at < REMEMBERED_S else None


def find_endpoint_host(environment: Mapping[str, str]) -> str:
    """Return the address of the engine that the environment selects; empty if it is unclear."""
    try:
        return find_endpoint(environment).host
    except BakehouseError:
        return ""


def marked_engine(folder: Path) -> str | None:
    """Return the recorded engine's address: empty if it is unclear, None if there is no record."""
    try:
        return (folder / MARKED).read_text().strip()
    except (OSError, ValueError):
        return None


def make(
    docker: DockerClient, plan: ServePlan, folder: Path, nonce: str, secret: tuple[str, str] | None
) -> str:
    """Create the container of one launch, without starting it; return its id.

    A leftover of the same server is removed first. `secret` is a variable and its value. Raises
    HostError if the name is in use, or a file to mount does not exist.
    """
    if plan.container is None:
        raise ValueError("the plan has no container")
    name = container_name(folder.name)
    if there := docker.container(name):
        owner = there.labels.get(SERVER)
        if owner != str(folder):
            raise HostError(
                f"another container is named {name}" + (f": that of {owner}" if owner else ""),
                where=f"container {there.id[:12]}, {there.state}", id="name-in-use",
                hint="look at 'docker ps --all', and remove it if nobody needs it",
            )  # fmt: skip
        docker.remove(there.id)
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
    """Resolve links, and create a folder that the container writes to. Raises BakehouseError."""
    if mount.volume:
        return mount
    # A Hugging Face cache has symlinks, which would be broken inside.
    source = os.path.realpath(mount.source)
    if why := reaches(source, sockets):
        raise UsageError(
            f"container.volumes: {mount.source} {why}", where=source, id="bad-volume",
            hint="mount the one folder that the server needs",
        )  # fmt: skip
    if not os.path.exists(source):
        if mount.read_only:
            raise HostError(
                f"file or folder to mount not found: {source}", where=mount.target,
                hint="the engine would create an empty folder there", id="mount-missing",
            )  # fmt: skip
        try:
            Path(source).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HostError(
                f"cannot create the folder to mount: {error.strerror}", where=source,
                hint="create it, or change container.volumes", id="mount-missing",
            ) from None  # fmt: skip
    return mount.model_copy(update={"source": source})


def remove_failed_launch(docker: DockerClient, folder: Path, nonce: str) -> None:
    """Remove the container of a launch that failed."""
    with suppress(BakehouseError):
        for one in docker.containers({SERVER: str(folder), NONCE: nonce}):
            docker.remove(one.id)


def find(folder: Path, host: str | None) -> tuple[ContainerFacts, ...]:
    """Return the containers of a server, by their label. Raises HostError."""
    return ask(host, lambda docker: docker.containers({SERVER: str(folder)}))


def refuse_remote(host: str) -> None:
    """Raise HostError for an engine on another machine: our files and ports are not there."""
    parts = urlsplit(host)
    name = parts.hostname or ""
    if parts.scheme in ("tcp", "http", "https", "ssh") and not is_loopback(host):
        raise HostError(
            f"the Docker Engine is on another machine: {name}", where=host, id="docker-remote",
            hint="weights are mounted from here, and the server is reached on loopback: run "
            "Bakehouse on the engine's machine",
        )  # fmt: skip


def folders_with(servers: Path) -> set[Path]:
    """Return the server folders that labels of containers name; empty without an engine."""
    if not _has_engine():
        return set()
    with suppress(BakehouseError):
        found = ask(None, lambda docker: docker.containers({SERVER: ""}))
        named = (Path(one.labels[SERVER]) for one in found)
        return {folder for folder in named if folder.parent == servers}
    return set()


def clear_questions() -> None:
    """Remove containers in which killed runs queried images, if there is an engine."""
    if _has_engine():
        with suppress(BakehouseError):
            ask(None, lambda docker: docker.clear_left())


def _has_engine() -> bool:
    """Return False if the engine's socket does not exist: nothing is asked or imported then."""
    where = find_endpoint_host(os.environ)
    return not where.startswith("unix://") or os.path.exists(where.removeprefix("unix://"))


def remove(found: Iterable[ContainerFacts], host: str | None) -> None:
    """Remove containers of ours, running or not. Raises HostError."""
    docker = engine_at(host)
    for one in found:
        docker.remove(one.id)
