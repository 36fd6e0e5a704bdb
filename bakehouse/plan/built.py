"""What images that Bakehouse builds are called, say of themselves, and are built by. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from bakehouse import __version__
from bakehouse.base import digest
from bakehouse.lock import GitPin, ImagePin, Lock
from bakehouse.ports.docker import OURS
from bakehouse.recipe.model import Recipe


def tag_of(name: str, key: str) -> str:
    """What a built image is called: by the recipe, for people, and by the plan's digest."""
    plain = re.sub(r"[._-]+", "-", name).strip("-")
    return f"{OURS}/{plain}:{key[:16]}"


def base_name(pin: ImagePin) -> str:
    """What a Dockerfile calls a base image: its digest, or our own name for a local one."""
    return pin.ref if pin.digest else f"{OURS}/base:{pin.id.removeprefix('sha256:')[:24]}"


def labels_of(recipe: Recipe, lock: Lock, key: str) -> dict[str, str]:
    """What a built image says of where it comes from."""
    source = lock.source.commit if isinstance(lock.source, GitPin) else lock.source_tree
    return {
        OURS: __version__,
        f"{OURS}.recipe": recipe.name,
        f"{OURS}.plan": key,
        f"{OURS}.lock": digest(lock),
        f"{OURS}.source": source or "none",
        f"{OURS}.mods": " ".join(f"{m.folder}:{digest(m)}" for m in lock.mods) or "none",
        f"{OURS}.patches": " ".join(f"{p.id}:{p.file.sha256}" for p in lock.patches) or "none",
    }


def build_argv(
    image: str, args: Mapping[str, str], labels: Mapping[str, str], target: str | None = None
) -> tuple[str, ...]:
    """The command that builds; it runs in the folder that holds the context."""
    argv = ["docker", "build", "--force-rm", "--network", "none", "--tag", image]
    if target:
        argv += ["--target", target]
    else:
        argv += [part for n, v in args.items() for part in ("--build-arg", f"{n}={v}")]
        argv += [part for n, v in labels.items() for part in ("--label", f"{n}={v}")]
    return (*argv, ".")
