"""Files on their way to a machine without network, and a package index for them there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

JSON = "application/vnd.pypi.simple.v1+json"
PART = re.compile(r"(.+)\.part-(\d+)-of-(\d+)")
DEBIAN = ("git", "libpcre2-8-0")
"""Packages that are brought along in case the machine has no git."""
LIMIT = 61_500_000
"""Bytes that travel in one call."""


def fetch(requirement: str, ending: str, folder: Path) -> Path:
    """Fetch one file of a release as the package index has it."""
    name, version = requirement.split("==")
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    asked = urllib.request.Request(f"{index}/{name}/", headers={"Accept": JSON})  # noqa: S310
    with urllib.request.urlopen(asked, timeout=60) as reply:  # noqa: S310
        files = json.load(reply)["files"]
    file = next(
        f for f in files if f"-{version}" in f["filename"] and f["filename"].endswith(ending)
    )
    with urllib.request.urlopen(urljoin(asked.full_url, file["url"]), timeout=600) as reply:  # noqa: S310
        data: bytes = reply.read()
    if hashlib.sha256(data).hexdigest() != file["hashes"]["sha256"]:
        raise SystemExit(f"{file['filename']} is not what the index says")
    target = folder / str(file["filename"])
    target.write_bytes(data)
    return target


def debian(packages: Iterable[str], folder: Path) -> None:
    """Fetch packages of a Debian-like system, where this is one."""
    if shutil.which("apt-get"):
        subprocess.run(["apt-get", "-q", "download", *packages], cwd=folder, check=False)
        for file in folder.glob("*.deb"):
            file.rename(file.with_name(f"{file.name.partition('_')[0]}.deb"))


def pack(files: Iterable[Path], folder: Path, limit: int = LIMIT, first: int = 1) -> None:
    """Fill `folder` with 1, 2 … of at most `limit` bytes, one for each call, in this order.

    Folders from the number `first` on are made anew.
    """
    for old in folder.glob("*"):
        if old.name.isdigit() and int(old.name) >= first:
            shutil.rmtree(old)
    number, room = first, limit
    for file in files:
        left = file.stat().st_size
        pieces: list[tuple[int, int]] = []
        while left or not pieces:
            if not room:
                number, room = number + 1, limit
            pieces.append((number, min(left, room)))
            left, room = left - pieces[-1][1], room - pieces[-1][1]
        with file.open("rb") as whole:
            for index_, (part, size) in enumerate(pieces):
                name = f"{file.name}.part-{index_}-of-{len(pieces)}" if pieces[1:] else file.name
                (folder / str(part)).mkdir(parents=True, exist_ok=True)
                (folder / str(part) / name).write_bytes(whole.read(size))
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            print(f"{path.stat().st_size:>12,}  {path.relative_to(folder)}")


def receive(parts: Path, target: Path) -> None:
    """Copy what arrived into `target`, and put together what is there in all its parts."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(parts.iterdir()):
        copying = target / f".{file.name}.copying"
        shutil.copyfile(file, copying)
        copying.replace(target / file.name)
    groups: dict[str, list[Path]] = {}
    for file in sorted(target.iterdir()):
        if found := PART.fullmatch(file.name):
            groups.setdefault(found[1], []).append(file)
    for name, files in groups.items():
        wanted = int(PART.fullmatch(files[0].name)[3])  # type: ignore[index]
        if len(files) != wanted:
            continue
        joining = target / f".{name}.joining"
        with joining.open("wb") as whole:
            for file in sorted(files, key=lambda f: int(PART.fullmatch(f.name)[2])):  # type: ignore[index]
                whole.write(file.read_bytes())
        joining.replace(target / name)
        for file in files:
            file.unlink()


@contextmanager
def index(folder: Path) -> Iterator[str]:
    """Serve a folder on loopback as a package index in JSON (PEP 691); give its address."""
    hashes: dict[str, str] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            part = self.path.strip("/").split("/")
            if part[0] == "files" and (folder / part[1]).is_file():
                self.answer((folder / part[1]).read_bytes(), "application/octet-stream")
                return
            project = part[-1].replace("-", "_")
            found = [
                f for f in sorted(folder.iterdir())
                if f.name.lower().replace("-", "_").startswith(f"{project}_")
                and f.suffix in (".whl", ".gz")
            ]  # fmt: skip
            listed = [
                {
                    "filename": f.name,
                    "url": f"/files/{f.name}",
                    "size": f.stat().st_size,
                    "hashes": {"sha256": sha256(f, hashes)},
                }
                for f in found
            ]
            self.answer(json.dumps({"files": listed}).encode(), JSON)

        def answer(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/simple"
    finally:
        server.shutdown()
        server.server_close()


def sha256(file: Path, known: dict[str, str]) -> str:
    """Hash a file, once."""
    if file.name not in known:
        with file.open("rb") as opened:
            known[file.name] = hashlib.file_digest(opened, "sha256").hexdigest()
    return known[file.name]
