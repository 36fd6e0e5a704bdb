"""A Hugging Face Hub on loopback, to be reached through `HF_ENDPOINT`.

It has the listing of a model at a revision and files that redirect to a content host, as the real
one does; repositories can be gated or private.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import quote

from tests.support.filehost import FileHost, Handler, Resource, serve_files

Page = Callable[[Handler], None]
TOKEN = "hf_" + "sesame" * 4


def page(status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Page:
    """A page with one answer."""
    return lambda handler: handler.answer(status, body, headers)


class HubRepo:
    """One model repository with one commit for each state that it was in."""

    def __init__(self, api: FileHost, content: FileHost, name: str) -> None:
        self.api, self.content, self.name = api, content, name
        self.private = False
        self.gated = False
        self.blobs = True
        """Whether the listing at a revision knows sizes and hashes, as it does with `blobs`."""
        self.resources: dict[str, Resource] = {}

    def commit(
        self,
        files: Mapping[str, bytes],
        *,
        revision: str = "main",
        lfs: tuple[str, ...] = (".gguf",),
    ) -> str:
        """Publish files; those that end as `lfs` says carry a sha256. Give the commit."""
        digest = json.dumps(
            {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
        )
        commit = hashlib.sha1(digest.encode(), usedforsecurity=False).hexdigest()
        siblings = []
        for path, data in files.items():
            sha256 = hashlib.sha256(data).hexdigest()
            row: dict[str, object] = {"rfilename": path, "size": len(data), "blobId": "0" * 40}
            if path.endswith(lfs):
                row["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 134}
            siblings.append(row)
            self.resources[path] = self.content.put(f"/blob/{sha256}", data)
            self.resources[path].etag = f'"{sha256}"'
            page = f"/{self.name}/resolve/{commit}/{quote(path)}"
            self.api.pages[page] = self._guard(self._redirect(self.content.at(f"/blob/{sha256}")))
        if not self.blobs:
            siblings = [{"rfilename": row["rfilename"]} for row in siblings]
        listing = json.dumps({"id": self.name, "sha": commit, "siblings": siblings}).encode()
        self.api.pages[f"/api/models/{self.name}/paths-info/{commit}"] = self._guard(
            self._paths_info(files, lfs)
        )
        for named in (revision, commit):
            page = f"/api/models/{self.name}/revision/{quote(named, safe='')}"
            self.api.pages[page] = self._guard(lambda handler: handler.answer(200, listing))
        return commit

    def _paths_info(self, files: Mapping[str, bytes], lfs: tuple[str, ...]) -> Page:
        """Sizes and hashes of named files."""
        rows: list[dict[str, object]] = [{"type": "directory", "path": "x", "oid": "0"}]
        for name, data in files.items():
            row: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": "0"}
            if name.endswith(lfs):
                sha256 = hashlib.sha256(data).hexdigest()
                row["lfs"] = {"oid": sha256, "size": len(data), "pointerSize": 134}
            rows.append(row)
        return lambda handler: handler.answer(200, json.dumps(rows).encode())

    def _redirect(self, to: str) -> Page:
        return lambda handler: handler.answer(302, b"", {"Location": to, "X-Linked-Etag": "x"})

    def _guard(self, page: Page) -> Page:
        def guarded(handler: Handler) -> None:
            known = handler.headers.get("Authorization") == f"Bearer {TOKEN}"
            if self.gated and not known:
                handler.answer(401, b"", {"X-Error-Code": "GatedRepo"})
            elif self.private and not known:
                handler.answer(401, b"", {"X-Error-Code": "RepoNotFound"})
            else:
                page(handler)

        return guarded


class Hub:
    """The hub: its API and the host that files are redirected to."""

    def __init__(self, api: FileHost, content: FileHost) -> None:
        self.api, self.content = api, content

    @property
    def url(self) -> str:
        return self.api.url

    def repo(self, name: str = "org/model") -> HubRepo:
        return HubRepo(self.api, self.content, name)


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Run a hub for the length of a `with` block."""
    with serve_files() as api, serve_files() as content:
        yield Hub(api, content)
