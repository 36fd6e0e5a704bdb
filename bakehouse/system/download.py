"""Downloads that resume, retry with backoff, and are renamed into place once they are whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import requests
import urllib3

from bakehouse.errors import HostError, is_disk_full, os_error
from bakehouse.redact import clean, without_credentials
from bakehouse.system.http import HttpStatus, Unreachable, exchange, is_loopback, why
from bakehouse.system.process import Clock
from bakehouse.util.files import fsync_folder
from bakehouse.util.retry import BUSY, Retry, TransientError, asks_to_return, retry_after

CONNECT_S = 20.0
SILENCE_S = 60.0
"""The connection counts as lost after this long without a byte."""
LONGEST_WAIT_S = 300.0
"""A host that asks for a longer pause is not waited for."""
CHUNK = 2**18
_HINTS = {
    401: "login required: check that the right token is set",
    403: "access denied: check permissions, or accept the terms in a browser",
    404: "check the address; the file may have been removed",
    410: "the file was removed",
    451: "the file was removed for legal reasons",
}


class Download:
    """One file. What has arrived is in `target.part`, and its source in `target.part.json`."""

    def __init__(
        self,
        url: str,
        target: Path,
        headers: Mapping[str, str],
        size: int | None,
        on_bytes: Callable[[int, int | None], None] | None,
        on_wait: Callable[[str], None] | None,
        clock: Clock,
    ) -> None:
        self.url = url
        self.target = target
        self.part = target.with_name(target.name + ".part")
        self.note = target.with_name(target.name + ".part.json")
        self.headers = {k: v for k, v in headers.items() if k.lower() not in ("range", "if-range")}
        self.size = size
        self.on_bytes = on_bytes
        self.shown = without_credentials(url)
        self._retry = Retry(clock.sleep, longest_wait=LONGEST_WAIT_S, say=on_wait, where=self.shown)
        self._furthest = 0
        self._patched = True

    def run(self) -> bool:
        """Fetch, resume and retry until the whole file is in place. Raises HostError.

        Return whether it was put together from several responses.
        """
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._retry.call(self._attempt)
            os.replace(self.part, self.target)
            self.note.unlink(missing_ok=True)
            fsync_folder(self.target.parent)
            return self._patched
        except TransientError as error:
            way = "try again later" if error.after else "check the network and run it again"
            raise HostError(
                f"the download failed: {error.reason}",
                where=self.shown,
                hint=f"{way}; the partial download is kept and resumed",
                id="download",
            ) from None
        except OSError as error:
            if is_disk_full(error):
                raise self._disk_full(error.strerror or "no space") from error
            hint = "check that the folder exists and is writable, or set BAKEHOUSE_HOME"
            raise os_error(
                error, "the download cannot be written", self.target.parent, hint
            ) from error

    def _attempt(self) -> None:
        """Request the missing bytes and write them."""
        have = self._resumable()
        if self.size is not None and have == self.size > 0:
            return
        sent = dict(self.headers)
        if have:
            sent["Range"] = f"bytes={have}-"
            if validator := self._noted().get("validator"):
                sent["If-Range"] = validator
        try:
            with exchange(
                "GET", self.url, headers=sent, timeouts=(CONNECT_S, SILENCE_S)
            ) as response:
                if self._has_body(response, have):
                    self._receive(response, have if response.status_code == 206 else 0)
        except (requests.RequestException, urllib3.exceptions.HTTPError, Unreachable) as error:
            found = why(error)
            if isinstance(error, Unreachable | requests.exceptions.InvalidURL):
                raise HostError(found.why, where=self.shown, id="download") from error
            near = found.refused and is_loopback(self.url)
            raise TransientError(found.why, nobody_listens=near) from error

    def _has_body(self, response: requests.Response, have: int) -> bool:
        """Whether to receive the body; False if the part is whole already."""
        status = response.status_code
        if status == 200:
            return True
        if status == 206 and have:
            begin, total = _content_range(response.headers.get("Content-Range"))
            changed = self._noted().get("validator") not in (None, _validator(response))
            if begin == have and not changed and (self.size is None or total == self.size):
                return True
            self._discard()
            raise TransientError("the host sent another range than requested; starting over", 0.0)
        if status == 416 and have:
            _, total = _content_range(response.headers.get("Content-Range"))
            if total == have and self.size in (None, have):
                return False
            self._discard()
            raise TransientError("partial download does not match the file; starting over", 0.0)
        if status in BUSY:
            after = retry_after(response.headers)
            answer = f"the host answers {status} {clean(response.reason)}"
            raise TransientError(answer + asks_to_return(after), after)
        raise HttpStatus(
            f"the host answers {status} {clean(response.reason or '')}".rstrip(),
            status=status,
            where=self.shown,
            hint=_HINTS.get(status, "open the address in a browser to see the reason"),
            headers=dict(response.headers),
        )

    def _receive(self, response: requests.Response, begin: int) -> None:
        length = response.headers.get("Content-Length", "")
        total = self.size
        if length.isdigit():
            total = begin + int(length)
            self._expect(total, response.headers.get("Content-Type", ""))
        self._patched = begin > 0
        wanted, free = (total or 0) - begin, shutil.disk_usage(self.target.parent).free
        if wanted > free:
            raise self._disk_full(f"{wanted:,} bytes needed, {free:,} free")
        note = {"url": self.url, "validator": _validator(response), "size": total}
        self.note.write_text(json.dumps(note))
        done = begin
        with self.part.open("r+b" if begin else "wb") as file:
            file.truncate(begin)
            file.seek(begin)
            for chunk in response.raw.stream(CHUNK, decode_content=False):
                file.write(chunk)
                done += len(chunk)
                # A host that always cuts off at the same place makes no progress.
                if done > self._furthest:
                    self._retry.made_progress()
                    self._furthest = done
                if self.on_bytes:
                    self.on_bytes(done, total)
                if total is not None and done > total:
                    self._expect(done)
            file.flush()
            os.fsync(file.fileno())
        if total is not None and done < total:
            raise TransientError(f"the answer was cut off after {done:,} of {total:,} bytes")

    def _expect(self, total: int, kind: str = "") -> None:
        """Raise HostError if the size is not the one that the caller expects."""
        if self.size is not None and total != self.size:
            self._discard()
            page = ", as an HTML page" if kind.startswith("text/html") else ""
            raise HostError(
                f"wrong size: {self.size:,} bytes expected, {total:,} offered{page}",
                where=self.shown,
                hint="the host now serves other content under this name than what is pinned",
                id="download-size",
            )

    def _noted(self) -> dict[str, Any]:
        try:
            note = json.loads(self.note.read_bytes())
        except (OSError, ValueError):
            return {}
        return note if isinstance(note, dict) else {}

    def _resumable(self) -> int:
        """Bytes of the part that can be kept; a part of unknown origin is deleted."""
        try:
            have = self.part.stat().st_size
        except FileNotFoundError:
            return 0
        note = self._noted()
        if note.get("url") != self.url or (self.size is not None and have > self.size):
            self._discard()
            return 0
        return have

    def _discard(self) -> None:
        self.part.unlink(missing_ok=True)
        self.note.unlink(missing_ok=True)

    def _disk_full(self, observed: str) -> HostError:
        return HostError(
            f"the disk is full: {observed}",
            where=str(self.target.parent),
            hint="free some space and run it again (the partial download is kept and resumed), "
            "or set BAKEHOUSE_HOME to a larger disk",
            id="disk-full",
        )


def _validator(response: requests.Response) -> str | None:
    """The value for If-Range: a strong ETag, or else the modification date."""
    etag = response.headers.get("ETag")
    if etag and not etag.startswith("W/"):
        return str(etag)
    return response.headers.get("Last-Modified")


def _content_range(value: str | None) -> tuple[int | None, int | None]:
    """First byte and total of `bytes 10-99/100` or `bytes */100`; None for a missing one."""
    unit, _, rest = (value or "").partition(" ")
    span, _, total = rest.partition("/")
    begin = span.partition("-")[0]
    if unit != "bytes":
        return None, None
    return (int(begin) if begin.isdigit() else None, int(total) if total.isdigit() else None)
