"""Diffs from where they are published: pull requests and commits of a GitHub host, plain addresses.

No token is used and no API: a host gives `.diff` and `.patch` to anybody, and git tells the head.
"""

from __future__ import annotations

import contextlib
import email.header
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from bakehouse.context import Context
from bakehouse.errors import BakehouseError, PatchError, UsageError
from bakehouse.ports.git import COMMIT, Git, GitFailed
from bakehouse.ports.http import Reply, Unreachable, is_loopback, web_fault
from bakehouse.redact import clean, without_credentials
from bakehouse.sources.diffs import MAX_BYTES, FilePart, read_diff
from bakehouse.sources.refs import remote_refs
from bakehouse.util.retry import BUSY, Retry, TransientError, asks_to_return, retry_after

SETTING = "BAKEHOUSE_GITHUB"
"""The environment variable that names another host than github.com, such as a company's own."""
ATTEMPTS = 4
MAX_COMMITS = 250
"""Of a pull request, for finding what it starts from."""
FULL_INDEX = "?full_index=1"
"""Abbreviated blob ids grow with the repository, and with them the diff's hash would change."""
_FINAL = ("redirected", "only http", "the URL is malformed", "the answer is longer")


class CannotFetch(PatchError):
    """The host did not give the diff; what is pinned and kept may stand in for it."""


@dataclass(frozen=True)
class Fetched:
    """A diff as it came, read, and what else was learned."""

    data: bytes = field(repr=False)
    parts: tuple[FilePart, ...]
    title: str = ""
    head: str | None = None
    base: str | None = None
    notes: tuple[str, ...] = ()


def host_of(environment: Mapping[str, str]) -> str:
    """The GitHub host: github.com, or what BAKEHOUSE_GITHUB names. Raises UsageError."""
    host = (environment.get(SETTING) or "https://github.com").rstrip("/")
    _check_address(host, SETTING, f"unset it to use github.com; else as in {SETTING}=https://HOST")
    if urlsplit(host).query or urlsplit(host).fragment:
        raise UsageError(f"{SETTING} is refused: it has a query or a fragment",
                         hint=f"as in {SETTING}=https://HOST")  # fmt: skip
    return host


def _check_address(url: str, named: str, hint: str) -> None:
    """Refuse what is no https address, or http one of this machine. Raises UsageError."""
    fault = web_fault(url)
    if fault is None and urlsplit(url).scheme == "http" and not is_loopback(url):
        fault, hint = "http can be changed on its way", "use https"
    if fault:
        shown = clean(without_credentials(url), one_line=True)
        raise UsageError(f"{named} '{shown}' is refused: {fault}", hint=hint, id="patch-url")


def pull_address(environment: Mapping[str, str], repo: str, number: int) -> str:
    """The page of a pull request."""
    return f"{host_of(environment)}/{repo}/pull/{number}"


def commit_address(environment: Mapping[str, str], repo: str, commit: str) -> str:
    """The page of a commit."""
    return f"{host_of(environment)}/{repo}/commit/{commit}"


def fetch_pull(
    ctx: Context, git: Git, repo: str, number: int, known: tuple[str | None, str | None]
) -> Fetched:
    """Fetch a pull request's diff, with its title, head and base where they can be learned.

    `known` is a head and the base that was found for it, which is then not looked for again.

    The head is asked before and after: a push in between would give the diff of one and the head
    of another. Raises PatchError.
    """
    page = pull_address(ctx.environment, repo, number)
    url = f"{host_of(ctx.environment)}/{repo}.git"
    notes: list[str] = []
    for _ in range(3):
        head = _head(ctx, git, url, number, notes)
        data = get(ctx, f"{page}.diff{FULL_INDEX}")
        parts = read_diff(data, f"{page}.diff")
        mails = _mails(ctx, f"{page}.patch", notes)
        if head is None or _head(ctx, git, url, number, notes) == head:
            break
    else:
        raise PatchError(
            "the pull request is being pushed to: its head changed three times while it was read",
            where=page, hint="wait until its author has finished, then fetch it again",
            id="patch-moving",
        )  # fmt: skip
    commits = _commits(mails)
    head = head or (commits[-1] if commits else None)
    base = known[1] if head is not None and head == known[0] else None
    if base is None:
        base = _base(git, url, f"refs/pull/{number}/head", commits, notes)
    return Fetched(data, parts, title_of(mails), head, base, tuple(dict.fromkeys(notes)))


def fetch_commit(ctx: Context, git: Git, repo: str, commit: str) -> Fetched:
    """Fetch what one commit changes. Raises PatchError."""
    page = commit_address(ctx.environment, repo, commit)
    notes: list[str] = []
    data = get(ctx, f"{page}.diff{FULL_INDEX}")
    parts = read_diff(data, f"{page}.diff")
    mails = _mails(ctx, f"{page}.patch", notes)
    commits = _commits(mails)
    if commits and commits != [commit]:
        raise PatchError(f"the host gave commit {commits[0]} instead", where=page, id="patch-other",
                         hint="see that the address is right")  # fmt: skip
    url = f"{host_of(ctx.environment)}/{repo}.git"
    base = _base(git, url, commit, [commit], notes)
    return Fetched(data, parts, title_of(mails), commit, base, tuple(notes))


def fetch_address(ctx: Context, url: str) -> Fetched:
    """Fetch a diff from any https address (http on this machine). Raises PatchError, UsageError."""
    hint = "the https address of a diff, a commit or a pull request; --file takes one on this disk"
    _check_address(url, "--url", hint)
    data = get(ctx, url)
    return Fetched(data, read_diff(data, without_credentials(url)), title_of(data))


def get(ctx: Context, url: str) -> bytes:
    """Fetch a small text, with retries; refuses web pages. Raises PatchError (CannotFetch).

    Busy hosts are asked again with growing pauses, or when they ask for it, within bounds.
    """
    shown = without_credentials(url)
    try:
        return Retry(ctx.clock.sleep, attempts=ATTEMPTS, say=ctx.progress.say).call(
            _get_once, ctx, url, shown
        )
    except TransientError as error:
        limited = error.after is not None or "429" in error.reason
        raise CannotFetch(
            f"the patch cannot be fetched: {error.reason}",
            where=shown,
            hint="wait, and run it again; what is pinned already needs no network"
            if limited else "check the network and run it again",
            id="rate-limited" if limited else "patch-unreachable",
        ) from None  # fmt: skip


def _get_once(ctx: Context, url: str, shown: str) -> bytes:
    try:
        reply = ctx.http.ask("GET", url, timeout=60, max_bytes=MAX_BYTES)
    except Unreachable as error:
        if error.why.startswith("the answer is longer"):
            raise PatchError(
                f"the patch is larger than {MAX_BYTES // 2**20} MiB", where=shown, id="patch-large",
                hint="so large a change is a branch: make its commit the recipe's source",
            ) from None  # fmt: skip
        if error.why.startswith(_FINAL):
            raise PatchError(
                f"the patch cannot be fetched: {error.why}", where=shown,
                hint="see that the address is right", id="patch-redirect",
            ) from None  # fmt: skip
        raise TransientError(error.why) from None
    _judge_status(reply, shown)
    if "html" in reply.headers.get("Content-Type", "").lower():
        raise PatchError(
            "the host answered with a web page, not a diff", where=shown, id="patch-html",
            hint="a login, a redirect or a rate limit stands before it: open it in a browser",
        )  # fmt: skip
    return reply.body


def _judge_status(reply: Reply, shown: str) -> None:
    """Raise what an answer other than 200 means."""
    status = reply.status
    if status == 200:
        return
    headers = {name.lower(): value for name, value in reply.headers.items()}
    limited = status == 403 and (
        headers.get("x-ratelimit-remaining") == "0" or "retry-after" in headers
    )
    if status in BUSY or limited:
        after = _asked_pause(headers)
        words = " (rate limited)" if status == 429 or limited else ""
        raise TransientError(f"the host answers {status}{words}{asks_to_return(after)}", after)
    if status in (404, 410):
        raise CannotFetch(
            f"the host does not have it (any more): it answers {status}", where=shown,
            hint="see that the number and the repository (--repo) are right", id="patch-gone",
        )  # fmt: skip
    if 300 <= status < 400:
        raise PatchError(
            f"the host answers with a redirect ({status}) that leads nowhere", where=shown,
            hint="open it in a browser to see what the host says", id="patch-redirect",
        )  # fmt: skip
    raise PatchError(
        f"the host answers {status}", where=shown, id="patch-refused",
        hint="a private repository? Save its diff, and give it with --file",
    )  # fmt: skip


def _asked_pause(headers: Mapping[str, str]) -> float | None:
    """Seconds that the host asks us to wait, by either header."""
    if (after := retry_after(headers)) is not None:
        return after
    reset = headers.get("x-ratelimit-reset", "")
    return max(0.0, int(reset) - time.time()) if reset.isdigit() else None


def _head(ctx: Context, git: Git, url: str, number: int, notes: list[str]) -> str | None:
    """The pull request's head commit, as git has it; None, and a note, where it does not say."""
    name = f"refs/pull/{number}/head"
    try:
        head = remote_refs(ctx, git, url, name).get(name)
    except BakehouseError as error:
        notes.append(f"git could not be asked for the head: {error.what}")
        return None
    if head is None:
        notes.append("git has no head of this pull request")
    return head


def _mails(ctx: Context, url: str, notes: list[str]) -> bytes:
    """The commits as mails, for their title and ids; nothing, and a note, where that fails."""
    try:
        return get(ctx, url)
    except PatchError as error:
        notes.append(f"title and commits are not known: {error.what}")
        return b""


def _commits(mails: bytes) -> list[str]:
    """Ids of the commits in a series of mails, in their order."""
    found = re.findall(rb"^From ([0-9a-f]{40}) Mon Sep 17 00:00:00 2001\r?$", mails, re.M)
    return [commit.decode() for commit in found]


def title_of(mails: bytes) -> str:
    """The subject of the first mail, safe to print; empty where there is none."""
    found = re.search(rb"^Subject: (.+(?:\r?\n[ \t].+)*)", mails[: 2**16], re.M)
    if not found:
        return ""
    text = " ".join(found[1].decode(errors="replace").split())
    with contextlib.suppress(ValueError, LookupError):  # else it is shown as it is written
        text = str(email.header.make_header(email.header.decode_header(text)))
    text = re.sub(r"^\[PATCH[^\]]*\]\s*", "", text)
    return clean(text, one_line=True)[:200].strip()


def _base(git: Git, url: str, what: str, commits: list[str], notes: list[str]) -> str | None:
    """The commit that the first of these starts from; None, and a note, where it is not found.

    Only commits are fetched, no files, into a repository that is thrown away.
    """
    if not 0 < len(commits) <= MAX_COMMITS:
        return None
    with tempfile.TemporaryDirectory(prefix="bakehouse-base-") as scratch:
        repository = Path(scratch, "base.git")
        try:
            git.ask(None, "init", "--bare", "--quiet", "--template=", str(repository))
            git.run(
                repository, "fetch", "--no-tags", "--filter=tree:0", f"--depth={len(commits) + 1}",
                "--", url, what, url=url, timeout=120,
            )  # fmt: skip
            found = git.object_id(repository, f"{commits[0]}^")
        except (GitFailed, BakehouseError) as error:
            notes.append(f"what it starts from is not known: {clean(error.what, one_line=True)}")
            return None
    return found if COMMIT.fullmatch(found) else None
