"""What a Hugging Face repository holds, and its files read in pieces: no download."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from bakehouse.errors import BakehouseError, HostError, NotFound, UsageError
from bakehouse.ports.http import Http, Reply, Unreachable

HUB = "https://huggingface.co"
MAX_PAGES = 100
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_REVISION = re.compile(r"[\w][\w./-]{0,199}")


@dataclass(frozen=True)
class Listed:
    """One file of a repository. `size` in bytes."""

    path: str
    size: int


@dataclass(frozen=True)
class Hub:
    """A repository at a revision. `HF_ENDPOINT` and `HF_TOKEN` mean what they mean to the Hub."""

    http: Http
    repository: str
    revision: str = "main"
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what is no repository or revision. Raises UsageError."""
        if not _REPOSITORY.fullmatch(self.repository):
            raise UsageError(
                f"'{self.repository}' is not a repository of the Hub",
                hint="write it as OWNER/NAME, such as unsloth/GLM-5.3-Flash-GGUF",
            )
        if not _REVISION.fullmatch(self.revision) or ".." in self.revision:
            raise UsageError(
                f"'{self.revision}' is not a revision", hint="give a branch, a tag or a commit"
            )

    @property
    def endpoint(self) -> str:
        """Base URL, without a final slash."""
        return (self.environment.get("HF_ENDPOINT") or HUB).rstrip("/")

    def headers(self) -> dict[str, str]:
        """The token, where there is one; the port drops it when a redirect leaves the host."""
        token = self.environment.get("HF_TOKEN")
        return {"Authorization": f"Bearer {token}"} if token else {}

    def files(self) -> tuple[Listed, ...]:
        """List every file. Raises NotFound or HostError."""
        name = f"{quote(self.repository)}/tree/{quote(self.revision, safe='')}"
        url: str | None = f"{self.endpoint}/api/models/{name}?recursive=true"
        found: list[Listed] = []
        for _ in range(MAX_PAGES):
            if url is None:
                return tuple(found)
            reply = self._get(url)
            found += _entries(reply, url)
            url = self._next_page(reply, url)
        raise HostError(
            f"the listing of {self.repository} has more than {MAX_PAGES} pages", where=url,
            hint="name a smaller repository",
        )  # fmt: skip

    def open(self, file: Listed) -> RemoteFile:
        """Give a file to read in pieces."""
        path = f"{quote(self.repository)}/resolve/{quote(self.revision, safe='')}"
        return RemoteFile(self, f"{self.endpoint}/{path}/{quote(file.path)}", file.size)

    def _next_page(self, reply: Reply, url: str) -> str | None:
        link = next((v for k, v in reply.headers.items() if k.lower() == "link"), "")
        found = re.search(r"<([^>]{1,2000})>\s*;\s*rel=\"?next\"?", link)
        if found is None:
            return None
        there = urljoin(url, found[1])
        # The token goes along, so the next page has to be on the same host.
        return there if urlsplit(there)[:2] == urlsplit(url)[:2] else None

    def _get(self, url: str, extra: Mapping[str, str] | None = None, most: int = 2**25) -> Reply:
        try:
            reply = self.http.ask(
                "GET", url, headers={**self.headers(), **(extra or {})}, timeout=60, max_bytes=most
            )
        except Unreachable as error:
            raise HostError(
                f"the Hub does not answer: {error.why}", where=url,
                hint="check the network and HF_ENDPOINT, then try again",
            ) from error  # fmt: skip
        if reply.status in (200, 206):
            return reply
        raise self._refused(reply, url)

    def _refused(self, reply: Reply, url: str) -> BakehouseError:
        if reply.status in (401, 403):
            return HostError(
                f"{self.repository} is gated, private or not there (HTTP {reply.status})",
                where=url,
                hint="accept its conditions on the Hub and set HF_TOKEN",
                id="hub-access",
            )
        if reply.status == 404:
            return NotFound(
                f"{self.repository} has no revision '{self.revision}', or does not exist",
                where=url,
                hint="check the name and the revision",
            )
        return HostError(f"the Hub answered HTTP {reply.status}", where=url, hint="try again later")


def _entries(reply: Reply, url: str) -> list[Listed]:
    try:
        data = reply.json()
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, list):
        raise HostError(
            "the Hub's listing is not what it should be", where=url,
            hint="something between here and the Hub answers in its place (a login page, a proxy)",
        )  # fmt: skip
    return [made for entry in data if (made := _entry(entry))]


def _entry(entry: Any) -> Listed | None:
    """One file of a listing; None for a folder, or for what is no entry at all."""
    if not isinstance(entry, dict) or entry.get("type") != "file":
        return None
    path, size = entry.get("path"), entry.get("size")
    large = entry.get("lfs")
    if isinstance(large, dict) and isinstance(large.get("size"), int):
        size = large["size"]
    if not isinstance(path, str) or type(size) is not int or size < 0:
        return None
    return Listed(path, size)


@dataclass(frozen=True)
class RemoteFile:
    """A file on the Hub as a source of bytes (`checkpoints.reader.ByteSource`)."""

    hub: Hub
    name: str
    size: int
    chunk: int = 2 * 2**20

    def read(self, offset: int, length: int) -> bytes:
        """Ask for one range. Raises HostError or NotFound."""
        length = min(length, self.size - offset)
        if length <= 0:
            return b""
        asked = f"bytes={offset}-{offset + length - 1}"
        reply = self.hub._get(self.name, {"Range": asked}, most=length + 2**16)  # noqa: SLF001
        if reply.status == 200 and (offset or len(reply.body) < min(length, self.size)):
            raise HostError(
                "the server does not give parts of files (no range requests)", where=self.name,
                hint="fetch the file whole, then ask again with the recipe",
            )  # fmt: skip
        return reply.body[:length]
