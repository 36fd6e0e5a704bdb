"""The Hugging Face Hub: what a repository holds at one revision, and where its files lie."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from bakehouse.context import Context
from bakehouse.errors import BakehouseError, HostError, LockError, NotFound, UsageError
from bakehouse.ports.git import COMMIT
from bakehouse.ports.http import HttpStatus, Reply, Unreachable, is_loopback
from bakehouse.redact import clean, without_credentials
from bakehouse.sources.hublogin import Token, headers, must_be_online, token
from bakehouse.util.retry import BUSY, Retry, TransientError, retry_after

LOGIN = "set HF_TOKEN to your token, or run 'hf auth login'"
ENDPOINT = "https://huggingface.co"
ATTEMPTS = 4
MAX_LISTING = 64 * 2**20
MAX_PAGES = 200
MAX_FILE = 2**50
"""Bytes; a listing with a larger file is no listing."""
_ENDPOINT = re.compile(r"[A-Za-z]+://(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::\d{1,5})?(?:/[\w./~%-]*)?")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")


@dataclass(frozen=True)
class HubFile:
    """One file of a repository. `sha256` is there for files in LFS, as all weights are."""

    path: str
    size: int | None
    sha256: str | None


@dataclass(frozen=True)
class HubListing:
    """A repository's files at one commit."""

    repository: str
    commit: str
    files: tuple[HubFile, ...]


def endpoint(environment: Mapping[str, str]) -> str:
    """The hub in use: `HF_ENDPOINT`, as huggingface_hub has it, or huggingface.co."""
    url = (environment.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    if not _ENDPOINT.fullmatch(url):
        shown = without_credentials(url).partition("?")[0]
        raise UsageError(
            "HF_ENDPOINT is no address of a hub: a scheme, a host and perhaps a path are wanted, "
            "and no user, password or query",
            where=f"HF_ENDPOINT={shown}",
            hint=f"unset it to use {ENDPOINT}; a token goes into HF_TOKEN",
        )
    parts = urlsplit(url)
    local = is_loopback(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and local):
        raise UsageError(
            "HF_ENDPOINT has to be an https address: a token would travel in plain text",
            where=f"HF_ENDPOINT={clean(url)}",
            hint=f"unset it to use {ENDPOINT}",
        )
    return url


def file_url(ctx: Context, repository: str, commit: str, path: str) -> str:
    """Where a file lies at a commit. Raises HostError where the hub may not be asked."""
    must_be_online(ctx.environment, path, f"{repository} at {commit}")
    return f"{endpoint(ctx.environment)}/{repository}/resolve/{commit}/{quote(path)}"


def list_files(ctx: Context, repository: str, revision: str, *, patient: bool = True) -> HubListing:
    """Ask what a repository holds at a branch, tag or commit; once only unless `patient`.

    Raises NotFound (no such repository or revision), HostError (a token is needed, terms are to be
    accepted, the hub cannot be reached), UsageError.
    """
    if not _REPOSITORY.fullmatch(repository) or ".." in repository:
        raise UsageError(
            f"'{clean(repository)}' is not a hub repository", hint="write it as owner/name"
        )
    where = f"{endpoint(ctx.environment)}/{repository}, revision {clean(revision)}"
    must_be_online(ctx.environment, "what it lists", where)
    base = f"{endpoint(ctx.environment)}/api/models/{repository}"
    url = f"{base}/revision/{quote(revision, safe='')}?blobs=true"
    reply = _ask(ctx, url, where, attempts=ATTEMPTS if patient else 1)
    if reply.status != 200:
        raise refused(reply.status, reply.headers, where, token(ctx))
    try:
        answer = reply.json()
        commit, siblings = answer["sha"], answer["siblings"]
        files = tuple(_file(sibling) for sibling in siblings)
    except (ValueError, KeyError, TypeError, AttributeError):
        commit, files = "", ()
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise HostError(
            "the hub's answer is not a listing",
            where=where,
            hint="see that HF_ENDPOINT is a hub and that no portal stands before it",
            id="hub",
        )
    if COMMIT.fullmatch(revision) and revision != commit:
        raise LockError(f"the hub answers with commit {commit}", where=where)
    if any(file.size is None for file in files):  # some hubs do not know `blobs`
        files = tuple(_tree(ctx, base, commit, where))
    return HubListing(repository, commit, files)


def _tree(ctx: Context, base: str, commit: str, where: str) -> Iterator[HubFile]:
    """The files by the hub's other listing, page by page."""
    url = f"{base}/tree/{commit}?recursive=true"
    for _ in range(MAX_PAGES):
        reply = _ask(ctx, url, where)
        if reply.status != 200:
            raise refused(reply.status, reply.headers, where, token(ctx))
        try:
            rows = [row for row in reply.json() if row["type"] == "file"]
            made = [_file({**row, "rfilename": row["path"]}) for row in rows]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise HostError(
                "the hub's answer is not a listing",
                where=where,
                hint="see that HF_ENDPOINT is a hub and that no portal stands before it",
                id="hub",
            ) from error
        yield from made
        link = {key.lower(): value for key, value in reply.headers.items()}.get("link", "")
        following = re.search(r"<([^<>]+)>\s*;\s*rel=\"?next\"?", link)
        if not following:
            return
        url = urljoin(url, following[1])
        if not url.startswith(f"{base}/tree/"):  # the token goes along
            raise HostError("the hub's listing leads elsewhere", where=where, id="hub",
                            hint="see that HF_ENDPOINT is right")  # fmt: skip
    raise HostError("the hub's listing has no end", where=where, id="hub",
                    hint="see that HF_ENDPOINT is a hub")  # fmt: skip


def _file(sibling: Mapping[str, Any]) -> HubFile:
    lfs = sibling.get("lfs") or {}
    size = lfs.get("size", sibling.get("size"))
    sha256 = lfs.get("sha256") or lfs.get("oid")
    if isinstance(sha256, str):
        sha256 = sha256.removeprefix("sha256:")
    if sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise ValueError(sha256)
    if size is not None and (type(size) is not int or not 0 <= size < MAX_FILE):
        raise ValueError(size)
    return HubFile(str(sibling["rfilename"]), size, sha256)


def _ask(
    ctx: Context, url: str, where: str, max_bytes: int = MAX_LISTING, *, attempts: int = ATTEMPTS
) -> Reply:
    """Ask, again if the hub is busy or cannot be reached. Raises HostError."""
    timeout = 30 if attempts > 1 else 10

    def once() -> Reply:
        try:
            reply = ctx.http.ask(
                "GET", url, headers=headers(ctx), max_bytes=max_bytes, timeout=timeout
            )
        except Unreachable as error:
            near = error.refused and is_loopback(url)
            raise TransientError(f"the hub: {error.why}", nobody_listens=near) from error
        if reply.status in BUSY:
            after = retry_after(reply.headers)
            raise TransientError(f"the hub: it answers {reply.status}", after, reply=reply)
        return reply

    try:
        return Retry(ctx.clock.sleep, attempts=attempts, say=ctx.progress.say, where=where).call(
            once
        )
    except TransientError as error:
        if isinstance(error.reply, Reply):
            return error.reply
        raise HostError(
            f"the hub cannot be reached: {error.reason.removeprefix('the hub: ')}",
            where=where,
            hint="check the network and HF_ENDPOINT, and run it again",
            id="hub",
        ) from error


def small_file(ctx: Context, repository: str, commit: str, path: str, max_bytes: int) -> bytes:
    """Read a file that is not in LFS (a configuration), bounded."""
    where = f"{repository}, {clean(path)}"
    reply = _ask(ctx, file_url(ctx, repository, commit, path), where, max_bytes)
    if reply.status != 200:
        raise refused(reply.status, reply.headers, where, token(ctx))
    return reply.body


def refused(
    status: int, sent: Mapping[str, str], where: str, sent_token: Token | None
) -> BakehouseError:
    """Tell apart: wants a token, wants terms accepted, no such repository, revision or file."""
    code = {key.lower(): value for key, value in sent.items()}.get("x-error-code", "")
    if code == "GatedRepo" or (status == 403 and sent_token is not None):
        return HostError(
            "the model is gated: the hub gives it out only to those who accepted its terms",
            where=where,
            hint="open the model's page, accept the terms with the account whose token "
            f"{sent_token.origin} holds"
            if sent_token
            else f"accept the terms on the model's page, then {LOGIN}",
            id="hub-gated",
        )
    if code == "RevisionNotFound":
        return NotFound("the hub repository has no such revision", where=where, id="hub-revision")
    if code == "EntryNotFound":
        return NotFound("the hub repository has no such file", where=where, id="hub-file")
    if status in (401, 403):
        what = "says no to your token" if sent_token else "wants a token, or has no such repository"
        return HostError(
            f"the hub {what}",
            where=where,
            hint=f"see that the token in {sent_token.origin} is valid and may read this repository"
            if sent_token
            else f"see that the name is right; for a private or gated one, {LOGIN}",
            id="hub-login",
        )
    if status == 404:
        return NotFound(
            "the hub has no such repository, or it is private",
            where=where,
            hint=f"see that the name is right; for a private one, {LOGIN}",
            id="hub-repository",
        )
    return HostError(
        f"the hub answers {status}", where=where, hint="wait a while and run it again", id="hub"
    )


def explain(ctx: Context, error: HttpStatus, where: str) -> BakehouseError:
    """Put a refused download into the hub's terms: the file was listed when it was pinned."""
    code = any(key.lower() == "x-error-code" for key in error.headers)
    if error.status in (404, 410, 451) and not code:
        return NotFound(
            "the hub no longer gives out this file at the pinned revision",
            where=where,
            hint="the repository or the revision was taken away or made private: if you may "
            f"read it, {LOGIN}; or see what there is now with 'invoke lock --update'",
            id="hub-file",
        )
    return refused(error.status, error.headers, where, token(ctx))
