"""Byte sources, and file types by their first bytes."""

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


HEAD = 512
"""Bytes that are looked at."""


def wrong_format(source: ByteSource, wanted: str, head: bytes | None = None) -> CheckpointError:
    """Name the cause for which `source` is not a `wanted` file, with what to do about it."""
    head = source.read(0, HEAD) if head is None else head[:HEAD]
    cause, hint = _cause(head, source.size, wanted)
    return CheckpointError(cause, where=f"{source.name}, first bytes {head[:8]!r}", hint=hint)


_AGAIN = "download the file again"


def _cause(head: bytes, size: int, wanted: str) -> tuple[str, str]:
    """What it is, and what to do."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if size == 0:
        return "the file is empty", _AGAIN
    if not head.strip(b"\0"):
        return (
            "the file begins with zeros only: space was reserved for it and never filled",
            f"the download was cut short; {_AGAIN}",
        )
    for starts, what, hint in _TEXTS:
        if text[:40].lower().startswith(starts):
            return what.format(size=size, wanted=wanted, line=_line(text)), hint
    for magic, name in _KNOWN:
        if head.startswith(magic) and name != wanted:
            return f"this is a {name} file, not {wanted}", f"give a {wanted} file"
    return f"this is not a {wanted} file", f"give a {wanted} file, or {_AGAIN}"


_TEXTS: tuple[tuple[tuple[bytes, ...], str, str], ...] = (
    (
        (b"version https://git-lfs", b"version https://hawser"),
        "this is a git-lfs pointer of {size} bytes, not the weights",
        "fetch the real file: git lfs pull in that checkout, or let `invoke fetch` get it",
    ),
    (
        (b"<!do", b"<htm", b"<head", b"<?xml", b"<!--", b"<error"),
        "this is an HTML or XML page, not a {wanted} file",
        "the link gave a page (a login, an error): use the file's own address and a valid token",
    ),
    (
        (b"entr", b"inva", b"acce", b"unau", b"forb", b"not f", b"repo", b"404", b"401", b"403"),
        "this is an HTTP error message ({line}), not a {wanted} file",
        f"the file's name, the revision or the token is wrong: correct it, then {_AGAIN}",
    ),
    ((b"{",), "this is JSON ({line}), not a {wanted} file", _AGAIN),
)

_KNOWN = (
    (b"GGUF", "GGUF"),
    (b"FUGG", "byte-swapped GGUF"),
    (b"lmgg", "ggml (before GGUF)"),
    (b"fmgg", "ggmf (before GGUF)"),
    (b"tjgg", "ggjt (before GGUF)"),
    (b"algg", "ggla (a LoRA from before GGUF)"),
    (b"PK\x03\x04", "zip archive (PyTorch pickles are such)"),
    (b"\x80\x02", "pickle"),
    (b"\x80\x04", "pickle"),
    (b"\x89HDF", "HDF5"),
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\xfd7zXZ", "xz"),
    (b"\x7fELF", "program (ELF)"),
)


def _line(text: bytes) -> str:
    """The first line, short and printable."""
    line = text.splitlines()[0][:60] if text else b""
    return "".join(c if c.isprintable() else "?" for c in line.decode(errors="replace"))
