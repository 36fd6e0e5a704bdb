"""What CMake configured, and what was expected.

An accept rule is a pure function from these to checks, so that it is tested on recorded output;
`build.configure` reads the output of a real build folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from bakehouse.base import Frozen
from bakehouse.checks import Check
from bakehouse.toolkit.types import Requested, Toolkit


class Compiler(Frozen):
    """A compiler as CMake identified it, or as it was planned."""

    path: str
    version: str
    id: str = ""
    """CMake's name for its maker: GNU, Clang, NVIDIA."""


class CudaExpected(Frozen):
    """The toolkit of a CUDA build and what is requested of it."""

    toolkit: Toolkit
    requested: Requested
    links: dict[str, str] | None = None
    """For a toolkit inside a container: each path that CMake chose, with all links resolved."""

    def resolve(self, path: str) -> str:
        """Resolve a path's links, on the machine of the toolkit."""
        return os.path.realpath(path) if self.links is None else self.links.get(path, path)


class Expected(Frozen):
    """What the plan expects, in CMake's terms."""

    generator: str
    build_type: str
    compilers: dict[str, Compiler]
    """By CMake's name of the language: C, CXX, CUDA."""
    forced: dict[str, str]
    """Definitions that the engine needs exactly like this."""
    asked: dict[str, str]
    """The recipe's own definitions, as they were passed."""
    targets: tuple[str, ...]
    cuda: CudaExpected | None = None


@dataclass(frozen=True)
class CacheEntry:
    """A variable in CMake's cache. Type UNINITIALIZED: no project declared it."""

    value: str
    type: str


@dataclass(frozen=True)
class Target:
    """A target of the build. Artifacts are paths relative to the build folder, unless absolute."""

    name: str
    type: str
    """EXECUTABLE, SHARED_LIBRARY, MODULE_LIBRARY, STATIC_LIBRARY and so on."""
    artifacts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Configured:
    """A build folder after configure."""

    log: tuple[str, ...]
    log_path: str
    cache: Mapping[str, CacheEntry]
    cache_path: str
    generator: str
    compilers: Mapping[str, Compiler]
    targets: Mapping[str, Target] = field(default_factory=dict)
    named: frozenset[str] = frozenset()
    """Undeclared entries of the cache that a CMake file of the source mentions."""

    def line(self, number: int) -> str:
        """Format a line of the log (counting from 1) as editors do."""
        return f"{self.log_path}:{number}"


AcceptRule = Callable[[Configured, Expected], Iterable[Check]]
"""Checks a configured build before anything is compiled."""
