"""One bare mirror a repository, into which exact commits are fetched.

A commit counts as present only under a ref of ours that was written after its fetch had ended and
every object of its tree had been found. So a run that was killed in the middle leaves nothing that
a later one trusts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bakehouse.context import Context
from bakehouse.errors import BakehouseError, HostError, LockError, NotFound
from bakehouse.places import Places
from bakehouse.ports.git import Git, GitFailed, check_url, foreign_owner
from bakehouse.redact import clean
from bakehouse.sources.files import guarded
from bakehouse.util.retry import Retry, TransientError

COMMITS = "refs/bakehouse/commits"
TREES = "refs/bakehouse/trees"
REMOTE = "refs/bakehouse/remote"
ATTEMPTS = 4

_LOOK_IN = (
    ("branches", f"+refs/heads/*:{REMOTE}/heads/*"),
    ("tags", f"+refs/tags/*:{REMOTE}/tags/*"),
    ("pull requests", f"+refs/pull/*/head:{REMOTE}/pull/*"),
    ("merge requests", f"+refs/merge-requests/*/head:{REMOTE}/merge-requests/*"),
)
_NOT_OFFERED = re.compile(r"unadvertised object|not our ref|couldn't find remote ref", re.I)
_TRANSIENT = re.compile(
    r"error: (?:429|5\d\d)|early EOF|unexpected disconnect|RPC failed|reset by peer|timed out"
    r"|Operation too slow|hung up|Empty reply|Could ?n[o']t resolve host|Connection refused"
    r"|Connection closed|Recv failure|transfer closed|invalid index-pack output|bad pack header",
    re.I,
)
_DAMAGED = re.compile(
    r"bad object|corrupt|does not match index|cannot be accessed|inflate|necessary objects"
    r"|unable to read|missing (?:blob|tree|commit)|reference broken|not a git repository: '/",
    re.I,
)
_GONE = re.compile(
    r"repository '[^']*' not found|error: (?:404|410)|does not appear to be a git repository"
    r"|Repository not found",
    re.I,
)
_NOT_GIT = re.compile(
    r"is this a git repository|invalid server response|dumb http transport|protocol error", re.I
)
_LOGIN = re.compile(
    r"could not read (?:Username|Password)|Authentication failed|error: (?:401|403)"
    r"|Permission denied|Host key verification failed",
    re.I,
)


def mirror_folder(places: Places, url: str) -> Path:
    """Where a repository's mirror lies: a readable name and a hash of the URL."""
    tail = url.partition("://")[2].removesuffix("/").removesuffix(".git")
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", tail).strip("-.")[-60:].lstrip("-.")
    return places.git / f"{slug}-{hashlib.sha256(url.encode()).hexdigest()[:12]}.git"


def tree_is_whole(git: Git, repository: Path, tree: str) -> bool:
    """Whether a tree and everything below it is in a repository (submodules apart)."""
    if not repository.is_dir():
        return False
    try:
        git.ask(repository, "rev-list", "--objects", "--quiet", tree)
    except GitFailed:
        return False
    return True


def check_owner(repository: Path) -> None:
    """Refuse a repository of another user: whoever owns it can change what git does in it.

    Git looks at that itself only where it had to search for the repository.
    """
    if repository.stat().st_uid != os.geteuid():
        raise foreign_owner(str(repository))


def commit_is_ready(git: Git, repository: Path, commit: str) -> bool:
    """Whether a commit was fetched to its end, and its tree is still whole."""
    if not repository.is_dir():
        return False
    check_owner(repository)
    try:
        noted = git.object_id(repository, f"{COMMITS}/{commit}")
    except GitFailed:
        return False
    return noted == commit and tree_is_whole(git, repository, f"{commit}^{{tree}}")


def make_bare(ctx: Context, git: Git, repository: Path) -> None:
    """Make an empty bare repository appear at once, whole; clear what a killed run left in it."""
    if repository.is_dir():
        check_owner(repository)
    if repository.is_dir() and not _is_repository(git, repository):
        set_aside(ctx, repository)
    if repository.is_dir():
        _clear_leftovers(repository)
        return
    repository.parent.mkdir(parents=True, exist_ok=True)
    new = repository.with_name(f".{repository.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    git.ask(None, "init", "--bare", "--quiet", "--template=", str(new))
    # These attributes come before any in a tree: what comes out is what went in, byte for byte.
    (new / "info").mkdir(exist_ok=True)
    (new / "info" / "attributes").write_text(
        "* -text -eol -ident -filter -working-tree-encoding -export-ignore -export-subst\n"
    )
    new.rename(repository)


def set_aside(ctx: Context, repository: Path) -> None:
    """Move a damaged repository out of the way. It is kept: it may hold the last copy there is."""
    aside = repository.with_name(f"{repository.name}.damaged-{int(time.time())}")
    repository.rename(aside)
    ctx.progress.say(f"the mirror was damaged; it is fetched anew (the old one: {aside})")


def _is_repository(git: Git, repository: Path) -> bool:
    try:
        return git.ask(repository, "rev-parse", "--is-bare-repository").strip() == "true"
    except GitFailed:
        return False


def _clear_leftovers(repository: Path) -> None:
    """Remove git's own lock files and half packs; we hold the mirror's lock, so they are stale.

    A git that a killed run had started may live on for some seconds until it is ended.
    """
    deadline = time.monotonic() + 5
    while (stale := [*repository.rglob("*.lock")]) and time.monotonic() < deadline:
        time.sleep(0.1)
    empty = (p for p in repository.glob("refs/bakehouse/*/*") if p.stat().st_size == 0)
    half = (*repository.glob("objects/pack/tmp_*"), *repository.glob("shallow_*"))
    for path in (*stale, *empty, *half):
        with contextlib.suppress(OSError):
            path.unlink()


def ensure_commit(ctx: Context, git: Git, url: str, commit: str, *, ref: str | None = None) -> Path:
    """Have a commit and its whole tree in its mirror; no network where it is there already.

    The commit is asked for by id. A host that gives out only what a ref points at is asked for the
    ref, its branches, tags and pull requests in turn, until the commit is among them. Raises
    LockError where it is in none of them, HostError where the host cannot be reached.
    """
    check_url(url)
    repository = mirror_folder(ctx.places, url)
    if commit_is_ready(git, repository, commit):
        return repository
    with guarded(ctx, repository.with_suffix(".lock"), f"the mirror of {url}"):
        if commit_is_ready(git, repository, commit):
            return repository
        try:
            _fetch_whole(ctx, git, repository, url, commit, ref)
        except _Damaged:
            # What git believed to have, and therefore did not ask for, is not readable.
            set_aside(ctx, repository)
            _fetch_whole(ctx, git, repository, url, commit, ref)
    return repository


class _Damaged(HostError):
    """A mirror cannot be used as it is."""


def _fetch_whole(
    ctx: Context, git: Git, repository: Path, url: str, commit: str, ref: str | None
) -> None:
    """Fetch a commit, see that its tree is whole, and only then note that it is there."""
    damaged = _Damaged(
        "the repository's mirror is damaged, and fetching it anew did not mend that",
        where=str(repository),
        hint="check the disk, remove the mirror, and run it again",
        id="mirror-damaged",
    )
    make_bare(ctx, git, repository)
    try:
        tried = _fetch_commit(ctx, git, repository, url, commit, ref)
    except GitFailed as error:
        raise damaged if _DAMAGED.search(error.said) else explain(error, url) from error
    if tried is not None:
        raise LockError(
            f"commit {commit} is not to be had from its repository",
            where=f"{url} (tried: {', '.join(tried)})",
            hint="it may have been force-pushed away: find a mirror or fork that has it, "
            "or move the pin with 'invoke lock --update'",
            id="commit-gone",
        )
    if not tree_is_whole(git, repository, f"{commit}^{{tree}}"):
        raise damaged
    try:
        git.ask(repository, "update-ref", f"{COMMITS}/{commit}", commit)
    except GitFailed as error:
        raise damaged from error


def _fetch_commit(
    ctx: Context, git: Git, repository: Path, url: str, commit: str, ref: str | None
) -> list[str] | None:
    """Fetch; None where the commit came, else the list of what was tried. Raises GitFailed."""
    tried = ["by id"]
    try:
        fetch(ctx, git, repository, url, "--depth=1", commit)
        return None
    except GitFailed as error:
        if not _NOT_OFFERED.search(error.said):
            raise
    places = [*_LOOK_IN]
    if ref:
        places.insert(0, (f"ref {ref}", f"+{ref}:{REMOTE}/asked"))
    for name, refspec in places:
        tried.append(name)
        try:
            fetch(ctx, git, repository, url, *whole_history(git, repository), refspec)
        except GitFailed as error:
            if not _NOT_OFFERED.search(error.said):
                raise
        if _has_commit(git, repository, commit):
            return None
    return tried


def whole_history(git: Git, repository: Path) -> tuple[str, ...]:
    """What a fetch needs so that it is not cut off where an earlier shallow one was."""
    return () if has_whole_history(git, repository) else ("--unshallow",)


def has_whole_history(git: Git, repository: Path) -> bool:
    """Whether no fetch into this repository was shallow: else commits cannot be counted."""
    return git.ask(repository, "rev-parse", "--is-shallow-repository").strip() == "false"


def _has_commit(git: Git, repository: Path, commit: str) -> bool:
    try:
        return git.object_id(repository, f"{commit}^{{commit}}") == commit
    except GitFailed:
        return False


def retrying(ctx: Context) -> Callable[..., Any]:
    """Give a caller of git that tries again while a host is busy or out of reach.

    It raises GitFailed.
    """

    def call(job: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def once() -> Any:
            try:
                return job(*args, **kwargs)
            except GitFailed as error:
                if not _TRANSIENT.search(error.said):
                    raise
                raise TransientError(f"git: {error.first()}") from error

        try:
            return Retry(ctx.clock.sleep, attempts=ATTEMPTS, say=ctx.progress.say).call(once)
        except TransientError as error:
            raise (error.__cause__ or error) from None

    return call


def fetch(ctx: Context, git: Git, repository: Path, url: str, *arguments: str) -> None:
    """Fetch into a mirror; transient failures are retried. Raises GitFailed."""
    with ctx.progress.bar(f"fetch {url}") as bar:
        retrying(ctx)(
            git.run,
            repository, "fetch", "--no-tags", "--no-write-fetch-head", "--no-auto-gc", "--progress",
            *arguments[:-1], "--", url, arguments[-1],
            url=url,
            on_line=_show_percent(bar.update),
        )  # fmt: skip


def _show_percent(update: Callable[[float, float | None, str], None]) -> Callable[[str], None]:
    def line(text: str) -> None:
        if found := re.search(r"Receiving objects:\s+\d+% \((\d+)/(\d+)\)(?:, (.*))?", text):
            update(float(found[1]), float(found[2]), clean(found[3] or "", one_line=True))

    return line


def explain(error: GitFailed, url: str) -> BakehouseError:
    """Tell apart: gone, needs a login, cannot be reached, not git at all."""
    first = error.first()
    if _GONE.search(error.said):
        return NotFound(
            "there is no such repository, or it is private",
            where=f"{url}: {first}",
            hint="see that the URL is right; for a private repository use ssh and its agent",
            id="repository-gone",
        )
    if _LOGIN.search(error.said):
        return HostError(
            "the repository wants a login, or says no to yours",
            where=f"{url}: {first}",
            hint="see that the URL is right; for a private repository use ssh and its agent",
            id="repository-login",
        )
    if _NOT_GIT.search(error.said):
        return HostError(
            "what answers there does not speak git (a login page, perhaps)",
            where=f"{url}: {first}",
            hint="see that the URL is right and that no portal or proxy stands before it",
            id="not-git",
        )
    return HostError(
        "the repository cannot be fetched",
        where=f"{url}: {first}",
        hint="check the network and run it again",
        id="repository-unreachable",
    )
