"""Resolve the refs of a repository, and abbreviated commits."""

from __future__ import annotations

import re
from functools import partial

from bakehouse.context import Context
from bakehouse.errors import HostError, LockError, UsageError
from bakehouse.ports.git import COMMIT, Git, GitFailed, check_url
from bakehouse.redact import clean
from bakehouse.sources.files import guarded
from bakehouse.sources.mirror import (
    REMOTE,
    explain,
    fetch,
    make_bare,
    mirror_folder,
    retry_git,
    whole_history,
)


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
            hint="check the URL, and that no login page or proxy stands before it",
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
