"""Bare mirrors of git repositories, and their refs.

A commit counts as present only under a ref of ours that is written after its fetch has ended and
every object of its tree was found. So a run that is killed leaves nothing that a later one trusts.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from bakehouse.context import Context
from bakehouse.errors import BakehouseError, HostError, LockError, NotFound, UsageError
from bakehouse.paths import Places
from bakehouse.redact import clean
from bakehouse.sources.files import guarded
from bakehouse.system.git import COMMIT, Git, GitFailed, check_url, foreign_owner
from bakehouse.util.retry import Retry, TransientError, retry

T = TypeVar("T")
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
_NO_PAGE = "check the URL, and that no login page or proxy stands before it"
_LOGIN = re.compile(
    r"could not read (?:Username|Password)|Authentication failed|error: (?:401|403)"
    r"|Permission denied|Host key verification failed",
    re.I,
)


def mirror_folder(places: Places, url: str) -> Path:
    """Give the folder of a repository's mirror: a readable name and a hash of the URL."""
    tail = url.partition("://")[2].removesuffix("/").removesuffix(".git")
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", tail).strip("-.")[-60:].lstrip("-.")
    return places.git / f"{slug}-{hashlib.sha256(url.encode()).hexdigest()[:12]}.git"


def tree_is_whole(git: Git, repository: Path, tree: str) -> bool:
    """Whether a tree and all objects below it are in a repository (without submodules)."""
    if not repository.is_dir():
        return False
    with suppress(GitFailed):
        git.ask(repository, "rev-list", "--objects", "--quiet", tree)
        return True
    return False


def check_owner(repository: Path) -> None:
    """Refuse a repository of another user, who can change what git does in it.

    Git checks that itself only if it had to search for the repository.
    """
    if repository.stat().st_uid != os.geteuid():
        raise foreign_owner(str(repository))


def is_ready(git: Git, repository: Path, ref: str, target: str) -> bool:
    """Whether our `ref` names a commit or tree that was completely fetched and is still whole."""
    if not repository.is_dir():
        return False
    check_owner(repository)
    with suppress(GitFailed):
        if git.object_id(repository, ref) == target:
            return tree_is_whole(git, repository, f"{target}^{{tree}}")
    return False


def commit_is_ready(git: Git, repository: Path, commit: str) -> bool:
    """Whether a commit was fetched completely, and its tree is still whole."""
    return is_ready(git, repository, f"{COMMITS}/{commit}", commit)


def make_bare(ctx: Context, git: Git, repository: Path) -> None:
    """Make an empty bare repository, atomically; clean up what a killed run left in it."""
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
    # These attributes override any in a tree: files come out as they went in, byte for byte.
    (new / "info").mkdir(exist_ok=True)
    (new / "info" / "attributes").write_text(
        "* -text -eol -ident -filter -working-tree-encoding -export-ignore -export-subst\n"
    )
    new.rename(repository)


def set_aside(ctx: Context, repository: Path) -> None:
    """Move a damaged repository aside. It is kept: it may be the last copy."""
    aside = repository.with_name(f"{repository.name}.damaged-{int(time.time())}")
    repository.rename(aside)
    ctx.progress.say(f"the mirror was damaged; fetching it again (the old one: {aside})")


def _is_repository(git: Git, repository: Path) -> bool:
    with suppress(GitFailed):
        return git.ask(repository, "rev-parse", "--is-bare-repository").strip() == "true"
    return False


def _clear_leftovers(repository: Path) -> None:
    """Remove git's own lock files and partial packs; we hold the mirror's lock, so they are stale.

    A git process of a killed run may live on for some seconds.
    """
    deadline = time.monotonic() + 5
    while (stale := [*repository.rglob("*.lock")]) and time.monotonic() < deadline:
        time.sleep(0.1)
    empty = (p for p in repository.glob("refs/bakehouse/*/*") if p.stat().st_size == 0)
    half = (*repository.glob("objects/pack/tmp_*"), *repository.glob("shallow_*"))
    for path in (*stale, *empty, *half):
        with suppress(OSError):
            path.unlink()


def ensure_commit(ctx: Context, git: Git, url: str, commit: str, *, ref: str | None = None) -> Path:
    """Fetch a commit and its whole tree into its mirror, unless it is there already.

    The commit is fetched by id. A host that serves only what a ref points at is asked for the ref,
    its branches, tags and pull requests in turn, until the commit is among them. Raises LockError
    if it is in none of them, HostError if the host cannot be reached.
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
            # Objects that git believed to have, and therefore did not fetch, cannot be read.
            set_aside(ctx, repository)
            _fetch_whole(ctx, git, repository, url, commit, ref)
    return repository


class _Damaged(HostError):
    """A mirror cannot be used as it is."""


def _fetch_whole(
    ctx: Context, git: Git, repository: Path, url: str, commit: str, ref: str | None
) -> None:
    """Fetch a commit, check that its tree is whole, and only then write our ref."""
    damaged = _Damaged(
        "the repository's mirror is damaged, and fetching it again did not fix that",
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
            f"commit {commit} not found in its repository",
            where=f"{url} (tried: {', '.join(tried)})",
            hint="it may have been removed by a force push: find a mirror or fork that has it, "
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
    """Fetch; None on success, else the list of what was tried. Raises GitFailed."""
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
        with suppress(GitFailed):
            if git.object_id(repository, f"{commit}^{{commit}}") == commit:
                return None
    return tried


def whole_history(git: Git, repository: Path) -> tuple[str, ...]:
    """Give the flags with which a fetch is not cut off where an earlier shallow one was."""
    return () if has_whole_history(git, repository) else ("--unshallow",)


def has_whole_history(git: Git, repository: Path) -> bool:
    """Whether the repository is not shallow: else commits cannot be counted."""
    return git.ask(repository, "rev-parse", "--is-shallow-repository").strip() == "false"


def retry_git(ctx: Context, url: str, call: Callable[[], T]) -> T:
    """Call git, again if a host is busy or cannot be reached. Raises GitFailed."""

    def transient(error: Exception) -> TransientError | None:
        found = isinstance(error, GitFailed) and _TRANSIENT.search(error.said)
        return TransientError(f"git: {clean(found[0], one_line=True)}") if found else None

    policy = Retry(ctx.clock.sleep, attempts=ATTEMPTS, say=ctx.progress.say, where=url)
    return retry(call, transient, policy)


def fetch(ctx: Context, git: Git, repository: Path, url: str, *arguments: str) -> None:
    """Fetch into a mirror, with retries. Raises GitFailed."""
    with ctx.progress.bar(f"fetch {url}") as bar:

        def on_line(text: str) -> None:
            if found := re.search(r"Receiving objects:\s+\d+% \((\d+)/(\d+)\)(?:, (.*))?", text):
                bar.update(float(found[1]), float(found[2]), clean(found[3] or "", one_line=True))

        call = partial(
            git.run,
            repository, "fetch", "--no-tags", "--no-write-fetch-head", "--no-auto-gc", "--progress",
            *arguments[:-1], "--", url, arguments[-1],
            url=url,
            on_line=on_line,
        )  # fmt: skip
        retry_git(ctx, url, call)


def explain(error: GitFailed, url: str) -> BakehouseError:
    """Explain a failed fetch: gone, login needed, unreachable, or not git."""
    where = f"{url}: {error.first()}"
    private = "check the URL; for a private repository use ssh and its agent"
    if _GONE.search(error.said):
        what = "repository not found, or it is private"
        return NotFound(what, where=where, hint=private, id="repository-gone")
    if _LOGIN.search(error.said):
        what = "the repository requires a login, or rejected yours"
        return HostError(what, where=where, hint=private, id="repository-login")
    if _NOT_GIT.search(error.said):
        what = "not a git repository (perhaps a login page)"
        return HostError(what, where=where, hint=_NO_PAGE, id="not-git")
    what, hint = "the repository cannot be fetched", "check the network and run it again"
    return HostError(what, where=where, hint=hint, id="repository-unreachable")


def remote_refs(ctx: Context, git: Git, url: str, *patterns: str) -> dict[str, str]:
    """List a remote's refs and their commits, annotated tags followed. Raises HostError."""
    check_url(url)
    try:
        peeled = [f"{pattern}^{{}}" for pattern in patterns]
        names = ("HEAD", *patterns, *peeled)
        out = retry_git(ctx, url, partial(git.ask, None, "ls-remote", "--", url, *names, url=url))
    except GitFailed as error:
        raise explain(error, url) from error
    if not out.strip():
        raise HostError(
            "no refs found: an empty repository, or a web page",
            where=url,
            hint=_NO_PAGE,
            id="not-git",
        )
    refs: dict[str, str] = {}
    for line in out.splitlines():
        commit, _, name = line.partition("\t")
        if COMMIT.fullmatch(commit):
            refs[name.removesuffix("^{}")] = commit  # the peeled line follows the tag's own
    return refs


def find_ref(ctx: Context, git: Git, url: str, ref: str) -> tuple[str, str]:
    """Resolve a ref: give its full name and its commit.

    `ref` is a branch, a tag, `pull/N/head` or a name from `refs/` on. Raises LockError if there is
    none of that name, or a branch and a tag that differ; UsageError, HostError.
    """
    unfit = re.search(r"[\s~^:?*\[\\\x00-\x1f\x7f]|\.\.|@\{|//", ref)
    if unfit or ref.startswith(("-", "/")) or ref.endswith(("/", ".lock", ".")):
        raise UsageError(f"'{clean(ref)}' is not a valid ref name", hint="give a branch or tag")
    names = [ref] if ref.startswith("refs/") else [
        f"refs/heads/{ref}", f"refs/tags/{ref}", f"refs/{ref}",
    ]  # fmt: skip
    refs = remote_refs(ctx, git, url, *names)
    found = {name: refs[name] for name in names if name in refs}
    if not found:
        raise LockError(
            f"the repository has no branch or tag '{ref}'",
            where=url,
            hint="check the name; it may have been deleted or renamed",
            id="ref-gone",
        )
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name} is {commit[:12]}" for name, commit in found.items())
        raise LockError(
            f"'{ref}' is ambiguous: {listed}",
            where=url,
            hint="write the full name, from refs/ on",
            id="ref-ambiguous",
        )
    return next(iter(found.items()))


def find_short(ctx: Context, git: Git, url: str, ref: str, short: str) -> str:
    """Resolve an abbreviated commit among those that `ref` (a full name) reaches.

    Raises LockError if none or several match, HostError.
    """
    repository = mirror_folder(ctx.places, url)
    with guarded(ctx, repository.with_suffix(".lock"), f"the mirror of {url}"):
        make_bare(ctx, git, repository)
        history = whole_history(git, repository)
        try:
            fetch(ctx, git, repository, url, *history, f"+{ref}:{REMOTE}/asked")
        except GitFailed as error:
            raise explain(error, url) from error
        listed = git.ask(repository, "rev-list", f"{REMOTE}/asked").split()
    fitting = sorted(commit for commit in listed if commit.startswith(short))
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise LockError(
            f"no commit of {ref} starts with {short}",
            where=url,
            hint="give all 40 hex digits of the commit, or the ref that has it",
            id="commit-gone",
        )
    shown = ", ".join(fitting[:5]) + (" and more" if len(fitting) > 5 else "")
    raise LockError(
        f"{short} is ambiguous in {ref}: {shown}",
        where=url,
        hint="give more digits",
        id="commit-ambiguous",
    )
