"""Debian's own Docker Engine and registry, started for the tests beside whatever else runs here.

The engine has its own socket, data root, exec root, pid file, bridge and containerd; it is ended by
its process id. Where it cannot run (not root, packages missing) the tests are skipped, loudly.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from bakehouse.server import containers
from bakehouse.system.docker import client
from bakehouse.system.docker.client import DockerClient

BUSYBOX = Path("/bin/busybox")
APPLETS = ("sh", "sleep", "echo", "cat", "env", "id", "ls", "head", "yes", "nc", "httpd", "touch")
_started = itertools.count()
GIVEN = "BAKEHOUSE_TEST_DOCKER_HOST"
"""Names an engine that is there already, in place of one that is started."""


def lacking() -> str:
    """Why no engine can be started here; empty where one can."""
    if os.geteuid() != 0:
        return "only root can start a Docker Engine"
    need = ("dockerd", "containerd", "ip", "docker", "docker-registry")
    missing = [name for name in need if shutil.which(name, path=_path()) is None]
    if not BUSYBOX.exists():
        missing.append("busybox-static")
    return f"not installed: {', '.join(missing)}" if missing else ""


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Engine:
    """A running engine."""

    host: str
    root: Path
    pid: int = 0
    """Of the engine's process, where it was started here."""
    argv: tuple[str, ...] = ()
    """How it was started."""

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """Have the engine hang: it is connected to, and never answers."""
        if not self.pid:
            pytest.skip("an engine that is not the tests' own is not stopped")
        os.kill(self.pid, signal.SIGSTOP)
        try:
            _wait_until_stopped(self.pid)
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)
            client._silent.clear()
            containers._timeouts.clear()

    @property
    def environment(self) -> dict[str, str]:
        """What leads to it."""
        config = self.root / "config"
        config.mkdir(exist_ok=True)
        return {
            **os.environ, "PATH": _path(), "DOCKER_HOST": self.host, "DOCKER_CONFIG": str(config),
        }  # fmt: skip

    def port(self) -> DockerClient:
        """Our own port to it."""
        return DockerClient(self.environment)

    def cli(self, *argv: str, stdin: bytes | None = None) -> str:
        """Run Docker's own command line; give what it prints."""
        done = subprocess.run(
            ["docker", *argv], input=stdin, env=self.environment, capture_output=True, check=False,
            timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"docker {' '.join(argv)}: {done.stderr.decode()}"
        return done.stdout.decode().strip()


def _wait_until_stopped(pid: int) -> None:
    """Until then its other threads still answer: on a busy machine, long enough for a question."""
    for _ in range(500):
        stats = Path(f"/proc/{pid}/task").glob("*/stat")
        if all(stat.read_text().rpartition(")")[2].split()[0] in "Tt" for stat in stats):
            return
        time.sleep(0.01)
    pytest.fail("dockerd does not stop")


@contextmanager
def running(root: Path, *more: str) -> Iterator[Engine]:
    """Start an engine with its data below `root`, and end it."""
    # A socket's path holds at most 107 bytes, and pytest's own folders are deep.
    short = Path(tempfile.mkdtemp(prefix="bh-docker-", dir="/tmp"))
    pid_file, log = short / "pid", root / "dockerd.log"
    host = f"unix://{short}/docker.sock"
    nth = next(_started)
    number = 200 + (os.getpid() + nth) % 50
    bridge = f"bh{nth}x{os.getpid()}"[:15]
    with ExitStack() as last:
        last.callback(shutil.rmtree, short, ignore_errors=True)
        _ip("link", "add", bridge, "type", "bridge")
        last.callback(_ip, "link", "delete", bridge)
        _ip("addr", "add", f"172.29.{number}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        argv = [
            "dockerd", "--host", host, "--data-root", str(root / "data"),
            "--exec-root", str(short / "exec"), "--pidfile", str(pid_file), "--bridge", bridge,
            "--containerd-namespace", bridge, "--containerd-plugins-namespace", f"{bridge}p",
            # The chains of iptables are one for all engines: another one's would be flushed.
            # Published ports go through the engine's own proxy, which is all that tests need.
            "--iptables=false", "--ip-forward=false", "--ip-masq=false", *more,
        ]  # fmt: skip
        with log.open("wb") as out:
            engine = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
                env={**os.environ, "PATH": _path()},
            )  # fmt: skip
        last.callback(_end, engine)
        _wait_for(engine, Path(short / "docker.sock"), log)
        yield Engine(host, root, engine.pid, tuple(argv))


def _ip(*argv: str) -> None:
    subprocess.run(["ip", *argv], check=False, capture_output=True, env={"PATH": _path()})


def _wait_for(engine: subprocess.Popen[bytes], path: Path, log: Path) -> None:
    for _ in range(600):
        if engine.poll() is not None:
            pytest.fail(f"dockerd ended with {engine.returncode}:\n{log.read_text()[-2000:]}")
        with suppress(OSError), socket.socket(socket.AF_UNIX) as one:
            one.connect(str(path))
            return
        time.sleep(0.1)
    pytest.fail(f"dockerd does not listen after a minute:\n{log.read_text()[-2000:]}")


def _end(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(30)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(10)


@pytest.fixture(scope="session")
def docker_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A real engine for the whole session."""
    root = tmp_path_factory.mktemp("docker")
    if given := os.environ.get(GIVEN):
        yield Engine(given, root)
        return
    if why := lacking():
        pytest.skip(f"NO DOCKER ENGINE WAS TESTED: {why}; scripts/test installs what it takes")
    with running(root) as engine:
        yield engine


def small_files(extra: Mapping[str, bytes] | None = None) -> bytes:
    """A tar of a root file system with busybox, and `extra` files (executable)."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, data in {"bin/busybox": BUSYBOX.read_bytes(), **(extra or {})}.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755
            tar.addfile(info, io.BytesIO(data))
        for applet in APPLETS:
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    return made.getvalue()


def make_image(
    engine: Engine,
    name: str,
    *changes: str,
    extra: Mapping[str, bytes] | None = None,
) -> str:
    """Import a small image; `changes` are lines of a Dockerfile. Give its id."""
    argv = ["import"]
    for change in changes:
        argv += ["--change", change]
    return engine.cli(*argv, "-", name, stdin=small_files(extra))


@dataclass(frozen=True)
class LocalRegistry:
    """A registry on loopback."""

    host: str
    """127.0.0.1:PORT."""
    root: Path

    def ask(
        self, method: str, path: str, data: bytes | None = None, kind: str = ""
    ) -> tuple[bytes, str]:
        """Speak to it; give the body and the content's digest."""
        headers = {"Accept": "application/vnd.docker.distribution.manifest.v2+json"}
        if kind:
            headers["Content-Type"] = kind
        url = f"http://{self.host}/v2/{path}"
        reply = requests.request(method, url, data=data, headers=headers, timeout=10)
        reply.raise_for_status()
        return reply.content, reply.headers.get("Docker-Content-Digest") or ""

    def index(self, repository: str, tag: str, platforms: Mapping[str, str]) -> str:
        """Put a list of platforms under a tag: `linux/amd64` to the tag of its image."""
        kind = "application/vnd.docker.distribution.manifest.list.v2+json"
        entries = []
        for platform, name in platforms.items():
            body, digest = self.ask("GET", f"{repository}/manifests/{name}")
            system, _, architecture = platform.partition("/")
            entries.append({
                "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
                "size": len(body), "digest": digest,
                "platform": {"os": system, "architecture": architecture},
            })  # fmt: skip
        data = json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": entries}).encode()
        self.ask("PUT", f"{repository}/manifests/{tag}", data, kind)
        return f"sha256:{hashlib.sha256(data).hexdigest()}"

    def for_arm(self, repository: str, tag: str, new: str) -> str:
        """Put an image under a new tag that says it is for arm64; give its digest."""
        manifest = json.loads(self.ask("GET", f"{repository}/manifests/{tag}")[0])
        config = json.loads(
            self.ask("GET", f"{repository}/blobs/{manifest['config']['digest']}")[0]
        )
        data = json.dumps({**config, "architecture": "arm64"}).encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        url = f"http://{self.host}/v2/{repository}/blobs/uploads/"
        begun = requests.post(url, timeout=10).headers["Location"]
        requests.put(begun, params={"digest": digest}, data=data, timeout=10).raise_for_status()
        manifest["config"] |= {"digest": digest, "size": len(data)}
        body, kind = json.dumps(manifest).encode(), manifest["mediaType"]
        self.ask("PUT", f"{repository}/manifests/{new}", body, kind)
        return f"sha256:{hashlib.sha256(body).hexdigest()}"

    def forget(self, repository: str, digest: str) -> None:
        """Delete a manifest, as a clean-up would."""
        self.ask("DELETE", f"{repository}/manifests/{digest}")


@contextmanager
def registry(root: Path, users: str | None = None) -> Iterator[LocalRegistry]:
    """Start Debian's docker-registry; `users` is the text of an htpasswd file."""
    root.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {
            "filesystem": {"rootdirectory": str(root / "data")}, "delete": {"enabled": True},
            "maintenance": {"uploadpurging": {"enabled": False}},
        },
        "http": {"addr": f"127.0.0.1:{port}"},
    }  # fmt: skip
    if users:
        (root / "users").write_text(users)
        config["auth"] = {"htpasswd": {"realm": "tests", "path": str(root / "users")}}
    (root / "config.yml").write_text(json.dumps(config))
    with (root / "log").open("wb") as out:
        child = subprocess.Popen(
            ["docker-registry", "serve", str(root / "config.yml")], stdin=subprocess.DEVNULL,
            stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        for _ in range(100):
            assert child.poll() is None, (root / "log").read_text()[-2000:]
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield LocalRegistry(f"127.0.0.1:{port}", root)
    finally:
        _end(child)


@pytest.fixture
def docker_registry(tmp_path: Path, docker_engine: Engine) -> Iterator[LocalRegistry]:
    """A registry of a test's own."""
    with registry(tmp_path / "registry") as made:
        yield made


def push(engine: Engine, image: str, reference: str) -> str:
    """Tag and push an image; give the manifest's digest."""
    engine.cli("tag", image, reference)
    said = engine.cli("push", reference)
    return next(word for word in said.split() if word.startswith("sha256:") and len(word) == 71)
