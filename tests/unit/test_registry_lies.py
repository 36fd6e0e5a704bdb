"""Registries and configurations that are not what they should be: an error each, never a crash."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bakehouse.context import Context
from bakehouse.errors import BakehouseError, HostError
from bakehouse.ports.docker_engine import RealDocker
from bakehouse.ports.http import RealHttp, Reply
from bakehouse.sources.images import pin_image

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG: dict[str, Any] = {
    "architecture": "amd64", "os": "linux",
    "config": {"Entrypoint": ["vllm"], "Labels": {"a": "b"}},
}  # fmt: skip


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Liar(RealHttp):
    """A registry that answers with what it is given."""

    def __init__(self, manifest: bytes, config: bytes) -> None:
        self.manifest = manifest
        self.config = config

    def ask(self, method: str, url: str, **how: Any) -> Reply:
        del method, how
        body = self.manifest if "/manifests/" in url else self.config
        return Reply(200, {"Content-Type": MANIFEST}, body, 0.0)


def whole(config: bytes) -> dict[str, Any]:
    return {
        "schemaVersion": 2, "mediaType": MANIFEST,
        "config": {"digest": digest(config), "size": len(config)},
        "layers": [{"digest": digest(b"layer"), "size": 5}],
    }  # fmt: skip


def pin(context: Context, manifest: bytes, config: bytes) -> Any:
    nobody = {"DOCKER_HOST": "unix:///nobody/listens.sock", "DOCKER_CONFIG": "/nobody/there"}
    made = replace(context, http=Liar(manifest, config), docker=RealDocker(nobody))
    return pin_image(made, "127.0.0.1:5000/a:1", "x86_64")


def encoded(data: object) -> bytes:
    return json.dumps(data).encode()


def test_an_honest_one_is_pinned(context: Context) -> None:
    config = encoded(CONFIG)
    found = pin(context, encoded(whole(config)), config)
    assert (found.size, found.entrypoint, found.labels) == (5, ("vllm",), {"a": "b"})


ODD: tuple[object, ...] = (None, 5, -5, "big", [], {}, [5], [None], True, 1.5)


@pytest.mark.parametrize("value", ODD, ids=repr)
@pytest.mark.parametrize("key", ["config", "layers", "manifests", "schemaVersion", "layer", "size",
                                 "digest", "config.size", "config.digest"])  # fmt: skip
def test_a_manifest_of_odd_values_is_an_error(context: Context, key: str, value: object) -> None:
    config = encoded(CONFIG)
    data = whole(config)
    if key == "layer":
        data["layers"] = [value]
    elif key in ("size", "digest"):
        data["layers"][0][key] = value
    elif key.startswith("config."):
        data["config"][key.partition(".")[2]] = value
    else:
        data[key] = value
    lawful: dict[str, tuple[object, ...]] = {
        "layers": ([],),
        "manifests": (None,),
        "size": (5,),
        "config.size": (5,),
    }
    if value in lawful.get(key, ()) and value is not True:
        return
    with pytest.raises(BakehouseError) as caught:
        pin(context, encoded(data), config)
    assert caught.value.id in ("registry", "image-platform")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"null", b"[1]", b"[" * 100_000, b"<html>", b"\xff\xfe", b"5"], ids=range(8)
)
def test_a_manifest_that_is_none_is_an_error(context: Context, body: bytes) -> None:
    with pytest.raises(HostError, match="no image of today's kind"):
        pin(context, body, b"{}")


@pytest.mark.parametrize(
    "config",
    [b"", b"null", b"[]", b"5", b"[" * 100_000, encoded({**CONFIG, "config": 5}),
     encoded({**CONFIG, "config": {"Labels": [1]}}), encoded({**CONFIG, "config": [1]})],
    ids=range(8),
)  # fmt: skip
def test_a_configuration_that_is_none_is_an_error(context: Context, config: bytes) -> None:
    with pytest.raises(HostError, match="configuration is none"):
        pin(context, encoded(whole(config)), config)


@pytest.mark.parametrize("entrypoint", [5, {"a": 1}, True], ids=repr)
def test_an_odd_entrypoint_counts_as_none(context: Context, entrypoint: object) -> None:
    config = encoded({**CONFIG, "config": {"Entrypoint": entrypoint}})
    assert pin(context, encoded(whole(config)), config).entrypoint == ()


@pytest.mark.parametrize(
    "text",
    ["[]", "5", '{"auths": 5}', '{"auths": {"r.io": {"auth": "!!!"}}}', '{"proxies": 5}',
     '{"auths": {"r.io": {"auth": "YQ=="}}}', '{"auths": {"r.io": {"auth": 5}}}',
     '{"proxies": {"default": 5}}', '{"HttpHeaders": 5}'],
)  # fmt: skip
def test_a_damaged_docker_configuration_is_named_and_no_engine_is_blamed(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(text)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", "unix:///nobody/listens.sock")
    with pytest.raises(HostError) as caught:
        RealDocker().facts()
    assert caught.value.id == "docker-config"
    assert caught.value.where == str(tmp_path / "config.json")
