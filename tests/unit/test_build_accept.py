"""Checks of a configured build, on recorded output of CMake with one thing wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bakehouse.engines.base import CacheEntry, Compiler, Configured, Expected, Target
from bakehouse.engines.llamacpp.cmake import check_configured
from bakehouse.models import Check, Verdict, not_passed

LOG = (
    "-- The C compiler identification is GNU 12.2.0",
    "-- ggml commit:  b0a2feb64",
    "CMake Warning:",
    "  Manually-specified variables were not used by the project:",
    "",
    "    FETCHCONTENT_FULLY_DISCONNECTED",
    "",
    "",
    "-- Build files have been written to: /w/build",
)
EXPECTED = Expected(
    generator="Ninja",
    build_type="Release",
    compilers={
        "C": Compiler(path="/usr/bin/cc", version="12.2.0"),
        "CXX": Compiler(path="/usr/bin/c++", version="12.2.0"),
    },
    forced={"LLAMA_BUILD_UI": "OFF", "CMAKE_INSTALL_RPATH": "$ORIGIN"},
    asked={"GGML_BLAS": "OFF"},
    targets=("llama-server",),
)
GOOD = Configured(
    log=LOG,
    log_path="/run/configure.log",
    cache={
        "CMAKE_BUILD_TYPE": CacheEntry("Release", "STRING"),
        "LLAMA_BUILD_UI": CacheEntry("OFF", "BOOL"),
        "CMAKE_INSTALL_RPATH": CacheEntry("$ORIGIN", "UNINITIALIZED"),
        "GGML_BLAS": CacheEntry("FALSE", "BOOL"),
        "GGML_LTO": CacheEntry("OFF", "BOOL"),
    },
    cache_path="/w/build/CMakeCache.txt",
    generator="Ninja",
    compilers={
        "C": Compiler(path="/usr/bin/cc", version="12.2.0", id="GNU"),
        "CXX": Compiler(path="/usr/bin/c++", version="12.2.0", id="GNU"),
        "ASM": Compiler(path="/usr/bin/cc", version=""),
    },
    targets={"llama-server": Target("llama-server", "EXECUTABLE", ("bin/llama-server",))},
)


def judge(configured: Configured, expected: Expected = EXPECTED) -> tuple[Check, ...]:
    return check_configured(configured, expected)


def only(checks: tuple[Check, ...], name: str) -> Check:
    """The one check that did not pass."""
    missing = not_passed(checks)
    assert [c.id for c in missing] == [name]
    return missing[0]


def cached(**values: str | None) -> Mapping[str, CacheEntry]:
    changed = {n: CacheEntry(v, "BOOL") for n, v in values.items() if v is not None}
    return {n: e for n, e in {**GOOD.cache, **changed}.items() if values.get(n, "") is not None}


def test_configure_checks_pass() -> None:
    checks = judge(GOOD)
    assert not_passed(checks) == ()
    assert len(checks) == 9


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"generator": "Unix Makefiles"}, "configure.generator", "Unix Makefiles"),
    (
        {"compilers": {**GOOD.compilers, "C": Compiler(path="/usr/bin/cc", version="13.1.0")}},
        "configure.compiler.C", "/usr/bin/cc 13.1.0",
    ),
    (
        {"compilers": {**GOOD.compilers, "CXX": Compiler(path="/opt/c++", version="12.2.0")}},
        "configure.compiler.CXX", "/opt/c++ 12.2.0",
    ),
    ({"cache": cached(CMAKE_BUILD_TYPE="Debug")}, "configure.build_type", "Debug"),
    ({"cache": cached(LLAMA_BUILD_UI="ON")}, "configure.forced", "LLAMA_BUILD_UI=ON instead"),
    ({"cache": cached(LLAMA_BUILD_UI=None)}, "configure.forced", "no LLAMA_BUILD_UI in"),
    ({"cache": cached(GGML_BLAS="ON")}, "configure.asked", "GGML_BLAS=ON"),
    (
        {"log": (*LOG, "-- Downloading https://example.org/ui.tar.gz")},
        "configure.no_download", "-- Downloading https://example.org/ui.tar.gz",
    ),
    ({"log": (*LOG, "Cloning into 'kleidiai-src'...")}, "configure.no_download", "Cloning"),
    (
        {"targets": {"llama-serve": Target("llama-serve", "EXECUTABLE")}},
        "configure.targets", "llama-server does not exist (did you mean llama-serve?)",
    ),
]  # fmt: skip


def test_configure_check_fails_for_one_thing_wrong() -> None:
    for change, name, observed in WRONG:
        check = only(judge(replace(GOOD, **change)), name)
        assert check.verdict is Verdict.FAILED, name
        assert check.observed.startswith(observed)


def test_configure_check_does_not_pass_without_evidence() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"compilers": {"C": GOOD.compilers["C"]}}, "configure.compiler.CXX"),
        ({"targets": {}}, "configure.targets"),
        ({"cache": cached(CMAKE_BUILD_TYPE=None)}, "configure.build_type"),
        ({"log": ()}, "configure.no_download"),
    ]
    for change, name in rows:
        assert only(judge(replace(GOOD, **change)), name).verdict is Verdict.UNKNOWN


def test_configure_check_finds_a_definition_that_nothing_reads() -> None:
    asked = EXPECTED.model_copy(update={"asked": {"GGML_LT0": "ON", "GGML_BLAS": "OFF"}})
    log = (*LOG[:5], "    FETCHCONTENT_FULLY_DISCONNECTED", "    GGML_LT0", "", "GGML_BLAS")
    configured = replace(
        GOOD, log=log, cache={**GOOD.cache, "GGML_LT0": CacheEntry("ON", "UNINITIALIZED")}
    )
    check = only(judge(configured, asked), "configure.used")
    assert check.observed == "GGML_LT0 is not used (did you mean GGML_LTO?)"
    assert check.where == "/run/configure.log:7"


def test_configure_check_finds_a_definition_that_only_seems_read() -> None:
    """ggml reads all that begins with GGML_, so that CMake calls none of it unused."""
    asked = EXPECTED.model_copy(update={"asked": {"GGML_BLAS": "OFF", "GGML_LT0": "ON"}})
    cache = {**GOOD.cache, "GGML_LT0": CacheEntry("ON", "UNINITIALIZED")}
    known = replace(GOOD, cache=cache, named=frozenset({"GGML_LT0"}))
    assert not_passed(judge(known, asked)) == ()
    check = only(judge(replace(GOOD, cache=cache), asked), "configure.used")
    assert check.observed == "GGML_LT0 is not used (did you mean GGML_LTO?)"
    assert check.where == GOOD.cache_path


def test_configure_check_fails_for_a_switch_that_is_neither_on_nor_off() -> None:
    """CMake silently takes any such text for one of the two."""
    for value in ("onn", "ON;OFF", "ture", "-DX=1"):
        asked = EXPECTED.model_copy(update={"asked": {"GGML_BLAS": value}})
        check = only(judge(replace(GOOD, cache=cached(GGML_BLAS=value)), asked), "configure.asked")
        assert check.observed == f"GGML_BLAS={value}, but the project expects ON or OFF"


def test_configure_check_allows_unused_definitions_of_ours() -> None:
    """Older trees do not know all that is forced."""
    assert not_passed(judge(replace(GOOD, log=(*LOG[:6], "    LLAMA_BUILD_UI", "")))) == ()


def test_configure_check_follows_a_link_to_the_planned_compiler(tmp_path: Any) -> None:
    link = tmp_path / "cc"
    link.symlink_to("/usr/bin/cc")
    compilers = {**GOOD.compilers, "C": Compiler(path=str(link), version="12.2.0")}
    assert not_passed(judge(replace(GOOD, compilers=compilers))) == ()
