"""A file on the Hub read in pieces, so that its header needs no download."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bakehouse.context import Context
from bakehouse.errors import HostError
from bakehouse.ports.http import Reply, Unreachable
from bakehouse.sources import hub
from bakehouse.sources.hublogin import headers, token

TRIES = 3


def _begins(reply: Reply, offset: int) -> bool:
    """Whether a part begins where it should; one without its place is believed."""
    sent = {key.lower(): value for key, value in reply.headers.items()}
    found = re.match(r"bytes (\d+)-", sent.get("content-range", f"bytes {offset}-"))
    return found is not None and int(found[1]) == offset


@dataclass(frozen=True)
class RemoteFile:
    """A source of bytes (`checkpoints.reader.ByteSource`) by range requests."""

    ctx: Context
    name: str
    """The URL."""
    size: int
    chunk: int = 2 * 2**20

    @classmethod
    def of(cls, ctx: Context, listing: hub.HubListing, path: str, size: int) -> RemoteFile:
        """Open a file of a listing."""
        return cls(ctx, hub.file_url(ctx, listing.repository, listing.commit, path), size)

    def read(self, offset: int, length: int) -> bytes:
        """Ask for one range. Raises HostError or NotFound."""
        length = min(length, self.size - offset)
        if length <= 0:
            return b""
        asked = {**headers(self.ctx), "Range": f"bytes={offset}-{offset + length - 1}"}
        why = ""
        for attempt in range(TRIES):
            if attempt:
                self.ctx.clock.sleep(0.5 * attempt)
            try:
                reply = self.ctx.http.ask(
                    "GET", self.name, headers=asked, timeout=60, max_bytes=length + 2**12
                )
            except Unreachable as error:
                why = error.why
                continue
            if reply.status == 206 and not _begins(reply, offset):
                why = "another part of the file came than was asked for"
                continue
            if reply.status == 206 or (reply.status == 200 and not offset):
                return reply.body[:length]
            if reply.status < 500 and reply.status not in (200, 408, 429):
                raise hub.refused(reply.status, reply.headers, self.name, token(self.ctx))
            why = f"HTTP {reply.status} where a part of the file was asked for"
        raise HostError(
            f"the header of a file on the hub cannot be read: {why}",
            where=self.name,
            hint="try again; where the server gives no parts of files, fetch the whole first",
            id="hub",
        )
