"""A client of the Docker Engine: where it is, images, containers, pulls.

Over the SDK's low-level client, so that the engine is sent exactly what `docker.create_body` gives.
The SDK takes long to import and is imported with the first call.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import math
import os
import socket
import stat
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bakehouse.debug_log import event
from bakehouse.errors import HostError, NotFound
from bakehouse.redact import without_credentials
from bakehouse.system.docker.errors import explain, unreachable
from bakehouse.system.docker.models import (
    ARCHITECTURES,
    OURS,
    Answered,
    ContainerFacts,
    ContainerSpec,
    Credentials,
    EngineFacts,
    Happening,
    ImageFacts,
    OnLayer,
    container_facts,
    create_body,
    engine_facts,
    happening,
    image_facts,
)

TIMEOUT_S = 60.0
"""Default limit of a short request, in seconds."""
ACTION_S = 180.0
"""Limit for creating, starting, stopping or removing something, in seconds."""
STALL_S = 300.0
"""A pull without any data for this long has failed, in seconds."""
REMEMBERED_S = 2.0
"""An engine that timed out is not tried again for this long, in seconds: several requests of a task
wait for it once."""
_silent: dict[str, tuple[float, HostError]] = {}
ASKED_BY = f"{OURS}.asked-by"
"""Label of a short-lived container: host and process id of its owner, so that the containers of
killed runs are found and removed."""
CHUNK = 2**20
PING_S = 5
"""A living engine answers a ping at once, whatever else it does; in seconds."""
PING_API = "1.24"
"""The oldest version of the API, used for the ping only."""
DEFAULT = "unix:///var/run/docker.sock"
SCHEMES = ("unix", "tcp", "http", "https", "ssh")
DONE = ("Pull complete", "Already exists", "Download complete")
"""States of a layer that needs nothing more."""
COMING = ("Downloading", "Verifying Checksum", "Extracting", "Retrying")


@dataclass(frozen=True)
class Endpoint:
    """Where an engine listens. `tls` is the folder of ca.pem, cert.pem and key.pem."""

    host: str
    origin: str
    """The setting that names it, for messages."""
    tls: Path | None = None
    verify: bool = True


def config_file(environment: Mapping[str, str]) -> Path:
    """The Docker command line's configuration: contexts and credentials."""
    folder = environment.get("DOCKER_CONFIG")
    home = Path(environment.get("HOME") or "/")
    return (Path(folder) if folder else home / ".docker") / "config.json"


def read_config(environment: Mapping[str, str]) -> dict[str, Any]:
    """Read the Docker configuration; empty without a file. Raises HostError if it is corrupt."""
    path = config_file(environment)
    try:
        data = json.loads(path.read_text(errors="replace"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise HostError(
            "the Docker configuration cannot be read",
            where=f"{path}: {getattr(error, 'strerror', None) or 'not JSON'}",
            hint="fix the file, or name another folder in DOCKER_CONFIG",
            id="docker-config",
        ) from None
    return data if isinstance(data, dict) else {}


def find_endpoint(environment: Mapping[str, str]) -> Endpoint:
    """Find the engine as the Docker command line does. Raises HostError.

    Not through the SDK's ContextAPI: it reads only this process's own environment, takes a corrupt
    configuration for the default context, and does not verify TLS unless a context says so.
    """
    if host := environment.get("DOCKER_HOST", "").strip():
        folder = environment.get("DOCKER_CERT_PATH")
        verify = bool(environment.get("DOCKER_TLS_VERIFY"))
        wanted = bool(folder) or verify
        tls = Path(folder) if folder else config_file(environment).parent
        return _checked(Endpoint(host, "DOCKER_HOST", tls if wanted else None, verify))
    name = environment.get("DOCKER_CONTEXT", "").strip()
    origin = "DOCKER_CONTEXT"
    if not name:
        name = str(read_config(environment).get("currentContext") or "default")
        origin = f"currentContext in {config_file(environment)}"
    if name == "default":
        return Endpoint(DEFAULT, "the default context")
    contexts = config_file(environment).parent / "contexts"
    key = hashlib.sha256(name.encode()).hexdigest()
    meta = contexts / "meta" / key / "meta.json"
    try:
        docker = json.loads(meta.read_text())["Endpoints"]["docker"]
        host = docker["Host"]
    except (OSError, ValueError, KeyError, TypeError):
        raise HostError(
            f"Docker context '{name}' not found, or it names no engine",
            where=f"{origin}; looked at {meta}",
            hint="list contexts with 'docker context ls', or set DOCKER_HOST",
            id="docker-context",
        ) from None
    tls = contexts / "tls" / key / "docker"
    found = Endpoint(
        str(host), f"the context '{name}'", tls if tls.is_dir() else None,
        not docker.get("SkipTLSVerify", False),
    )  # fmt: skip
    return _checked(found)


def _checked(end: Endpoint) -> Endpoint:
    """Give the endpoint back if its address is valid. Raises HostError."""
    try:
        parts = urlsplit(end.host)
        named = bool(parts.path if parts.scheme == "unix" else parts.hostname)
        valid = parts.scheme in SCHEMES and named and parts.port != 0
    except ValueError:  # a port beyond 65535, half a bracket
        valid = False
    if valid:
        return end
    raise HostError(
        f"'{without_credentials(end.host)}' is not the address of a Docker Engine",
        where=end.origin, id="docker-host",
        hint="write unix:///path/to/docker.sock, tcp://HOST:PORT or ssh://HOST",
    )  # fmt: skip


class Layers:
    """Progress of the layers of one pull."""

    def __init__(self, on_layer: OnLayer | None) -> None:
        self._on_layer = on_layer
        self._last: dict[str, tuple[str, int, int]] = {}

    def take(self, line: Mapping[str, Any]) -> None:
        """Record one line of the engine's progress, and report it."""
        layer, status = line.get("id"), str(line.get("status"))
        if not layer or status.startswith("Pulling from"):
            return
        detail = line.get("progressDetail") or {}
        done, total = int(detail.get("current") or 0), int(detail.get("total") or 0)
        self._last[layer] = (status, done, total)
        if self._on_layer:
            self._on_layer(layer, status, done, total)

    def stalled(self, where: str, seconds: float) -> HostError:
        """Make the error for a pull that no longer gets data."""
        left = {n: one for n, one in self._last.items() if one[0] not in DONE}
        coming = {n: one for n, one in left.items() if one[0].startswith(COMING)} or left
        named = ", ".join(
            f"layer {name} ({status.lower()}"
            + (f", {done:,} of {total:,} bytes)" if total else ")")
            for name, (status, done, total) in coming.items()
        )
        held = named or "its manifest, or what the engine does with its layers"
        return HostError(
            f"no data for {seconds:.0f} s of {held}", where=where, id="pull-stalled",
            hint="check the network of the engine's machine, its proxy and the registry, then try "
            "again: layers that arrived whole are kept",
        )  # fmt: skip


class DockerClient:
    """Client of one Docker Engine. Connects when it is first used.

    `patience` limits a request, `stall` a pull without data, in seconds; `origin` is the setting
    that names the engine, if that is not the environment. All methods raise HostError if the engine
    cannot be reached.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        *,
        patience: float | None = None,
        stall: float = STALL_S,
        origin: str | None = None,
    ) -> None:
        self._environment = environment
        self._patience = patience or TIMEOUT_S
        self._stall = stall
        self._origin = origin
        self._client: Any = None
        self._endpoint: Endpoint | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that name the engine."""
        return os.environ if self._environment is None else self._environment

    def facts(self) -> EngineFacts:
        """Query version, architecture, GPU access and data root."""
        with self._talking("the engine") as client:
            return engine_facts(
                client.info(), client.version(), self._endpoint.host if self._endpoint else ""
            )

    def credentials(self, registry: str) -> Credentials | None:
        """Credentials in the Docker configuration or its helpers; None without any."""
        from docker.errors import DockerException

        from docker import auth

        path = config_file(self.environment)
        if not path.is_file():
            return None
        helpers = {k: v for k, v in self.environment.items() if k in ("HOME", "PATH")}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about a missing helper; an error follows
                config = auth.load_config(str(path), credstore_env=helpers)
                found = config.resolve_authconfig(registry)
        except (DockerException, ValueError, KeyError, AttributeError, TypeError) as error:
            raise HostError(
                f"the credentials of {registry} cannot be read ({type(error).__name__})",
                where=str(path),
                hint="fix the file or its credential helper, or log in again: docker login",
                id="docker-config",
            ) from None
        known = {str(k).lower(): str(v or "") for k, v in (found or {}).items()}
        made = Credentials(
            username=known.get("username", ""),
            password=known.get("password", ""),
            identity_token=known.get("identitytoken", ""),
        )
        return made if made.password or made.identity_token else None

    def image(self, reference: str) -> ImageFacts | None:
        """Find an image by name, digest or id; None if the engine does not have it."""
        try:
            with self._talking(reference) as client:
                inspected: dict[str, Any] = client.inspect_image(reference)
                return image_facts(inspected)
        except NotFound:
            return None

    def pull(self, reference: str, *, arch: str, on_layer: OnLayer | None = None) -> ImageFacts:
        """Pull an image for one architecture. Raises LockError, NotFound, HostError."""
        known = self.credentials(registry_of(reference))
        auth = {} if known is None else {
            "username": known.username, "password": known.password,
            "identitytoken": known.identity_token,
        }  # fmt: skip
        layers, where = Layers(on_layer), f"pulling {reference}"
        try:
            with self._talking(where, ACTION_S) as client:
                client.longest = self._stall
                lines = client.pull(
                    reference, stream=True, decode=True, platform=f"linux/{ARCHITECTURES[arch]}",
                    auth_config=auth or None,
                )  # fmt: skip
                try:
                    for line in lines:
                        if failed := line.get("error"):
                            raise explain(str(failed), where)
                        layers.take(line)
                finally:
                    client.hang_up()
        except HostError as error:
            if error.id != "docker-timeout":
                raise
            self.facts()  # raises if the engine itself hangs
            raise layers.stalled(where, self._stall) from None
        found = self.image(reference)
        if found is None:
            raise explain("no such image", where)
        return found

    def tag(self, image: str, repository: str, tag: str) -> None:
        """Tag an image."""
        with self._talking(f"{repository}:{tag}", ACTION_S) as client:
            client.tag(image, repository, tag)

    def remove_image(self, reference: str) -> None:
        """Remove a name of an image, and the image with its last name; no error if it is gone."""
        with suppress(NotFound), self._talking(reference, ACTION_S) as client:
            client.remove_image(reference)

    def create(self, spec: ContainerSpec) -> str:
        """Create a container; give its id. Raises HostError (name in use), NotFound (no image)."""
        cdi = bool(spec.gpus) and self.facts().gpus.startswith("cdi")
        with self._talking(f"container {spec.name or 'of ' + spec.image}", ACTION_S) as client:
            made: dict[str, Any] = client.create_container_from_config(
                create_body(spec, cdi=cdi), spec.name
            )
            return str(made["Id"])

    def start(self, container: str) -> None:
        """Start it. Raises HostError: port in use, no NVIDIA runtime, command not found."""
        with self._talking(f"container {container[:12]}", ACTION_S) as client:
            client.start(container)

    def container(self, container: str) -> ContainerFacts | None:
        """Find a container by name or id; None if there is none."""
        try:
            with self._talking(f"container {container[:12]}") as client:
                return container_facts(client.inspect_container(container))
        except NotFound:
            return None

    def happened(self, container: str, since: float) -> tuple[Happening, ...]:
        """Events of a container since a time (Unix, in seconds), oldest first.

        An engine keeps only the latest events of all its containers.
        """
        with self._talking(f"container {container[:12]}") as client:
            # The SDK's types know whole seconds only; the engine takes parts of them, as text.
            span: Any = {"since": f"{since:.9f}", "until": f"{time.time():.9f}"}
            wanted = {"container": container, "type": "container"}
            return tuple(map(happening, client.events(**span, decode=True, filters=wanted)))

    def containers(self, labels: Mapping[str, str]) -> tuple[ContainerFacts, ...]:
        """All containers with these labels, ended ones too; an empty value matches any."""
        wanted = [f"{name}={value}" if value else name for name, value in labels.items()]
        with self._talking("containers") as client:
            listed = client.containers(all=True, filters={"label": wanted})
        found = (self.container(one["Id"]) for one in listed)
        return tuple(one for one in found if one)

    def logs(
        self, container: str, *, follow: bool = False, tail: int | None = None
    ) -> Iterator[bytes]:
        """Yield both output streams in order; with `follow`, until the container ends."""
        with self._talking(f"container {container[:12]}") as client:
            yield from client.logs(
                container, stream=True, follow=follow, tail="all" if tail is None else tail
            )

    def wait(self, container: str, timeout: float) -> int | None:
        """Wait at most `timeout` seconds for its end; give the exit code, or None."""
        from requests.exceptions import ConnectionError as Cut
        from requests.exceptions import ReadTimeout

        with self._talking(f"container {container[:12]}") as client:
            try:
                return int(client.wait(container, timeout=math.ceil(timeout))["StatusCode"])
            except ReadTimeout:
                return None
            except Cut as error:  # how the SDK's own transport says that time ran out
                if "timed out" in str(error).lower():
                    return None
                raise

    def stop(self, container: str, timeout: float) -> None:
        """TERM, wait, KILL; no error if it has ended or is gone."""
        with suppress(NotFound), self._talking(f"container {container[:12]}", ACTION_S) as client:
            client.stop(container, timeout=int(timeout))

    def remove(self, container: str) -> None:
        """Kill and remove it with its anonymous volumes; no error if it is gone."""
        from docker.errors import APIError

        with suppress(NotFound), self._talking(f"container {container[:12]}", ACTION_S) as client:
            try:
                client.remove_container(container, force=True, v=True)
            except APIError as error:
                if error.status_code != 409:  # it is being removed
                    raise

    def ask(self, spec: ContainerSpec, *, timeout: float, max_bytes: int = 2**20) -> Answered:
        """Run a short command; its container is removed however this ends."""
        self.clear_left()
        label = f"{socket.gethostname()}:{os.getpid()}"
        labels = {**spec.labels, OURS: "question", ASKED_BY: label}
        update = {"labels": labels, "log_bytes": max(4 * max_bytes, 2**20)}
        container = self.create(spec.model_copy(update=update))
        try:
            self.start(container)
            code = self.wait(container, timeout)
            if code is None:
                self._client = None  # ping again: an engine that hangs would delay each of the rest
                self.stop(container, 0)
            facts = self.container(container)
            out, cut_out = self._stream(container, max_bytes, stdout=True)
            err, cut_err = self._stream(container, max_bytes, stdout=False)
            return Answered(
                code=-9 if code is None else code, out=out, err=err, timed_out=code is None,
                oom_killed=bool(facts and facts.oom_killed), cut=cut_out or cut_err,
            )  # fmt: skip
        finally:
            self.remove(container)

    def _stream(self, container: str, limit: int, *, stdout: bool) -> tuple[str, bool]:
        """The end of one output stream, at most `limit` bytes, and whether it was cut."""
        kept = b""
        cut = False
        with self._talking(f"container {container[:12]}") as client:
            chunks = client.logs(
                container, stdout=stdout, stderr=not stdout, stream=True, follow=False
            )
            for chunk in chunks:
                kept += chunk
                if len(kept) > limit:
                    kept, cut = kept[-limit:], True
        return kept.decode(errors="replace"), cut

    def clear_left(self) -> None:
        """Remove short-lived containers of runs on this machine that were killed."""
        here = socket.gethostname()
        for one in self.containers({ASKED_BY: ""}):
            host, _, pid = one.labels.get(ASKED_BY, "").rpartition(":")
            if host == here and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                self.remove(one.id)

    def export(self, container: str) -> Iterable[bytes]:
        """Yield a container's file system as a tar stream."""
        with self._talking(f"container {container[:12]}", ACTION_S) as client:
            yield from client.export(container, chunk_size=CHUNK)

    @contextmanager
    def _talking(self, where: str, seconds: float | None = None) -> Iterator[Any]:
        """Give the SDK's client; translate its errors into ours."""
        client = self._connected()
        from docker.errors import APIError, DockerException
        from requests.exceptions import RequestException
        from urllib3.exceptions import HTTPError  # raw, out of the SDK's streams

        client.timeout = math.ceil(seconds or self._patience)
        try:
            yield client
        except APIError as error:
            event("docker", where=where, status=error.status_code, said=str(error.explanation))
            raise explain(str(error.explanation or error), where) from None
        except (DockerException, RequestException, HTTPError) as error:
            self._client = None  # the next request pings again
            raise self._unreachable(error) from None

    def _connected(self) -> Any:
        if self._client is None:
            from docker.errors import DockerException
            from requests.exceptions import RequestException

            found = find_endpoint(self.environment)
            self._endpoint = replace(found, origin=self._origin or found.origin)
            at, silent = _silent.get(found.host, (0.0, None))
            if silent and time.monotonic() - at < REMEMBERED_S:
                raise silent
            try:
                self._client = connect(self._endpoint)
            except (DockerException, RequestException, OSError, ValueError) as error:
                failed = self._unreachable(error)
                if failed.id == "docker-timeout":
                    _silent[found.host] = (time.monotonic(), failed)
                raise failed from None
            weakref.finalize(self, self._client.close)
        return self._client

    def _unreachable(self, error: BaseException) -> HostError:
        end = self._endpoint
        return unreachable(error, end.host, end.origin) if end else unreachable(error, "", "")


@functools.cache
def _client_class() -> type[Any]:
    from docker import APIClient

    class Client(APIClient):
        """The SDK's client with a limit on every wait."""

        longest = 60.0
        """Seconds without a byte if the SDK sets no limit, as for a pull."""
        answer: Any = None
        """The latest response."""

        def request(self, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("timeout") is None:
                kwargs["timeout"] = self.longest
            self.answer = super().request(*args, **kwargs)
            return self.answer

        def hang_up(self) -> None:
            """Close the latest response, which the SDK's streams leave open."""
            if self.answer is not None:
                self.answer.close()

    return Client


def connect(end: Endpoint) -> Any:
    """Give the SDK's client of an engine that answers a ping.

    Raises HostError, and the errors of the SDK and of the system.
    """
    from docker import tls

    client = _client_class()
    _check_configuration()
    config: Any = False
    if end.tls:
        config = tls.TLSConfig(
            client_cert=(str(end.tls / "cert.pem"), str(end.tls / "key.pem")),
            ca_cert=str(end.tls / "ca.pem"), verify=end.verify,
        )  # fmt: skip
    if end.host.startswith("unix://"):
        status, spoken = _ping(end.host.removeprefix("unix://"))
    else:
        with client(base_url=end.host, version=PING_API, timeout=PING_S, tls=config) as first:
            answer = first.get(f"{first.base_url}/_ping", timeout=PING_S)
            status, spoken = answer.status_code, answer.headers.get("Api-Version", "")
    if not spoken:
        raise HostError(
            f"not a Docker Engine: it answered {status} without an Api-Version",
            where=f"{end.host} ({end.origin})", id="docker-host",
            hint=f"check what listens there, and fix {end.origin}",
        )  # fmt: skip
    return client(base_url=end.host, version=spoken, timeout=PING_S, tls=config)


def _check_configuration() -> None:
    """Check that the SDK can read Docker's configuration, as it does while it connects.

    Otherwise an error in that file would look like an engine that does not answer.
    """
    from docker.errors import DockerException
    from docker.utils.config import find_config_file, load_general_config

    from docker import auth

    try:
        auth.load_config()
        general = load_general_config()
        proxies = general.get("proxies", {})
        for each in (general.get("HttpHeaders", {}), proxies, *dict(proxies).values()):
            if not isinstance(each, dict):
                raise TypeError("expected a map")
    except (DockerException, ValueError, KeyError, AttributeError, TypeError) as error:
        raise HostError(
            f"the Docker configuration cannot be read ({type(error).__name__})",
            where=str(find_config_file()), id="docker-config",
            hint="fix the file, or name another folder in DOCKER_CONFIG",
        ) from None  # fmt: skip


def _ping(path: str) -> tuple[int, str]:
    """Ping an engine at a socket; give the HTTP status and the version of its API.

    Not through the SDK, which hides the system's error, and leaks a socket that cannot connect.
    """
    import http.client  # slow to import

    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise FileExistsError(errno.EEXIST, "no socket", path)
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(PING_S)
        one.connect(path)
        asking = http.client.HTTPConnection("localhost")
        asking.sock = one
        try:
            asking.request("GET", "/_ping")
            with asking.getresponse() as answer:
                return answer.status, answer.headers.get("Api-Version", "")
        except http.client.RemoteDisconnected:
            raise  # the engine is just stopping
        except http.client.HTTPException:
            return 0, ""


def registry_of(reference: str) -> str:
    """The registry of an image reference: `docker.io` if it names none."""
    first, slash, _ = reference.partition("/")
    named = slash and ("." in first or ":" in first or first == "localhost")
    return first if named else "docker.io"
