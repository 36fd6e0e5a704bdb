"""Containers, images and engines: types, how the engine's JSON is read, and what it is sent.

Nothing here talks to an engine: `system/docker/client.py` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from bakehouse.errors import UsageError
from bakehouse.models import Frozen

OURS = "bakehouse"
"""Label of everything that Bakehouse makes; its value is the version of Bakehouse."""

CDI_KIND = "nvidia.com/gpu"
"""Kind of NVIDIA's GPUs as CDI devices (Container Device Interface)."""
CDI_LISTED_SINCE = (1, 50)
"""From this version of the API on, `/info` lists the CDI devices."""

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


def engine_facts(info: Mapping[str, Any], version: Mapping[str, Any], host: str) -> EngineFacts:
    """Read `/info` and `/version`."""
    number = str(version.get("ApiVersion") or "0")
    api = tuple(map(int, number.split(".")))
    runtimes, devices = info.get("Runtimes") or {}, info.get("DiscoveredDevices") or ()
    gpus: Literal["runtime", "cdi", "cdi-unlisted", "none"] = "none"
    if "nvidia" in runtimes:
        gpus = "runtime"
    elif any(str(d.get("ID", "")).startswith(f"{CDI_KIND}=") for d in devices):
        gpus = "cdi"
    # An empty list of folders means that the engine's CDI is switched off.
    elif api < CDI_LISTED_SINCE and info.get("CDISpecDirs"):
        gpus = "cdi-unlisted"
    return EngineFacts(
        version=str(version.get("Version") or "unknown"),
        api=number,
        arch=machine_arch(str(version.get("Arch") or info.get("Architecture") or "")),
        system=str(info.get("OSType") or "linux"),
        runtimes=tuple(sorted(runtimes)),
        gpus=gpus,
        buildkit=api >= (1, 39),
        root=str(info.get("DockerRootDir") or ""),
        host=host,
        security=tuple(map(str, info.get("SecurityOptions") or ())),
    )


def image_facts(data: Mapping[str, Any]) -> ImageFacts:
    """Read the answer of `image inspect`."""
    config = data.get("Config") or {}
    pairs = (str(line).partition("=") for line in config.get("Env") or ())
    return ImageFacts(
        id=str(data["Id"]),
        digests=tuple(data.get("RepoDigests") or ()),
        tags=tuple(data.get("RepoTags") or ()),
        arch=machine_arch(str(data.get("Architecture") or "")),
        system=str(data.get("Os") or ""),
        size=int(data.get("Size") or 0),
        created=str(data.get("Created") or ""),
        entrypoint=words(config.get("Entrypoint")),
        cmd=words(config.get("Cmd")),
        user=str(config.get("User") or ""),
        workdir=str(config.get("WorkingDir") or ""),
        labels=_labels(config),
        env={name: value for name, _, value in pairs},
    )


def _labels(config: Mapping[str, Any] | None) -> dict[str, str]:
    return {str(k): str(v) for k, v in ((config or {}).get("Labels") or {}).items()}


def words(value: Any) -> tuple[str, ...]:
    """An entrypoint or command: a list, one word, or nothing."""
    if isinstance(value, str):
        return (value,)
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def container_facts(data: Mapping[str, Any]) -> ContainerFacts:
    """Read the answer of `container inspect`."""
    state = data.get("State") or {}
    status = str(state.get("Status") or "")
    ended = status in ("exited", "dead")
    ports = (data.get("NetworkSettings") or {}).get("Ports") or {}
    return ContainerFacts(
        id=str(data["Id"]),
        name=str(data.get("Name") or "").removeprefix("/"),
        image=str(data.get("Image") or ""),
        state=status,
        exit_code=int(state.get("ExitCode") or 0) if ended else None,
        oom_killed=bool(state.get("OOMKilled")),
        restarts=int(data.get("RestartCount") or 0),
        pid=int(state.get("Pid") or 0),
        error=str(state.get("Error") or ""),
        started=str(state.get("StartedAt") or ""),
        finished=str(state.get("FinishedAt") or "") if ended else "",
        labels=_labels(data.get("Config")),
        ports={
            int(inside.partition("/")[0]): int(outside[0]["HostPort"])
            for inside, outside in ports.items()
            if outside and inside.endswith("/tcp")
        },
    )


def happening(event: Mapping[str, Any]) -> Happening:
    """Read one event of the engine."""
    number = str(((event.get("Actor") or {}).get("Attributes") or {}).get("signal") or "")
    return Happening(
        at=float(event.get("timeNano") or 0) / 1e9 or float(event.get("time") or 0),
        what=str(event.get("Action") or event.get("status") or ""),
        signal=int(number) if number.isdigit() else None,
    )


def create_body(spec: ContainerSpec, *, cdi: bool = False) -> dict[str, Any]:
    """Give the engine's request for a new container. Raises UsageError for odd `gpus`.

    With `cdi`, GPUs are requested as CDI devices, for an engine without NVIDIA's runtime.
    """
    host = {
        "RestartPolicy": {"Name": "no"},
        "Privileged": False,
        "SecurityOpt": ["no-new-privileges"],
        "LogConfig": {
            "Type": "json-file",
            "Config": {"max-size": f"{spec.log_bytes // 2}", "max-file": "2"},
        },
        "Mounts": [
            {
                "Type": "volume" if mount.volume else "bind",
                "Source": mount.source,
                "Target": mount.target,
                "ReadOnly": mount.read_only,
            }
            for mount in spec.mounts
        ],
        "PortBindings": {
            f"{p.port}/tcp": [{"HostIp": p.host, "HostPort": str(p.host_port or "")}]
            for p in spec.publish
        },
        "IpcMode": spec.ipc,
        "ShmSize": spec.shm_size,
        "NetworkMode": spec.network,
        "Memory": spec.memory,
        "MemorySwap": spec.memory,
        "PidsLimit": spec.pids,
        "Init": spec.init or None,
        "OomScoreAdj": spec.oom_score,
        "CapDrop": ["ALL"] if spec.drop_capabilities else None,
        "DeviceRequests": [gpu_request(spec.gpus, cdi=cdi)] if spec.gpus else None,
    }
    body: dict[str, Any] = {
        "Image": spec.image,
        "Cmd": list(spec.argv) or None,
        "Entrypoint": None if spec.entrypoint is None else list(spec.entrypoint) or [""],
        "User": spec.user,
        "WorkingDir": spec.workdir,
        "Env": [f"{name}={value}" for name, value in spec.env.items()],
        "Labels": spec.labels,
        "ExposedPorts": {f"{p.port}/tcp": {} for p in spec.publish},
        "Tty": False,
        "OpenStdin": False,
        "StopSignal": "SIGTERM",
        "HostConfig": {name: value for name, value in host.items() if value is not None},
    }
    return {name: value for name, value in body.items() if value is not None}


def gpu_request(gpus: str, *, cdi: bool = False) -> dict[str, Any]:
    """Give the engine's request for GPUs: `all`, a number, or `device=0,1`. Raises UsageError.

    NVIDIA's runtime takes a number as that many GPUs from the first one on; CDI devices are named
    one by one.
    """
    ids = [part.strip() for part in gpus.removeprefix("device=").split(",") if part.strip()]
    by_name = gpus.startswith("device=") and bool(ids)
    counted = re.fullmatch(r"[1-9][0-9]{0,3}", gpus) is not None
    if not (by_name or counted or gpus == "all"):
        raise UsageError(
            f"'{gpus}' does not say which GPUs",
            where="container.gpus",
            hint="write all, a number, or device=0,1",
            id="bad-gpus",
        )
    if cdi:
        names = ids if by_name else map(str, range(int(gpus))) if counted else ["all"]
        return {"Driver": "cdi", "DeviceIDs": [f"{CDI_KIND}={name}" for name in names]}
    which = {"DeviceIDs": ids} if by_name else {"Count": int(gpus) if counted else -1}
    return {"Driver": "", "Capabilities": [["gpu"]], **which}
