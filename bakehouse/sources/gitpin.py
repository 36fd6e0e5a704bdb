"""Pin a git source: commit, tree, date and submodules."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path

from bakehouse.context import Context
from bakehouse.errors import LockError, UsageError
from bakehouse.lock import GitPin, SubmodulePin
from bakehouse.ports.git import COMMIT, Git, GitFailed, check_url
from bakehouse.recipe.model import FULL_COMMIT, Source
from bakehouse.redact import clean
from bakehouse.sources.mirror import ensure_commit, has_whole_history
from bakehouse.sources.refs import find_ref, find_short

MAX_SUBMODULES = 200
MAX_DEPTH = 8


def pin_git(ctx: Context, git: Git, source: Source) -> GitPin:
    """Fetch and pin a commit. Raises LockError, NotFound, HostError, UsageError."""
    url, commit = str(source.git), str(source.commit)
    check_url(url)
    ref_name = ref_commit = None
    if source.ref:
        ref_name, ref_commit = find_ref(ctx, git, url, source.ref)
    if not FULL_COMMIT.fullmatch(commit):
        if ref_name is None:
            raise LockError(f"commit {commit} is abbreviated and has no ref", where=url)
        commit = find_short(ctx, git, url, ref_name, commit)
    repository = ensure_commit(ctx, git, url, commit, ref=ref_name)
    # One call, so that tree and date come from the same object.
    shown = git.ask(
        repository, "show", "-s", "--no-show-signature", "--format=%T %ct", commit, "--"
    )
    tree, _, date = shown.strip().partition(" ")
    if not COMMIT.fullmatch(tree) or not date.isdigit():
        raise LockError(
            f"git printed no tree and date for commit {commit}: '{clean(shown.strip())}'", where=url
        )
    number = None
    if has_whole_history(git, repository):
        number = int(git.ask(repository, "rev-list", "--count", commit))
    return GitPin(
        url=url,
        ref=source.ref,
        ref_commit=ref_commit,
        commit=commit,
        tree=tree,
        date=int(date),
        number=number,
        submodules=tuple(_submodules(ctx, git, repository, url, commit)),
    )


def _submodules(
    ctx: Context, git: Git, repository: Path, url: str, commit: str
) -> Iterator[SubmodulePin]:
    """Pin the submodules of a tree, and theirs."""
    todo = [(repository, url, commit, "", 0)]
    seen = 0
    while todo:
        repository, url, commit, below, depth = todo.pop(0)
        links = _gitlinks(git, repository, commit)
        urls = _urls(git, repository, commit) if links else {}
        for path, wanted in sorted(links.items()):
            seen += 1
            if seen > MAX_SUBMODULES or depth >= MAX_DEPTH:
                raise LockError("too many submodules", where=url)
            if path not in urls:
                raise LockError(
                    f"submodule '{clean(path)}' has no URL in .gitmodules",
                    where=f"{url} at {commit}",
                    hint="choose another commit: this one is incomplete",
                )
            there = resolve_url(url, urls[path])
            mirror = ensure_commit(ctx, git, there, wanted)
            full = posixpath.join(below, path)
            yield SubmodulePin(
                path=full, url=there, commit=wanted,
                tree=git.object_id(mirror, f"{wanted}^{{tree}}"),
            )  # fmt: skip
            todo.append((mirror, there, wanted, full, depth + 1))


def _gitlinks(git: Git, repository: Path, commit: str) -> dict[str, str]:
    """Return the commit of each submodule path in a commit's tree."""
    links = {}
    for row in git.ask(repository, "ls-tree", "-r", "-z", "--full-tree", commit).split("\0"):
        head, _, path = row.partition("\t")
        if head.startswith("160000 "):
            links[path] = head.split()[2]
    return links


def _urls(git: Git, repository: Path, commit: str) -> dict[str, str]:
    """Return the URL of each path in `.gitmodules`."""
    try:
        out = git.ask(repository, "config", "--blob", f"{commit}:.gitmodules", "--list", "-z")
    except GitFailed:
        return {}
    parts: dict[str, dict[str, str]] = {}
    for row in out.split("\0"):
        key, _, value = row.partition("\n")
        section, _, name = key.rpartition(".")
        if section.startswith("submodule.") and name in ("path", "url"):
            parts.setdefault(section, {}).setdefault(name, value)
    return {part["path"]: part["url"] for part in parts.values() if {"path", "url"} <= part.keys()}


def resolve_url(parent: str, url: str) -> str:
    """Return a submodule's URL; `./` and `../` are relative to its parent's.

    Raises UsageError for an invalid URL, or an unsupported protocol.
    """
    if url.startswith(("./", "../")):
        scheme, _, rest = parent.rstrip("/").partition("://")
        host, _, path = rest.partition("/")
        joined = posixpath.normpath(posixpath.join(f"/{path}", url))
        if url.count("../") > len([part for part in path.split("/") if part]):
            raise UsageError(f"the submodule URL '{clean(url)}' leads above its host", where=parent)
        url = f"{scheme}://{host}{joined}"
    check_url(url)
    return url
