"""Who we are at the Hugging Face Hub, and whether it may be asked at all: huggingface_hub's ways.

The variables are those that huggingface_hub reads, and so is the file that `hf auth login` writes.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bakehouse.context import Context
from bakehouse.errors import HostError, UsageError
from bakehouse.recipe.faults import shown

VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Either goes before the file."""
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
NO_TOKEN = "HF_HUB_DISABLE_IMPLICIT_TOKEN"  # noqa: S105 - the name of a switch
MAX_BYTES = 2**16
_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True)
class Token:
    """A token, and what it comes from, for messages."""

    value: str = field(repr=False)
    origin: str


def home(environment: Mapping[str, str]) -> Path | None:
    """The folder of huggingface_hub; None where there is no home folder."""
    if given := environment.get("HF_HOME"):
        return Path(os.path.expanduser(given))
    base = environment.get("XDG_CACHE_HOME")
    if not base:
        if not (own := environment.get("HOME")):
            return None
        base = str(Path(own) / ".cache")
    return Path(os.path.expanduser(base)) / "huggingface"


def token(ctx: Context) -> Token | None:
    """Find the token to send, by a variable or by `hf auth login`; from then on it is hidden.

    Raises UsageError for what cannot be one, HostError where HF_TOKEN_PATH cannot be read.
    """
    if is_on(ctx.environment.get(NO_TOKEN)):
        return None
    for name in VARIABLES:
        if value := ctx.environment.get(name, "").strip():
            return _checked(ctx, value, name)
    path = token_file(ctx.environment)
    named = bool(ctx.environment.get("HF_TOKEN_PATH"))
    value = _read(path, named=named) if path else ""
    return _checked(ctx, value, shown(path)) if path and value else None


def headers(ctx: Context) -> dict[str, str]:
    """What authorises a request, where there is a token; never shown. Raises as `token` does."""
    found = token(ctx)
    return {"Authorization": f"Bearer {found.value}"} if found else {}


def token_file(environment: Mapping[str, str]) -> Path | None:
    """Where `hf auth login` keeps its token: HF_TOKEN_PATH, or `token` in HF_HOME."""
    if given := environment.get("HF_TOKEN_PATH"):
        return Path(os.path.expanduser(given))
    folder = home(environment)
    return folder / "token" if folder else None


def _read(path: Path, *, named: bool) -> str:
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe: waited for forever
            raise OSError(errno.EINVAL, "it is no file")
        with path.open("rb") as file:
            return file.read(MAX_BYTES).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, ValueError) as error:
        if not named:  # a home that is nowhere is no obstacle to what needs no token
            return ""
        raise HostError(
            f"HF_TOKEN_PATH names a file that cannot be read: {getattr(error, 'strerror', error)}",
            where=shown(path),
            hint="mend it, unset HF_TOKEN_PATH, or set HF_TOKEN",
            id="hub-token",
        ) from None


def _checked(ctx: Context, value: str, origin: str) -> Token:
    ctx.redactor.add(value)
    if not _TOKEN.fullmatch(value):
        raise UsageError(
            f"{origin} holds what no token holds: a space, a line break or a letter that is not "
            "ASCII",
            where=f"{origin}, {len(value)} characters long",
            hint="copy the token anew: it begins with hf_",
        )
    return Token(value, origin)


def is_on(value: str | None) -> bool:
    """Whether a switch of huggingface_hub is on."""
    return (value or "").strip().upper() in {"1", "ON", "YES", "TRUE"}


def offline(environment: Mapping[str, str]) -> str | None:
    """The variable that forbids asking the hub; None where it may be asked."""
    return next((name for name in OFFLINE if is_on(environment.get(name))), None)


def must_be_online(environment: Mapping[str, str], what: str, where: str) -> None:
    """Refuse to ask the hub for `what` where that is forbidden. Raises HostError `hub-offline`."""
    if name := offline(environment):
        raise HostError(
            f"{name} is set, so the hub is not asked for {what}",
            where=where,
            hint=f"unset {name} for this run, or bring what is missing into the cache of "
            "huggingface_hub on a machine that may ask (`hf download`)",
            id="hub-offline",
        )
