"""Error classes, one for each exit code.

An error has three parts, printed on three lines: *what* is wrong, *where* (a file and line, a
step, a log line, a request) and *hint* (what to do about it).
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from bakehouse.models import Check


class BakehouseError(Exception):
    """Base of all errors with an explanation. `id` is stable, for scripts."""

    exit_code: ClassVar[int] = 1
    default_id: ClassVar[str] = "unexpected"

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        hint: str | None = None,
        id: str | None = None,  # noqa: A002 - the field's name in the JSON document
        checks: Sequence[Check] = (),
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint
        self.id = id or self.default_id
        self.checks = tuple(checks)


class UsageError(BakehouseError):
    """The command line cannot be understood."""

    exit_code = 2
    default_id = "usage"


@dataclass(frozen=True, order=True)
class Fault:
    """One error in a file; prints as `file:line:column: message (hint)`.

    `line` and `column` count from 1; 0 means that the place is not known.
    """

    file: str
    line: int
    column: int
    message: str
    hint: str | None = None

    def __str__(self) -> str:
        """Format as compilers do, so that editors can open the place."""
        place = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{place}: {self.message}" + (f" ({self.hint})" if self.hint else "")


class RecipeError(BakehouseError):
    """A recipe is invalid; holds all of its faults, not only the first."""

    exit_code = 2
    default_id = "recipe"

    def __init__(self, what: str, faults: Sequence[Fault], *, hint: str | None = None) -> None:
        ordered = tuple(sorted(set(faults), key=lambda f: (f.file, f.line, f.column, f.message)))
        super().__init__(what, where="\n".join(map(str, ordered)), hint=hint)
        self.faults = ordered


class NotFound(BakehouseError):
    """Something named does not exist, or has not been built."""

    exit_code = 3
    default_id = "not-found"

    @classmethod
    def named(
        cls,
        kind: str,
        name: str,
        *,
        where: str | None = None,
        hint: str | None = None,
        id: str | None = None,  # noqa: A002 - the field's name in the JSON document
    ) -> Self:
        """Make the error for a file, folder or recipe that does not exist."""
        return cls(f"{kind} '{name}' not found", where=where, hint=hint, id=id)


class LockError(BakehouseError):
    """A pin is missing, has drifted, or does not match the fetched content."""

    exit_code = 4
    default_id = "lock"


class CheckpointError(LockError):
    """A weight file is truncated, corrupt, hostile or of another format."""

    default_id = "checkpoint"


class PatchError(BakehouseError):
    """A patch cannot be fetched, trusted or applied."""

    exit_code = 5
    default_id = "patch"


class BuildFailed(BakehouseError):
    """Configure, acceptance or compile failed."""

    exit_code = 6
    default_id = "build"


class NotHealthy(BakehouseError):
    """A server did not start, died, stalled or lacks a feature that the recipe requires."""

    exit_code = 7
    default_id = "not-healthy"


class NotCorrect(BakehouseError):
    """A server answers, but wrongly."""

    exit_code = 8
    default_id = "not-correct"


class HostError(BakehouseError):
    """This machine lacks something: a tool, memory, disk, a port, the network, a permission."""

    exit_code = 9
    default_id = "environment"


def is_disk_full(error: OSError) -> bool:
    """Whether the disk, the quota or the largest file size is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def os_error(
    error: OSError,
    what: str,
    folder: PathLike[str],
    hint: str,
    id: str = "disk",  # noqa: A002 - the field's name in the JSON document
) -> HostError:
    """Make the error for a file below `folder` that cannot be read or written.

    The id `disk` becomes `disk-full` if the disk is full.
    """
    return HostError(
        f"{what}: {error.strerror or error}",
        where=str(error.filename2 or error.filename or folder),
        hint=hint,
        id="disk-full" if id == "disk" and is_disk_full(error) else id,
    )


class Interrupted(BakehouseError):
    """The user, or a supervisor, stopped us; all children were ended first."""

    exit_code = 130
    default_id = "interrupted"
