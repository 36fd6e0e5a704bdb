"""Volumes of a container, `SOURCE:TARGET[:ro]`: parsed and checked.

A recipe must not mount what controls the machine: the engine's socket, or the kernel's own file
systems.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath

from bakehouse.errors import UsageError
from bakehouse.ports.docker import Mount

WEIGHTS = PurePosixPath("/weights")
"""The pinned files of each role in the container: `/weights/model` and so on."""
SOCKETS = ("docker.sock", "podman.sock", "containerd.sock", "crio.sock")
HOLDS_SOCKETS = ("/", "/run", "/var", "/var/run", "/run/containerd", "/run/podman", "/run/user")
KERNEL = ("/proc", "/sys")
"""These change the kernel's settings and show other processes' environments."""
CODE = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr", "/etc", "/opt", "/boot", "/run",
        "/proc", "/sys", "/dev", "/bakehouse")  # fmt: skip
"""Code and settings of the image, which was verified as it is."""
PACKAGES = (".local", "site-packages", "dist-packages")
"""Folders in which Python looks for code, anywhere."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]+")


def volumes(texts: Sequence[str], folder: str) -> tuple[Mount, ...]:
    """Parse `SOURCE:TARGET[:ro]`: a named volume, or a path of the host. Raises UsageError."""
    read = tuple(_volume(text, folder) for text in texts)
    seen: dict[str, str] = {}
    for text, mount in zip(texts, read, strict=True):
        if other := seen.get(inner := os.path.normpath(mount.target)):
            raise _bad(text)(f"has the same target as '{other}'", "give each its own folder")
        seen[inner] = text
    return read


def reaches(path: str, sockets: Sequence[str] = ()) -> str | None:
    """Return why a path of the host must not be mounted, links followed; None if it may be.

    `sockets` are the sockets of engines, which no mounted folder may contain.
    """
    real = os.path.realpath(path)
    for kernel in KERNEL:
        if real == kernel or real.startswith(f"{kernel}/"):
            return f"would give the container the kernel's own {kernel}"
    if real == "/dev":
        return "would give the container the devices of this machine"
    names = [os.path.join(real, name) for name in SOCKETS]
    above = [os.path.realpath(one) for one in sockets]
    if (
        real in HOLDS_SOCKETS
        or os.path.basename(real) in SOCKETS
        or any(map(_is_socket, (real, *names)))
        or any(one == real or one.startswith(f"{real}/") for one in above)
    ):
        return "would give the container the engine's own socket, and with it this machine"
    return None


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _bad(text: str) -> Callable[[str, str], UsageError]:
    def made(why: str, hint: str) -> UsageError:
        return UsageError(f"container.volumes: '{text}' {why}", hint=hint, id="bad-volume")

    return made


def _volume(text: str, folder: str) -> Mount:
    bad = _bad(text)
    parts = text.split(":")
    mode = parts.pop() if len(parts) == 3 else "rw"
    if len(parts) != 2 or mode not in ("ro", "rw") or not all(parts) or "\0" in text:
        raise bad("is not a volume", "write SOURCE:TARGET or SOURCE:TARGET:ro")
    source, target = parts
    inner = PurePosixPath(os.path.normpath(target))
    if not target.startswith("/") or inner == PurePosixPath("/"):
        raise bad("has no target folder in the container", "name one, such as /root/.cache/vllm")
    if inner == WEIGHTS or WEIGHTS in inner.parents or inner in WEIGHTS.parents:
        raise bad("hides the pinned weights", f"they are in {WEIGHTS}; name another folder")
    if (
        inner in map(PurePosixPath, ("/root", "/home"))
        or set(PACKAGES) & set(inner.parts)
        or any(PurePosixPath(code) in (inner, *inner.parents) for code in CODE)
    ):
        raise bad(
            "hides code of the image, which was verified as it is",
            "mount data elsewhere, such as in /data or /root/.cache; change code with image.mods "
            "or image.patches",
        )
    if "/" not in source and not source.startswith(("~", ".")):
        if not _NAME.fullmatch(source):
            raise bad(
                "has an invalid volume name",
                "a name has two or more letters, digits, '_', '.' and '-'; a path begins with /, ~ "
                "or .",
            )
        return Mount(source=source, target=target, read_only=mode == "ro", volume=True)
    path = os.path.abspath(os.path.join(folder, os.path.expanduser(source)))
    if why := reaches(path):
        raise bad(why, "mount the one folder that the server needs")
    return Mount(source=path, target=target, read_only=mode == "ro")
