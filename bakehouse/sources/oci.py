"""Container registries: what a reference means there, asked without pulling anything.

The registry's API is the OCI distribution specification, 1.1; tokens are fetched as the
`WWW-Authenticate` header of a 401 says. Everything named by a digest is hashed before it counts.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from bakehouse.context import Context
from bakehouse.errors import BakehouseError, HostError, LockError
from bakehouse.ports.docker import Credentials
from bakehouse.ports.http import Reply, Unreachable
from bakehouse.recipe.references import Reference
from bakehouse.redact import clean

if TYPE_CHECKING:
    from tenacity import RetryCallState

INDEX_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
ACCEPT = ", ".join((*INDEX_TYPES, *MANIFEST_TYPES))
ATTEMPTS = 4
MAX_MANIFEST = 8 * 2**20
LONGEST_WAIT_S = 30.0
ONCE_S = 30.0
"""One try of a question, to the last byte, in seconds."""
QUESTION_S = 60.0
"""One question with its token and all its tries, in seconds; pauses between them not counted."""
ALL_S = 300.0
"""All questions about one image, in seconds: a registry that drips answers each a little late."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True)
class Blob:
    """Something in a registry by content. Size in bytes."""

    digest: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """An image or an index as the registry has it."""

    digest: str
    kind: str
    data: dict[str, Any]

    @property
    def is_index(self) -> bool:
        """Whether it lists platforms."""
        return self.kind in INDEX_TYPES or "manifests" in self.data

    def layers(self) -> tuple[Blob, ...]:
        """The layers of an image."""
        return tuple(Blob(str(d["digest"]), int(d["size"])) for d in self.data["layers"])


class Registry:
    """One repository of one registry. Make one for each task: it remembers its token."""

    def __init__(self, ctx: Context, reference: Reference) -> None:
        self._ctx = ctx
        self._at = reference
        self._authorization: str | None = None
        self._asked_s = 0.0
        """What all answers together took so far, in seconds."""
        self._until = 0.0
        host = {"docker.io": "registry-1.docker.io"}.get(reference.registry, reference.registry)
        self._base = f"{_scheme(host)}://{host}/v2/{quote(reference.repository)}"

    def manifest(self, wanted: str) -> Manifest:
        """Read a manifest by tag or digest. Raises LockError (there is none), HostError."""
        reply = self._ask("GET", f"manifests/{wanted}")
        where = f"{self._at.name}, {clean(wanted)}"
        if reply.status == 404:
            raise missing(where, wanted, _code(reply))
        digest = f"sha256:{hashlib.sha256(reply.body).hexdigest()}"
        announced = _header(reply, "docker-content-digest") or digest
        if digest != (wanted if wanted.startswith("sha256:") else announced):
            raise LockError(
                f"the registry gives another manifest than it says: {digest}",
                where=where, hint="see what stands between here and the registry",
                id="digest-mismatch",
            )  # fmt: skip
        data = decoded(reply.body)
        if not isinstance(data, dict) or not _is_whole(data):
            raise HostError(
                "the registry's answer is no image of today's kind", where=where, id="registry",
                hint="images of schema 1 are too old for any engine of today",
            )  # fmt: skip
        kind = str(data.get("mediaType") or _header(reply, "content-type"))
        return Manifest(digest, kind.partition(";")[0].strip(), data)

    def blob(self, blob: Blob) -> bytes:
        """Read a small blob, such as an image's configuration."""
        reply = self._ask("GET", f"blobs/{blob.digest}")
        if reply.status == 404:
            raise missing(self._at.name, blob.digest, "")
        if f"sha256:{hashlib.sha256(reply.body).hexdigest()}" != blob.digest:
            raise LockError(
                "the registry's content is not what its digest says",
                where=f"{self._at.name}, {blob.digest}", id="digest-mismatch",
                hint="see what stands between here and the registry",
            )  # fmt: skip
        return reply.body

    def has(self, blob: Blob) -> bool:
        """Whether the registry still holds a blob."""
        return self._ask("HEAD", f"blobs/{blob.digest}").status != 404

    def _ask(self, method: str, path: str) -> Reply:
        """Ask, with a token once the registry wants one. 200 and 404 are given back."""
        self._until = min(self._asked_s + QUESTION_S, ALL_S)
        reply = self._send(method, f"{self._base}/{path}", self._authorization)
        if reply.status == 401 and self._authorization is None:
            self._authorization = self._authorize(_header(reply, "www-authenticate") or "")
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
        if kind.lower() != "bearer" or not (realm.startswith("https://") or _here(realm)):
            raise HostError(
                "the registry asks for a login of a kind that is not known", where=self._at.name,
                id="registry", hint="see that no portal stands before the registry",
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
        """Ask, again where the registry is busy or out of reach for the moment."""
        import tenacity  # `plan` passes through this room

        headers = {"Accept": ACCEPT}
        if authorization:
            headers["Authorization"] = authorization

        def give_up(state: RetryCallState) -> Any:
            return state.outcome.result() if state.outcome else None

        backoff = tenacity.wait_exponential(multiplier=0.5, max=20) + tenacity.wait_random(0, 0.5)

        def wait(state: RetryCallState) -> float:
            reply = (
                None if state.outcome is None or state.outcome.failed else state.outcome.result()
            )
            told = _header(reply, "retry-after") if reply else None
            return float(told) if told and told.isdigit() else backoff(state)

        def busy(reply: Reply) -> bool:
            told = _header(reply, "retry-after") or "0"
            soon = not told.isdigit() or int(told) <= LONGEST_WAIT_S
            return reply.status in (408, 429, 500, 502, 503, 504) and soon

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_result(busy) | tenacity.retry_if_exception_type(Unreachable),
            stop=lambda state: state.attempt_number >= ATTEMPTS or self._asked_s >= self._until,
            wait=wait, sleep=self._ctx.clock.sleep, retry_error_callback=give_up,
        )  # fmt: skip
        try:
            reply: Reply = retrying(self._once, method, url, headers)
        except Unreachable as error:
            raise HostError(
                f"the registry cannot be reached: {error.why}", where=self._at.name,
                hint="check the network, then run it again", id="registry-unreachable",
            ) from error  # fmt: skip
        return reply

    def _once(self, method: str, url: str, headers: dict[str, str]) -> Reply:
        """Ask once, in what is left of the time. Raises Unreachable."""
        left = min(ONCE_S, self._until - self._asked_s)
        if left <= 0:
            raise Unreachable("it answers too slowly: the time for all questions is up")
        began = self._ctx.clock.monotonic()
        try:
            return self._ctx.http.ask(
                method, url, headers=headers, max_bytes=MAX_MANIFEST, timeout=left
            )
        finally:
            self._asked_s += self._ctx.clock.monotonic() - began


def decoded(body: bytes) -> Any:
    """Read JSON that somebody else wrote; None for what is none, or is nested without end."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _is_whole(data: dict[str, Any]) -> bool:
    """Whether an index or a manifest holds all that is read of it, each as what it has to be."""
    if data.get("schemaVersion") != 2:
        return False
    if (listed := data.get("manifests")) is not None:
        return isinstance(listed, list) and all(
            isinstance(e, dict) and isinstance(e.get("platform", {}), dict) and _is_digest(e)
            for e in listed
        )
    layers = data.get("layers")
    return isinstance(layers, list) and all(map(_is_blob, (data.get("config"), *layers)))


def _is_digest(entry: dict[str, Any]) -> bool:
    return bool(_DIGEST.fullmatch(str(entry.get("digest"))))


def _is_blob(entry: object) -> bool:
    if not isinstance(entry, dict) or not _is_digest(entry):
        return False
    size = entry.get("size")
    return isinstance(size, int) and not isinstance(size, bool) and size >= 0


def _here(url: str) -> bool:
    """Whether a URL's host is this machine: plain HTTP is spoken with no other, as engines do."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _scheme(host: str) -> str:
    return "http" if _here(f"http://{host}") else "https"


def _basic(known: Credentials) -> str:
    pair = f"{known.username}:{known.password}".encode()
    return f"Basic {base64.b64encode(pair).decode()}"


def _header(reply: Reply, name: str) -> str | None:
    return {key.lower(): value for key, value in reply.headers.items()}.get(name)


def _code(reply: Reply) -> str:
    """The registry's own word for what is wrong."""
    try:
        return str(reply.json()["errors"][0]["code"])
    except (ValueError, KeyError, IndexError, TypeError):
        return ""


def missing(where: str, wanted: str, code: str) -> LockError:
    """Make the error for what a registry does not have."""
    if code == "NAME_UNKNOWN":
        return LockError(
            "the registry has no such repository, or it is private", where=where,
            hint="see that the name is right; for a private one: docker login",
            id="image-unknown",
        )  # fmt: skip
    kind = "digest" if wanted.startswith("sha256:") else "tag"
    return LockError(
        f"the registry has no such {kind}: manifest unknown", where=where,
        hint="tags and digests vanish when registries are cleaned up: name another one in the "
        "recipe, or keep images that you need in a registry of your own",
        id="manifest-unknown",
    )  # fmt: skip


def unauthorised(where: str, *, known: bool) -> HostError:
    """Make the error for a login that is missing or does not do."""
    return HostError(
        "the registry does not let this account read the image, or does not have it"
        if known
        else "the registry wants a login to read the image, or does not have it",
        where=where,
        hint="see that the name is right; then: docker login " + where.partition("/")[0],
        id="registry-unauthorised",
    )


def _refused(reply: Reply, where: str) -> BakehouseError:
    if reply.status in (401, 403):
        return unauthorised(where, known=True)
    if reply.status == 429:
        told = _header(reply, "retry-after")
        wait = f"wait {clean(told)} seconds" if told else "wait a while"
        return HostError(
            "the registry has had too many requests from here (429)", where=where,
            hint=f"{wait}, or log in with 'docker login': accounts have higher limits",
            id="registry-limit",
        )  # fmt: skip
    code = clean(_code(reply))
    return HostError(
        f"the registry answers {reply.status}{f' ({code})' if code else ''}", where=where,
        hint="wait a while and run it again", id="registry",
    )  # fmt: skip
