"""How headers are read: small positioned reads, so that a range request can stand in for a file."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from bakehouse.errors import CheckpointError, NotFound


class ByteSource(Protocol):
    """Bytes of known size that can be read at any offset."""

    @property
    def name(self) -> str:
        """What messages call it: a path or a URL."""

    @property
    def size(self) -> int:
        """Bytes in all."""

    @property
    def chunk(self) -> int:
        """How many bytes are worth asking for at once."""

    def read(self, offset: int, length: int) -> bytes:
        """Give at most `length` bytes from `offset`; fewer only at the end."""


class FileSource:
    """A file on this machine. Raises NotFound or CheckpointError where it cannot be opened."""

    chunk = 256 * 2**10

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        # Without O_NONBLOCK, opening a FIFO under a weight file's name would wait for ever.
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound.named(
                "weight file", path.name, where=self.name, hint="fetch it first"
            ) from error
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the weight file '{path.name}' cannot be opened: {_reason(error)}",
                where=self.name,
                hint="check its permissions and the disk",
            ) from error
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise CheckpointError(
                f"'{path.name}' is not a regular file",
                where=self.name,
                hint="give the path of a weight file",
            )
        self.size = status.st_size

    def read(self, offset: int, length: int) -> bytes:
        """See `ByteSource.read`."""
        try:
            return os.pread(self._fd, length, offset)
        except OSError as error:
            raise CheckpointError(
                f"the weight file '{self.path.name}' cannot be read: {_reason(error)}",
                where=f"{self.name}, byte {offset}",
                hint="the disk or the network file system may be failing; look at dmesg",
            ) from error

    def __enter__(self) -> Self:
        """Use as a context manager: the file is closed at the end."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        os.close(self._fd)


@dataclass(frozen=True)
class BytesSource:
    """Bytes in memory under a name."""

    name: str
    data: bytes
    chunk: int = 64 * 2**10

    @property
    def size(self) -> int:
        """Bytes in all."""
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        """See `ByteSource.read`."""
        return self.data[offset : offset + length]


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
