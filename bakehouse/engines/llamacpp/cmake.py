"""CMake definitions of a llama.cpp build: what the engine forces, and what a recipe may choose.

Source: llama.cpp's own CMakeLists.txt, cmake/build-info.cmake and ggml/CMakeLists.txt, build 11434.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bakehouse.engines.configured import CudaExpected
from bakehouse.lock import Lock

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
