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
"""What a build has to have so that it needs no network, no neighbour, and can be moved."""

DEFAULTS: Mapping[str, str] = {
    "CMAKE_BUILD_TYPE": "Release",
    # A binary made for the machine that it was built on dies elsewhere, by SIGILL and in silence.
    "GGML_NATIVE": "OFF",
    # Whether the host happens to have OpenSSL's headers must not decide what is built.
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
}
"""What holds where a recipe says nothing."""

INSTRUCTIONS: Mapping[str, str] = dict.fromkeys(
    ("GGML_SSE42", "GGML_AVX", "GGML_AVX2", "GGML_BMI2", "GGML_FMA", "GGML_F16C"), "ON"
)
"""What llama.cpp chooses for x86_64 by itself, unless SOURCE_DATE_EPOCH is set: then it drops all
of these, says nothing, and the server is several times slower. So they are named."""

OURS: Mapping[str, str] = {
    "CMAKE_C_COMPILER": "set CC in the environment",
    "CMAKE_CXX_COMPILER": "set CXX in the environment",
    "CMAKE_ASM_COMPILER": "set CC in the environment",
    "CMAKE_C_COMPILER_LAUNCHER": "ccache on PATH is used without being asked",
    "CMAKE_CXX_COMPILER_LAUNCHER": "ccache on PATH is used without being asked",
    "CMAKE_MAKE_PROGRAM": "the Ninja beside Python, or on PATH, is used",
    "CMAKE_GENERATOR": "the generator is always Ninja",
    "CMAKE_TOOLCHAIN_FILE": "a toolchain file is not part of the pinned inputs; "
    "write its definitions into build.cmake",
    "GIT_EXE": "the stamp comes from the lock",
    "GIT_EXECUTABLE": "the stamp comes from the lock",
    "LLAMA_BUILD_COMMIT": "the stamp comes from the lock",
    "LLAMA_BUILD_NUMBER": "the number comes from the lock",
}
"""Definitions that no recipe may set, and what to do in their place."""

SEEMS_READ = "GGML_"
"""Prefix of names that CMake never calls unused: ggml/CMakeLists.txt reads all that begin so, to
write them into its package file, a misspelled one among them."""

COMPILE_FLAGS = ("CMAKE_C_FLAGS", "CMAKE_CXX_FLAGS", "CMAKE_ASM_FLAGS")
LINK_FLAGS = ("CMAKE_EXE_LINKER_FLAGS", "CMAKE_SHARED_LINKER_FLAGS", "CMAKE_MODULE_LINKER_FLAGS")
NO_BUILD_ID = "-Wl,--build-id=none"
"""A build id hashes what `strip` then removes, so that equal programs would get unequal ids."""


@dataclass(frozen=True)
class Extra:
    """What else takes part in a build: a CUDA toolkit brings one of these."""

    definitions: Mapping[str, str] = field(default_factory=dict)
    """Shape the result: part of the digest, and no recipe may set them otherwise."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Say where things lie: passed, not part of the digest."""
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Added to a definition such as CMAKE_CUDA_FLAGS; `{work}` stands for the work folder.
    Not part of the digest."""
    tools: Mapping[str, str] = field(default_factory=dict)
    """Name to identity."""
    compilers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """CMake's language to path and version, for acceptance."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Shapes the result: part of the digest."""
    path_environment: Mapping[str, str] = field(default_factory=dict)
    """Says where things lie: passed, not part of the digest."""
    cuda: CudaExpected | None = None
    """The toolkit, and what acceptance holds CMake's words against."""
    place: str | None = None
    """The path at which configure and compile see the work folder, where that can be had."""
    mount: tuple[str, ...] = ()
    """What is put before a command so that it sees it there; `{work}` is the work folder."""
    not_reproducible: str = ""
    """Why two builds of the same inputs may differ."""


NOTHING = Extra()


@dataclass(frozen=True)
class Refusal:
    """A definition of the recipe that cannot stand."""

    name: str
    message: str
    hint: str


def value_text(value: str | int | float | bool) -> str:
    """Give a value as CMake writes it: booleans are ON and OFF."""
    if isinstance(value, bool):
        return "ON" if value else "OFF"
    return str(value)


def same(one: str, other: str) -> bool:
    """Whether two values mean the same to CMake, which has many words for ON and OFF."""
    return one == other or (truth(one) is not None and truth(one) == truth(other))


def truth(value: str) -> bool | None:
    """Give what CMake's words for ON and OFF mean; None for any other text."""
    word = value.upper()
    if word in {"ON", "TRUE", "YES", "Y", "1"}:
        return True
    if word in {"OFF", "FALSE", "NO", "N", "0", ""}:
        return False
    return None


def refusals(cmake: Mapping[str, str | int | float | bool], extra: Extra) -> tuple[Refusal, ...]:
    """Find every definition that the recipe may not set, or not so."""
    found = []
    for name, value in cmake.items():
        text = value_text(value)
        needed = {**FORCED, **extra.definitions, **extra.paths}.get(name)
        if name in OURS:
            found.append(Refusal(name, f"{name} is not the recipe's to set", OURS[name]))
        elif needed is not None and not same(text, needed):
            message = f"{name} must be {needed}, the recipe says {text}"
            found.append(Refusal(name, message, "leave it out: it is set for every build"))
        elif any(char in text for char in "\0\r\n"):
            found.append(
                Refusal(name, f"{name} holds a line break or NUL", "CMake cannot keep such a value")
            )
        elif text != text.strip(" \t") or (len(text) > 1 and text[0] == text[-1] == "'"):
            message = f"{name} has blanks or single quotes around its value, which CMake drops"
            found.append(Refusal(name, message, "leave them out"))
    return tuple(found)


def asked(cmake: Mapping[str, str | int | float | bool]) -> dict[str, str]:
    """Give the recipe's definitions as text."""
    return {name: value_text(value) for name, value in sorted(cmake.items())}


def stamps(lock: Lock) -> dict[str, str]:
    """What the engine has to report as its commit and number."""
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
    """Source of the `git` that the tree gets to see.

    llama.cpp asks Git for its commit while it is configured. The tree has no history, and a
    repository around the cache folder would answer in its place; so it gets this program, which
    reports the pin and knows nothing else.
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
