"""CMake definitions of llama.cpp, and checks of what CMake configured.

Source: llama.cpp's own CMakeLists.txt, cmake/build-info.cmake and ggml/CMakeLists.txt, build 11434.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bakehouse.context import Context
from bakehouse.cuda.configure import cmake_overrides, select_toolkit, with_architectures
from bakehouse.cuda.toolkit import Requested
from bakehouse.cuda.verify import UNVERIFIED, accept_configure, refuse
from bakehouse.engines.base import AcceptRule, Configured, CudaExpected, Expected
from bakehouse.lock import Lock
from bakehouse.models import Check, check
from bakehouse.recipe.models import Recipe
from bakehouse.system import mount_namespace
from bakehouse.system.process import environment
from bakehouse.toolchain import Tools
from bakehouse.util.text import suggestion

SERVER = "llama-server"

FORCED: Mapping[str, str] = {
    # The web UI would be fetched from the network during the build, falling back to `latest`.
    # The second pair are the names that the same switches had before.
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_BUILD_WEBUI": "OFF",
    "LLAMA_USE_PREBUILT_WEBUI": "OFF",
    "FETCHCONTENT_FULLY_DISCONNECTED": "ON",
    # The compiler cache is ours to set: the tree's own search for one depends on the machine.
    "GGML_CCACHE": "OFF",
    # Libraries are found beside the binary, wherever the artifact lies.
    "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
    "CMAKE_INSTALL_RPATH": "$ORIGIN",
    "CMAKE_INSTALL_RPATH_USE_LINK_PATH": "OFF",
    "CMAKE_INSTALL_PREFIX": "/build/install",
    # Packages that other projects left in this user's or this machine's registry are not inputs.
    "CMAKE_FIND_USE_PACKAGE_REGISTRY": "OFF",
    "CMAKE_FIND_USE_SYSTEM_PACKAGE_REGISTRY": "OFF",
}
"""What makes a build independent of network and neighbours, and movable."""

DEFAULTS: Mapping[str, str] = {
    "CMAKE_BUILD_TYPE": "Release",
    # A binary made for the machine that it was built on dies elsewhere, silently, by SIGILL.
    "GGML_NATIVE": "OFF",
    # OpenSSL's headers on the host must not change what is built.
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
}
"""Used unless a recipe sets them."""

INSTRUCTIONS: Mapping[str, str] = dict.fromkeys(
    ("GGML_SSE42", "GGML_AVX", "GGML_AVX2", "GGML_BMI2", "GGML_FMA", "GGML_F16C"), "ON"
)
"""What llama.cpp chooses for x86_64 by itself, unless SOURCE_DATE_EPOCH is set: then it silently
drops all of these, and the server is several times slower. So they are named."""

OURS: Mapping[str, str] = {
    "CMAKE_C_COMPILER": "set CC in the environment",
    "CMAKE_CXX_COMPILER": "set CXX in the environment",
    "CMAKE_ASM_COMPILER": "set CC in the environment",
    "CMAKE_C_COMPILER_LAUNCHER": "ccache on PATH is used automatically",
    "CMAKE_CXX_COMPILER_LAUNCHER": "ccache on PATH is used automatically",
    "CMAKE_MAKE_PROGRAM": "the Ninja beside Python, or on PATH, is used",
    "CMAKE_GENERATOR": "the generator is always Ninja",
    "CMAKE_TOOLCHAIN_FILE": "a toolchain file is not part of the pinned inputs; "
    "write its definitions into build.cmake",
    "GIT_EXE": "the stamp comes from the lock",
    "GIT_EXECUTABLE": "the stamp comes from the lock",
    "LLAMA_BUILD_COMMIT": "the stamp comes from the lock",
    "LLAMA_BUILD_NUMBER": "the number comes from the lock",
}
"""Definitions that no recipe may set, and what to do instead."""

SEEMS_READ = "GGML_"
"""Prefix of names that CMake never reports as unused: ggml/CMakeLists.txt reads all of them, also
misspelled ones, to write them into its package file."""

COMPILE_FLAGS = ("CMAKE_C_FLAGS", "CMAKE_CXX_FLAGS", "CMAKE_ASM_FLAGS")
LINK_FLAGS = ("CMAKE_EXE_LINKER_FLAGS", "CMAKE_SHARED_LINKER_FLAGS", "CMAKE_MODULE_LINKER_FLAGS")
NO_BUILD_ID = "-Wl,--build-id=none"
"""A build id hashes what `strip` removes later, so that equal programs would get different ids."""


@dataclass(frozen=True)
class Extra:
    """What a CUDA toolkit adds to a build."""

    definitions: Mapping[str, str] = field(default_factory=dict)
    """Part of the digest; a recipe may not set other values."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Paths of this machine: passed, not part of the digest."""
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Added to a definition such as CMAKE_CUDA_FLAGS; `{work}` stands for the work folder.
    Not part of the digest."""
    tools: Mapping[str, str] = field(default_factory=dict)
    """Name to identity."""
    compilers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """CMake's language to path and version, for acceptance."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Part of the digest."""
    path_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables with paths of this machine: passed, not part of the digest."""
    cuda: CudaExpected | None = None
    """The toolkit and what is requested of it, for acceptance."""
    place: str | None = None
    """The path at which configure and compile see the work folder, if it can be mounted."""
    mount: tuple[str, ...] = ()
    """Arguments before a command that mount it there; `{work}` is the work folder."""
    not_reproducible: str = ""
    """Why two builds of the same inputs may differ."""


NOTHING = Extra()


@dataclass(frozen=True)
class Refusal:
    """A definition of the recipe that is refused."""

    name: str
    message: str
    hint: str


def value_text(value: str | int | float | bool) -> str:
    """Format a value for CMake: booleans are ON and OFF."""
    if isinstance(value, bool):
        return "ON" if value else "OFF"
    return str(value)


def same(one: str, other: str) -> bool:
    """Whether two values are equal for CMake, which has many words for ON and OFF."""
    return one == other or (truth(one) is not None and truth(one) == truth(other))


def truth(value: str) -> bool | None:
    """Parse CMake's words for ON and OFF; None for any other text."""
    true, false = {"ON", "TRUE", "YES", "Y", "1"}, {"OFF", "FALSE", "NO", "N", "0", ""}
    return value.upper() in true if value.upper() in true | false else None


def refusals(cmake: Mapping[str, str | int | float | bool], extra: Extra) -> tuple[Refusal, ...]:
    """Find every definition that the recipe may not set, or not to this value."""
    needed = {**FORCED, **extra.definitions, **extra.paths}
    checked = ((name, _refusal(name, value_text(cmake[name]), needed.get(name))) for name in cmake)
    return tuple(Refusal(name, *found) for name, found in checked if found)


def _refusal(name: str, text: str, needed: str | None) -> tuple[str, str] | None:
    """Message and hint for a definition that is refused."""
    if name in OURS:
        return f"a recipe cannot set {name}", OURS[name]
    if needed is not None and not same(text, needed):
        return f"{name} must be {needed}, not {text}", "leave it out: it is set for every build"
    if any(char in text for char in "\0\r\n"):
        return f"{name} contains a line break or NUL", "CMake does not support such a value"
    if text != text.strip(" \t") or (len(text) > 1 and text[0] == text[-1] == "'"):
        message = f"{name} has blanks or single quotes around its value, which CMake drops"
        return message, "leave them out"
    return None


def asked(cmake: Mapping[str, str | int | float | bool]) -> dict[str, str]:
    """Format the recipe's definitions, sorted by name."""
    return {name: value_text(value) for name, value in sorted(cmake.items())}


def stamps(lock: Lock) -> dict[str, str]:
    """Commit and build number that the engine has to report."""
    return {"LLAMA_BUILD_COMMIT": lock.stamp, "LLAMA_BUILD_NUMBER": str(lock.build_number)}


def definitions(own: Mapping[str, str], lock: Lock, extra: Extra, arch: str) -> dict[str, str]:
    """All definitions that shape the result, sorted by name; `own` are the recipe's."""
    merged = {**DEFAULTS, **own, **FORCED, **stamps(lock), **extra.definitions}
    if arch == "x86_64" and not for_this_cpu(merged):
        merged = {**INSTRUCTIONS, **merged}
    for name in LINK_FLAGS:
        merged[name] = " ".join(filter(None, (own.get(name, ""), NO_BUILD_ID)))
    return dict(sorted(merged.items()))


def for_this_cpu(merged: Mapping[str, str]) -> bool:
    """Whether the result depends on the CPU of the machine that builds."""
    return truth(merged.get("GGML_NATIVE", "OFF")) is True or any(
        "=native" in value for name, value in merged.items() if name.endswith("_FLAGS")
    )


def git_stand_in(lock: Lock) -> str:
    """Source of a `git` that reports the pin and nothing else.

    llama.cpp runs Git for its commit while it is configured. The tree has no history, and a
    repository around the cache folder would answer instead.
    """
    return f"""#!/bin/sh
# The pinned source's answers to what a build asks of Git.
case "$1" in
  --version) echo 'git version 2.40.0' ;;
  rev-parse|describe) echo '{lock.stamp}' ;;
  rev-list) echo '{lock.build_number}' ;;
  diff-index) exit 0 ;;
  *) echo "fatal: no history here" >&2; exit 128 ;;
esac
"""


PLACE = "/tmp/bakehouse-build"  # noqa: S108 - only a mount point, in a namespace of our own
"""Where nvcc sees every build, so that the path that it hashes into symbols is always the same."""
PROBE_S = 10.0


def fixed_place(ctx: Context) -> str:
    """Why the work folder cannot be mounted at PLACE on this machine; empty if it can."""
    argv = (*mounting(PLACE), "true")
    said = ctx.processes.capture(argv, env=environment(), timeout=PROBE_S)
    return "" if said.ok else (said.err.strip().splitlines() or [f"exit code {said.code}"])[0]


def mounting(folder: str) -> tuple[str, ...]:
    """Give the arguments before a command that has to see a folder at PLACE."""
    return (sys.executable, "-I", "-S", str(Path(mount_namespace.__file__)), folder, PLACE, "--")


def prepared(
    ctx: Context, recipe: Recipe, lock: Lock, tools: Tools, *, make: bool
) -> tuple[Recipe, Extra]:
    """Give what `plan_build` takes: the recipe as built here, and what the toolkit adds.

    `plan` only describes (`make=False`); `build` and `serve` install a toolkit from PyPI first.
    Both give the same digest. Raises what `toolkit.settle.settle` raises.
    """
    settled = select_toolkit(ctx, recipe, lock.toolkit, make=make)
    if settled is None:
        return recipe, NOTHING
    recipe = with_architectures(recipe, settled)
    # Without a fixed path, the objects carry the path of the builds folder.
    why_not = fixed_place(ctx)
    forced = cmake_overrides(
        settled.toolkit,
        host_compiler=tools.cxx.path,
        search_path=tools.search_path,
        hides_nvcc=lambda folder: os.path.exists(os.path.join(folder, "nvcc")),
    )
    requested = Requested(
        version=settled.version,
        architectures=settled.architectures,
        definitions=asked(recipe.build.cmake if recipe.build else {}),
    )
    reason = f"nvcc writes the folder's path into what it makes, and {why_not}" if why_not else ""
    return recipe, Extra(
        paths=forced.definitions,
        flags=forced.flags,
        tools={"cuda": settled.identity, "path": str(ctx.places.builds) if why_not else PLACE},
        # No `compilers`: CMake 3.25's file API gives no version for CUDA (seen); its log does, and
        # the rule below compares compiler and version with the toolkit.
        path_environment=forced.environment,
        cuda=CudaExpected(toolkit=settled.toolkit, requested=requested),
        place=None if why_not else PLACE,
        mount=() if why_not else mounting("{work}"),
        not_reproducible=reason,
    )


def cuda(configured: Configured, expected: Expected) -> Iterable[Check]:
    """Rule: CMake's log and cache prove a correct CUDA build."""
    if expected.cuda is None:
        return ()
    cache = "\n".join(f"{n}:{e.type}={e.value}" for n, e in configured.cache.items())
    return accept_configure(
        "\n".join(configured.log),
        cache,
        expected.cuda.toolkit,
        _requested(configured, expected.cuda),
        expected.cuda.resolve,
    )


def _requested(configured: Configured, cuda: CudaExpected) -> Requested:
    return cuda.requested.model_copy(update={"log": configured.log_path})


def refuse_cuda(configured: Configured, expected: Expected, checks: tuple[Check, ...]) -> None:
    """Raise BuildFailed with CMake's two lines, both paths and the fix, if a CUDA check failed."""
    if expected.cuda is not None:
        of_cuda = tuple(c for c in checks if c.id.startswith("cuda."))
        requested = _requested(configured, expected.cuda)
        refuse(of_cuda, "\n".join(configured.log), expected.cuda.toolkit, requested)


def decisive(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Those that have to pass: a recipe may switch off nvcc's own check, and is unverified then."""
    return tuple(c for c in checks if c.id != UNVERIFIED)


_UNUSED = re.compile(r"\s*Manually-specified variables were not used by the project:")
_DOWNLOAD = re.compile(
    r"(?i)\b(download(?:ing|ed)\b|fetching\b|cloning into\b|https?://\S+ .*\d+%|could not resolve)"
)


def generator(configured: Configured, expected: Expected) -> Iterable[Check]:
    """The generator is the planned one."""
    yield _same("configure.generator", expected.generator, configured.generator, configured)


def build_type(configured: Configured, expected: Expected) -> Iterable[Check]:
    """The build type is the one asked for."""
    entry = configured.cache.get("CMAKE_BUILD_TYPE")
    seen = entry.value if entry else None
    yield _same("configure.build_type", expected.build_type, seen, configured)


def _same(name: str, wanted: str, seen: str | None, configured: Configured) -> Check:
    return check(name, wanted, seen, configured.cache_path, ok=seen == wanted)


def compilers(configured: Configured, expected: Expected) -> Iterable[Check]:
    """Every language is compiled by the planned compiler in the planned version."""
    for language, wanted in expected.compilers.items():
        found = configured.compilers.get(language)
        right = (
            found is not None
            and found.version == wanted.version
            and os.path.realpath(found.path) == os.path.realpath(wanted.path)
        )
        yield check(
            f"configure.compiler.{language}",
            f"{wanted.path} {wanted.version}",
            f"{found.path} {found.version}" if found else None,
            configured.cache_path,
            ok=right,
        )


def definitions_kept(configured: Configured, expected: Expected) -> Iterable[Check]:
    """The cache holds every definition as it was passed: the engine's and the recipe's."""
    yield _held("configure.forced", expected.forced, configured)
    if expected.asked:
        yield _held("configure.asked", expected.asked, configured)


def _held(id: str, wanted: dict[str, str], configured: Configured) -> Check:  # noqa: A002
    wrong = []
    for name, value in wanted.items():
        entry = configured.cache.get(name)
        if entry is None or not same(entry.value, value):
            seen = f"{name}={entry.value}" if entry else f"no {name}"
            wrong.append(f"{seen} instead of {value or 'nothing'}")
        elif entry.type == "BOOL" and truth(value) is None:
            wrong.append(f"{name}={value}, but the project expects ON or OFF")
    return check(
        id,
        f"{len(wanted)} definitions as they were passed",
        "; ".join(wrong) if wrong else "all of them",
        configured.cache_path,
        ok=not wrong,
    )


def used(configured: Configured, expected: Expected) -> Iterable[Check]:
    """The project reads every definition of the recipe: one that it does not read is a typo."""
    if not expected.asked:
        return
    unused = {n: configured.line(at) for at, n in _unused(configured.log) if n in expected.asked}
    for name in sorted(expected.asked):
        if _only_seems_read(name, configured):
            unused.setdefault(name, configured.cache_path)
    declared = [n for n, e in configured.cache.items() if e.type not in {"UNINITIALIZED", "STATIC"}]
    yield check(
        "configure.used",
        f"the project reads all {len(expected.asked)} definitions of the recipe",
        "; ".join(f"{n} is not used{suggestion(n, declared)}" for n in unused) or "it does",
        next(iter(unused.values()), configured.log_path),
        ok=not unused,
    )


def _only_seems_read(name: str, configured: Configured) -> bool:
    """Whether a name that CMake counts as read appears nowhere in the source."""
    entry = configured.cache.get(name)
    undeclared = entry is not None and entry.type == "UNINITIALIZED"
    return name.startswith(SEEMS_READ) and undeclared and name not in configured.named


def _unused(log: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Line number and name of each entry in CMake's list of unused definitions."""
    inside = False
    for number, line in enumerate(log, 1):
        if _UNUSED.match(line):
            inside = True
        elif inside and line.strip():
            if not line.startswith("    "):
                inside = False
                continue
            yield number, line.strip()


def no_download(configured: Configured, expected: Expected) -> Iterable[Check]:  # noqa: ARG001
    """Configure downloaded nothing."""
    found = [(n, ln) for n, ln in enumerate(configured.log, 1) if _DOWNLOAD.search(ln)]
    yield check(
        "configure.no_download",
        "no download in the log",
        found[0][1].strip() if found else "none",
        configured.line(found[0][0]) if found else configured.log_path,
        ok=not found if configured.log else None,
    )


def targets(configured: Configured, expected: Expected) -> Iterable[Check]:
    """Every target that will be built exists."""
    known = configured.targets
    missing = [
        f"{name} does not exist{suggestion(name, known)}"
        for name in expected.targets
        if name not in known
    ]
    yield check(
        "configure.targets",
        ", ".join(expected.targets),
        "; ".join(missing) or "all exist",
        configured.cache_path,
        ok=not missing if known else None,
    )


RULES: tuple[AcceptRule, ...] = (
    generator, compilers, build_type, definitions_kept, used, targets, no_download, cuda,
)  # fmt: skip
"""All rules, in the order in which they are printed."""
