"""What a container is given beside the weights: `SOURCE:TARGET[:ro]`, read, and judged.

The recipe's author says what is mounted, and may name nothing that is the machine itself: the
engine's socket, or the kernel's own file systems.
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
"""Where the pinned files of each role lie inside: `/weights/model` and so on."""
SOCKETS = ("docker.sock", "podman.sock", "containerd.sock", "crio.sock")
HOLDS_SOCKETS = ("/", "/run", "/var", "/var/run", "/run/containerd", "/run/podman", "/run/user")
KERNEL = ("/proc", "/sys")
"""Through these the kernel is set, and other processes' environments are read."""
CODE = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr", "/etc", "/opt", "/boot", "/run",
        "/proc", "/sys", "/dev", "/bakehouse")  # fmt: skip
"""What an image runs, or is set up by: it was proven able as it is."""
PACKAGES = (".local", "site-packages", "dist-packages")
"""Folders in which Python looks for code, wherever they lie."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]+")


def volumes(texts: Sequence[str], folder: str) -> tuple[Mount, ...]:
    """Read `SOURCE:TARGET[:ro]`: a named volume, or a path of the host. Raises UsageError."""
    read = tuple(_volume(text, folder) for text in texts)
    seen: dict[str, str] = {}
    for text, mount in zip(texts, read, strict=True):
        if other := seen.get(inner := os.path.normpath(mount.target)):
            raise _bad(text)(f"lies where '{other}' lies", "give each a folder of its own")
        seen[inner] = text
    return read


def reaches(path: str, sockets: Sequence[str] = ()) -> str | None:
    """Say what a path of the host gives away, links followed; None where it is harmless.

    `sockets` are those of engines at hand: a folder above one of them holds it.
    """
    real = os.path.realpath(path)
    for kernel in KERNEL:
        if real == kernel or real.startswith(f"{kernel}/"):
            return f"would hand the container the kernel's own {kernel}"
    if real == "/dev":
        return "would hand the container the devices of this machine"
    names = [os.path.join(real, name) for name in SOCKETS]
    above = [os.path.realpath(one) for one in sockets]
    if (
        real in HOLDS_SOCKETS
        or os.path.basename(real) in SOCKETS
        or any(map(_is_socket, (real, *names)))
        or any(one == real or one.startswith(f"{real}/") for one in above)
    ):
        return "would hand the container the engine's own socket, and with it this machine"
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
        raise bad("is no volume", "write SOURCE:TARGET or SOURCE:TARGET:ro")
    source, target = parts
    inner = PurePosixPath(os.path.normpath(target))
    if not target.startswith("/") or inner == PurePosixPath("/"):
        raise bad("has no folder inside the container", "name one, such as /root/.cache/vllm")
    if inner == WEIGHTS or WEIGHTS in inner.parents or inner in WEIGHTS.parents:
        raise bad("lies over the pinned weights", f"{WEIGHTS} holds them; name another folder")
    if (
        inner in map(PurePosixPath, ("/root", "/home"))
        or set(PACKAGES) & set(inner.parts)
        or any(PurePosixPath(code) in (inner, *inner.parents) for code in CODE)
    ):
        raise bad(
            "lies over what the image runs, which was proven able as it is",
            "mount data elsewhere, such as in /data or /root/.cache; code comes with the image: "
            "image.mods, image.patches",
        )
    if "/" not in source and not source.startswith(("~", ".")):
        if not _NAME.fullmatch(source):
            raise bad(
                "names no volume that an engine could have",
                "a name has two or more letters, digits, '_', '.' and '-'; a path begins with /, ~ "
                "or .",
            )
        return Mount(source=source, target=target, read_only=mode == "ro", volume=True)
    path = os.path.abspath(os.path.join(folder, os.path.expanduser(source)))
    if why := reaches(path):
        raise bad(why, "mount the one folder that the server needs")
    return Mount(source=path, target=target, read_only=mode == "ro")
