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
from bakehouse.cuda.configure import Conflict, cmake_overrides, select_toolkit, with_architectures
from bakehouse.cuda.toolkit import Requested
from bakehouse.cuda.verify import UNVERIFIED, accept_configure, refuse
from bakehouse.engines.base import Configured, CudaExpected, Expected
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


def refusals(cmake: Mapping[str, str | int | float | bool], extra: Extra) -> Iterator[Conflict]:
    """Find every definition that the recipe may not set, or not to this value."""
    needed = {**FORCED, **extra.definitions, **extra.paths}
    for name in cmake:
        text, must = value_text(cmake[name]), needed.get(name)
        keys = ("build", "cmake", name)
        if name in OURS:
            yield Conflict(keys, f"a recipe cannot set {name}", OURS[name])
        elif must is not None and not same(text, must):
            hint = "leave it out: it is set for every build"
            yield Conflict(keys, f"{name} must be {must}, not {text}", hint)
        elif any(char in text for char in "\0\r\n"):
            hint = "CMake does not support such a value"
            yield Conflict(keys, f"{name} contains a line break or NUL", hint)
        elif text != text.strip(" \t") or (len(text) > 1 and text[0] == text[-1] == "'"):
            message = f"{name} has blanks or single quotes around its value, which CMake drops"
            yield Conflict(keys, message, "leave them out")


def recipe_definitions(cmake: Mapping[str, str | int | float | bool]) -> dict[str, str]:
    """Format the recipe's definitions, sorted by name."""
    return {name: value_text(value) for name, value in sorted(cmake.items())}


def definitions(own: Mapping[str, str], lock: Lock, extra: Extra, arch: str) -> dict[str, str]:
    """All definitions that shape the result, sorted by name; `own` are the recipe's."""
    stamps = {"LLAMA_BUILD_COMMIT": lock.stamp, "LLAMA_BUILD_NUMBER": str(lock.build_number)}
    merged = {**DEFAULTS, **own, **FORCED, **stamps, **extra.definitions}
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
    tried = ctx.processes.capture(argv, env=environment(), timeout=PROBE_S)
    return "" if tried.ok else (tried.err.strip().splitlines() or [f"exit code {tried.code}"])[0]


def mounting(folder: str) -> tuple[str, ...]:
    """Give the arguments before a command that has to see a folder at PLACE."""
    return (sys.executable, "-I", "-S", str(Path(mount_namespace.__file__)), folder, PLACE, "--")


def prepared(
    ctx: Context, recipe: Recipe, lock: Lock, tools: Tools, *, make: bool
) -> tuple[Recipe, Extra]:
    """Give what `plan_build` takes: the recipe as built here, and what the toolkit adds.

    `plan` only describes (`make=False`); `build` and `serve` install a toolkit from PyPI first.
    Both give the same digest. Raises as `select_toolkit` does.
    """
    selected = select_toolkit(ctx, recipe, lock.toolkit, make=make)
    if selected is None:
        return recipe, NOTHING
    recipe = with_architectures(recipe, selected)
    # Without a fixed path, the objects carry the path of the builds folder.
    why_not = fixed_place(ctx)
    forced = cmake_overrides(
        selected.toolkit,
        host_compiler=tools.cxx.path,
        search_path=tools.search_path,
        hides_nvcc=lambda folder: os.path.exists(os.path.join(folder, "nvcc")),
    )
    requested = Requested(
        version=selected.version,
        architectures=selected.architectures,
        definitions=recipe_definitions(recipe.build.cmake if recipe.build else {}),
    )
    reason = f"nvcc writes the folder's path into what it makes, and {why_not}" if why_not else ""
    # The compilers' check leaves nvcc out: CMake 3.25's file API gives no version for CUDA (seen).
    # Its log does, and `accept_configure` compares compiler and version with the toolkit.
    return recipe, Extra(
        paths=forced.definitions,
        flags=forced.flags,
        tools={"cuda": selected.identity, "path": str(ctx.places.builds) if why_not else PLACE},
        path_environment=forced.environment,
        cuda=CudaExpected(toolkit=selected.toolkit, requested=requested),
        place=None if why_not else PLACE,
        mount=() if why_not else mounting("{work}"),
        not_reproducible=reason,
    )


_UNUSED = re.compile(r"\s*Manually-specified variables were not used by the project:")
_DOWNLOAD = re.compile(
    r"(?i)\b(download(?:ing|ed)\b|fetching\b|cloning into\b|https?://\S+ .*\d+%|could not resolve)"
)


def check_configured(configured: Configured, expected: Expected) -> tuple[Check, ...]:
    """Check a configured build before anything is compiled, in the order that is printed."""
    at, log, cache = configured.cache_path, configured.log, configured.cache
    generator, entry = configured.generator, cache.get("CMAKE_BUILD_TYPE")
    build_type = entry.value if entry else None
    checks = [
        check("configure.generator", expected.generator, generator, at,
              ok=generator == expected.generator),
    ]  # fmt: skip
    for language, wanted in expected.compilers.items():
        found = configured.compilers.get(language)
        right = (
            found is not None
            and found.version == wanted.version
            and os.path.realpath(found.path) == os.path.realpath(wanted.path)
        )
        observed = f"{found.path} {found.version}" if found else None
        name, planned = f"configure.compiler.{language}", f"{wanted.path} {wanted.version}"
        checks.append(check(name, planned, observed, at, ok=right))
    checks += [
        check("configure.build_type", expected.build_type, build_type, at,
              ok=build_type == expected.build_type),
        _kept("configure.forced", expected.forced, configured),
    ]  # fmt: skip
    if expected.asked:
        checks += [
            _kept("configure.asked", expected.asked, configured),
            _used(configured, expected.asked),
        ]
    targets, known = ", ".join(expected.targets), configured.targets
    absent = [name for name in expected.targets if name not in known]
    missing = "; ".join(f"{name} does not exist{suggestion(name, known)}" for name in absent)
    downloads = [(n, line) for n, line in enumerate(log, 1) if _DOWNLOAD.search(line)]
    checks += [
        check("configure.targets", targets, missing or "all exist", at,
              ok=not missing if known else None),
        check("configure.no_download", "no download in the log",
              downloads[0][1].strip() if downloads else "none",
              configured.line(downloads[0][0]) if downloads else configured.log_path,
              ok=not downloads if log else None),
    ]  # fmt: skip
    if cuda := expected.cuda:
        requested = cuda.requested.model_copy(update={"log": configured.log_path})
        values = {name: entry.value for name, entry in cache.items()}
        checks += accept_configure("\n".join(log), values, cuda.toolkit, requested, cuda.resolve)
    return tuple(checks)


def _kept(id: str, wanted: Mapping[str, str], configured: Configured) -> Check:  # noqa: A002
    """The cache holds these definitions as they were passed."""
    wrong = []
    for name, value in wanted.items():
        entry = configured.cache.get(name)
        if entry is None or not same(entry.value, value):
            found = f"{name}={entry.value}" if entry else f"no {name}"
            wrong.append(f"{found} instead of {value or 'nothing'}")
        elif entry.type == "BOOL" and truth(value) is None:
            wrong.append(f"{name}={value}, but the project expects ON or OFF")
    expected, observed = f"{len(wanted)} definitions as they were passed", "; ".join(wrong)
    return check(id, expected, observed or "all of them", configured.cache_path, ok=not wrong)


def _used(configured: Configured, wanted: Mapping[str, str]) -> Check:
    """The project reads every definition of the recipe: one that it does not read is a typo."""
    unused: dict[str, str] = {}
    inside = False  # CMake's list of unused definitions
    for number, line in enumerate(configured.log, 1):
        if _UNUSED.match(line):
            inside = True
        elif inside and line.strip():
            inside = line.startswith("    ")
            if inside and line.strip() in wanted:
                unused[line.strip()] = configured.line(number)
    for name in sorted(wanted):
        entry = configured.cache.get(name)
        undeclared = entry is not None and entry.type == "UNINITIALIZED"
        # CMake counts such a name as read, even if it appears nowhere in the source.
        if name.startswith(SEEMS_READ) and undeclared and name not in configured.named:
            unused.setdefault(name, configured.cache_path)
    declared = [n for n, e in configured.cache.items() if e.type not in {"UNINITIALIZED", "STATIC"}]
    return check(
        "configure.used",
        f"the project reads all {len(wanted)} definitions of the recipe",
        "; ".join(f"{n} is not used{suggestion(n, declared)}" for n in unused) or "it does",
        next(iter(unused.values()), configured.log_path),
        ok=not unused,
    )


def refuse_cuda(configured: Configured, expected: Expected, checks: tuple[Check, ...]) -> None:
    """Raise BuildFailed with CMake's two lines, both paths and the fix, if a CUDA check failed."""
    if cuda := expected.cuda:
        requested = cuda.requested.model_copy(update={"log": configured.log_path})
        of_cuda = tuple(c for c in checks if c.id.startswith("cuda."))
        refuse(of_cuda, "\n".join(configured.log), cuda.toolkit, requested)


def decisive(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Those that have to pass: a recipe may switch off nvcc's own check, and is unverified then."""
    return tuple(c for c in checks if c.id != UNVERIFIED)
