"""The Docker port against a real engine."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest
import requests

from bakehouse.errors import BakehouseError, HostError, NotFound
from bakehouse.system.docker.client import ASKED_BY, DockerClient
from bakehouse.system.docker.models import OURS, ContainerSpec, Mount, Published
from tests.support.docker_engine import Engine, make_image

pytestmark = [pytest.mark.integration, pytest.mark.docker]


@pytest.fixture(scope="module")
def image(docker_engine: Engine) -> str:
    return make_image(docker_engine, "port/busybox:1", "USER 1000:1000", "ENV PATH=/bin")


def spec(image: str, *script: str, **over: object) -> ContainerSpec:
    data = {"image": image, "entrypoint": ("/bin/sh", "-c"), "argv": script, "network": "none"}
    return ContainerSpec.model_validate(data | over)


def test_docker_facts(docker_engine: Engine) -> None:
    facts = docker_engine.port().facts()
    assert (facts.system, facts.nvidia, facts.buildkit) == ("linux", False, True)
    assert facts.host == docker_engine.host
    assert Path(facts.root).is_dir()


def test_docker_image_facts(docker_engine: Engine, image: str) -> None:
    found = docker_engine.port().image("port/busybox:1")
    assert found is not None
    assert (found.id, found.user, found.has_root) == (image, "1000:1000", False)
    assert found.env == {"PATH": "/bin"}
    assert docker_engine.port().image("port/nothing:1") is None


def test_docker_ask_leaves_nothing(docker_engine: Engine, image: str) -> None:
    port = docker_engine.port()
    said = port.ask(spec(image, "id -u; echo no >&2; exit 3"), timeout=30)
    assert (said.code, said.out, said.err) == (3, "1000\n", "no\n")
    assert (said.timed_out, said.cut, said.oom_killed) == (False, False, False)
    assert port.containers({OURS: ""}) == ()


def test_docker_ask_times_out(docker_engine: Engine, image: str) -> None:
    port = docker_engine.port()
    began = time.monotonic()
    said = port.ask(spec(image, "sleep 300"), timeout=1)
    assert said.timed_out
    assert time.monotonic() - began < 20
    assert port.containers({OURS: ""}) == ()


def test_docker_ask_cuts_a_flood(docker_engine: Engine, image: str) -> None:
    script = "yes 0123456789 | head -n 200000; echo last"
    said = docker_engine.port().ask(spec(image, script), timeout=60, max_bytes=1000)
    assert said.cut
    assert len(said.out) <= 1000
    assert said.out.endswith("last\n")


def test_docker_ask_removes_leftovers_of_killed_runs(docker_engine: Engine, image: str) -> None:
    import socket

    port = docker_engine.port()
    labels = {ASKED_BY: f"{socket.gethostname()}:{2**22 + 1}"}
    left = port.create(spec(image, "sleep 300", labels=labels))
    port.start(left)
    port.ask(spec(image, "true"), timeout=30)
    assert port.container(left) is None


def test_docker_ask_reports_out_of_memory(docker_engine: Engine, image: str) -> None:
    script = "x=0123456789abcdef; while true; do x=$x$x; done"
    said = docker_engine.port().ask(spec(image, script, memory=16 * 2**20), timeout=60)
    assert (said.code, said.oom_killed) == (137, True)


def _text_of(url: str) -> str:
    """What is answered there, once somebody does: a published port is open before its server."""
    for _ in range(50):
        with suppress(requests.ConnectionError):
            return requests.get(url, timeout=10).text
        time.sleep(0.1)
    raise AssertionError(f"nobody answers at {url}")


def test_docker_container_from_create_to_remove(
    docker_engine: Engine, image: str, tmp_path: Path
) -> None:
    (tmp_path / "word").write_text("mounted\n")
    tmp_path.chmod(0o755)
    port = docker_engine.port()
    one = port.create(
        spec(
            image, "cat /in/word; touch /in/x || echo read-only; httpd -p 8000 -f -h /in",
            network=None, name="port-lives", labels={OURS: "test"}, init=True,
            mounts=(Mount(source=str(tmp_path), target="/in"),), publish=(Published(port=8000),),
        )
    )  # fmt: skip
    try:
        assert port.container(one).state == "created"  # type: ignore[union-attr]
        port.start(one)
        facts = port.container("port-lives")
        assert facts is not None
        assert (facts.id, facts.running, facts.exit_code) == (one, True, None)
        assert facts.pid > 0
        assert facts.ports[8000] > 0
        assert [c.id for c in port.containers({OURS: "test"})] == [one]
        url = f"http://127.0.0.1:{facts.ports[8000]}/word"
        assert _text_of(url) == "mounted\n"
        assert port.wait(one, 0.5) is None
        port.stop(one, 5)
        ended = port.container(one)
        assert ended is not None
        assert (ended.state, ended.exit_code) == ("exited", 143)
        text = b"".join(port.logs(one)).decode()
        assert "mounted" in text
        assert "read-only" in text
    finally:
        port.remove(one)
    assert port.container(one) is None
    port.stop(one, 1)
    port.remove(one)


def test_docker_logs_follow_to_the_end(docker_engine: Engine, image: str) -> None:
    port = docker_engine.port()
    one = port.create(spec(image, "echo one; sleep 1; echo two"))
    try:
        port.start(one)
        assert b"".join(port.logs(one, follow=True)) == b"one\ntwo\n"
        assert b"".join(port.logs(one, tail=1)) == b"two\n"
    finally:
        port.remove(one)


@pytest.mark.parametrize(
    ("change", "kind", "id_"),
    [
        ({"gpus": "all"}, HostError, "no-nvidia-runtime"),
        ({"image": "port/nothing:1"}, NotFound, "image-missing"),
        ({"entrypoint": ("/nope",)}, HostError, "image-command"),
        ({"mounts": (Mount(source="/nope/x", target="/x"),)}, HostError, "mount-missing"),
    ],
)
def test_docker_start_errors(
    docker_engine: Engine,
    image: str,
    change: dict[str, object],
    kind: type[BakehouseError],
    id_: str,
) -> None:
    with pytest.raises(kind) as caught:
        docker_engine.port().ask(spec(image, "true", **change) if "image" not in change
                                 else spec(str(change["image"]), "true"), timeout=30)  # fmt: skip
    assert caught.value.id == id_
    assert caught.value.hint
    assert docker_engine.port().containers({OURS: ""}) == ()


def test_docker_name_and_port_in_use(docker_engine: Engine, image: str) -> None:
    import socket

    port = docker_engine.port()
    one = port.create(spec(image, "sleep 60", name="port-taken"))
    try:
        with pytest.raises(HostError) as caught:
            port.create(spec(image, "sleep 60", name="port-taken"))
        assert caught.value.id == "name-in-use"
    finally:
        port.remove(one)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        wanted = (Published(port=80, host_port=number),)
        two = port.create(spec(image, "sleep 60", network=None, publish=wanted))
        try:
            with pytest.raises(HostError) as caught:
                port.start(two)
            assert caught.value.id == "port-in-use"
        finally:
            port.remove(two)


def test_docker_engine_missing(tmp_path: Path) -> None:
    def asked(**env: str) -> BakehouseError:
        with pytest.raises(BakehouseError) as caught:
            DockerClient({"HOME": str(tmp_path), **env}).facts()
        assert caught.value.exit_code == 9
        assert caught.value.hint
        return caught.value

    assert asked(DOCKER_HOST=f"unix://{tmp_path}/none.sock").id == "docker-daemon"
    assert asked(DOCKER_HOST="tcp://127.0.0.1:1").id == "docker-daemon"
    assert asked(DOCKER_HOST="nonsense").id == "docker-host"
    assert asked(DOCKER_CONTEXT="gone").id == "docker-context"


def test_docker_context_leads_to_its_engine(docker_engine: Engine, tmp_path: Path) -> None:
    import subprocess

    env = {"PATH": docker_engine.environment["PATH"], "HOME": str(tmp_path)}
    argv = ["docker", "context", "create", "mine", "--docker", f"host={docker_engine.host}"]
    subprocess.run(argv, env=env, check=True, capture_output=True)
    assert DockerClient({**env, "DOCKER_CONTEXT": "mine"}).facts().host == docker_engine.host
    subprocess.run(["docker", "context", "use", "mine"], env=env, check=True, capture_output=True)
    assert DockerClient(env).facts().host == docker_engine.host


def test_docker_pull_from_a_dead_registry(docker_engine: Engine) -> None:
    with pytest.raises(HostError) as caught:
        docker_engine.port().pull("127.0.0.1:1/some/thing:1", arch="x86_64")
    assert caught.value.id == "network"


def test_docker_export(docker_engine: Engine, image: str) -> None:
    import io
    import tarfile

    port = docker_engine.port()
    one = port.create(spec(image, "true"))
    try:
        data = b"".join(port.export(one))
    finally:
        port.remove(one)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert "bin/busybox" in tar.getnames()
