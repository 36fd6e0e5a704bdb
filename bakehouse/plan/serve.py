"""Plan a server: its argument list, and its container if it has one. Pure.

A container sees exactly the pinned files, each mounted by itself and read-only: other files beside
them on the host are no input of the server.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

from bakehouse.engines.base import Requirements, engine_of
from bakehouse.lock import Lock
from bakehouse.paths import Places
from bakehouse.plan.types import ServePlan
from bakehouse.preflight.rules import WEIGHTS, bind_address, volumes
from bakehouse.recipe.models import Container, Recipe
from bakehouse.recipe.template import Paths, StandIn, render, template_variables
from bakehouse.recipe.types import Origin
from bakehouse.system.docker.models import OURS, ContainerSpec, Mount, Published

ANY_ADDRESS = "0.0.0.0"  # noqa: S104 - of the container; the host publishes another address
SERVER = f"{OURS}.server"
"""Label with the server's folder on the host; set with each launch."""
RECIPE = f"{OURS}.recipe"
NONCE = f"{OURS}.nonce"


def plan_serve(
    recipe: Recipe,
    lock: Lock,
    binary: str,
    weights: Mapping[str, Paths],
    *,
    places: Places,
    origin: Origin,
    host: str | None = None,
    port: int | None = None,
    image: str | None = None,
    folder: str = "/",
) -> tuple[ServePlan, Requirements]:
    """Plan a server that runs `binary`, in a container of `image` if that is given.

    `host` and `port` override the recipe's; `origin` is the command's place in the recipe, `folder`
    the one that its volumes are relative to. Raises RecipeError for an invalid command, UsageError
    for an address that must not be used.
    """
    engine = engine_of(recipe.engine)
    state = places.servers / recipe.name
    has_key = recipe.serve.api_key is not None
    address = bind_address(host or recipe.serve.host, has_key=has_key)
    chosen = recipe.serve.port if port is None else port
    visible: Mapping[str, Paths] = {r: inside(r, lock) for r in weights} if image else weights
    variables = template_variables(recipe, server=binary, weights=visible)
    command = render(recipe.serve.command, variables, origin=origin)
    engine.refuse(command, recipe, origin, lock)
    added, late = engine.additions(
        command, recipe,
        host=ANY_ADDRESS if image else address,
        port=engine.inside_port if image else chosen,
        key_file=str(state / "api-key") if has_key and not image else None,
    )  # fmt: skip
    requirements = engine.features(recipe, lock, command, engine.served(visible["model"]))
    container = None
    if image:
        box = recipe.container or Container()
        container = ContainerSpec(  # the launch adds its command, the run's labels and an API key
            image=image,
            name=container_name(recipe.name),
            env={**engine.environment, **box.env, **recipe.serve.env, **engine.forced_environment},
            labels={OURS: "server", RECIPE: recipe.name},
            user=box.user,
            gpus=box.gpus,
            ipc=box.ipc,
            shm_size=box.shm_size,
            memory=box.memory,
            mounts=(*weight_mounts(lock, weights), *volumes(box.volumes, folder)),
            publish=(Published(port=engine.inside_port, host=address, host_port=chosen),),
        )
    plan = ServePlan(
        name=recipe.name,
        argv=(*command, *added),
        late=(len(command) + late,),
        env={} if image else {**recipe.serve.env, "XDG_CONFIG_HOME": str(state / "config")},
        host=address,
        port=chosen,
        expects=engine.expectations(requirements),
        suites=recipe.asked.suites or (),
        container=container,
    )
    return plan, requirements


def container_name(server: str) -> str:
    """Return the container's name for a server's; an instance's `@` is not allowed in it."""
    return f"bakehouse-{server.replace('@', '.')}"


def inside(role: str, lock: Lock) -> StandIn:
    """Return the paths of one role's weights inside the container."""
    base = WEIGHTS / role
    files = tuple(str(base / pin.path) for pin in lock.weights[role].files)
    loadable = [f for f in files if f.endswith((".gguf", ".safetensors"))]
    first = min(loadable or files)
    folder = os.path.commonpath([os.path.dirname(f) for f in files])
    return StandIn(first, first if len(files) == 1 else folder, files)


def weight_mounts(lock: Lock, weights: Mapping[str, Paths]) -> tuple[Mount, ...]:
    """Mount each pinned file, read-only, at its path of `inside`."""
    return tuple(
        Mount(source=source, target=target)
        for role, paths in weights.items()
        for source, target in zip(paths.files, inside(role, lock).files, strict=True)
    )


def described(spec: ContainerSpec) -> list[str]:
    """Describe a container as options of `docker run`; its command follows."""
    lines = [f"--name {spec.name}", "--restart no", "--entrypoint ''"]
    for name in ("gpus", "ipc", "shm_size", "memory", "user"):
        if value := getattr(spec, name):
            lines.append(f"--{name.replace('_', '-')} {value}")
    lines += [f"--publish {p.host}:{p.host_port or ''}:{p.port}" for p in spec.publish]
    lines += [f"--env {shlex.quote(f'{name}={value}')}" for name, value in spec.env.items()]
    for mount in spec.mounts:
        mode = ":ro" if mount.read_only else ""
        lines.append(f"--volume {shlex.quote(f'{mount.source}:{mount.target}{mode}')}")
    return [*lines, spec.image]
