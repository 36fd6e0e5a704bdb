"""How a server's container is made: pinned files read-only, one port, nothing that can do harm.

The container sees exactly the files that are pinned, each mounted by itself: what else lies
beside them on the host is no input of the server.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from bakehouse.engines.engine import Engine
from bakehouse.lock import Lock
from bakehouse.ports.docker import OURS, ContainerSpec, Mount, Published
from bakehouse.preflight.volumes import WEIGHTS, volumes
from bakehouse.recipe.model import Recipe
from bakehouse.recipe.variables import Paths, StandIn

ANY = "0.0.0.0"  # noqa: S104 - of the container alone; what the host publishes is another address
SERVER = f"{OURS}.server"
"""Label that names the server's folder on the host; its value is set with each launch."""
RECIPE = f"{OURS}.recipe"
NONCE = f"{OURS}.nonce"


def container_name(server: str) -> str:
    """Give the container's name for a server's name; an instance's `@` is not allowed there."""
    return f"bakehouse-{server.replace('@', '.')}"


def inside(role: str, lock: Lock) -> StandIn:
    """Give one role's weights as the server in its container sees them."""
    base = WEIGHTS / role
    files = tuple(str(base / pin.path) for pin in lock.weights[role].files)
    loadable = [f for f in files if f.endswith((".gguf", ".safetensors"))]
    first = min(loadable or files)
    folder = os.path.commonpath([os.path.dirname(f) for f in files])
    return StandIn(first, first if len(files) == 1 else folder, files)


def weight_mounts(lock: Lock, weights: Mapping[str, Paths]) -> tuple[Mount, ...]:
    """Mount each pinned file, read-only, where `inside` says that it is."""
    return tuple(
        Mount(source=source, target=target)
        for role, paths in weights.items()
        for source, target in zip(paths.files, inside(role, lock).files, strict=True)
    )


def plan_container(
    recipe: Recipe,
    engine: Engine,
    image: str,
    mounts: Sequence[Mount],
    *,
    folder: str,
    host: str,
    port: int,
) -> ContainerSpec:
    """Plan the container; its command, the run's labels and an API key come with the launch.

    `folder` is what relative volumes are relative to. Raises UsageError for a volume that must not
    be mounted.
    """
    wanted = recipe.container
    own = volumes(wanted.volumes if wanted else (), folder)
    return ContainerSpec(
        image=image,
        name=container_name(recipe.name),
        env={**engine.environment, **(wanted.env if wanted else {}), **recipe.serve.env,
             **engine.forced_environment},
        labels={OURS: "server", RECIPE: recipe.name},
        user=wanted.user if wanted else None,
        gpus=wanted.gpus if wanted else None,
        ipc=wanted.ipc if wanted else None,
        shm_size=wanted.shm_size if wanted else None,
        memory=wanted.memory if wanted else None,
        mounts=(*mounts, *own),
        publish=(Published(port=engine.inside_port, host=host, host_port=port),),
    )  # fmt: skip


def described(spec: ContainerSpec) -> list[str]:
    """Say what a container is given, as options of `docker run`; its command follows."""
    said = [f"--name {spec.name}", "--restart no", "--entrypoint ''"]
    said += [f"--gpus {spec.gpus}"] if spec.gpus else []
    said += [f"--ipc {spec.ipc}"] if spec.ipc else []
    said += [f"--shm-size {spec.shm_size}"] if spec.shm_size else []
    said += [f"--memory {spec.memory}"] if spec.memory else []
    said += [f"--user {spec.user}"] if spec.user else []
    said += [f"--publish {p.host}:{p.host_port or ''}:{p.port}" for p in spec.publish]
    said += [f"--env {shlex.quote(f'{name}={value}')}" for name, value in spec.env.items()]
    for mount in spec.mounts:
        mode = ":ro" if mount.read_only else ""
        said.append(f"--volume {shlex.quote(f'{mount.source}:{mount.target}{mode}')}")
    return [*said, spec.image]
