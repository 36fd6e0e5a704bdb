"""The state of a server, `servers/<name>/state.json`. Standard library only.

One writer (the supervisor), many readers. Every write goes to a new file that is renamed into
place, so a reader never sees half of one; a file cut short or edited is detected, and not used.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bakehouse.server.memory_guard import Bounds
from bakehouse.server.processes import Process, boot_id

SCHEMA = 1
LOST = "was lost"
"""How `Ended.says` begins if the Docker Engine went away, and the container may still exist."""
KEY_FILE = "api-key"
PHASES = ("starting", "proven", "ended")


class Unreadable(Exception):
    """The state file is cut short, edited, or of another version."""


@dataclass(frozen=True)
class Ended:
    """How a server ended. `code` is its exit status, or minus a signal's number."""

    at: str
    why: str
    """`stopped`, `unproven`, `refused`, `memory`, `exited` or `lost` (the cause is not known)."""
    code: int | None
    says: str
    """One sentence for people."""


@dataclass(frozen=True)
class ServerState:
    """All that has to be known about one server. Its fields are the keys of the file."""

    name: str
    nonce: str
    phase: str
    boot: str
    argv: tuple[str, ...]
    host: str
    port: int
    """0 until the socket is known."""
    plan: str
    """Digest of the settings it was started with."""
    started: str
    stop_timeout: float
    keeper: Process | None = None
    server: Process | None = None
    proven: str | None = None
    record: str | None = None
    foreground: bool = False
    ended: Ended | None = None
    findings: tuple[dict[str, Any], ...] = ()
    """The first fatal and silent faults that its log showed."""
    container: str | None = None
    """Id of its container, if it has one; `server` is then the follower."""
    docker: str | None = None
    """Address of the Docker Engine that the container is on."""
    image: str | None = None
    """Id of the verified image that the container was made from."""
    version: str | None = None
    """Version that the image reports."""
    alarms: tuple[dict[str, Any], ...] = ()
    """The latest alarms of the memory guard, each with its time and figures."""

    @property
    def this_boot(self) -> bool:
        """Whether its process ids are of this boot."""
        return self.boot == boot_id()

    @property
    def server_alive(self) -> bool:
        """Whether the server's process runs."""
        return self.this_boot and self.server is not None and self.server.alive


def now() -> str:
    """Return the time in UTC, ISO 8601, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def path(folder: Path) -> Path:
    """Return the path of a server's state file."""
    return folder / "state.json"


def write(folder: Path, state: ServerState, *, sync: bool = True) -> None:
    """Write a state atomically, readable for its owner only; `sync` waits for the disk."""
    data = {"schema": SCHEMA, **asdict(state)}
    target = path(folder)
    part = target.with_name(f".state.{os.getpid()}.part")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=2, sort_keys=True)
            file.write("\n")
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(part, target)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


Mark = tuple[int, int, int]
"""Inode, modification time in nanoseconds, and size: every write changes them."""


def mark(folder: Path) -> Mark | None:
    """Return what identifies the current state file without reading it; None if there is none."""
    try:
        seen = path(folder).stat()
    except OSError:
        return None
    return seen.st_ino, seen.st_mtime_ns, seen.st_size


def forget_key(folder: Path) -> None:
    """Delete the API key of a server that has ended."""
    with contextlib.suppress(OSError):
        (folder / KEY_FILE).unlink()


def read(folder: Path) -> ServerState | None:
    """Return the state, None if there is none. Raises Unreadable."""
    try:
        return _state(json.loads(path(folder).read_text(encoding="utf-8")), folder.name)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unreadable(f"{path(folder)}: {error}") from error


def _state(data: dict[str, Any], name: str) -> ServerState:
    if data.pop("schema") != SCHEMA:
        raise ValueError("unknown schema version")
    made = ServerState(**data)
    made = replace(
        made,
        argv=tuple(str(a) for a in made.argv),
        keeper=_process(data.get("keeper")),
        server=_process(data.get("server")),
        ended=Ended(**data["ended"]) if data.get("ended") else None,
        findings=tuple(dict(f) for f in made.findings),
        alarms=tuple(dict(a) for a in made.alarms),
    )
    texts = (made.name, made.nonce, made.boot, made.host, made.plan, made.started)
    if made.name != name or made.phase not in PHASES or not all(isinstance(t, str) for t in texts):
        raise ValueError("inconsistent fields")
    if not re.fullmatch(r"[0-9a-f]{16}", made.nonce):
        raise ValueError("invalid nonce")
    if not 0 <= made.port <= 65535 or not 0 <= float(made.stop_timeout) < 86400:
        raise ValueError("a number is out of range")
    return made


def _process(data: Any) -> Process | None:
    if data is None:
        return None
    pid, start = int(data["pid"]), int(data["start"])
    if pid <= 1:
        raise ValueError(f"{pid} cannot be a server's process id")
    return Process(pid, start)


@dataclass(frozen=True)
class SupervisorInput:
    """What a supervisor starts, as sent over its socket. It may contain secrets."""

    state: ServerState
    env: dict[str, str]
    cwd: str
    guard: Bounds | None = None
    """Limits of the memory guard; None switches it off."""
    engine: str = ""
    run: tuple[str, ...] = ()
    """The follower's command, run in place of the server's if that runs in a container."""
    known_losses: tuple[str, ...] = ()
    """Ids of log signatures that this server is expected to show."""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SupervisorInput:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        state, bounds = data.pop("state"), data.pop("guard")
        return cls(
            state=_state({"schema": SCHEMA, **state}, state["name"]),
            guard=Bounds(**bounds) if bounds else None,
            **{**data, **{name: tuple(data[name]) for name in ("run", "known_losses")}},
        )
