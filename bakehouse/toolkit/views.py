"""A toolkit as it can be looked at: on this machine, or by what a container told of its own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from bakehouse.context import Context
from bakehouse.ports.process import Captured, environment

HEADER_BYTES = 2**20
NVCC_S = 30.0


class View(Protocol):
    """What is asked of the files and of the compiler of a toolkit."""

    def nvcc(self, nvcc: Path, *arguments: str) -> Captured:
        """Run nvcc."""

    def exists(self, path: Path) -> bool:
        """Whether there is such a file or folder, links followed."""

    def real(self, path: Path | str) -> str:
        """The path with all links resolved; of one that is not there, as good as it goes."""

    def names(self, folder: Path) -> tuple[str, ...]:
        """What lies in a folder; nothing where it is not there."""

    def read(self, path: Path) -> str:
        """The beginning of a text file; empty where it is not there."""

    def size(self, path: str) -> int:
        """Bytes of a file."""


class Here:
    """A toolkit of this machine."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    def nvcc(self, nvcc: Path, *arguments: str) -> Captured:
        """See `View`."""
        argv = (str(nvcc), *arguments)
        return self._ctx.processes.capture(argv, env=environment(), timeout=NVCC_S)

    def exists(self, path: Path) -> bool:
        """See `View`."""
        return path.exists()

    def real(self, path: Path | str) -> str:
        """See `View`."""
        return os.path.realpath(path)

    def names(self, folder: Path) -> tuple[str, ...]:
        """See `View`."""
        try:
            return tuple(os.listdir(folder))
        except OSError:
            return ()

    def read(self, path: Path) -> str:
        """See `View`."""
        return _read(path)

    def size(self, path: str) -> int:
        """See `View`."""
        return os.stat(path).st_size


class Told:
    """A toolkit inside a container, by what `docker/toolkit.sh` wrote of it into `folder`.

    `links` gives, for each path that was told of, the one that all its links lead to.
    Raises OSError where nothing was written, ValueError where it makes no sense.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[str, int] = {}
        links: dict[str, str] = {}
        for line in (folder / "paths").read_text(errors="replace").splitlines():
            real, size, path = line.split("\t")
            links |= {path: real, real: real}
            self._sizes[real] = int(size)
        self.links: Mapping[str, str] = links

    def nvcc(self, nvcc: Path, *arguments: str) -> Captured:
        """See `View`; only what was asked there is known."""
        name = arguments[0].removeprefix("--")
        argv = (str(nvcc), *arguments)
        if (self._folder / name).is_file():
            return Captured(argv, 0, _read(self._folder / name), "")
        return Captured(argv, 1, "", _read(self._folder / f"{name}.failed"))

    def exists(self, path: Path) -> bool:
        """See `View`."""
        return str(path) in self.links

    def real(self, path: Path | str) -> str:
        """See `View`."""
        plain = os.path.normpath(path)  # nvcc names its root as `bin/..`
        return self.links.get(plain, plain)

    def names(self, folder: Path) -> tuple[str, ...]:
        """See `View`."""
        return tuple(Path(path).name for path in self.links if Path(path).parent == folder)

    def same(self, candidate: Path, chosen: str) -> bool:
        """Whether a file here is the toolkit's file there, by its sha256."""
        lines = _read(self._folder / "hashes").splitlines()
        told = {path.strip(): value for value, _, path in (line.partition(" ") for line in lines)}
        with candidate.open("rb") as file:
            return told.get(chosen) == hashlib.file_digest(file, "sha256").hexdigest()

    @property
    def stub(self) -> Path | None:
        """The stub of the driver's library, under the driver's name."""
        path = self._folder / "stub" / "libcuda.so.1"
        return path if path.is_file() else None

    def read(self, path: Path) -> str:
        """See `View`."""
        return _read(Path(f"{self._folder}/files{path}"))

    def size(self, path: str) -> int:
        """See `View`."""
        return self._sizes[self.real(path)]


def _read(path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            return file.read(HEADER_BYTES)
    except OSError:
        return ""
