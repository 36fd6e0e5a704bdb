"""Images resolved at a real registry, and pulled by digest into a real engine."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from bakehouse.context import Context
from bakehouse.errors import BakehouseError, HostError, LockError, NotFound
from bakehouse.lock import ImagePin, Lock
from bakehouse.models import to_json
from bakehouse.progress import Bar, Silent
from bakehouse.sources import images
from bakehouse.sources.images import ensure_image, moved_tags, pin_image
from tests.support.clocks import ImpatientClock
from tests.support.docker_engine import (
    Engine,
    LocalRegistry,
    make_image,
    push,
    registry,
)

pytestmark = [pytest.mark.integration, pytest.mark.docker]


@pytest.fixture
def ctx(context: Context, docker_engine: Engine) -> Context:
    return replace(
        context,
        docker=docker_engine.port(),
        environment=docker_engine.environment,
        clock=ImpatientClock(),
    )


@pytest.fixture
def pushed(docker_engine: Engine, docker_registry: LocalRegistry) -> Iterator[str]:
    """A tag in the registry that the engine no longer holds."""
    reference = f"{docker_registry.host}/some/engine:1"
    publish(docker_engine, reference)
    yield reference
    forget(docker_engine, reference)


def publish(engine: Engine, reference: str, *changes: str) -> str:
    name = "images/work:1"
    # A layer of its own: one that another test's image has would not be pulled.
    own = {"own": reference.encode()}
    make_image(engine, name, 'ENTRYPOINT ["/bin/sh"]', "LABEL a=b", *changes, extra=own)
    digest = push(engine, name, reference)
    forget(engine, reference, name)
    return digest


def forget(engine: Engine, *names: str) -> None:
    """Remove all names of images, so that their content goes."""
    for name in names:
        engine.port().remove_image(name)
    for line in engine.cli(
        "images", "--digests", "--format", "{{.Repository}}@{{.Digest}}"
    ).split():
        if any(line.startswith(name.rpartition(":")[0]) for name in names) and "<none>" not in line:
            engine.port().remove_image(line)


def lock_of(pin: ImagePin, arch: str = "x86_64") -> Lock:
    return Lock(recipe="r", engine="vllm", wants="0", weights={}, images={"image": {arch: pin}})


def test_image_tag_is_pinned_without_a_pull(
    ctx: Context, docker_engine: Engine, docker_registry: LocalRegistry, pushed: str
) -> None:
    pin = pin_image(ctx, pushed, "x86_64")
    assert pin.name == f"{docker_registry.host}/some/engine"
    _, digest = docker_registry.ask("GET", "some/engine/manifests/1")
    assert (pin.digest, pin.index, pin.layers, pin.local) == (digest, None, 1, False)
    assert pin.size > 100_000
    assert (pin.entrypoint, pin.labels, pin.user) == (("/bin/sh",), {"a": "b"}, "")
    assert ctx.docker.image(pushed) is None
    assert pin_image(ctx, f"{pin.name}@{pin.digest}", "x86_64").id == pin.id
    assert moved_tags(ctx, lock_of(pin)) == ()


@dataclass
class Told(Silent):
    """Keeps what a bar was told."""

    seen: list[tuple[float, float | None, str]] = field(default_factory=list)

    @contextmanager
    def bar(self, title: str, unit: str = "") -> Iterator[Bar]:
        seen = self.seen

        class Kept:
            def update(self, done: float, total: float | None = None, note: str = "") -> None:
                seen.append((done, total, note))

        yield Kept()


def test_image_pin_is_pulled_by_digest_once(
    ctx: Context, docker_engine: Engine, pushed: str
) -> None:
    told = Told()
    pin = pin_image(ctx, pushed, "x86_64")
    publish(docker_engine, pushed, "LABEL a=c")  # the tag moves on
    found = ensure_image(replace(ctx, progress=told), pin, "x86_64")
    assert found.id == pin.id
    assert found.labels == {"a": "b"}
    assert any("pull complete" in note for _, _, note in told.seen)
    assert all(done <= (total or 0) for done, total, _ in told.seen)
    told.seen.clear()
    assert ensure_image(replace(ctx, progress=told), pin, "x86_64").id == pin.id
    assert told.seen == []
    (drift,) = moved_tags(ctx, lock_of(pin))
    assert (drift.reason, drift.where, drift.locked) == ("tag-moved", "image x86_64", pin.digest)
    forget(docker_engine, pin.ref)


def test_image_index_leads_to_the_platform(
    ctx: Context, docker_engine: Engine, docker_registry: LocalRegistry
) -> None:
    host = docker_registry.host
    amd = publish(docker_engine, f"{host}/two/engine:amd")
    arm = docker_registry.for_arm("two/engine", "amd", "arm")
    index = docker_registry.index(
        "two/engine", "both", {"linux/amd64": "amd", "linux/arm64": "arm"}
    )
    pins = images.pin_images(
        ctx, {"image": {"x86_64": f"{host}/two/engine:both", "aarch64": f"{host}/two/engine:both"}}
    )["image"]
    assert {pin.index for pin in pins.values()} == {index}
    assert (pins["x86_64"].digest, pins["aarch64"].digest) == (amd, arm)
    assert moved_tags(ctx, lock_of(pins["x86_64"])) == ()
    # The platform's manifest vanishes, the index stays.
    docker_registry.forget("two/engine", amd)
    with pytest.raises(LockError) as caught:
        pin_image(ctx, f"{host}/two/engine:both", "x86_64")
    assert (caught.value.id, caught.value.exit_code) == ("manifest-vanished", 4)
    with pytest.raises(LockError) as caught:
        ensure_image(ctx, pins["x86_64"], "x86_64")
    assert caught.value.id == "manifest-unknown"


def test_image_for_another_machine_is_refused(
    ctx: Context, docker_engine: Engine, docker_registry: LocalRegistry
) -> None:
    reference = f"{docker_registry.host}/arm/engine:1"
    publish(docker_engine, f"{docker_registry.host}/arm/engine:amd")
    docker_registry.for_arm("arm/engine", "amd", "1")
    docker_registry.index("arm/engine", "list", {"linux/arm64": "1"})
    for tag in ("1", "list"):
        with pytest.raises(HostError) as caught:
            pin_image(ctx, f"{docker_registry.host}/arm/engine:{tag}", "x86_64")
        assert (caught.value.id, caught.value.exit_code) == ("image-platform", 9)
        assert "arm64" in caught.value.what or "aarch64" in caught.value.what
    pin = pin_image(ctx, reference, "aarch64")
    with pytest.raises(HostError) as caught:
        ensure_image(ctx, pin, "aarch64")
    assert caught.value.id == "image-platform"
    assert ctx.docker.image(pin.ref) is None, "it was pulled all the same"
    with pytest.raises(HostError) as caught:
        lock_of(pin, "aarch64").image("x86_64")
    assert caught.value.id == "image-platform"


def test_image_that_the_registry_does_not_have(
    ctx: Context, docker_registry: LocalRegistry, pushed: str
) -> None:
    name = pushed.rpartition(":")[0]
    wrong = {
        f"{name}:nope": "manifest-unknown",
        f"{name}@sha256:{'0' * 64}": "manifest-unknown",
        f"{docker_registry.host}/no/such:1": "image-unknown",
    }
    for reference, id_ in wrong.items():
        with pytest.raises(BakehouseError) as caught:
            pin_image(ctx, reference, "x86_64")
        assert caught.value.id in (id_, "manifest-unknown"), reference
        assert caught.value.exit_code == 4
        assert caught.value.hint
    with pytest.raises(HostError) as host_error:
        pin_image(ctx, "127.0.0.1:1/some/engine:1", "x86_64")
    assert host_error.value.id == "registry-unreachable"


def test_image_with_a_lost_layer_is_refused(
    ctx: Context, docker_registry: LocalRegistry, pushed: str
) -> None:
    body, _ = docker_registry.ask("GET", "some/engine/manifests/1")
    layer = json.loads(body)["layers"][0]["digest"].removeprefix("sha256:")
    blobs = docker_registry.root / "data/docker/registry/v2/blobs/sha256"
    shutil.rmtree(blobs / layer[:2] / layer)
    with pytest.raises(LockError) as caught:
        pin_image(ctx, pushed, "x86_64")
    assert "layer" in str(caught.value.where)


def test_image_larger_than_the_disk_is_refused(
    ctx: Context, pushed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = pin_image(ctx, pushed, "x86_64").model_copy(update={"size": 2**60})
    with pytest.raises(HostError) as caught:
        ensure_image(ctx, pin, "x86_64")
    assert (caught.value.id, caught.value.exit_code) == ("disk-full", 9)
    assert ctx.docker.image(pin.ref) is None


def test_image_that_is_only_local(ctx: Context, docker_engine: Engine) -> None:
    made = make_image(docker_engine, "only/here:1")
    pin = pin_image(ctx, "only/here:1", "x86_64")
    assert (pin.local, pin.id, pin.ref, pin.digest) == (True, made, made, None)
    assert ensure_image(ctx, pin, "x86_64").id == made
    assert pin_image(ctx, made, "x86_64").ref == made
    other = make_image(docker_engine, "only/here:1", "LABEL new=one")
    (drift,) = moved_tags(ctx, lock_of(pin))
    assert (drift.locked, drift.now) == (made, other)
    docker_engine.port().remove_image(made)
    with pytest.raises(NotFound) as caught:
        ensure_image(ctx, pin, "x86_64")
    assert caught.value.id == "image-missing"


USER, PASSWORD = "baker", "the-pass-word-1"
HTPASSWD = f"{USER}:$2b$04$ZJmIhXw4sUmPfK1kuNm5gePyW0uiKy3MZjXhnGSbPB2IQbKqpo4um\n"


def test_registry_login(
    ctx: Context, docker_engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with registry(tmp_path / "private", HTPASSWD) as private:
        reference = f"{private.host}/private/engine:1"
        with pytest.raises(HostError) as caught:
            pin_image(ctx, reference, "x86_64")
        assert (caught.value.id, caught.value.exit_code) == ("registry-unauthorised", 9)
        assert "docker login" in str(caught.value.hint)
        config = Path(docker_engine.environment["DOCKER_CONFIG"]) / "config.json"
        pair = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        config.write_text(json.dumps({"auths": {private.host: {"auth": pair}}}))
        try:
            publish(docker_engine, reference)
            pin = pin_image(ctx, reference, "x86_64")
            assert ensure_image(ctx, pin, "x86_64").id == pin.id
            assert PASSWORD not in to_json(pin)
            assert PASSWORD in ctx.redactor.secrets
            monkeypatch.setenv("PATH", f"{tmp_path}:{docker_engine.environment['PATH']}")
            _with_a_helper(ctx, docker_engine, private, config, tmp_path)
            config.write_text(json.dumps({"auths": {private.host: {"auth": pair[:8]}}}))
            with pytest.raises(BakehouseError) as wrong:
                pin_image(ctx, reference, "x86_64")
            assert wrong.value.exit_code == 9
            forget(docker_engine, pin.ref)
        finally:
            config.unlink()


def _with_a_helper(
    ctx: Context, engine: Engine, private: LocalRegistry, config: Path, folder: Path
) -> None:
    """The same through a credential helper, a program that Docker runs."""
    answer = json.dumps({"ServerURL": private.host, "Username": USER, "Secret": PASSWORD})
    program = folder / "docker-credential-tests"
    program.write_text(f"#!/bin/sh\ncat >/dev/null\necho '{answer}'\n")
    program.chmod(0o755)
    config.write_text(json.dumps({"credHelpers": {private.host: "tests"}}))
    port = engine.port()
    known = port.credentials(private.host)
    assert known is not None
    assert (known.username, known.password) == (USER, PASSWORD)
    assert PASSWORD not in f"{known!r} {known}"
    again = pin_image(replace(ctx, docker=port), f"{private.host}/private/engine:1", "x86_64")
    assert again.digest
    config.write_text(json.dumps({"credHelpers": {private.host: "not-there"}}))
    with pytest.raises(HostError) as caught:
        port.credentials(private.host)
    assert caught.value.id == "docker-config"


class _Scripted(BaseHTTPRequestHandler):
    """A registry that gives prepared answers: status, headers, body; the last one stays."""

    answers: list[tuple[int, dict[str, str], bytes]]
    seen: list[str]

    def do_GET(self) -> None:
        self.seen.append(f"{self.path} {self.headers.get('Authorization', '')}".strip())
        status, headers, body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def scripted(*answers: tuple[int, dict[str, str], bytes]) -> Iterator[tuple[str, list[str]]]:
    seen: list[str] = []
    handler = type("Handler", (_Scripted,), {"answers": list(answers), "seen": seen})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}", seen
        finally:
            server.shutdown()
            thread.join()


def test_registry_refusals_are_explained(ctx: Context) -> None:
    http_realm = 'Bearer realm="http://example.org/t"'
    rows: list[tuple[tuple[int, dict[str, str], bytes], str, int]] = [
        ((429, {"Retry-After": "1"}, b"{}"), "registry-limit", 4),
        ((429, {"Retry-After": "86400"}, b"{}"), "registry-limit", 1),
        ((503, {}, b""), "registry", 4),
        ((403, {}, b""), "registry-unauthorised", 1),
        ((200, {}, b"<html>log in to this network</html>"), "registry", 1),
        ((401, {"WWW-Authenticate": "Negotiate"}, b""), "registry", 1),
        ((401, {"WWW-Authenticate": http_realm}, b""), "registry", 1),
        ((401, {"WWW-Authenticate": 'Basic realm="x"'}, b""), "registry-unauthorised", 1),
    ]
    got = []
    for answer, _, _ in rows:
        with scripted(answer) as (host, seen):
            with pytest.raises(BakehouseError) as caught:
                pin_image(ctx, f"{host}/some/engine:1", "x86_64")
            assert caught.value.exit_code == 9
            got.append((answer, caught.value.id, len(seen)))
    assert got == rows


def test_registry_content_that_differs_from_its_digest(ctx: Context) -> None:
    body = b'{"schemaVersion": 2, "layers": [], "config": {}}'
    with scripted((200, {}, body)) as (host, _), pytest.raises(LockError) as caught:
        pin_image(ctx, f"{host}/some/engine@sha256:{'1' * 64}", "x86_64")
    assert caught.value.id == "digest-mismatch"


def test_registry_token_is_fetched_and_hidden(ctx: Context) -> None:
    challenge: dict[str, str] = {}
    steps = [
        (401, challenge, b""),
        (200, {}, b'{"token": "a-very-secret-token"}'),
        (404, {}, b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}'),
    ]
    with scripted(*steps) as (host, seen):
        challenge["WWW-Authenticate"] = (
            f'Bearer realm="http://{host}/token",service="reg",scope="repository:some/engine:pull"'
        )
        with pytest.raises(LockError) as caught:
            pin_image(ctx, f"{host}/some/engine:1", "x86_64")
    assert caught.value.id == "manifest-unknown"
    assert seen[1] == "/token?service=reg&scope=repository%3Asome%2Fengine%3Apull"
    assert seen[2].endswith("Bearer a-very-secret-token")
    assert "a-very-secret-token" in ctx.redactor.secrets
