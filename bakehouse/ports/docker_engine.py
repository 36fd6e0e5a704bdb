"""The Docker port on a real engine, through the Docker SDK, which is imported with the first call.

The SDK's low-level client is used: what is asked of the engine is then exactly what
`docker_facts.create_body` says.
"""

from __future__ import annotations

import math
import os
import socket
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bakehouse.errors import HostError, NotFound
from bakehouse.logs import debug
from bakehouse.ports.docker import (
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
)
from bakehouse.ports.docker_errors import explain, unreachable
from bakehouse.ports.docker_facts import (
    container_facts,
    create_body,
    engine_facts,
    happening,
    image_facts,
)
from bakehouse.ports.docker_pull import Layers
from bakehouse.ports.docker_where import Endpoint, config_file, find_endpoint

if TYPE_CHECKING:
    from bakehouse.ports.docker_connect import Client

TIMEOUT_S = 60.0
"""What a short question may take where nobody says otherwise, in seconds."""
ACTION_S = 180.0
"""What it may take to make, start, end or remove something, in seconds."""
STALL_S = 300.0
"""A pull of which nothing comes for so long, in seconds, does not come any more."""
REMEMBERED_S = 2.0
"""An engine that did not answer is not knocked at again for so long, in seconds: what a task asks
of it in one go waits once."""
_silent: dict[str, tuple[float, HostError]] = {}
ASKED_BY = f"{OURS}.asked-by"
"""Label of a short question's container: host and process that asked, so that what a killed run
left is found and removed."""
CHUNK = 2**20


class RealDocker:
    """See `ports.docker.Docker`. Connects when it is first used.

    `patience` is what a question may take (a minute), `stall` how long a pull may bring nothing, in
    seconds; `origin` says who named the engine, where that is not the environment.
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
        self._client: Client | None = None
        self._endpoint: Endpoint | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that say which engine."""
        return os.environ if self._environment is None else self._environment

    def facts(self) -> EngineFacts:
        """See `Docker.facts`."""
        with self._said("the engine") as client:
            return engine_facts(client.info(), client.version(), self._where())

    def credentials(self, registry: str) -> Credentials | None:
        """See `Docker.credentials`."""
        from docker.errors import DockerException

        from docker import auth

        path = config_file(self.environment)
        if not path.is_file():
            return None
        helpers = {k: v for k, v in self.environment.items() if k in ("HOME", "PATH")}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a helper that is not there: an error follows
                config = auth.load_config(str(path), credstore_env=helpers)
                found = config.resolve_authconfig(registry)
        except (DockerException, ValueError, KeyError, AttributeError, TypeError) as error:
            raise HostError(
                f"the credentials of {registry} cannot be read ({type(error).__name__})",
                where=str(path),
                hint="mend the file or its credential helper, or log in anew: docker login",
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
        """See `Docker.image`."""
        try:
            with self._said(reference) as client:
                inspected: dict[str, Any] = client.inspect_image(reference)  # type: ignore[no-untyped-call]
                return image_facts(inspected)
        except NotFound:
            return None

    def pull(self, reference: str, *, arch: str, on_layer: OnLayer | None = None) -> ImageFacts:
        """See `Docker.pull`."""
        known = self.credentials(registry_of(reference))
        auth = {} if known is None else {
            "username": known.username, "password": known.password,
            "identitytoken": known.identity_token,
        }  # fmt: skip
        layers, where = Layers(on_layer), f"pulling {reference}"
        try:
            with self._said(where, ACTION_S) as client:
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
            self.facts()  # an engine that hangs is one, whatever it was pulling
            raise layers.stalled(where, self._stall) from None
        found = self.image(reference)
        if found is None:
            raise explain("no such image", where)
        return found

    def tag(self, image: str, repository: str, tag: str) -> None:
        """See `Docker.tag`."""
        with self._said(f"{repository}:{tag}", ACTION_S) as client:
            client.tag(image, repository, tag)

    def remove_image(self, reference: str) -> None:
        """See `Docker.remove_image`."""
        with suppress(NotFound), self._said(reference, ACTION_S) as client:
            client.remove_image(reference)

    def create(self, spec: ContainerSpec) -> str:
        """See `Docker.create`."""
        cdi = bool(spec.gpus) and self.facts().gpus.startswith("cdi")
        with self._said(f"container {spec.name or 'of ' + spec.image}", ACTION_S) as client:
            made: dict[str, Any] = client.create_container_from_config(  # type: ignore[no-untyped-call]
                create_body(spec, cdi=cdi), spec.name
            )
            return str(made["Id"])

    def start(self, container: str) -> None:
        """See `Docker.start`."""
        with self._said(f"container {container[:12]}", ACTION_S) as client:
            client.start(container)

    def container(self, container: str) -> ContainerFacts | None:
        """See `Docker.container`."""
        try:
            with self._said(f"container {container[:12]}") as client:
                return container_facts(client.inspect_container(container))
        except NotFound:
            return None

    def happened(self, container: str, since: float) -> tuple[Happening, ...]:
        """See `Docker.happened`."""
        with self._said(f"container {container[:12]}") as client:
            # The SDK's types know whole seconds only; the engine takes parts of them, as text.
            span: Any = {"since": f"{since:.9f}", "until": f"{time.time():.9f}"}
            wanted = {"container": container, "type": "container"}
            return tuple(map(happening, client.events(**span, decode=True, filters=wanted)))

    def containers(self, labels: Mapping[str, str]) -> tuple[ContainerFacts, ...]:
        """See `Docker.containers`."""
        wanted = [f"{name}={value}" if value else name for name, value in labels.items()]
        with self._said("containers") as client:
            listed = client.containers(all=True, filters={"label": wanted})
        found = (self.container(one["Id"]) for one in listed)
        return tuple(one for one in found if one)

    def logs(
        self, container: str, *, follow: bool = False, tail: int | None = None
    ) -> Iterator[bytes]:
        """See `Docker.logs`."""
        with self._said(f"container {container[:12]}") as client:
            yield from client.logs(
                container, stream=True, follow=follow, tail="all" if tail is None else tail
            )

    def wait(self, container: str, timeout: float) -> int | None:
        """See `Docker.wait`."""
        from requests.exceptions import ConnectionError as Cut
        from requests.exceptions import ReadTimeout

        with self._said(f"container {container[:12]}") as client:
            try:
                return int(client.wait(container, timeout=math.ceil(timeout))["StatusCode"])
            except ReadTimeout:
                return None
            except Cut as error:  # how the SDK's own transport says that time ran out
                if "timed out" in str(error).lower():
                    return None
                raise

    def stop(self, container: str, timeout: float) -> None:
        """See `Docker.stop`."""
        with suppress(NotFound), self._said(f"container {container[:12]}", ACTION_S) as client:
            client.stop(container, timeout=int(timeout))

    def remove(self, container: str) -> None:
        """See `Docker.remove`."""
        from docker.errors import APIError

        with suppress(NotFound), self._said(f"container {container[:12]}", ACTION_S) as client:
            try:
                client.remove_container(container, force=True, v=True)
            except APIError as error:
                if error.status_code != 409:  # it is being removed
                    raise

    def ask(self, spec: ContainerSpec, *, timeout: float, max_bytes: int = 2**20) -> Answered:
        """See `Docker.ask`."""
        self.clear_left()
        label = f"{socket.gethostname()}:{os.getpid()}"
        labels = {**spec.labels, OURS: "question", ASKED_BY: label}
        update = {"labels": labels, "log_bytes": max(4 * max_bytes, 2**20)}
        container = self.create(spec.model_copy(update=update))
        try:
            self.start(container)
            code = self.wait(container, timeout)
            if code is None:
                self._client = None  # knock anew: an engine that hangs would hold each of the rest
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
        """One stream's text, cut at a limit; its end is what counts."""
        kept = b""
        cut = False
        with self._said(f"container {container[:12]}") as client:
            chunks = client.logs(
                container, stdout=stdout, stderr=not stdout, stream=True, follow=False
            )
            for chunk in chunks:
                kept += chunk
                if len(kept) > limit:
                    kept, cut = kept[-limit:], True
        return kept.decode(errors="replace"), cut

    def clear_left(self) -> None:
        """See `Docker.clear_left`."""
        here = socket.gethostname()
        for one in self.containers({ASKED_BY: ""}):
            host, _, pid = one.labels.get(ASKED_BY, "").rpartition(":")
            if host == here and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                self.remove(one.id)

    def export(self, container: str) -> Iterable[bytes]:
        """See `Docker.export`."""
        with self._said(f"container {container[:12]}", ACTION_S) as client:
            yield from client.export(container, chunk_size=CHUNK)

    def _where(self) -> str:
        return self._endpoint.host if self._endpoint else ""

    @contextmanager
    def _said(self, where: str, seconds: float | None = None) -> Iterator[Client]:
        """Give the client; turn what it raises into an error that a person can act on."""
        client = self._connected()
        from docker.errors import APIError, DockerException
        from requests.exceptions import RequestException
        from urllib3.exceptions import HTTPError  # raw, out of the SDK's streams

        client.timeout = math.ceil(seconds or self._patience)
        try:
            yield client
        except APIError as error:
            debug("docker", where=where, status=error.status_code, said=str(error.explanation))
            raise explain(str(error.explanation or error), where) from None
        except (DockerException, RequestException, HTTPError) as error:
            self._client = None  # the next one knocks again
            raise self._unreachable(error) from None

    def _connected(self) -> Client:
        if self._client is None:
            from docker.errors import DockerException
            from requests.exceptions import RequestException

            from bakehouse.ports.docker_connect import connect

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


def registry_of(reference: str) -> str:
    """The registry that a reference names: `docker.io` where it names none."""
    first, slash, _ = reference.partition("/")
    named = slash and ("." in first or ":" in first or first == "localhost")
    return first if named else "docker.io"
