"""Addresses that people give, and those that hosts redirect to."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from bakehouse.context import Context
from bakehouse.errors import UsageError
from bakehouse.ports.http import Unreachable, _next_hop, is_loopback, web_fault
from bakehouse.sources.upstream import SETTING, host_of

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


@pytest.mark.parametrize(("url", "why"), WRONG.items())
@pytest.mark.parametrize("task", ["probe", "watch", "patch"])
def test_each_flag_that_takes_an_address_says_what_is_wrong_with_it(
    task: str, url: str, why: str, context: Context
) -> None:
    command = importlib.import_module(f"bakehouse.commands.{task}")

    with pytest.raises(UsageError) as caught:
        command.run(context, command.Options(url=url))

    said = f"{caught.value.what} {caught.value.where} {caught.value.hint}"
    assert caught.value.what.startswith("--url '")
    assert why in caught.value.what
    assert "\x1b" not in said
    assert "sesame" not in said
    assert "git URL" not in said
    assert "use https, ssh or file" not in said
    assert caught.value.hint


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "http://[::1]:1/v1", "https://a.b/c?d=e"])
def test_an_address_that_can_be_asked_has_no_fault(url: str) -> None:
    assert web_fault(url) is None


def test_a_diff_comes_by_https_from_other_machines(context: Context) -> None:
    patch = importlib.import_module("bakehouse.commands.patch")

    with pytest.raises(UsageError, match="http can be changed") as caught:
        patch.run(context, patch.Options(url="http://192.0.2.1/x.diff"))
    assert caught.value.hint == "use https"


@pytest.mark.parametrize(
    "url", ["ftp://host", "host", "http://192.0.2.1", "ssh://git@host", "https://host?q=1"]
)
def test_a_git_host_that_cannot_be_asked_is_named_by_its_variable(url: str) -> None:
    with pytest.raises(UsageError, match=rf"^{SETTING} ") as caught:
        host_of({SETTING: url})
    assert "http" in str(caught.value.hint)


def test_a_git_host_of_ones_own_is_taken(context: Context) -> None:
    own = replace(context, environment={SETTING: "https://git.example.com/"})
    assert host_of(own.environment) == "https://git.example.com"
    assert host_of({}) == "https://github.com"


HERE = ("http://127.0.0.1:9/x", "http://localhost/x", "http://[::1]/x", "http://127.1/x",
        "http://0x7f000001/x", "http://2130706433/x", "http://[::ffff:127.0.0.1]/x",
        "http://0.0.0.0/x", "http://127.8.8.8/x")  # fmt: skip
ELSEWHERE = ("https://192.0.2.1/x", "https://example.com/x", "https://localhost.example.com/x",
             "https://[2001:db8::1]/x", "https://[::ffff:192.0.2.1]/x",
             "https://127.0.0.1.example.com/x")  # fmt: skip


@pytest.mark.parametrize("url", HERE)
def test_this_machine_is_known_however_it_is_written(url: str) -> None:
    assert is_loopback(url)


@pytest.mark.parametrize("url", ELSEWHERE)
def test_another_machine_is_not_taken_for_this_one(url: str) -> None:
    assert not is_loopback(url)


@pytest.mark.parametrize("here", HERE)
@pytest.mark.parametrize("there", ELSEWHERE)
def test_no_redirect_leads_from_this_machine_to_another_or_back(here: str, there: str) -> None:
    with pytest.raises(Unreachable, match=r"^redirected from this machine to another \("):
        _next_hop(here, there)
    with pytest.raises(Unreachable, match=r"^redirected from another machine to this one \("):
        _next_hop(there, here.replace("http:", "https:"))


def test_a_redirect_among_machines_of_one_kind_is_followed() -> None:
    assert _next_hop(HERE[0], HERE[1]) == HERE[1]
    assert _next_hop(ELSEWHERE[0], ELSEWHERE[1]) == ELSEWHERE[1]
    assert _next_hop("http://192.0.2.7/x", ELSEWHERE[0]) == ELSEWHERE[0]
    assert _next_hop(ELSEWHERE[1], "/y") == "https://example.com/y"
