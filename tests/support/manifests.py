"""A small image of a registry: its manifest and its configuration."""

from __future__ import annotations

import hashlib
import json
from typing import Any

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG: dict[str, Any] = {
    "architecture": "amd64", "os": "linux",
    "config": {"Entrypoint": ["vllm"], "Labels": {"a": "b"}},
}  # fmt: skip
NO_ENGINE = {"DOCKER_HOST": "unix:///nobody/listens.sock", "DOCKER_CONFIG": "/nobody/there"}


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def encoded(data: object) -> bytes:
    return json.dumps(data).encode()


def manifest_of(config: bytes) -> dict[str, Any]:
    """The manifest of an image with this configuration and one layer of five bytes."""
    return {
        "schemaVersion": 2, "mediaType": MANIFEST,
        "config": {"digest": digest(config), "size": len(config)},
        "layers": [{"digest": digest(b"layer"), "size": 5}],
    }  # fmt: skip
