"""What a server's keeper writes about it: `servers/<name>/state.json`. Standard library only.

One writer (the keeper), many readers. Every write goes to a new file that is renamed into place, so
a reader sees a whole one; what was cut short or edited all the same is told apart, never believed.
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

from bakehouse.serve.guard import Bounds
from bakehouse.serve.processes import Process, boot_id

SCHEMA = 1
LOST = "was lost"
"""Begins what is said of a server whose engine went away from below it."""
KEY_FILE = "api-key"
PHASES = ("starting", "proven", "ended")


class Unreadable(Exception):
    """A state file that is cut short, edited, or of another version."""


@dataclass(frozen=True)
class Ended:
    """How a server ended. `code` is its exit status, or minus the number of the signal."""

    at: str
    why: str
    """`stopped`, `unproven`, `refused`, `memory`, `exited` or `lost` (nobody saw it)."""
    code: int | None
    says: str
    """One sentence for a person."""


@dataclass(frozen=True)
class State:
    """All that has to be known about one server."""

    name: str
    nonce: str
    phase: str
    boot: str
    argv: tuple[str, ...]
    host: str
    port: int
    """0 until the socket is known."""
    plan: str
    """Digest of what it was started from."""
    started: str
    stop_timeout: float
    keeper: Process | None = None
    server: Process | None = None
    proven: str | None = None
    record: str | None = None
    foreground: bool = False
    ended: Ended | None = None
    findings: tuple[dict[str, Any], ...] = ()
    """What the log showed of fatal or silent faults, the first ones."""
    container: str | None = None
    """Its id, where the server runs in one; `server` is then the process that follows it."""
    docker: str | None = None
    """Address of the engine that the container is on."""
    image: str | None = None
    """Id of the image that was proven able, of which the container was made."""
    version: str | None = None
    """What that image says of itself."""
    alarms: tuple[dict[str, Any], ...] = ()
    """What the memory guard said, the latest ones, each with its time and figures."""

    @property
    def this_boot(self) -> bool:
        """Whether its process ids mean anything now."""
        return self.boot == boot_id()

    @property
    def server_alive(self) -> bool:
        """Whether the server's process runs."""
        return self.this_boot and self.server is not None and self.server.alive

    @property
    def keeper_alive(self) -> bool:
        """Whether the keeper's process runs."""
        return self.this_boot and self.keeper is not None and self.keeper.alive


def now() -> str:
    """UTC, ISO 8601, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def path(folder: Path) -> Path:
    """Where a server's state lies."""
    return folder / "state.json"


def write(folder: Path, state: State, *, sync: bool = True) -> None:
    """Put a state in place whole, readable for its owner only; `sync` waits for the disk."""
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
"""Inode, modification time in nanoseconds and size: changed by whoever writes."""


def mark(folder: Path) -> Mark | None:
    """Tell one written state from another without reading it; None where there is none."""
    try:
        seen = path(folder).stat()
    except OSError:
        return None
    return seen.st_ino, seen.st_mtime_ns, seen.st_size


def forget_key(folder: Path) -> None:
    """Remove the API key of a server that has ended."""
    with contextlib.suppress(OSError):
        (folder / KEY_FILE).unlink()


def read(folder: Path) -> State | None:
    """Give the state, None where there is none; raises Unreadable."""
    try:
        text = path(folder).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(str(error)) from error
    try:
        data = json.loads(text)
        return _state(data, folder.name)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unreadable(f"{path(folder)}: {error}") from error


def _state(data: dict[str, Any], name: str) -> State:
    if data.pop("schema") != SCHEMA:
        raise ValueError("another version of the state file")
    made = State(**data)
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
        raise ValueError("its fields do not hold together")
    if not re.fullmatch(r"[0-9a-f]{16}", made.nonce):
        raise ValueError("its nonce is none")
    if not 0 <= made.port <= 65535 or not 0 <= float(made.stop_timeout) < 86400:
        raise ValueError("a number in it is out of range")
    return made


def _process(data: Any) -> Process | None:
    if data is None:
        return None
    pid, start = int(data["pid"]), int(data["start"])
    if pid <= 1:
        raise ValueError(f"{pid} is no server's process id")
    return Process(pid, start)


@dataclass(frozen=True)
class Spec:
    """What the keeper is told to start, over its control socket; it may hold secrets."""

    state: State
    env: dict[str, str]
    cwd: str
    guard: Bounds | None = None
    """Of the memory guard; None for no guard."""
    engine: str = ""
    run: tuple[str, ...] = ()
    """What is executed, where that is not the server's own command: it follows a container."""
    known_losses: tuple[str, ...] = ()
    """Ids of log signatures that are expected of this server."""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        state, bounds = data.pop("state"), data.pop("guard")
        return cls(
            state=_state({"schema": SCHEMA, **state}, state["name"]),
            guard=Bounds(**bounds) if bounds else None,
            **{**data, **{name: tuple(data[name]) for name in ("run", "known_losses")}},
        )
