"""A git host on loopback: real `git http-backend`, pull requests, and the ways of real hosts.

A modern host gives out any commit by its id. `strict` makes one that gives out only what a ref
points at, as older ones do: protocol version 0 and no `uploadpack.allowAnySHA1InWant`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.filehost import Fault, FileHost, FileServer, Handler, running

DATE = 1_700_000_000
IDENTITY = {
    "GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "C", "GIT_COMMITTER_EMAIL": "c@example.org",
    "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull,
}  # fmt: skip

File = bytes | str | tuple[str, str]
"""Bytes of a file; or a mode and what goes with it: a link's target, a submodule's commit."""


def git(
    folder: Path, *arguments: str, stdin: bytes = b"", extra: Mapping[str, str] | None = None
) -> str:
    """Run the real git in a repository and give what it prints."""
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), **IDENTITY, **(extra or {})}
    done = subprocess.run(
        ["git", f"--git-dir={folder}", *arguments], input=stdin, env=env, capture_output=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


class Repo:
    """A bare repository that is served."""

    def __init__(self, host: str, root: Path, name: str) -> None:
        self.folder = root / name
        self.url = f"{host}/{name}"
        self.strict = False
        self.folder.mkdir(parents=True)
        git(self.folder, "init", "--bare", "--quiet", "--initial-branch=main")
        git(self.folder, "config", "uploadpack.allowAnySHA1InWant", "true")
        git(self.folder, "config", "uploadpack.allowFilter", "true")

    def be_strict(self) -> Repo:
        """Give out only what a ref points at."""
        self.strict = True
        git(self.folder, "config", "uploadpack.allowAnySHA1InWant", "false")
        git(self.folder, "config", "uploadpack.allowFilter", "false")
        return self

    def tree(self, files: Mapping[str, File]) -> str:
        """Write a tree and give its id."""
        rows = []
        for path, file in files.items():
            mode, content = file if isinstance(file, tuple) else ("100644", file)
            data = content.encode() if isinstance(content, str) else content
            if mode == "160000":
                rows.append(f"160000 {data.decode()}\t{path}")
                continue
            blob = git(self.folder, "hash-object", "-w", "--stdin", stdin=data)
            rows.append(f"{mode} {blob}\t{path}")
        index = {"GIT_INDEX_FILE": str(self.folder / "scratch-index")}
        (self.folder / "scratch-index").unlink(missing_ok=True)
        listing = "".join(f"{row}\n" for row in rows).encode()
        git(self.folder, "update-index", "--index-info", stdin=listing, extra=index)
        return git(self.folder, "write-tree", extra=index)

    def commit(
        self,
        files: Mapping[str, File],
        *,
        ref: str | None = "refs/heads/main",
        parents: tuple[str, ...] = (),
        date: int = DATE,
        message: str = "m",
    ) -> str:
        """Commit a tree; `ref` is moved to it, whatever it pointed at. Give the commit's id."""
        above = [word for parent in parents for word in ("-p", parent)]
        when = {"GIT_AUTHOR_DATE": f"{date} +0000", "GIT_COMMITTER_DATE": f"{date} +0000"}
        made = git(self.folder, "commit-tree", *above, "-m", message, self.tree(files), extra=when)
        if ref:
            self.point(ref, made)
        return made

    def point(self, ref: str, commit: str) -> None:
        git(self.folder, "update-ref", ref, commit)

    def delete(self, ref: str) -> None:
        git(self.folder, "update-ref", "-d", ref)


class GitHandler(Handler):
    """Hands requests to git's own CGI program."""

    def do_GET(self) -> None:  # noqa: N802
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        host = self.server.host
        assert isinstance(host, GitHost)
        host.count += 1
        if host.faults and host.faults.pop(0)(self):
            return
        path, _, query = self.path.partition("?")
        name = path.strip("/").partition(".git")[0] + ".git"
        repo = host.repos.get(name)
        if repo is None or host.gone:
            self.answer(404, b"Not Found")
            return
        env = {
            "PATH": os.environ["PATH"], **IDENTITY,
            "GIT_PROJECT_ROOT": str(host.root), "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": path, "QUERY_STRING": query, "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""), "CONTENT_LENGTH": str(length),
            "REMOTE_ADDR": "127.0.0.1",
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
        }  # fmt: skip
        if not repo.strict:
            env["HTTP_GIT_PROTOCOL"] = self.headers.get("Git-Protocol", "")
        done = subprocess.run(
            ["git", "http-backend"], input=body, env=env, capture_output=True, check=False
        )
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if line)
        status = int(headers.pop("Status", "200").split()[0])
        self.answer(status, content, headers)

    do_POST = do_GET  # noqa: N815


class GitHost(FileHost):
    """The host. `faults` are used up, one a request; `gone` makes every repository a 404."""

    def __init__(self, port: int, root: Path) -> None:
        super().__init__(port)
        self.root = root
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.gone = False
        self.count = 0

    def repo(self, name: str = "org/project.git") -> Repo:
        """Make a repository, empty."""
        self.repos[name] = Repo(self.url, self.root, name)
        return self.repos[name]


@contextmanager
def serve_git(root: Path) -> Iterator[GitHost]:
    """Run a git host for the length of a `with` block."""
    server = FileServer(("127.0.0.1", 0), GitHandler)
    host = GitHost(server.server_address[1], root)
    server.host = host
    with running(server):
        yield host
