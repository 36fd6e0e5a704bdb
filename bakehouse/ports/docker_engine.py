"""The Docker port on a real engine, through the Docker SDK, which is imported with the first call.

The SDK's low-level client is used: what is asked of the engine is then exactly what
`docker_facts.create_body` says.
"""

from __future__ import annotations

import math
import os
import socket
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
    ImageFacts,
    OnLayer,
)
from bakehouse.ports.docker_errors import explain, unreachable
from bakehouse.ports.docker_facts import container_facts, create_body, engine_facts, image_facts
from bakehouse.ports.docker_where import Endpoint, config_file, find_endpoint

if TYPE_CHECKING:
    from docker import APIClient

TIMEOUT_S = 60
ASKED_BY = f"{OURS}.asked-by"
"""Label of a short question's container: host and process that asked, so that what a killed run
left is found and removed."""
CHUNK = 2**20


class RealDocker:
    """See `ports.docker.Docker`. Connects when it is first used."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = environment
        self._client: APIClient | None = None
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
        with self._said(f"pulling {reference}") as client:
            lines = client.pull(
                reference, stream=True, decode=True, platform=f"linux/{ARCHITECTURES[arch]}",
                auth_config=auth or None,
            )  # fmt: skip
            for line in lines:
                if failed := line.get("error"):
                    raise explain(str(failed), f"pulling {reference}")
                detail = line.get("progressDetail") or {}
                if on_layer and line.get("id"):
                    done, total = detail.get("current"), detail.get("total")
                    on_layer(line["id"], str(line.get("status")), int(done or 0), int(total or 0))
        found = self.image(reference)
        if found is None:
            raise explain("no such image", f"pulling {reference}")
        return found

    def tag(self, image: str, repository: str, tag: str) -> None:
        """See `Docker.tag`."""
        with self._said(f"{repository}:{tag}") as client:
            client.tag(image, repository, tag)

    def remove_image(self, reference: str) -> None:
        """See `Docker.remove_image`."""
        with suppress(NotFound), self._said(reference) as client:
            client.remove_image(reference)

    def create(self, spec: ContainerSpec) -> str:
        """See `Docker.create`."""
        cdi = bool(spec.gpus) and self.facts().gpus.startswith("cdi")
        with self._said(f"container {spec.name or 'of ' + spec.image}") as client:
            made: dict[str, Any] = client.create_container_from_config(  # type: ignore[no-untyped-call]
                create_body(spec, cdi=cdi), spec.name
            )
            return str(made["Id"])

    def start(self, container: str) -> None:
        """See `Docker.start`."""
        with self._said(f"container {container[:12]}") as client:
            client.start(container)

    def container(self, container: str) -> ContainerFacts | None:
        """See `Docker.container`."""
        try:
            with self._said(f"container {container[:12]}") as client:
                return container_facts(client.inspect_container(container))
        except NotFound:
            return None

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
        with suppress(NotFound), self._said(f"container {container[:12]}") as client:
            client.stop(container, timeout=int(timeout))

    def remove(self, container: str) -> None:
        """See `Docker.remove`."""
        from docker.errors import APIError

        with suppress(NotFound), self._said(f"container {container[:12]}") as client:
            try:
                client.remove_container(container, force=True, v=True)
            except APIError as error:
                if error.status_code != 409:  # it is being removed
                    raise

    def ask(self, spec: ContainerSpec, *, timeout: float, max_bytes: int = 2**20) -> Answered:
        """See `Docker.ask`."""
        self._clear_left()
        label = f"{socket.gethostname()}:{os.getpid()}"
        labels = {**spec.labels, OURS: "question", ASKED_BY: label}
        update = {"labels": labels, "log_bytes": max(4 * max_bytes, 2**20)}
        container = self.create(spec.model_copy(update=update))
        try:
            self.start(container)
            code = self.wait(container, timeout)
            if code is None:
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

    def _clear_left(self) -> None:
        """Remove containers of questions whose askers on this machine are gone."""
        here = socket.gethostname()
        for one in self.containers({ASKED_BY: ""}):
            host, _, pid = one.labels.get(ASKED_BY, "").rpartition(":")
            if host == here and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                self.remove(one.id)

    def export(self, container: str) -> Iterable[bytes]:
        """See `Docker.export`."""
        with self._said(f"container {container[:12]}") as client:
            yield from client.export(container, chunk_size=CHUNK)

    def _where(self) -> str:
        return self._endpoint.host if self._endpoint else ""

    @contextmanager
    def _said(self, where: str) -> Iterator[APIClient]:
        """Give the client; turn what it raises into an error that a person can act on."""
        from docker.errors import APIError, DockerException
        from requests.exceptions import RequestException

        client = self._connected()
        try:
            yield client
        except APIError as error:
            debug("docker", where=where, status=error.status_code, said=str(error.explanation))
            raise explain(str(error.explanation or error), where) from None
        except (DockerException, RequestException) as error:
            end = self._endpoint
            raise unreachable(error, self._where(), end.origin if end else "") from None

    def _connected(self) -> APIClient:
        if self._client is None:
            from docker.errors import DockerException
            from requests.exceptions import RequestException

            from docker import APIClient, tls

            end = self._endpoint = find_endpoint(self.environment)
            _see_configuration()
            try:
                _knock(end.host)
                config: Any = False
                if end.tls:
                    config = tls.TLSConfig(
                        client_cert=(str(end.tls / "cert.pem"), str(end.tls / "key.pem")),
                        ca_cert=str(end.tls / "ca.pem"), verify=end.verify,
                    )  # fmt: skip
                self._client = APIClient(
                    base_url=end.host,
                    version="auto",
                    timeout=TIMEOUT_S,
                    tls=config,
                )
            except (DockerException, RequestException, OSError, ValueError) as error:
                raise unreachable(error, end.host, end.origin) from None
            weakref.finalize(self, self._client.close)
        return self._client


def _see_configuration() -> None:
    """See that the SDK can read Docker's configuration, as it does while it connects.

    Otherwise a fault in that file would pass for an engine that does not answer.
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
                raise TypeError("a map is wanted")
    except (DockerException, ValueError, KeyError, AttributeError, TypeError) as error:
        raise HostError(
            f"the Docker configuration cannot be read ({type(error).__name__})",
            where=str(find_config_file()), id="docker-config",
            hint="mend the file, or name another folder in DOCKER_CONFIG",
        ) from None  # fmt: skip


def _knock(host: str) -> None:
    """See that a socket is listened at: the SDK would wrap the system's word, and leak a socket."""
    if host.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as one:
            one.settimeout(TIMEOUT_S)
            one.connect(host.removeprefix("unix://"))


def registry_of(reference: str) -> str:
    """The registry that a reference names: `docker.io` where it names none."""
    first, slash, _ = reference.partition("/")
    named = slash and ("." in first or ":" in first or first == "localhost")
    return first if named else "docker.io"
