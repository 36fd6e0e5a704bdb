"""Hermetic git: no configuration, hooks, filters, helpers or prompts of the user or the system.

A command may use the protocol of its URL only, so that neither a redirect nor a submodule can lead
to another one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bakehouse.errors import HostError, UsageError
from bakehouse.redact import clean, without_credentials
from bakehouse.system.http import is_loopback
from bakehouse.system.process import Processes, environment

OLDEST = (2, 32)
"""The oldest git with GIT_CONFIG_GLOBAL and GIT_CONFIG_COUNT, which keep configuration out."""

COMMIT = re.compile(r"[0-9a-f]{40}")

_CONFIG: Mapping[str, str] = {
    "core.hooksPath": os.devnull,
    "core.attributesFile": os.devnull,
    "core.excludesFile": os.devnull,
    "core.fsmonitor": "false",
    "core.autocrlf": "false",
    "core.eol": "lf",
    "core.symlinks": "true",
    "core.fileMode": "true",
    "core.precomposeUnicode": "false",
    "core.quotePath": "false",
    "core.looseCompression": "1",
    "credential.helper": "",
    "fetch.recurseSubmodules": "false",
    "fetch.unpackLimit": "1",  # a fetch is one pack, renamed into place, and never loose halves
    "gc.auto": "0",
    "maintenance.auto": "false",
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "60",
    "submodule.recurse": "false",
    "advice.detachedHead": "false",
}


class GitFailed(HostError):
    """A git command failed; `said` is its output, cleaned.

    Callers that know what it means raise a better error. Otherwise it is a problem of this machine,
    such as a full disk or a damaged repository.
    """

    default_id = "git"

    def __init__(self, command: str, code: int, said: str) -> None:
        self.command = command
        self.code = code
        self.said = said
        super().__init__(
            f"git {command} failed: {self.first()}",
            where=f"git {command}, exit code {code}",
            hint="check the disk and its free space, and run it again",
        )

    def first(self) -> str:
        """The first line that names an error, or the first line at all."""
        lines = [line.strip() for line in self.said.splitlines() if line.strip()]
        marked = [x for x in lines if x.startswith(("fatal:", "error:", "remote: error"))]
        return (marked or lines or ["no output"])[0]


def check_url(url: str) -> str:
    """Return the scheme of a repository's URL. Raises UsageError for a URL that is not allowed.

    Allowed are https, ssh and file, and http to this machine. Credentials in a URL would end up in
    locks and logs; a URL with a leading `-` would be an option.
    """

    def refuse(why: str, hint: str) -> UsageError:
        shown = without_credentials(url)
        return UsageError(f"the git URL '{shown}' is refused: {why}", hint=hint, id="git-url")

    usual = "write it as in https://github.com/ggml-org/llama.cpp.git"
    if not url or url.startswith("-") or re.search(r"[\s\x00-\x1f\x7f\\]", url):
        raise refuse("it is empty, starts with '-', or holds spaces or control characters", usual)
    if "::" in url.partition("://")[0]:
        raise refuse("remote helpers are not supported", usual)
    scheme, separator, rest = url.partition("://")
    if not separator:
        if re.match(r"[\w.-]+@[\w.-]+:", url):
            host, _, path = url.partition(":")
            raise refuse("it has no scheme", f"write it as ssh://{host}/{path.lstrip('/')}")
        raise refuse("it has no scheme", f"{usual}, or file:///absolute/path for a local one")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise refuse(f"it is malformed ({error})", usual) from None
    if scheme not in ("https", "http", "ssh", "file"):
        raise refuse(f"unsupported scheme '{clean(scheme)}'", "use https, ssh or file")
    if parts.query or parts.fragment:
        raise refuse("it has a query or a fragment", usual)
    if parts.password is not None or (parts.username is not None and scheme != "ssh"):
        raise refuse(
            "it contains credentials", "remove them; for a private repository use ssh and its agent"
        )
    if scheme == "file":
        if parts.netloc or not parts.path.startswith("/") or not rest.strip("/"):
            raise refuse("it names no absolute path", "write it as file:///absolute/path")
        return scheme
    host = parts.hostname or ""
    if not host or host.startswith("-") or (parts.username or "").startswith("-"):
        raise refuse("it names no host", usual)
    if scheme == "http" and not is_loopback(url):
        raise refuse("http can be tampered with", "use https")
    return scheme


def file_path(url: str) -> Path:
    """The path of a file URL."""
    return Path(unquote(urlsplit(url).path))


class Git:
    """Runs git. One value serves any number of repositories."""

    def __init__(self, processes: Processes, base: Mapping[str, str] | None = None) -> None:
        self._processes = processes
        self._base = os.environ if base is None else base
        self._known_good = False

    def _environment(self, url: str | None, extra: Mapping[str, str] | None) -> dict[str, str]:
        scheme = check_url(url) if url else "none"
        config = dict(_CONFIG)
        if scheme == "http":
            config["http.followRedirects"] = "false"  # loopback may not lead out in plain text
            config["http.proxy"] = ""
        # A host that is reached from a corporate network may need its own authorities.
        passed = ("GIT_SSL_CAINFO", "GIT_SSL_CAPATH", "SSH_AUTH_SOCK")
        env = {name: self._base[name] for name in passed if name in self._base}
        env |= {
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_NO_LAZY_FETCH": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "",
            "GIT_LFS_SKIP_SMUDGE": "1",
            "GIT_ALLOW_PROTOCOL": scheme,
            "GIT_SSH_COMMAND": "ssh -oBatchMode=yes -oConnectTimeout=20",
            "GIT_CONFIG_COUNT": str(len(config)),
        }
        for number, (key, value) in enumerate(config.items()):
            env[f"GIT_CONFIG_KEY_{number}"] = key
            env[f"GIT_CONFIG_VALUE_{number}"] = value
        return environment({**env, **(extra or {})}, self._base)

    def ask(
        self,
        repository: Path | None,
        *arguments: str,
        url: str | None = None,
        stdin: bytes | None = None,
        extra: Mapping[str, str] | None = None,
        timeout: float = 120,
    ) -> str:
        """Run a short command and return its standard output. Raises GitFailed.

        `url` is the only remote that the command may use.
        """
        return self.ask_both(
            repository, *arguments, url=url, stdin=stdin, extra=extra, timeout=timeout
        )[0]

    def ask_both(
        self,
        repository: Path | None,
        *arguments: str,
        url: str | None = None,
        stdin: bytes | None = None,
        extra: Mapping[str, str] | None = None,
        timeout: float = 120,
    ) -> tuple[str, str]:
        """Run a short command; return standard output and standard error. Raises GitFailed."""
        self.check()
        argv = self._argv(repository, arguments)
        done = self._processes.capture(
            argv, env=self._environment(url, extra), stdin=stdin, timeout=timeout
        )
        if not done.ok:
            raise _failed(arguments[0], done.code, done.err or done.out)
        return done.out, done.err

    def run(
        self,
        repository: Path,
        *arguments: str,
        url: str,
        on_line: Callable[[str], None] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Run a long command, such as a fetch, which ends when we end. Raises GitFailed."""
        self.check()
        argv = self._argv(repository, arguments)
        done = self._processes.run(
            argv, env=self._environment(url, None), on_line=on_line, timeout=timeout
        )
        if not done.ok:
            raise _failed(arguments[0], done.code, "\n".join(done.lines))

    def _argv(self, repository: Path | None, arguments: tuple[str, ...]) -> tuple[str, ...]:
        where = (f"--git-dir={repository}",) if repository else ()
        return ("git", "--no-pager", "--literal-pathspecs", *where, *arguments)

    def object_id(self, repository: Path, expression: str) -> str:
        """The full object id of an expression. Raises GitFailed."""
        out = self.ask(repository, "rev-parse", "--verify", "--end-of-options", expression).strip()
        if not COMMIT.fullmatch(out):
            raise _failed("rev-parse", 0, f"error: '{clean(out)}' is not an object id")
        return out

    def check(self) -> None:
        """Check once that git is installed and new enough. Raises HostError."""
        if self._known_good:
            return
        done = self._processes.capture(("git", "version"), env=environment(None, self._base))
        if done.code == 127:
            raise HostError(
                "git is not installed", where="PATH", hint="apt-get install git", id="no-git"
            )
        found = re.search(r"(\d+)\.(\d+)", done.out)
        if not done.ok or not found:
            raise HostError("git does not run", where=clean(done.err.strip()) or "git version")
        if (int(found[1]), int(found[2])) < OLDEST:
            raise HostError(
                f"git {found[0]} is too old: it cannot ignore the user's configuration",
                where="git version",
                hint=f"install git {OLDEST[0]}.{OLDEST[1]} or newer",
                id="old-git",
            )
        self._known_good = True


def _failed(command: str, code: int, said: str) -> HostError:
    """Make the error for a failed command; dubious ownership is the same for all."""
    said = without_credentials(said)
    if found := re.search(r"detected dubious ownership in repository at '([^']*)'", said):
        return foreign_owner(found[1])
    return GitFailed(command, code, said)


def foreign_owner(repository: str) -> HostError:
    """Make the error for a repository that belongs to another user."""
    return HostError(
        "git refuses a repository that belongs to another user",
        where=repository,
        hint=f"run as its owner, or make it yours: chown -R \"$(id -un)\" '{repository}'",
        id="git-ownership",
    )
