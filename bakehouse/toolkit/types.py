"""Types of a CUDA toolkit, and versions and architectures as text.

An architecture is written here as CMake writes it: `90`, `90-real`, `121a-real`, `120f-virtual`.
`real` is machine code for one GPU generation, `virtual` is PTX that the driver compiles, and no
suffix means both. The letters: `a` code runs on that one generation only, `f` on its family.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bakehouse.base import Frozen

ARCHITECTURE = re.compile(r"(\d{2,3})([af]?)(?:-(real|virtual))?")


class Toolkit(Frozen):
    """One installed toolkit. Paths are absolute, with all links resolved."""

    root: str
    origins: tuple[str, ...] = ()
    """Where it was found: `CUDA_HOME=/opt/cuda`, `/usr/local/cuda`, `PATH`."""
    version: str
    """The compiler's full version, as in 13.0.88."""
    build: str = ""
    """The compiler's own build line, as in `cuda_13.0.r13.0/compiler.36424714_0`."""
    nvcc: str
    include: str
    headers: str | None = None
    """Major and minor version that `cuda.h` or `cuda_runtime_api.h` states."""
    library: str
    target: str = ""
    """`x86_64-linux` or `sbsa-linux` where headers and libraries lie below `targets/`."""
    architectures: tuple[str, ...] = ()
    """All that this nvcc compiles for, without prefix: `90`, `90a`, `120f`."""
    gcc_max: int | None = None
    """Newest major version of GCC that the headers allow."""
    clang_max: int | None = None
    libraries: dict[str, str] = {}
    """`cudart`, `cublas`, `cublasLt` and the stub `cuda` to the file behind the link."""
    sizes: dict[str, int] = {}
    """Bytes of nvcc and of the libraries that are linked."""

    @property
    def identity(self) -> str:
        """What can change the code it makes; the same on every machine with this toolkit."""
        files = "".join(f" {name}={size}" for name, size in sorted(self.sizes.items()))
        return f"nvcc {self.version} {self.build} headers {self.headers}{files}"

    @property
    def faults(self) -> tuple[str, ...]:
        """Why a build against it would fail or could not be trusted."""
        wrong = [
            f"no lib{name}.so in {self.library}"
            for name in ("cudart", "cublas", "cublasLt", "cuda")
            if name not in self.libraries
        ]
        if self.headers is None:
            wrong.append(f"no cuda.h or cuda_runtime_api.h with a version in {self.include}")
        elif not satisfies(self.version, self.headers):
            wrong.append(f"nvcc is {self.version}, but the headers are {self.headers}")
        return tuple(wrong)


class Broken(Frozen):
    """A place where a toolkit was expected and does not work."""

    path: str
    origin: str
    why: str


class Found(Frozen):
    """All toolkits of a machine, newest first, and those that do not work."""

    toolkits: tuple[Toolkit, ...] = ()
    broken: tuple[Broken, ...] = ()


class Requested(Frozen):
    """What a recipe requests for its CUDA build."""

    version: str
    architectures: tuple[str, ...]
    """As CMake takes them, `native` expanded."""
    definitions: dict[str, str] = {}
    """All CMake definitions of the build."""
    log: str = "configure.log"
    """Name of the configure log in messages."""


@dataclass(frozen=True)
class Architecture:
    """One entry of CMAKE_CUDA_ARCHITECTURES."""

    number: int
    letter: str = ""
    kind: str = ""
    """`real`, `virtual`, or empty for both."""

    def __str__(self) -> str:
        """Give CMake's form."""
        return f"{self.number}{self.letter}" + (f"-{self.kind}" if self.kind else "")

    @property
    def name(self) -> str:
        """Number and letter: `121a`."""
        return f"{self.number}{self.letter}"

    @property
    def embeds(self) -> frozenset[str]:
        """What it puts into a library: `sm_121a` machine code, `compute_90` PTX."""
        real, virtual = f"sm_{self.name}", f"compute_{self.name}"
        return frozenset({"real": {real}, "virtual": {virtual}}.get(self.kind, {real, virtual}))


def parse_architecture(text: str) -> Architecture | None:
    """Read `90`, `121a-real`, `120f-virtual`; None for anything else, `native` included."""
    found = ARCHITECTURE.fullmatch(text.strip())
    return Architecture(int(found[1]), found[2], found[3] or "") if found else None


def split_list(text: str) -> tuple[str, ...]:
    """Give the items of a CMake list; commas and spaces are no separators there."""
    return tuple(item.strip() for item in text.split(";") if item.strip())


def numbers(version: str) -> tuple[int, ...]:
    """Read a version's leading numbers: `13.0.88` is (13, 0, 88)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def satisfies(version: str, wanted: str) -> bool:
    """Whether `version` is the wanted one: `13.0` takes any 13.0.*, `13.0.88` only itself."""
    have, want = numbers(version), numbers(wanted)
    return bool(want) and have[: len(want)] == want
