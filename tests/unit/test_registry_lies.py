"""Registries that answer with odd manifests and configurations: errors, never a crash."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bakehouse.context import Context
from bakehouse.errors import HostError
from bakehouse.lock import ImagePin
from bakehouse.sources.images import pin_image
from bakehouse.system.docker.client import DockerClient
from bakehouse.system.http import Http, Reply
from tests.support.manifests import CONFIG, MANIFEST, NO_ENGINE, encoded, manifest_of
from tests.support.weights import refusal


class Liar(Http):
    """A registry that answers with what it is given."""

    def __init__(self, manifest: bytes, config: bytes) -> None:
        self.manifest = manifest
        self.config = config

    def ask(self, method: str, url: str, **how: Any) -> Reply:
        del method, how
        body = self.manifest if "/manifests/" in url else self.config
        return Reply(200, {"Content-Type": MANIFEST}, body, 0.0)


def pin(context: Context, manifest: bytes, config: bytes) -> ImagePin:
    made = replace(context, http=Liar(manifest, config), docker=DockerClient(NO_ENGINE))
    return pin_image(made, "127.0.0.1:5000/a:1", "x86_64")


def test_registry_honest_image_is_pinned(context: Context) -> None:
    config = encoded(CONFIG)
    found = pin(context, encoded(manifest_of(config)), config)
    assert (found.size, found.entrypoint, found.labels) == (5, ("vllm",), {"a": "b"})
    for entrypoint in (5, {"a": 1}, True):
        config = encoded({**CONFIG, "config": {"Entrypoint": entrypoint}})
        assert pin(context, encoded(manifest_of(config)), config).entrypoint == ()


ODD: tuple[object, ...] = (None, 5, -5, "big", [], {}, [5], [None], True, 1.5)
KEYS = ("config", "layers", "manifests", "schemaVersion", "layer", "size", "digest", "config.size",
        "config.digest")  # fmt: skip
VALID = {("layers", "[]"), ("manifests", "None"), ("size", "5"), ("config.size", "5")}


def test_registry_manifest_with_odd_values_is_an_error(context: Context) -> None:
    config = encoded(CONFIG)
    got = set()
    for key in KEYS:
        for value in ODD:
            data = manifest_of(config)
            if key == "layer":
                data["layers"] = [value]
            elif key in ("size", "digest"):
                data["layers"][0][key] = value
            elif key.startswith("config."):
                data["config"][key.partition(".")[2]] = value
            else:
                data[key] = value
            said = refusal(partial(pin, context, encoded(data), config))
            if said == "accepted":
                got.add((key, repr(value)))
            else:
                assert said.partition(":")[0] in ("registry", "image-platform"), (key, value)
    assert got <= VALID


def test_registry_reply_that_is_not_a_manifest_is_an_error(context: Context) -> None:
    bodies = (b"", b"{", b"null", b"[1]", b"[" * 100_000, b"<html>", b"\xff\xfe")
    said = {refusal(partial(pin, context, body, b"{}")) for body in bodies}
    assert said == {"registry: unsupported manifest (schema 1)"}


def test_registry_reply_that_is_not_a_configuration_is_an_error(context: Context) -> None:
    configs = (
        b"", b"null", b"[]", b"[" * 100_000, encoded({**CONFIG, "config": 5}),
        encoded({**CONFIG, "config": {"Labels": [1]}}), encoded({**CONFIG, "config": [1]}),
    )  # fmt: skip
    said = {refusal(partial(pin, context, encoded(manifest_of(c)), c)) for c in configs}
    assert said == {"registry: invalid image configuration"}


def test_docker_configuration_that_is_damaged_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = (
        "[]", "5", '{"auths": 5}', '{"auths": {"r.io": {"auth": "!!!"}}}', '{"proxies": 5}',
        '{"auths": {"r.io": {"auth": "YQ=="}}}', '{"auths": {"r.io": {"auth": 5}}}',
        '{"proxies": {"default": 5}}', '{"HttpHeaders": 5}',
    )  # fmt: skip
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", "unix:///nobody/listens.sock")
    for text in texts:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(HostError) as caught:
            DockerClient().facts()
        assert caught.value.id == "docker-config", text
        assert caught.value.where == str(tmp_path / "config.json")
