"""What the keeper does once the process that followed a container has ended.

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NOTE = "container.json"
"""In the server's folder: how the container ended, or why it never started."""
KILLED = "was removed: the process that followed its container was killed"
REMOVE_S = 60.0
"""What it may take to remove a container that nobody follows any more, in seconds."""
ENGINE_S = 5.0
"""What the engine may take beyond the server's own time to stop, in seconds."""
AT_ONCE = signal.SIGUSR1
"""Tells the process that follows a container to kill it: there is no time for anything else."""


def read(folder: Path) -> dict[str, Any]:
    """Give what was written about the container's end; empty where nothing was."""
    try:
        found = json.loads((folder / NOTE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def clear(
    folder: Path, container: str, run: Sequence[str], env: Mapping[str, str]
) -> dict[str, Any]:
    """Give the note; where there is none the follower was killed, and its container is removed.

    `run` is the command of the follower, which can also remove a container. `lost` in the note says
    why the container may still be there.
    """
    note = read(folder)
    if not container or (note and "lost" not in note):
        return note
    said = "the Docker Engine did not remove its container in time"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [*run[:3], "--remove", container],
            env=dict(env), timeout=REMOVE_S, check=False, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, text=True, errors="replace",
        )  # fmt: skip
        if done.returncode == 0:
            note.pop("lost", None)
            return {"says": KILLED, **note}
        said = done.stdout.strip() or said
    return {**note, "lost": said}
