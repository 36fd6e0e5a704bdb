"""The Hugging Face Hub: listings, login, offline mode, the shared cache, and parts of files.

Listings and logins are huggingface_hub's, and the variables and folders are those that it reads.
It is imported only where used (0.24 s).
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, urlsplit

from bakehouse.context import Context
from bakehouse.debug_log import debug
from bakehouse.errors import BakehouseError, HostError, LockError, NotFound, UsageError
from bakehouse.lock import FilePin
from bakehouse.recipe.types import shown
from bakehouse.redact import clean, without_credentials
from bakehouse.system.git import COMMIT
from bakehouse.system.http import HttpStatus, Reply, Unreachable, header, is_loopback
from bakehouse.util.retry import BUSY, Retry, TransientError, retry, retry_after

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile, RepoSibling

T = TypeVar("T")
ENDPOINT = "https://huggingface.co"
LOGIN = "set HF_TOKEN to your token, or run 'hf auth login'"
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""They override the file that `hf auth login` writes."""
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
ATTEMPTS = 4
MAX_WAIT_S = 120.0
"""A hub that asks for a longer pause is not waited for."""
MAX_LISTING = 64 * 2**20
MAX_FILE = 2**50
"""Bytes; a listing with a larger file is not valid."""
_ENDPOINT = re.compile(r"[A-Za-z]+://(?:\[[0-9A-Fa-f:.]+\]|[\w.-]+)(?::\d{1,5})?(?:/[\w./~%-]*)?")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_REVISION = re.compile(r"[\w.-]+(?:/[\w.-]+)*")
_TOKEN = re.compile(r"[\x21-\x7e]+")
_LIBRARY = threading.Lock()


@dataclass(frozen=True)
class HubFile:
    """One file of a repository. `size` in bytes; `sha256` is known for files in LFS only."""

    path: str
    size: int | None
    sha256: str | None


@dataclass(frozen=True)
class HubListing:
    """A repository's files at one commit."""

    repository: str
    commit: str
    files: tuple[HubFile, ...]


@dataclass(frozen=True)
class Token:
    """A token, and where it comes from, for messages."""

    value: str = field(repr=False)
    origin: str


# --- settings -----------------------------------------------------------------------------------


def endpoint(environment: Mapping[str, str]) -> str:
    """Give the hub's URL: `HF_ENDPOINT`, or huggingface.co. Raises UsageError."""
    url = (environment.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
    if not _ENDPOINT.fullmatch(url):
        raise UsageError(
            "HF_ENDPOINT must be a URL without credentials or query",
            where=f"HF_ENDPOINT={without_credentials(url).partition('?')[0]}",
            hint=f"unset it to use {ENDPOINT}; a token goes into HF_TOKEN",
        )
    scheme = urlsplit(url).scheme
    local = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
    if scheme != "https" and not (scheme == "http" and local):
        raise UsageError(
            "HF_ENDPOINT must use https: a token would travel in plain text",
            where=f"HF_ENDPOINT={clean(url)}",
            hint=f"unset it to use {ENDPOINT}",
        )
    return url


def file_url(ctx: Context, repository: str, commit: str, path: str) -> str:
    """Give the URL of a file at a commit. Raises HostError in offline mode."""
    must_be_online(ctx.environment, path, f"{repository} at {commit}")
    return f"{endpoint(ctx.environment)}/{repository}/resolve/{commit}/{quote(path)}"


def _is_on(value: str | None) -> bool:
    return (value or "").strip().upper() in {"1", "ON", "YES", "TRUE"}


def offline(environment: Mapping[str, str]) -> str | None:
    """Give the variable that turns offline mode on; None when online."""
    return next((name for name in OFFLINE_VARIABLES if _is_on(environment.get(name))), None)


def must_be_online(environment: Mapping[str, str], what: str, where: str) -> None:
    """Refuse to download `what` in offline mode. Raises HostError `hub-offline`."""
    if name := offline(environment):
        raise HostError(
            f"{name} is set; cannot download {what}",
            where=where,
            hint=f"unset {name} for this run, or fill the Hugging Face cache on a machine that is "
            "online (`hf download`)",
            id="hub-offline",
        )


def _home(environment: Mapping[str, str]) -> Path | None:
    """Give huggingface_hub's folder; None when there is no home folder."""
    if given := environment.get("HF_HOME"):
        return Path(os.path.expanduser(given))
    base = environment.get("XDG_CACHE_HOME")
    if not base and environment.get("HOME"):
        base = f"{environment['HOME']}/.cache"
    return Path(os.path.expanduser(base)) / "huggingface" if base else None


# --- login --------------------------------------------------------------------------------------


def token(ctx: Context) -> Token | None:
    """Find the token to send, in a variable or from `hf auth login`; from then on it is hidden.

    Raises UsageError for text that cannot be a token, HostError if HF_TOKEN_PATH cannot be read.
    """
    environment = ctx.environment
    if _is_on(environment.get("HF_HUB_DISABLE_IMPLICIT_TOKEN")):
        return None
    for name in TOKEN_VARIABLES:
        if value := environment.get(name, "").strip():
            return _checked(ctx, value, name)
    given, home = environment.get("HF_TOKEN_PATH"), _home(environment)
    if not given and not home:
        return None
    path = Path(os.path.expanduser(given)) if given else Path(home or "") / "token"
    try:
        value = _read_login(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        if not given:  # public models need no token
            return None
        raise HostError(
            f"HF_TOKEN_PATH cannot be read: {getattr(error, 'strerror', error)}",
            where=shown(path),
            hint="fix it, unset HF_TOKEN_PATH, or set HF_TOKEN",
            id="hub-token",
        ) from None
    return _checked(ctx, value, shown(path)) if value else None


def _read_login(path: Path) -> str:
    """Read the file of `hf auth login`; the library renews a token that is about to expire."""
    if path.exists() and not (path.is_file() or path.is_dir()):  # a pipe would block
        raise OSError(errno.EINVAL, "it is not a file")
    path.open("rb").close()
    import huggingface_hub
    from huggingface_hub import constants

    stored = str(path.with_name("stored_tokens"))
    with _LIBRARY:  # it reads its variables once, when it is imported
        before = constants.HF_TOKEN_PATH, constants.HF_STORED_TOKENS_PATH
        constants.HF_TOKEN_PATH, constants.HF_STORED_TOKENS_PATH = str(path), stored
        try:
            return huggingface_hub.get_token() or ""
        finally:
            constants.HF_TOKEN_PATH, constants.HF_STORED_TOKENS_PATH = before


def _checked(ctx: Context, value: str, origin: str) -> Token:
    ctx.redactor.add(value)
    if not _TOKEN.fullmatch(value):
        raise UsageError(
            f"{origin} is not a valid token: it contains a space, a line break or a letter that is "
            "not ASCII",
            where=f"{origin}, {len(value)} characters long",
            hint="copy the token again: it begins with hf_",
        )
    return Token(value, origin)


def headers(ctx: Context) -> dict[str, str]:
    """Give the Authorization header, if there is a token. Raises as `token` does."""
    found = token(ctx)
    return {"Authorization": f"Bearer {found.value}"} if found else {}


# --- questions ----------------------------------------------------------------------------------


def list_files(ctx: Context, repository: str, revision: str, *, patient: bool = True) -> HubListing:
    """List a repository at a branch, tag or commit; `patient` retries.

    Raises NotFound (no such repository or revision), HostError (login, terms, network), UsageError.
    """
    if not _REPOSITORY.fullmatch(repository) or ".." in repository:
        raise UsageError(
            f"'{clean(repository)}' is not a hub repository", hint="write it as owner/name"
        )
    url = endpoint(ctx.environment)
    where = f"{url}/{repository}, revision {clean(revision)}"
    must_be_online(ctx.environment, "its list of files", where)
    timeout = 30 if patient else 10

    def model_info(api: HfApi) -> tuple[str, tuple[HubFile, ...]]:
        info = api.model_info(repository, revision=revision, timeout=timeout, files_metadata=True)
        if not isinstance(info.sha, str) or not COMMIT.fullmatch(info.sha) or info.siblings is None:
            raise ValueError(info.sha)
        return info.sha, tuple(map(_file, info.siblings))

    debug("hub", list=where)
    attempts = ATTEMPTS if patient else 1
    commit, files = _retry(ctx, url, where, partial(_library, ctx, model_info), attempts)
    if COMMIT.fullmatch(revision) and revision != commit:
        raise LockError(f"the hub answered with commit {commit}", where=where)
    if any(file.size is None for file in files):  # some hubs do not support `blobs`

        def paths_info(_: HfApi) -> tuple[HubFile, ...]:
            from huggingface_hub.hf_api import RepoFile

            rows = ctx.http.ask(
                "POST", f"{url}/api/models/{repository}/paths-info/{commit}",
                json={"paths": [file.path for file in files]}, headers=headers(ctx),
                max_bytes=MAX_LISTING,
            )  # fmt: skip
            if rows.status != 200:
                raise HttpStatus("", status=rows.status, where=where, headers=rows.headers)
            found = [row for row in rows.json() if row["type"] == "file"]
            return tuple(_file(RepoFile(**row)) for row in found)  # type: ignore[no-untyped-call]

        files = _retry(ctx, url, where, partial(_library, ctx, paths_info), attempts)
    return HubListing(repository, commit, files)


def _library(ctx: Context, ask: Callable[[HfApi], T]) -> T:
    """Ask through huggingface_hub. Raises HttpStatus, Unreachable, HostError."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    from bakehouse.system.http import why

    url, known = endpoint(ctx.environment), token(ctx)
    try:
        return ask(HfApi(endpoint=url, token=known.value if known else False))
    except HfHubHTTPError as error:
        reply = error.response
        raise HttpStatus(
            f"the hub answered {reply.status_code}", status=reply.status_code, where=url,
            headers=dict(reply.headers),
        ) from None  # fmt: skip
    except httpx2.HTTPError as error:
        raise why(error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HostError(
            "the hub's answer is not a listing",
            where=url,
            hint="check that HF_ENDPOINT is a hub and that no login page stands before it",
            id="hub",
        ) from error


def _file(row: RepoSibling | RepoFile) -> HubFile:
    """Check a row of a listing. Raises ValueError."""
    size, sha256 = (row.lfs.size, row.lfs.sha256) if row.lfs else (row.size, None)
    if sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise ValueError(sha256)
    if size is not None and (type(size) is not int or not 0 <= size < MAX_FILE):
        raise ValueError(size)
    return HubFile(str(row.rfilename), size, sha256)


def _retry(ctx: Context, url: str, where: str, call: Callable[[], T], attempts: int) -> T:
    """Ask, again if the hub is busy or cannot be reached. Raises HostError, NotFound."""

    def transient(error: Exception) -> TransientError | None:
        if isinstance(error, Unreachable):
            near = error.refused and is_loopback(url)
            return TransientError(f"the hub: {error.why}", nobody_listens=near)
        if isinstance(error, HttpStatus) and error.status in BUSY:
            after = retry_after(error.headers or {})
            return TransientError(f"the hub: it answered {error.status}", after)
        return None

    policy = Retry(ctx.clock.sleep, attempts=attempts, say=ctx.progress.say, where=where)
    try:
        return retry(call, transient, policy)
    except HttpStatus as error:
        raise refused(ctx, error, where) from None
    except Unreachable as error:
        raise HostError(
            f"the hub cannot be reached: {error.why}",
            where=where,
            hint="check the network and HF_ENDPOINT, and run it again",
            id="hub",
        ) from error


def _ask(
    ctx: Context, url: str, more: Mapping[str, str], max_bytes: int, fits: Callable[[Reply], bool]
) -> bytes:
    """Ask once. Raises HttpStatus, Unreachable for a reply that does not fit."""
    reply = ctx.http.ask(
        "GET", url, headers={**headers(ctx), **more}, timeout=60, max_bytes=max_bytes
    )
    if fits(reply):
        return reply.body
    if reply.status in (200, 206):
        raise Unreachable("it sent another part of the file than requested")
    raise HttpStatus(
        f"the hub answered {reply.status}", status=reply.status, where=url, headers=reply.headers
    )


def small_file(ctx: Context, repository: str, commit: str, path: str, max_bytes: int) -> bytes:
    """Read a file that is not in LFS, such as a configuration; at most `max_bytes`."""
    url = file_url(ctx, repository, commit, path)
    call = partial(_ask, ctx, url, {}, max_bytes, lambda reply: reply.status == 200)
    return _retry(ctx, url, f"{repository}, {clean(path)}", call, ATTEMPTS)


@dataclass(frozen=True)
class RemoteFile:
    """A file on the hub, read by range requests (a `checkpoints.reader.ByteSource`)."""

    ctx: Context
    name: str
    """The URL."""
    size: int
    chunk: int = 2 * 2**20

    @classmethod
    def of(cls, ctx: Context, listing: HubListing, path: str, size: int) -> RemoteFile:
        """Open a file of a listing."""
        return cls(ctx, file_url(ctx, listing.repository, listing.commit, path), size)

    def read(self, offset: int, length: int) -> bytes:
        """Read one range. Raises HostError or NotFound."""
        length = min(length, self.size - offset)
        if length <= 0:
            return b""

        def fits(reply: Reply) -> bool:
            sent = reply.header("content-range") or f"bytes {offset}-"
            begins = sent.startswith(f"bytes {offset}-")
            return (reply.status == 206 and begins) or (reply.status == 200 and not offset)

        part = {"Range": f"bytes={offset}-{offset + length - 1}"}
        call = partial(_ask, self.ctx, self.name, part, length + 2**12, fits)
        return _retry(self.ctx, self.name, self.name, call, 3)[:length]


def refused(ctx: Context, error: HttpStatus, where: str, *, pinned: bool = False) -> BakehouseError:
    """Explain a refusal: a token is needed, terms have to be accepted, or nothing is there.

    `pinned` for a file that was listed when it was pinned.
    """
    status, known = error.status, token(ctx)
    code = header(error.headers, "x-error-code") or ""
    if pinned and status in (404, 410, 451) and not code:
        return NotFound(
            "the hub no longer offers this file at the pinned revision",
            where=where,
            hint="the repository or the revision was deleted or made private: if you may read it, "
            f"{LOGIN}; or pin what exists now with 'invoke lock --update'",
            id="hub-file",
        )
    if code == "GatedRepo" or (status == 403 and known):
        who = (
            f"the account of the token in {known.origin}"
            if known
            else f"your account, then {LOGIN}"
        )
        return HostError(
            "the model is gated: accept its terms to download it",
            where=where,
            hint=f"open the model's page, accept the terms with {who}",
            id="hub-gated",
        )
    if missing := {"RevisionNotFound": "revision", "EntryNotFound": "file"}.get(code):
        return NotFound(
            f"the hub repository has no such {missing}", where=where, id=f"hub-{missing}"
        )
    if status in (401, 403):
        what = "rejected your token" if known else "needs a token, or has no such repository"
        login = f"check the name; for a private or gated repository, {LOGIN}"
        return HostError(
            f"the hub {what}",
            where=where,
            hint=f"check the token in {known.origin} and what it may read" if known else login,
            id="hub-login",
        )
    if status == 404:
        return NotFound(
            "the hub has no such repository, or it is private",
            where=where,
            hint=f"check the name; for a private repository, {LOGIN}",
            id="hub-repository",
        )
    return HostError(
        f"the hub answered {status}", where=where, hint="wait a while and run it again", id="hub"
    )


# --- cache --------------------------------------------------------------------------------------


class HubCache:
    """One repository in huggingface_hub's cache: `blobs/<sha256>`, `snapshots/<commit>/<path>`.

    Files are found and kept where every other tool of the user looks for them. The library names
    blobs outside LFS by their git id; it finds ours by the snapshot all the same.
    """

    def __init__(self, environment: Mapping[str, str], repository: str, commit: str) -> None:
        base = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
        home = _home(environment)
        folder = Path(os.path.expanduser(base)) if base else home / "hub" if home else None
        self.commit = commit
        self.folder: Path | None = None
        self.locks: Path | None = None
        if folder and not str(folder).startswith("~"):
            name = f"models--{repository.replace('/', '--')}"
            self.folder, self.locks = folder.absolute() / name, folder.absolute() / ".locks" / name

    def find(self, pin: FilePin) -> Path | None:
        """Find a file of the pinned size, whose content is yet to be verified."""
        if self.folder is None:
            return None
        for path in (self.folder / "blobs" / pin.sha256, self._snapshot / pin.path):
            try:
                if path.is_file() and path.stat().st_size == pin.size:
                    return path.resolve()
            except OSError:
                continue
        return None

    @property
    def _snapshot(self) -> Path:
        return Path(self.folder or "") / "snapshots" / self.commit

    def blobs(self) -> Path | None:
        """Make the folder for new files; None if the cache cannot be written to."""
        if self.folder is None or self.locks is None:
            return None
        blobs = self.folder / "blobs"
        try:
            for folder in (blobs, self._snapshot, self.locks):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return None
        return blobs if all(os.access(f, os.W_OK) for f in (blobs, self._snapshot)) else None

    def link(self, pin: FilePin, revision: str) -> None:
        """Name a blob in the snapshot, and the snapshot by `revision` if nothing does yet."""
        target = self._snapshot / pin.path
        target.parent.mkdir(parents=True, exist_ok=True)
        blob = Path(self.folder or "") / "blobs" / pin.sha256
        replace_link(target, Path(os.path.relpath(blob, target.parent)))
        ref = Path(self.folder or "") / "refs" / revision
        usable = _REVISION.fullmatch(revision) and ".." not in revision
        if usable and revision != self.commit and not ref.exists():
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(self.commit)


def replace_link(link: Path, target: Path) -> None:
    """Make a link, or point an existing one elsewhere, in one step."""
    incoming = link.with_name(f".{link.name[:200]}.{os.getpid()}-{threading.get_ident()}")
    incoming.unlink(missing_ok=True)
    incoming.symlink_to(target)
    os.replace(incoming, link)
