"""What every command gets: folders, clients and progress. Made once, in `cli`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bakehouse.places import Places
from bakehouse.ports.clock import Clock, RealClock
from bakehouse.ports.docker_engine import RealDocker
from bakehouse.ports.http import Http, RealHttp
from bakehouse.ports.process import Processes, RealProcesses
from bakehouse.progress import Progress, Silent
from bakehouse.redact import Redactor


@dataclass(frozen=True)
class Context:
    """Folders, clients and progress of one command; tests make their own."""

    places: Places
    recipes: Path
    """The folder in which `--recipe NAME` is found."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    processes: Processes = field(default_factory=RealProcesses)
    http: Http = field(default_factory=RealHttp)
    docker: RealDocker = field(default_factory=RealDocker)
    clock: Clock = field(default_factory=RealClock)
    progress: Progress = field(default_factory=Silent)
    redactor: Redactor = field(default_factory=Redactor)
    """Knows all secrets seen so far; records, logs and all output pass through it."""
