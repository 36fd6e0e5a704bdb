"""Fetch diffs: pull requests and commits of a GitHub host, and plain URLs.

Uses no token and no API: a host serves `.diff` and `.patch` to anybody, and git names the head.
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
from bakehouse.patches.diff import LARGE_HINT, MAX_BYTES, FilePart, read_diff
from bakehouse.redact import clean, without_credentials
from bakehouse.sources.git_mirror import remote_refs
from bakehouse.system.git import COMMIT, Git, GitFailed
from bakehouse.system.http import Reply, Unreachable, is_loopback, web_fault
from bakehouse.util.retry import BUSY, Retry, TransientError, asks_to_return, retry_after

SETTING = "BAKEHOUSE_GITHUB"
"""Environment variable with the URL of another GitHub host than github.com."""
ATTEMPTS = 4
MAX_COMMITS = 250
"""Most commits of a pull request whose base is looked up."""
FULL_INDEX = "?full_index=1"
"""Asks for whole blob ids: abbreviated ones grow with the repository and change the hash."""
_FINAL = ("redirected", "only http", "the URL is malformed", "the answer is longer")


class CannotFetch(PatchError):
    """The host did not serve the diff; a cached one may be used instead."""


@dataclass(frozen=True)
class Fetched:
    """A diff, parsed, with what else is known about it."""

    data: bytes = field(repr=False)
    parts: tuple[FilePart, ...]
    title: str = ""
    head: str | None = None
    base: str | None = None
    notes: tuple[str, ...] = ()


def host_of(environment: Mapping[str, str]) -> str:
    """Return the URL of the GitHub host: github.com, or BAKEHOUSE_GITHUB. Raises UsageError."""
    host = (environment.get(SETTING) or "https://github.com").rstrip("/")
    _check_address(host, SETTING, f"unset it to use github.com; else as in {SETTING}=https://HOST")
    if urlsplit(host).query or urlsplit(host).fragment:
        raise UsageError(f"{SETTING} must not have a query or a fragment",
                         hint=f"as in {SETTING}=https://HOST")  # fmt: skip
    return host


def _check_address(url: str, named: str, hint: str) -> None:
    """Accept https URLs, and http ones of this machine. Raises UsageError."""
    fault = web_fault(url)
    if fault is None and urlsplit(url).scheme == "http" and not is_loopback(url):
        fault, hint = "http can be changed in transit", "use https"
    if fault:
        shown = clean(without_credentials(url), one_line=True)
        raise UsageError(f"{named} '{shown}' is refused: {fault}", hint=hint, id="patch-url")


def pull_address(environment: Mapping[str, str], repo: str, number: int) -> str:
    """URL of a pull request."""
    return f"{host_of(environment)}/{repo}/pull/{number}"


def commit_address(environment: Mapping[str, str], repo: str, commit: str) -> str:
    """URL of a commit."""
    return f"{host_of(environment)}/{repo}/commit/{commit}"


def fetch_pull(
    ctx: Context, git: Git, repo: str, number: int, known: tuple[str | None, str | None]
) -> Fetched:
    """Fetch a pull request's diff, and its title, head and base if they can be found.

    `known` is a head and its base from before, which is then not looked up again. The head is read
    before and after the diff: a push in between would pair one's diff with another's head.
    Raises PatchError.
    """
    page = pull_address(ctx.environment, repo, number)
    url = f"{host_of(ctx.environment)}/{repo}.git"
    notes: list[str] = []
    for _ in range(3):
        head = _head(ctx, git, url, number, notes)
        data = get_diff(ctx, page)
        parts = read_diff(data, f"{page}.diff")
        mails = _mails(ctx, f"{page}.patch", notes)
        if head is None or _head(ctx, git, url, number, notes) == head:
            break
    else:
        raise PatchError(
            "the pull request is being pushed to: its head changed three times while reading it",
            where=page, hint="wait until its author is done, then fetch it again",
            id="patch-moving",
        )  # fmt: skip
    commits = _commits(mails)
    head = head or (commits[-1] if commits else None)
    base = known[1] if head is not None and head == known[0] else None
    if base is None:
        base = _base(git, url, f"refs/pull/{number}/head", commits, notes)
    return Fetched(data, parts, title_of(mails), head, base, tuple(dict.fromkeys(notes)))


def fetch_commit(ctx: Context, git: Git, repo: str, commit: str) -> Fetched:
    """Fetch the diff of one commit. Raises PatchError."""
    page = commit_address(ctx.environment, repo, commit)
    notes: list[str] = []
    data = get_diff(ctx, page)
    parts = read_diff(data, f"{page}.diff")
    mails = _mails(ctx, f"{page}.patch", notes)
    commits = _commits(mails)
    if commits and commits != [commit]:
        what = f"the host returned commit {commits[0]} instead"
        raise PatchError(what, where=page, id="patch-other", hint="check the URL")
    url = f"{host_of(ctx.environment)}/{repo}.git"
    base = _base(git, url, commit, [commit], notes)
    return Fetched(data, parts, title_of(mails), commit, base, tuple(notes))


def fetch_address(ctx: Context, url: str) -> Fetched:
    """Fetch a diff from any https URL (http on this machine). Raises PatchError, UsageError."""
    hint = "give the https URL of a diff, a commit or a pull request; --file takes a local one"
    _check_address(url, "--url", hint)
    data = get(ctx, url)
    return Fetched(data, read_diff(data, without_credentials(url)), title_of(data))


def get_diff(ctx: Context, page: str) -> bytes:
    """Fetch the diff of a GitHub page. Raises as `get` does."""
    return get(ctx, f"{page}.diff{FULL_INDEX}")


def get(ctx: Context, url: str) -> bytes:
    """Fetch a small text file with retries, after the pauses that a busy host asks for.

    Raises PatchError for what is not text of at most MAX_BYTES, CannotFetch if the host does not
    serve it.
    """
    shown = without_credentials(url)
    try:
        return Retry(ctx.clock.sleep, attempts=ATTEMPTS, say=ctx.progress.say).call(
            _get_once, ctx, url, shown
        )
    except TransientError as error:
        limited = error.after is not None or "429" in error.reason
        raise CannotFetch(
            f"cannot fetch the patch: {error.reason}", where=shown,
            hint="wait, and run it again; a pinned patch needs no network" if limited
            else "check the network and run it again",
            id="rate-limited" if limited else "patch-unreachable",
        ) from None  # fmt: skip


def _get_once(ctx: Context, url: str, shown: str) -> bytes:
    try:
        reply = ctx.http.ask("GET", url, timeout=60, max_bytes=MAX_BYTES)
    except Unreachable as error:
        if error.why.startswith("the answer is longer"):
            what = f"the patch is larger than {MAX_BYTES // 2**20} MiB"
            raise PatchError(what, where=shown, id="patch-large", hint=LARGE_HINT) from None
        if error.why.startswith(_FINAL):
            what = f"cannot fetch the patch: {error.why}"
            hint = "check the URL"
            raise PatchError(what, where=shown, hint=hint, id="patch-redirect") from None
        raise TransientError(error.why) from None
    _check_status(reply, shown)
    if "html" in reply.headers.get("Content-Type", "").lower():
        raise PatchError(
            "the host returned a web page, not a diff", where=shown, id="patch-html",
            hint="this may be a login, a redirect or a rate limit: open it in a browser",
        )  # fmt: skip
    return reply.body


def _check_status(reply: Reply, shown: str) -> None:
    """Raise TransientError, CannotFetch or PatchError for any status but 200."""
    status = reply.status
    if status == 200:
        return
    headers = {name.lower(): value for name, value in reply.headers.items()}
    limited = status == 403 and (
        headers.get("x-ratelimit-remaining") == "0" or "retry-after" in headers
    )
    if status in BUSY or limited:
        after = _requested_pause(headers)
        words = " (rate limited)" if status == 429 or limited else ""
        raise TransientError(f"HTTP {status}{words}{asks_to_return(after)}", after)
    if status in (404, 410):
        raise CannotFetch(
            f"the host does not have the patch: HTTP {status}", where=shown, id="patch-gone",
            hint="check the number and the repository (--repo); it may have been deleted",
        )  # fmt: skip
    redirect = 300 <= status < 400
    raise PatchError(
        f"the host returned a redirect without a target: HTTP {status}" if redirect
        else f"the host refused: HTTP {status}",
        where=shown, id="patch-redirect" if redirect else "patch-refused",
        hint="open it in a browser to see the host's answer" if redirect
        else "a private repository? Save its diff, and use --file",
    )  # fmt: skip


def _requested_pause(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait, by the headers Retry-After or X-RateLimit-Reset."""
    if (after := retry_after(headers)) is not None:
        return after
    reset = headers.get("x-ratelimit-reset", "")
    return max(0.0, int(reset) - time.time()) if reset.isdigit() else None


def _head(ctx: Context, git: Git, url: str, number: int, notes: list[str]) -> str | None:
    """The pull request's head commit, from git; None, and a note, if git does not have it."""
    name = f"refs/pull/{number}/head"
    try:
        head = remote_refs(ctx, git, url, name).get(name)
    except BakehouseError as error:
        notes.append(f"cannot get the head from git: {error.what}")
        return None
    if head is None:
        notes.append("git has no head of this pull request")
    return head


def _mails(ctx: Context, url: str, notes: list[str]) -> bytes:
    """The commits as mails, for their title and ids; empty, and a note, if that fails."""
    try:
        return get(ctx, url)
    except PatchError as error:
        notes.append(f"title and commits are unknown: {error.what}")
        return b""


def _commits(mails: bytes) -> list[str]:
    """Commit ids in a series of mails, in order."""
    found = re.findall(rb"^From ([0-9a-f]{40}) Mon Sep 17 00:00:00 2001\r?$", mails, re.M)
    return [commit.decode() for commit in found]


def title_of(mails: bytes) -> str:
    """The subject of the first mail, at most 200 printable characters; empty without one."""
    found = re.search(rb"^Subject: (.+(?:\r?\n[ \t].+)*)", mails[: 2**16], re.M)
    if not found:
        return ""
    text = " ".join(found[1].decode(errors="replace").split())
    with contextlib.suppress(ValueError, LookupError):  # else the undecoded text
        text = str(email.header.make_header(email.header.decode_header(text)))
    text = re.sub(r"^\[PATCH[^\]]*\]\s*", "", text)
    return clean(text, one_line=True)[:200].strip()


def _base(git: Git, url: str, what: str, commits: list[str], notes: list[str]) -> str | None:
    """The parent of the first commit; None, and a note, if it is not found.

    Fetches commits without files into a temporary repository.
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
            notes.append(f"its base is unknown: {clean(error.what, one_line=True)}")
            return None
    return found if COMMIT.fullmatch(found) else None
