"""Byte sources, and file types by their first bytes."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from bakehouse.errors import CheckpointError, NotFound


class ByteSource(Protocol):
    """Bytes of known size that can be read at any offset."""

    @property
    def name(self) -> str:
        """Path or URL, for messages."""

    @property
    def size(self) -> int:
        """Bytes in all."""

    @property
    def chunk(self) -> int:
        """Bytes to request at once."""

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`; fewer only at the end of the file."""


class FileSource:
    """A file on this machine. Raises NotFound or CheckpointError if it cannot be opened."""

    chunk = 256 * 2**10

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        # Without O_NONBLOCK, opening a FIFO would wait forever.
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound.named(
                "weight file", path.name, where=self.name, hint="fetch it first"
            ) from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(
                f"cannot open the weight file '{path.name}': {reason}",
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
                f"cannot read the weight file '{self.path.name}': {error.strerror or error}",
                where=f"{self.name}, byte {offset}",
                hint="the disk or the network file system may be failing; check dmesg",
            ) from error

    def __enter__(self) -> Self:
        """Use as a context manager, which closes the file at the end."""
        return self

    def __exit__(self, *_: object) -> None:
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


def wrong_format(source: ByteSource, wanted: str, head: bytes) -> CheckpointError:
    """Return the error for a file that is not a `wanted` one; `head` is its first 512 bytes."""
    cause, hint = _cause(head[:512], source.size, wanted)
    return CheckpointError(cause, where=f"{source.name}, first bytes {head[:8]!r}", hint=hint)


def damaged(source: ByteSource, kind: str, what: str, offset: int | None = None) -> CheckpointError:
    """Return the error for a `kind` file that is damaged or cut short."""
    return CheckpointError(
        f"the {kind} file is damaged: {what}",
        where=source.name if offset is None else f"{source.name}, byte {offset}",
        hint="download it again and compare its sha256; the download was probably cut short",
    )


_AGAIN = "download the file again"


def _cause(head: bytes, size: int, wanted: str) -> tuple[str, str]:
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if size == 0:
        return "the file is empty", _AGAIN
    if not head.strip(b"\0"):
        return (
            "the file starts with zeros only: its space was reserved but never written",
            f"the download was cut short; {_AGAIN}",
        )
    first = text.splitlines()[0][:60].decode(errors="replace") if text else ""
    line = "".join(c if c.isprintable() else "?" for c in first)
    for starts, what, hint in _TEXTS:
        if text[:40].lower().startswith(starts):
            return what.format(size=size, wanted=wanted, line=line), hint
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
        "the link returned a web page (login or error): use the file's own URL and a valid token",
    ),
    (
        (b"entr", b"inva", b"acce", b"unau", b"forb", b"not f", b"repo", b"404", b"401", b"403"),
        "this is an HTTP error message ({line}), not a {wanted} file",
        f"check the file name, the revision and the token, then {_AGAIN}",
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
    (b"PK\x03\x04", "zip archive (as PyTorch pickles are)"),
    (b"\x80\x02", "pickle"),
    (b"\x80\x04", "pickle"),
    (b"\x89HDF", "HDF5"),
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\xfd7zXZ", "xz"),
    (b"\x7fELF", "program (ELF)"),
)
