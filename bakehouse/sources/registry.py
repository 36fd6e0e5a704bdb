"""Registry client: resolve references without pulling anything.

The API is the OCI distribution specification, 1.1; tokens come from the realm in the
`WWW-Authenticate` header of a 401. Everything named by a digest is hashed before it is used.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote, urlencode

from pydantic import BaseModel, ConfigDict, Field

from bakehouse.context import Context
from bakehouse.errors import BakehouseError, HostError, LockError
from bakehouse.recipe.types import ImageReference
from bakehouse.redact import clean
from bakehouse.system.docker.models import Credentials
from bakehouse.system.http import Reply, Unreachable, is_loopback
from bakehouse.util.retry import BUSY, Retry, TransientError, retry_after

ACCEPT = (
    "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, "
    "application/vnd.docker.distribution.manifest.list.v2+json, "
    "application/vnd.docker.distribution.manifest.v2+json"
)
ATTEMPTS = 4
MAX_MANIFEST = 8 * 2**20
MAX_WAIT_S = 30.0
"""A registry that asks for a longer pause is not waited for."""
ONCE_S = 30.0
"""Seconds for one attempt of a request, to the last byte."""
QUESTION_S = 60.0
"""Seconds for one request with its token and all its attempts, without the pauses."""
ALL_S = 300.0
"""Seconds for all requests about one image: a slow registry answers each a little late."""
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


class _Document(BaseModel):
    """A document of a registry: keys that nobody reads may be there, and may be anything."""

    model_config = ConfigDict(frozen=True, strict=True)


class Blob(_Document):
    """A blob by its digest. Size in bytes."""

    digest: Digest
    size: int = Field(ge=0)


class Platform(_Document):
    """The platform of an image in an index."""

    os: str | None = None
    architecture: str | None = None
    variant: str | None = None


class IndexEntry(_Document):
    """An image in an index."""

    digest: Digest
    platform: Platform | None = None


class Manifest(_Document):
    """A manifest of schema 2: an index of images by platform, or an image."""

    schema_version: Literal[2] = Field(alias="schemaVersion")
    manifests: list[IndexEntry] | None = None
    config: Blob | None = None
    layers: list[Blob] | None = None
    digest: str = ""
    """Of the document itself."""


class ImageRun(_Document):
    """How an image runs. `entrypoint` and `cmd` are lists or words; anything else is ignored."""

    entrypoint: Any = Field(default=None, alias="Entrypoint")
    cmd: Any = Field(default=None, alias="Cmd")
    user: str | None = Field(default=None, alias="User")
    workdir: str | None = Field(default=None, alias="WorkingDir")
    labels: dict[str, str] | None = Field(default=None, alias="Labels")


class ImageConfig(_Document):
    """An image's configuration."""

    os: str | None = None
    architecture: str | None = None
    created: str | None = None
    config: ImageRun | None = None


class Registry:
    """One repository of one registry. Make one for each task: it keeps its token."""

    def __init__(self, ctx: Context, reference: ImageReference) -> None:
        self._ctx = ctx
        self._at = reference
        self._authorization: str | None = None
        self._asked_s = 0.0
        """Seconds that all answers took so far."""
        self._until = 0.0
        host = {"docker.io": "registry-1.docker.io"}.get(reference.registry, reference.registry)
        scheme = "http" if is_loopback(f"http://{host}") else "https"
        self._base = f"{scheme}://{host}/v2/{quote(reference.repository)}"

    def manifest(self, wanted: str) -> Manifest:
        """Read a manifest by tag or digest. Raises LockError (not found), HostError."""
        reply = self._ask("GET", f"manifests/{wanted}")
        where = f"{self._at.name}, {clean(wanted)}"
        if reply.status == 404:
            raise missing(where, wanted, _code(reply))
        digest = f"sha256:{hashlib.sha256(reply.body).hexdigest()}"
        announced = reply.header("docker-content-digest") or digest
        _check_digest(
            "manifest", reply, wanted if wanted.startswith("sha256:") else announced, where
        )
        found = _parse(Manifest, reply.body)
        if found is None or not (
            found.manifests is not None or (found.config and found.layers is not None)
        ):
            raise HostError(
                "unsupported manifest (schema 1)", where=where, id="registry",
                hint="only image manifests of schema 2 can be run",
            )  # fmt: skip
        return found.model_copy(update={"digest": digest})

    def config(self, blob: Blob) -> ImageConfig:
        """Read an image's configuration. Raises LockError, HostError."""
        reply = self._ask("GET", f"blobs/{blob.digest}")
        where = f"{self._at.name}, {blob.digest}"
        if reply.status == 404:
            raise missing(self._at.name, blob.digest, "")
        _check_digest("blob", reply, blob.digest, where)
        if found := _parse(ImageConfig, reply.body):
            return found
        raise HostError(
            "invalid image configuration", where=where, id="registry",
            hint="check for a proxy before the registry, or report it to the publisher",
        )  # fmt: skip

    def has(self, blob: Blob) -> bool:
        """Whether the registry still has a blob."""
        return self._ask("HEAD", f"blobs/{blob.digest}").status != 404

    def _ask(self, method: str, path: str) -> Reply:
        """Ask, with a token if the registry needs one; give the reply if it is 200 or 404."""
        self._until = min(self._asked_s + QUESTION_S, ALL_S)
        reply = self._send(method, f"{self._base}/{path}", self._authorization)
        if reply.status == 401 and self._authorization is None:
            self._authorization = self._authorize(reply.header("www-authenticate") or "")
            reply = self._send(method, f"{self._base}/{path}", self._authorization)
        if reply.status in (200, 404):
            return reply
        raise _refused(reply, f"{self._at.name}, {path}")

    def _authorize(self, challenge: str) -> str:
        """Give the Authorization header that a challenge asks for. Raises HostError."""
        known = self._ctx.docker.credentials(self._at.registry)
        if known:
            self._ctx.redactor.add(known.password, known.identity_token)
        kind, _, rest = challenge.partition(" ")
        if kind.lower() == "basic":
            if known and known.password:
                return _basic(known)
            raise unauthorised(self._at.name, known=known is not None)
        fields = dict(_CHALLENGE.findall(rest))
        realm = fields.pop("realm", "")
        if kind.lower() != "bearer" or not (realm.startswith("https://") or is_loopback(realm)):
            raise HostError(
                "the registry uses an unsupported kind of login", where=self._at.name,
                id="registry", hint="check that no login page stands before the registry",
            )  # fmt: skip
        query = {name: fields[name] for name in ("service", "scope") if name in fields}
        query.setdefault("scope", f"repository:{self._at.repository}:pull")
        header = _basic(known) if known and known.password else None
        reply = self._send("GET", f"{realm}?{urlencode(query)}", header)
        if reply.status != 200:
            if reply.status in (400, 401, 403):
                raise unauthorised(self._at.name, known=known is not None)
            raise _refused(reply, realm)
        try:
            answer = reply.json()
            token = str(answer.get("token") or answer["access_token"])
        except (ValueError, KeyError, AttributeError):
            raise _refused(reply, realm) from None
        self._ctx.redactor.add(token)
        return f"Bearer {token}"

    def _send(self, method: str, url: str, authorization: str | None) -> Reply:
        """Ask, again if the registry is busy or cannot be reached. Raises HostError."""
        headers = {"Accept": ACCEPT}
        if authorization:
            headers["Authorization"] = authorization

        def once() -> Reply:
            try:
                reply = self._once(method, url, headers)
            except Unreachable as error:
                near = error.refused and is_loopback(url)
                reason = f"the registry: {error.why}"
                raise TransientError(reason, nobody_listens=near) from error
            if reply.status in BUSY:
                reason = f"the registry: it answered {reply.status}"
                raise TransientError(reason, retry_after(reply.headers), reply=reply)
            return reply

        policy = Retry(
            self._ctx.clock.sleep, attempts=ATTEMPTS, longest_wait=MAX_WAIT_S,
            say=self._ctx.progress.say, where=self._at.name,
            out_of_time=lambda: self._asked_s >= self._until,
        )  # fmt: skip
        try:
            return policy.call(once)
        except TransientError as error:
            if isinstance(error.reply, Reply):
                return error.reply
            raise HostError(
                f"the registry cannot be reached: {error.__cause__}", where=self._at.name,
                hint="check the network, then run it again", id="registry-unreachable",
            ) from error  # fmt: skip

    def _once(self, method: str, url: str, headers: dict[str, str]) -> Reply:
        """Ask once, in the time that is left. Raises Unreachable."""
        left = min(ONCE_S, self._until - self._asked_s)
        if left <= 0:
            raise Unreachable("it answers too slowly: the time for all requests is up")
        began = self._ctx.clock.monotonic()
        try:
            return self._ctx.http.ask(
                method, url, headers=headers, max_bytes=MAX_MANIFEST, timeout=left
            )
        finally:
            self._asked_s += self._ctx.clock.monotonic() - began


D = TypeVar("D", bound=_Document)


def _parse(kind: type[D], body: bytes) -> D | None:
    """Parse and check a document; None if it is not one."""
    try:
        return kind.model_validate_json(body)
    except ValueError:
        return None


def _check_digest(what: str, reply: Reply, digest: str, where: str) -> None:
    if f"sha256:{hashlib.sha256(reply.body).hexdigest()}" != digest:
        raise LockError(
            f"the {what} does not match its digest", where=where, id="digest-mismatch",
            hint="check for a proxy between here and the registry",
        )  # fmt: skip


def _basic(known: Credentials) -> str:
    pair = f"{known.username}:{known.password}".encode()
    return f"Basic {base64.b64encode(pair).decode()}"


def _code(reply: Reply) -> str:
    """Give the registry's own error code."""
    try:
        return str(reply.json()["errors"][0]["code"])
    except (ValueError, KeyError, IndexError, TypeError):
        return ""


def missing(where: str, wanted: str, code: str) -> LockError:
    """Make the error for a missing repository, tag or digest."""
    if code == "NAME_UNKNOWN":
        return LockError(
            "the registry has no such repository, or it is private", where=where,
            hint="check the name; for a private one: docker login",
            id="image-unknown",
        )  # fmt: skip
    kind = "digest" if wanted.startswith("sha256:") else "tag"
    return LockError(
        f"the registry has no such {kind}: manifest unknown", where=where,
        hint="tags and digests vanish when registries are cleaned up: use another one in the "
        "recipe, or keep images that you need in a registry of your own",
        id="manifest-unknown",
    )  # fmt: skip


def unauthorised(where: str, *, known: bool) -> HostError:
    """Make the error for a login that is missing or rejected."""
    return HostError(
        "the registry denies this account access to the image, or does not have it"
        if known
        else "the registry requires a login for this image, or does not have it",
        where=where,
        hint="check the name; then: docker login " + where.partition("/")[0],
        id="registry-unauthorised",
    )


def _refused(reply: Reply, where: str) -> BakehouseError:
    if reply.status in (401, 403):
        return unauthorised(where, known=True)
    if reply.status == 429:
        seconds = reply.header("retry-after")
        wait = f"wait {clean(seconds)} seconds" if seconds else "wait a while"
        return HostError(
            "too many requests to the registry (429)", where=where,
            hint=f"{wait}, or log in with 'docker login': accounts have higher limits",
            id="registry-limit",
        )  # fmt: skip
    code = clean(_code(reply))
    return HostError(
        f"the registry answered {reply.status}{f' ({code})' if code else ''}", where=where,
        hint="wait a while and run it again", id="registry",
    )  # fmt: skip
