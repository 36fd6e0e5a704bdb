"""What the engine's JSON says, as our types; and a container's description as the engine's JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from bakehouse.errors import UsageError
from bakehouse.ports.docker import (
    ContainerFacts,
    ContainerSpec,
    EngineFacts,
    Happening,
    ImageFacts,
    machine_arch,
)

CDI_KIND = "nvidia.com/gpu"
"""What NVIDIA's GPUs are called as CDI devices (Container Device Interface)."""
CDI_LISTS = (1, 50)
"""From this version of the API on, `/info` lists the CDI devices that there are."""


def engine_facts(info: Mapping[str, Any], version: Mapping[str, Any], host: str) -> EngineFacts:
    """Read `/info` and `/version`."""
    runtimes = tuple(sorted(info.get("Runtimes") or {}))
    number = str(version.get("ApiVersion") or "0")
    return EngineFacts(
        version=str(version.get("Version") or "unknown"),
        api=number,
        arch=machine_arch(str(version.get("Arch") or info.get("Architecture") or "")),
        system=str(info.get("OSType") or "linux"),
        runtimes=runtimes,
        gpus=_gpus_by(info, _api(number)),
        buildkit=_api(number) >= (1, 39),
        root=str(info.get("DockerRootDir") or ""),
        host=host,
        security=tuple(map(str, info.get("SecurityOptions") or ())),
    )


def _api(number: str) -> tuple[int, ...]:
    return tuple(map(int, number.split(".")))


def _gpus_by(
    info: Mapping[str, Any], api: tuple[int, ...]
) -> Literal["runtime", "cdi", "cdi-unlisted", "none"]:
    """Tell how this engine takes GPUs: by NVIDIA's runtime where it is registered, else by CDI."""
    if "nvidia" in (info.get("Runtimes") or {}):
        return "runtime"
    devices = info.get("DiscoveredDevices") or ()
    if any(str(d.get("ID", "")).startswith(f"{CDI_KIND}=") for d in devices):
        return "cdi"
    # An empty list of folders means that the engine's CDI is switched off.
    return "cdi-unlisted" if api < CDI_LISTS and info.get("CDISpecDirs") else "none"


def image_facts(data: Mapping[str, Any]) -> ImageFacts:
    """Read what `image inspect` gives."""
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
        labels={str(k): str(v) for k, v in (config.get("Labels") or {}).items()},
        env={name: value for name, _, value in pairs},
    )


def words(value: Any) -> tuple[str, ...]:
    """An entrypoint or command: a list, one word, or nothing."""
    if isinstance(value, str):
        return (value,)
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def container_facts(data: Mapping[str, Any]) -> ContainerFacts:
    """Read what `container inspect` gives."""
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
        labels={
            str(k): str(v) for k, v in ((data.get("Config") or {}).get("Labels") or {}).items()
        },
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

    With `cdi`, GPUs are asked for as CDI devices: an engine without NVIDIA's runtime knows them
    by no other name.
    """
    ports: dict[str, Any] = {f"{p.port}/tcp": {} for p in spec.publish}
    body: dict[str, Any] = {
        "Image": spec.image,
        "Cmd": list(spec.argv) or None,
        "Env": [f"{name}={value}" for name, value in spec.env.items()],
        "Labels": spec.labels,
        "ExposedPorts": ports,
        "Tty": False,
        "OpenStdin": False,
        "StopSignal": "SIGTERM",
        "HostConfig": _host_config(spec, cdi=cdi),
    }
    if spec.entrypoint is not None:
        body["Entrypoint"] = list(spec.entrypoint) or [""]
    if spec.user is not None:
        body["User"] = spec.user
    if spec.workdir is not None:
        body["WorkingDir"] = spec.workdir
    return body


def _host_config(spec: ContainerSpec, *, cdi: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
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
    }
    limits = {
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
    return {**config, **{name: value for name, value in limits.items() if value is not None}}


def gpu_request(gpus: str, *, cdi: bool = False) -> dict[str, Any]:
    """Give the engine's request for GPUs: `all`, a number, or `device=0,1`.

    NVIDIA's runtime takes a number as so many GPUs from the first one on; as CDI devices they are
    named one by one.
    """
    request: dict[str, Any] = {"Driver": "", "Capabilities": [["gpu"]]}
    ids = [part.strip() for part in gpus.removeprefix("device=").split(",") if part.strip()]
    by_name = gpus.startswith("device=") and bool(ids)
    counted = re.fullmatch(r"[1-9][0-9]{0,3}", gpus) is not None
    if cdi and (by_name or counted or gpus == "all"):
        names = ids if by_name else list(map(str, range(int(gpus)))) if counted else ["all"]
        return {"Driver": "cdi", "DeviceIDs": [f"{CDI_KIND}={name}" for name in names]}
    if by_name:
        return {**request, "DeviceIDs": ids}
    if counted or gpus == "all":
        return {**request, "Count": int(gpus) if counted else -1}
    raise UsageError(
        f"'{gpus}' does not say which GPUs",
        where="container.gpus",
        hint="write all, a number, or device=0,1",
        id="bad-gpus",
    )
