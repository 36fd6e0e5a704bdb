"""The files and the compiler of a toolkit: on this machine, or as a container reported them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from bakehouse.context import Context
from bakehouse.ports.process import Captured, environment

HEADER_BYTES = 2**20
NVCC_S = 30.0


class Here:
    """A toolkit of this machine."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    def nvcc(self, nvcc: Path, *arguments: str) -> Captured:
        """Run nvcc."""
        argv = (str(nvcc), *arguments)
        return self._ctx.processes.capture(argv, env=environment(), timeout=NVCC_S)

    def exists(self, path: Path) -> bool:
        """Whether a file or folder exists, links followed."""
        return path.exists()

    def real(self, path: Path | str) -> str:
        """Resolve all links of a path; as far as possible if it does not exist."""
        return os.path.realpath(path)

    def names(self, folder: Path) -> tuple[str, ...]:
        """List a folder; empty if it does not exist."""
        try:
            return tuple(os.listdir(folder))
        except OSError:
            return ()

    def read(self, path: Path) -> str:
        """Read the first MiB of a text file; empty if it does not exist."""
        try:
            with path.open(errors="replace") as file:
                return file.read(HEADER_BYTES)
        except OSError:
            return ""

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return os.stat(path).st_size


class Told(Here):
    """A toolkit inside a container, from what `docker/toolkit.sh` wrote about it into `folder`.

    `links` gives, for each path that was reported, the one that all its links lead to.
    Raises OSError if nothing was written, ValueError if it cannot be parsed.
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
        """Give a recorded answer of nvcc."""
        name = arguments[0].removeprefix("--")
        argv = (str(nvcc), *arguments)
        if (self._folder / name).is_file():
            return Captured(argv, 0, super().read(self._folder / name), "")
        return Captured(argv, 1, "", super().read(self._folder / f"{name}.failed"))

    def exists(self, path: Path) -> bool:
        """Whether the path was reported."""
        return str(path) in self.links

    def real(self, path: Path | str) -> str:
        """Resolve all links of a path, as in the container."""
        plain = os.path.normpath(path)  # nvcc names its root as `bin/..`
        return self.links.get(plain, plain)

    def names(self, folder: Path) -> tuple[str, ...]:
        """List what was reported of a folder."""
        return tuple(Path(path).name for path in self.links if Path(path).parent == folder)

    def read(self, path: Path) -> str:
        """Read the copy of a file."""
        return super().read(Path(f"{self._folder}/files{path}"))

    def size(self, path: str) -> int:
        """Bytes of a file, as reported."""
        return self._sizes[self.real(path)]

    def same(self, candidate: Path, chosen: str) -> bool:
        """Whether a file here is the toolkit's file there, by its sha256."""
        lines = super().read(self._folder / "hashes").splitlines()
        told = {path.strip(): value for value, _, path in (line.partition(" ") for line in lines)}
        with candidate.open("rb") as file:
            return told.get(chosen) == hashlib.file_digest(file, "sha256").hexdigest()

    @property
    def stub(self) -> Path | None:
        """The stub of the driver's library, under the driver's name."""
        path = self._folder / "stub" / "libcuda.so.1"
        return path if path.is_file() else None
