"""What a command gets (paths, clients, progress) and what it returns."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bakehouse.errors import BakehouseError
from bakehouse.host import Gpu, read_gpus
from bakehouse.models import Check
from bakehouse.paths import Places
from bakehouse.progress import Progress, Silent
from bakehouse.redact import Redactor
from bakehouse.system.docker.client import DockerClient
from bakehouse.system.http import Http
from bakehouse.system.process import Clock, Processes


@dataclass(frozen=True)
class Context:
    """Folders, clients and progress of one command; tests make their own."""

    places: Places
    recipes: Path
    """The folder in which `--recipe NAME` is found."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    processes: Processes = field(default_factory=Processes)
    http: Http = field(default_factory=Http)
    docker: DockerClient = field(default_factory=DockerClient)
    clock: Clock = field(default_factory=Clock)
    progress: Progress = field(default_factory=Silent)
    redactor: Redactor = field(default_factory=Redactor)
    """Knows all secrets seen so far; records, logs and all output pass through it."""

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """This machine's GPUs: nvidia-smi runs at most once a command."""
        return read_gpus(self.processes)

    @property
    def compute_capabilities(self) -> tuple[str, ...]:
        """Those of this machine's GPUs, such as 12.1, in their order."""
        return tuple(gpu.compute_capability for gpu in self.gpus)


@dataclass(frozen=True)
class Outcome:
    """A command's result. `text` is for people and goes to standard output."""

    result: dict[str, Any]
    text: str = ""
    checks: tuple[Check, ...] = field(default=())
    exit: int = 0
    lines: Iterable[str] = ()
    """Streamed text, such as a followed log, printed line by line after `text`; not read with
    `--json`."""
    error: BakehouseError | None = None
    """An error beside the result; its exit code is then used."""
    told: bool = False
    """Whether `text` contains the checks already, so that they are not printed again."""
