"""How an engine is connected to: knocked at first, so that one that hangs is told within seconds.

Imports the Docker SDK: only `docker_engine` imports this, with its first question.
"""

from __future__ import annotations

import errno
import http.client
import os
import socket
import stat
from typing import Any

import requests
from docker.errors import DockerException
from docker.utils.config import find_config_file, load_general_config

from bakehouse.errors import HostError
from bakehouse.ports.docker_where import Endpoint
from docker import APIClient, auth, tls

KNOCK_S = 5
"""An engine that lives says so at once, whatever else it has to do; in seconds."""
KNOCKED_AS = "1.24"
"""The oldest version of the API: no question is asked in it."""


class Client(APIClient):
    """The SDK's client, of which nothing waits without end."""

    longest = 60.0
    """Seconds without a byte where the SDK itself sets no bound, as for a pull."""

    answer: requests.Response | None = None
    """The latest one."""

    def request(self, *args: Any, **kwargs: Any) -> Any:
        """Ask as requests does, bounded."""
        if kwargs.get("timeout") is None:
            kwargs["timeout"] = self.longest
        self.answer = super().request(*args, **kwargs)
        return self.answer

    def hang_up(self) -> None:
        """End the latest exchange, which the SDK's streams leave open: the engine then gives up."""
        if self.answer is not None:
            self.answer.close()


def connect(end: Endpoint) -> Client:
    """Give a client of an engine that answers. Raises HostError, and what SDK and system raise."""
    _see_configuration()
    config: Any = False
    if end.tls:
        config = tls.TLSConfig(
            client_cert=(str(end.tls / "cert.pem"), str(end.tls / "key.pem")),
            ca_cert=str(end.tls / "ca.pem"), verify=end.verify,
        )  # fmt: skip
    if end.host.startswith("unix://"):
        status, spoken = _knock(end.host.removeprefix("unix://"))
    else:
        with Client(base_url=end.host, version=KNOCKED_AS, timeout=KNOCK_S, tls=config) as first:
            answer = first.get(f"{first.base_url}/_ping", timeout=KNOCK_S)
            status, spoken = answer.status_code, answer.headers.get("Api-Version", "")
    if not spoken:
        raise HostError(
            f"what answers there is no Docker Engine: {status} and no version of its "
            "API", where=f"{end.host} ({end.origin})", id="docker-host",
            hint=f"see what listens there, and mend {end.origin}",
        )  # fmt: skip
    return Client(base_url=end.host, version=spoken, timeout=KNOCK_S, tls=config)


def _see_configuration() -> None:
    """See that the SDK can read Docker's configuration, as it does while it connects.

    Otherwise a fault in that file would pass for an engine that does not answer.
    """
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


def _knock(path: str) -> tuple[int, str]:
    """Ask at a socket who is there; give the status and the version of the API.

    Not through the SDK, which wraps the system's word, and leaks a socket that cannot connect.
    """
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise FileExistsError(errno.EEXIST, "no socket", path)
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(KNOCK_S)
        one.connect(path)
        asking = http.client.HTTPConnection("localhost")
        asking.sock = one
        try:
            asking.request("GET", "/_ping")
            with asking.getresponse() as answer:
                return answer.status, answer.headers.get("Api-Version", "")
        except http.client.RemoteDisconnected:
            raise  # an engine that just ends
        except http.client.HTTPException:
            return 0, ""
