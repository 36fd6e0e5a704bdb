"""The cache that huggingface_hub keeps: files that are there already are used in place.

Its layout: `models--OWNER--NAME/blobs/<sha256>` for files in LFS, and names that lead to them in
`models--OWNER--NAME/snapshots/<commit>/`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from bakehouse.lock import FilePin
from bakehouse.sources.hublogin import home


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Where the cache lies, by the variables that huggingface_hub reads; None without a home."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if given := environment.get(name):
            return Path(os.path.expanduser(given))
    base = home(environment)
    return base / "hub" if base else None


class CachedRepository:
    """What the cache holds of one repository at one commit."""

    def __init__(self, environment: Mapping[str, str], repository: str, commit: str) -> None:
        base = cache_folder(environment)
        self.folder = base / f"models--{repository.replace('/', '--')}" if base else None
        self.commit = commit

    def find(self, pin: FilePin) -> Path | None:
        """A file of the pinned size, whose content is yet to be verified."""
        if self.folder is None:
            return None
        for path in (
            self.folder / "blobs" / pin.sha256,
            self.folder / "snapshots" / self.commit / pin.path,
        ):
            try:
                if path.is_file() and path.stat().st_size == pin.size:
                    return path.resolve()
            except OSError:
                continue
        return None

    def only_configuration(self) -> Path | None:
        """The snapshot, where it has a configuration and no weights: half a download."""
        if self.folder is None:
            return None
        snapshot = self.folder / "snapshots" / self.commit
        try:
            names = [path.name for path in snapshot.rglob("*") if path.is_file()]
        except OSError:
            return None
        weights = any(name.endswith((".gguf", ".safetensors", ".bin")) for name in names)
        return snapshot if "config.json" in names and not weights else None
