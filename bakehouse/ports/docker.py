"""The Docker Engine behind one small protocol: images, containers, short questions.

Only types here: `ports/docker_engine.py` speaks to a real engine, through the Docker SDK.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, Protocol

from bakehouse.base import Frozen

OURS = "bakehouse"
"""Label of everything that Bakehouse makes; its value is the version of Bakehouse."""

ARCHITECTURES: Mapping[str, str] = {"x86_64": "amd64", "aarch64": "arm64"}
"""What `uname -m` says, to what images say."""


def machine_arch(architecture: str) -> str:
    """Give an image's or engine's architecture as `uname -m` names it."""
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(architecture, architecture)


class EngineFacts(Frozen):
    """What an engine says of itself."""

    version: str
    api: str
    arch: str
    """As `uname -m` says."""
    system: str
    """`linux`, or `windows`, which runs none of our images."""
    runtimes: tuple[str, ...]
    gpus: Literal["runtime", "cdi", "cdi-unlisted", "none"]
    """How GPUs are asked for: through NVIDIA's runtime, or as CDI devices of that vendor. An engine
    older than 28.2 takes CDI devices without saying which it has."""
    buildkit: bool
    """Whether the engine has BuildKit; whether the command line can use it is another question."""
    root: str
    """The data root, as the engine's machine sees it."""
    host: str
    """The endpoint that was connected to."""
    security: tuple[str, ...] = ()

    @property
    def nvidia(self) -> bool:
        """Whether GPUs can be asked for."""
        return self.gpus != "none"


class ImageFacts(Frozen):
    """An image that the engine holds. `size` in bytes, unpacked."""

    id: str
    digests: tuple[str, ...]
    """`NAME@sha256:…`, where it came from a registry."""
    tags: tuple[str, ...]
    arch: str
    system: str
    size: int
    created: str
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    user: str
    workdir: str
    labels: dict[str, str]
    env: dict[str, str]

    @property
    def has_root(self) -> bool:
        """Whether it runs as root where nothing else is said."""
        return self.user.partition(":")[0] in ("", "0", "root")


class Mount(Frozen):
    """A folder or file of the host, or a named volume, inside a container."""

    source: str
    """An absolute path, or a volume's name."""
    target: str
    read_only: bool = True
    volume: bool = False


class Published(Frozen):
    """A container's TCP port on the host; `host_port` 0 lets the engine choose."""

    port: int
    host: str = "127.0.0.1"
    host_port: int = 0


class ContainerSpec(Frozen):
    """Everything that a container is made of. Never privileged, never restarted by the engine."""

    image: str
    """By digest or id."""
    argv: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] | None = None
    """None keeps the image's own."""
    name: str | None = None
    env: dict[str, str] = {}
    labels: dict[str, str] = {}
    user: str | None = None
    workdir: str | None = None
    gpus: str | None = None
    """`all`, a number, or `device=0,1`."""
    ipc: Literal["host", "private", "shareable"] | None = None
    shm_size: int | None = None
    """Bytes of /dev/shm."""
    mounts: tuple[Mount, ...] = ()
    publish: tuple[Published, ...] = ()
    network: str | None = None
    """`none`, or None for the engine's default bridge."""
    memory: int | None = None
    """Bytes; swap is no way around it."""
    pids: int | None = None
    init: bool = False
    """Whether the engine's own init is process 1: it reaps, and hands signals on."""
    oom_score: int | None = None
    """What the kernel adds to its claim to be ended where the machine's memory runs out."""
    drop_capabilities: bool = False
    log_bytes: int = 2**27
    """What the engine keeps of its log: one that floods must not fill the disk."""


class ContainerFacts(Frozen):
    """A container as it stands."""

    id: str
    name: str
    image: str
    """The image's id."""
    state: str
    """created, running, paused, restarting, removing, exited or dead."""
    exit_code: int | None
    """None while it has not ended."""
    oom_killed: bool
    restarts: int
    pid: int
    """Of its first process, on the engine's machine; 0 where it does not run."""
    error: str
    """What the engine says of a failed start."""
    started: str
    finished: str
    labels: dict[str, str]
    ports: dict[int, int]
    """Inside to outside, of those that are published."""

    @property
    def running(self) -> bool:
        """Whether its process is alive."""
        return self.state in ("running", "paused")


class Happening(Frozen):
    """Something that befell a container, as the engine's events name it."""

    at: float
    """Unix, in seconds."""
    what: str
    """kill, die, stop, pause, oom, destroy and so on."""
    signal: int | None = None
    """Of a `kill`."""


class Answered(Frozen):
    """What a short question came to. Output is text, cut at the limit that was given."""

    code: int
    out: str
    err: str
    timed_out: bool = False
    oom_killed: bool = False
    cut: bool = False


class Credentials(Frozen):
    """A registry's credentials, as the Docker configuration holds them. Never printed."""

    username: str = ""
    password: str = ""
    identity_token: str = ""

    def __repr__(self) -> str:
        return "Credentials([hidden])"

    __str__ = __repr__


OnLayer = Callable[[str, str, int, int], None]
"""Gets a layer's short id, what happens to it, bytes done, bytes in all (0: not known)."""


class Docker(Protocol):
    """The Docker port. Everything raises HostError where the engine cannot be reached."""

    def facts(self) -> EngineFacts:
        """Ask the engine what it is."""

    def credentials(self, registry: str) -> Credentials | None:
        """Give what the Docker configuration holds for a registry, credential helpers included."""

    def image(self, reference: str) -> ImageFacts | None:
        """Look an image up by name, digest or id; None where the engine does not hold it."""

    def pull(self, reference: str, *, arch: str, on_layer: OnLayer | None = None) -> ImageFacts:
        """Pull an image for one architecture. Raises LockError, NotFound, HostError."""

    def tag(self, image: str, repository: str, tag: str) -> None:
        """Name an image."""

    def remove_image(self, reference: str) -> None:
        """Forget an image's name, and the image with its last one; nothing where it is gone."""

    def create(self, spec: ContainerSpec) -> str:
        """Make a container; give its id. Raises HostError (name in use), NotFound (no image)."""

    def start(self, container: str) -> None:
        """Start it. Raises HostError: port in use, no NVIDIA runtime, command not found."""

    def container(self, container: str) -> ContainerFacts | None:
        """Look a container up by name or id; None where there is none."""

    def happened(self, container: str, since: float) -> tuple[Happening, ...]:
        """What befell a container since a time (Unix, in seconds), oldest first.

        An engine remembers only the latest events of all its containers.
        """

    def containers(self, labels: Mapping[str, str]) -> tuple[ContainerFacts, ...]:
        """All containers with these labels, ended ones too; an empty value matches any."""

    def logs(
        self, container: str, *, follow: bool = False, tail: int | None = None
    ) -> Iterator[bytes]:
        """Both streams in order, as they come; with `follow` until the container ends."""

    def wait(self, container: str, timeout: float) -> int | None:
        """Wait for its end, in seconds; give the exit code, or None where time ran out."""

    def stop(self, container: str, timeout: float) -> None:
        """TERM, wait, KILL; nothing where it has ended or is gone."""

    def remove(self, container: str) -> None:
        """Kill and remove, with its anonymous volumes; nothing where it is gone."""

    def ask(self, spec: ContainerSpec, *, timeout: float, max_bytes: int = 2**20) -> Answered:
        """Run a short command to its end; the container is removed however this ends."""

    def clear_left(self) -> None:
        """Remove containers of short questions whose askers on this machine were killed."""

    def export(self, container: str) -> Iterable[bytes]:
        """A container's file system as a tar stream."""
