"""A GitHub host on loopback: real git with refs/pull, and the pages that give diffs away.

As on the real one `/pull/N.diff` redirects to another address, which gives the text.
"""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.filehost import Fault, FileServer, running
from tests.support.githost import IDENTITY, GitHandler, GitHost, Repo

REPO = "org/project"


class PullHandler(GitHandler):
    """Answers for pages; hands the rest to git."""

    def do_GET(self) -> None:  # noqa: N802
        host = self.server.host
        assert isinstance(host, PullHost)
        path = self.path.partition("?")[0]
        if ".git" in path:
            super().do_GET()
            return
        host.asked.append(self.path)
        if host.page_faults[path] and host.page_faults[path].pop(0)(self):
            return
        if path.startswith("/raw/"):
            text = host.text(path.removeprefix("/raw"))
            kind = {"Content-Type": "text/plain; charset=utf-8"}
            self.answer(200 if text else 404, text or b"Not Found", kind)
        else:
            self.answer(302, b"<html>You are being redirected</html>",
                        {"Location": f"/raw{self.path}", "Content-Type": "text/html"})  # fmt: skip

    do_POST = do_GET  # noqa: N815


class PullHost(GitHost):
    """The host. `page_faults` are used up, by path; `asked` are the pages that were asked for."""

    def __init__(self, port: int, root: Path) -> None:
        super().__init__(port, root)
        self.page_faults: defaultdict[str, list[Fault]] = defaultdict(list)
        self.asked: list[str] = []
        self.collected: set[str] = set()
        """Commits that no ref reaches any more, and that are gone."""

    def text(self, path: str) -> bytes | None:
        """What `/OWNER/NAME/pull/N.diff` and its like hold; None where there is no such thing."""
        _, owner, name, kind, what = path.split("/")
        repo = self.repos.get(f"{owner}/{name}.git")
        what, _, form = what.rpartition(".")
        if kind == "compare":
            begin, _, end = what.partition("...")
            gone = repo is None or self.gone or end in self.collected
            return (
                self._git(repo, "diff", "--full-index", begin, end) if repo and not gone else None
            )
        end = f"refs/pull/{what}/head" if kind == "pull" else what
        if repo is None or self.gone or self._git(repo, "rev-parse", "--verify", "-q", end) is None:
            return None
        start = self._git(repo, "merge-base", "main", end) if kind == "pull" else None
        begin = start.decode().strip() if start else f"{end}^"
        if form == "diff":
            return self._git(repo, "diff", "--full-index", begin, end)
        return self._git(repo, "format-patch", "--stdout", f"{begin}..{end}")

    @staticmethod
    def _git(repo: Repo, *arguments: str) -> bytes | None:
        done = subprocess.run(
            ["git", f"--git-dir={repo.folder}", *arguments],
            env={"PATH": os.environ["PATH"], **IDENTITY}, capture_output=True, check=False,
        )  # fmt: skip
        return done.stdout if done.returncode == 0 else None


@contextmanager
def serve_pulls(root: Path) -> Iterator[PullHost]:
    """Run the host for the length of a `with` block."""
    server = FileServer(("127.0.0.1", 0), PullHandler)
    host = PullHost(server.server_address[1], root)
    server.host = host
    with running(server):
        yield host
