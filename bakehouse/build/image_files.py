"""The file tree of an image: what two builds of the same inputs are compared by.

Digests of images differ even where nothing else does, since they cover times; paths, modes, owners,
sizes and bytes are what runs.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import cast

from bakehouse.base import Frozen, digest
from bakehouse.ports.docker import ContainerSpec
from bakehouse.ports.docker_engine import RealDocker

NOT_THE_IMAGES = (
    ".dockerenv", "dev/", "proc/", "sys/", "etc/hostname", "etc/hosts", "etc/resolv.conf",
    "etc/mtab",
)  # fmt: skip
"""What the engine puts into every container."""


class ImageFile(Frozen):
    """One entry of a file tree. Mode as in `0755`; a link's target stands in `link`."""

    path: str
    kind: str
    mode: str
    owner: str
    size: int = 0
    sha256: str = ""
    link: str = ""


class _Stream(io.RawIOBase):
    """Chunks as a file."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(cast(bytearray, buffer))
        while not self._rest:
            piece = next(self._chunks, None)
            if piece is None:
                return 0
            self._rest = piece
        count = min(len(view), len(self._rest))
        view[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def read_tar(chunks: Iterable[bytes]) -> Iterator[tuple[tarfile.TarInfo, io.BufferedIOBase | None]]:
    """Entries of a tar stream, each with its content where it is a file; one after the other."""
    stream = io.BufferedReader(_Stream(chunks), 2**20)
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for entry in tar:
            content = tar.extractfile(entry) if entry.isfile() else None
            yield entry, cast("io.BufferedIOBase | None", content)


def image_files(
    docker: RealDocker, image: str, *, below: str = "", target: Path | None = None
) -> tuple[ImageFile, ...]:
    """List an image's file tree, hashing every file; the container for it never starts.

    Files in the folder `below` of the image, not deeper, are written to `target` as well.
    """
    container = docker.create(ContainerSpec(image=image, argv=("none",), network="none"))
    try:
        found = [
            _file(entry, content, _copy_of(entry, below, target))
            for entry, content in read_tar(docker.export(container))
            if not entry.name.startswith(NOT_THE_IMAGES)
        ]
    finally:
        docker.remove(container)
    return tuple(sorted(found, key=lambda file: file.path))


def _copy_of(entry: tarfile.TarInfo, below: str, target: Path | None) -> Path | None:
    """Where a file is to be written, if it is."""
    folder, _, name = f"/{entry.name}".rpartition("/")
    return target / name if target and entry.isfile() and folder == below else None


def _file(
    entry: tarfile.TarInfo, content: io.BufferedIOBase | None, copy: Path | None
) -> ImageFile:
    kinds = (("folder", entry.isdir()), ("file", entry.isfile()), ("link", entry.issym()),
             ("hard link", entry.islnk()))  # fmt: skip
    hashed = hashlib.sha256()
    with copy.open("wb") if copy else nullcontext() as kept:
        while content and (piece := content.read(2**20)):
            hashed.update(piece)
            if kept:
                kept.write(piece)
    return ImageFile(
        path=entry.name.strip("/"),
        kind=next((kind for kind, is_one in kinds if is_one), "other"),
        mode=f"{entry.mode:04o}",
        owner=f"{entry.uid}:{entry.gid}",
        size=entry.size if entry.isfile() else 0,
        sha256=hashed.hexdigest() if entry.isfile() else "",
        link=entry.linkname,
    )


def tree_digest(files: Iterable[ImageFile]) -> str:
    """One value for a whole file tree."""
    return digest([file.to_data() for file in files])


def differences(one: Iterable[ImageFile], other: Iterable[ImageFile]) -> tuple[str, ...]:
    """How two file trees differ, a line each."""
    first, second = ({file.path: file for file in files} for files in (one, other))
    lines = []
    for path in sorted({*first, *second}):
        a, b = first.get(path), second.get(path)
        if a is None or b is None:
            lines.append(f"{path}: only in the {'second' if a is None else 'first'}")
        elif a != b:
            was, now = a.to_data(), b.to_data()
            parts = (
                f"{name} {was[name]} and {now[name]}" for name in was if was[name] != now[name]
            )
            lines.append(f"{path}: {', '.join(parts)}")
    return tuple(lines)
