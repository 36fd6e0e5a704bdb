"""What the keeper does once the process that followed a container has ended.

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NOTE = "container.json"
"""In the server's folder: how the container ended, or why it never started."""
FOLLOWER = "bakehouse.serve.container"
REMOVE_S = 60.0


def read(folder: Path) -> dict[str, Any]:
    """Give what was written about the container's end; empty where nothing was."""
    try:
        found = json.loads((folder / NOTE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def clear(folder: Path, container: str, env: Mapping[str, str]) -> dict[str, Any]:
    """Give the note; where there is none the follower was killed, and its container is removed."""
    note = read(folder)
    if not note and container:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [sys.executable, "-m", FOLLOWER, "--remove", container],
                env=dict(env), timeout=REMOVE_S, check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
    return note
