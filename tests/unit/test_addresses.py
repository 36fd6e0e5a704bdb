"""Addresses given by users, and redirects."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from bakehouse.context import Context
from bakehouse.errors import UsageError
from bakehouse.patches.fetch import SETTING, host_of
from bakehouse.system.http import Unreachable, _next_hop, is_loopback, web_fault

WRONG = {
    "ftp://127.0.0.1/x": "unsupported scheme 'ftp'",
    "file:///etc/passwd": "unsupported scheme 'file'",
    "ssh://git@host/x": "unsupported scheme 'ssh'",
    "git@github.com:owner/name": "no scheme",
    "127.0.0.1:8000": "no scheme",
    "localhost": "no scheme",
    "-u": "no scheme",
    "http://": "no host",
    "http://:80": "no host",
    "http://127.0.0.1:0": "no port",
    "http://127.0.0.1:x": "malformed",
    "http://[::1": "malformed",
    "http://127.0.0.1/a b": "spaces",
    "http://127.0.0.1/\x1b": "control",
    "https://user:sesame@127.0.0.1/x": "a user or a password",
    "https://sesame@127.0.0.1/x": "a user or a password",
}


@pytest.mark.parametrize("task", ["probe", "watch", "patch"])
def test_url_flag_names_what_is_wrong_with_an_address(task: str, context: Context) -> None:
    command = importlib.import_module(f"bakehouse.commands.{task}")
    wrong = {}
    for url, why in WRONG.items():
        with pytest.raises(UsageError) as caught:
            command.run(context, command.Options(url=url))
        error = caught.value
        said = f"{error.what} {error.where} {error.hint}"
        leaks = [word for word in ("\x1b", "sesame", "git URL", "use https, ssh") if word in said]
        if leaks or why not in error.what or not error.what.startswith("--url '") or not error.hint:
            wrong[url] = said
    assert not wrong


def test_url_that_is_valid_has_no_fault() -> None:
    for url in ("http://127.0.0.1:8000", "http://[::1]:1/v1", "https://a.b/c?d=e"):
        assert web_fault(url) is None


def test_patch_url_of_another_machine_must_be_https(context: Context) -> None:
    patch = importlib.import_module("bakehouse.commands.patch")

    with pytest.raises(UsageError, match="http can be changed") as caught:
        patch.run(context, patch.Options(url="http://192.0.2.1/x.diff"))
    assert caught.value.hint == "use https"


def test_github_variable_is_named_if_its_address_is_wrong() -> None:
    for url in ("ftp://host", "host", "http://192.0.2.1", "ssh://git@host", "https://host?q=1"):
        with pytest.raises(UsageError, match=rf"^{SETTING} ") as caught:
            host_of({SETTING: url})
        assert "http" in str(caught.value.hint)


def test_github_variable_replaces_github(context: Context) -> None:
    own = replace(context, environment={SETTING: "https://git.example.com/"})
    assert host_of(own.environment) == "https://git.example.com"
    assert host_of({}) == "https://github.com"


HERE = ("http://127.0.0.1:9/x", "http://localhost/x", "http://[::1]/x", "http://127.1/x",
        "http://0x7f000001/x", "http://2130706433/x", "http://[::ffff:127.0.0.1]/x",
        "http://0.0.0.0/x", "http://127.8.8.8/x")  # fmt: skip
ELSEWHERE = ("https://192.0.2.1/x", "https://example.com/x", "https://localhost.example.com/x",
             "https://[2001:db8::1]/x", "https://[::ffff:192.0.2.1]/x",
             "https://127.0.0.1.example.com/x")  # fmt: skip


def test_loopback_is_recognised_in_every_spelling() -> None:
    assert [url for url in HERE if not is_loopback(url)] == []
    assert [url for url in ELSEWHERE if is_loopback(url)] == []


def test_redirect_between_this_machine_and_another_is_refused() -> None:
    for here in HERE:
        for there in ELSEWHERE:
            with pytest.raises(Unreachable, match=r"^redirected from this machine to another \("):
                _next_hop(here, there)
            with pytest.raises(Unreachable, match=r"^redirected from another machine to this one"):
                _next_hop(there, here.replace("http:", "https:"))


def test_redirect_among_local_or_remote_hosts_is_followed() -> None:
    assert _next_hop(HERE[0], HERE[1]) == HERE[1]
    assert _next_hop(ELSEWHERE[0], ELSEWHERE[1]) == ELSEWHERE[1]
    assert _next_hop("http://192.0.2.7/x", ELSEWHERE[0]) == ELSEWHERE[0]
    assert _next_hop(ELSEWHERE[1], "/y") == "https://example.com/y"
