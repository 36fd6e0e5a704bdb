"""CUDA toolkits and architectures: types, and finding a toolkit on this machine or in an image.

An architecture is written here as CMake writes it: `90`, `90-real`, `121a-real`, `120f-virtual`.
`real` is machine code for one GPU generation, `virtual` is PTX that the driver compiles, and no
suffix means both. The letters: `a` code runs on that one generation only, `f` on its family.

`nvidia-smi` is no help: the "CUDA Version" that it shows is the newest that the driver can run,
not a toolkit. A toolkit is what its own nvcc reports; `nvcc --dryrun` prints the real folders
(`TOP` and the target folder), also for a wrapper script.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bakehouse.context import Context
from bakehouse.errors import HostError
from bakehouse.models import Frozen
from bakehouse.system.process import Captured, environment
from bakehouse.util.files import sha256_file

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


HEADER_BYTES = 2**20
NVCC_S = 30.0


class HostView:
    """A toolkit of this machine."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    def nvcc(self, nvcc: Path, *arguments: str) -> Captured:
        """Run nvcc."""
        argv = (str(nvcc), *arguments)
        return self._ctx.processes.capture(argv, env=environment(), timeout=NVCC_S)

    def exists(self, path: Path) -> bool:
        """Whether a file or folder exists, links followed."""
        return path.exists()

    def real(self, path: Path | str) -> str:
        """Resolve all links of a path; as far as possible if it does not exist."""
        return os.path.realpath(path)

    def names(self, folder: Path) -> tuple[str, ...]:
        """List a folder; empty if it does not exist."""
        try:
            return tuple(os.listdir(folder))
        except OSError:
            return ()

    def read(self, path: Path) -> str:
        """Read the first MiB of a text file; empty if it does not exist."""
        try:
            with path.open(errors="replace") as file:
                return file.read(HEADER_BYTES)
        except OSError:
            return ""

    def size(self, path: str) -> int:
        """Bytes of a file."""
        return os.stat(path).st_size


class ImageView(HostView):
    """A toolkit inside a container, from what `docker/toolkit.sh` wrote about it into `folder`.

    `links` gives, for each path that was reported, the one that all its links lead to.
    Raises OSError if nothing was written, ValueError if it cannot be parsed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[str, int] = {}
        links: dict[str, str] = {}
        for line in (folder / "paths").read_text(errors="replace").splitlines():
            real, size, path = line.split("\t")
            links |= {path: real, real: real}
            self._sizes[real] = int(size)
        self.links: Mapping[str, str] = links

    def nvcc(self, nvcc: Path, *arguments: str) -> Captured:
        """Give a recorded answer of nvcc."""
        name = arguments[0].removeprefix("--")
        argv = (str(nvcc), *arguments)
        if (self._folder / name).is_file():
            return Captured(argv, 0, super().read(self._folder / name), "")
        return Captured(argv, 1, "", super().read(self._folder / f"{name}.failed"))

    def exists(self, path: Path) -> bool:
        """Whether the path was reported."""
        return str(path) in self.links

    def real(self, path: Path | str) -> str:
        """Resolve all links of a path, as in the container."""
        plain = os.path.normpath(path)  # nvcc names its root as `bin/..`
        return self.links.get(plain, plain)

    def names(self, folder: Path) -> tuple[str, ...]:
        """List what was reported of a folder."""
        return tuple(Path(path).name for path in self.links if Path(path).parent == folder)

    def read(self, path: Path) -> str:
        """Read the copy of a file."""
        return super().read(Path(f"{self._folder}/files{path}"))

    def size(self, path: str) -> int:
        """Bytes of a file, as reported."""
        return self._sizes[self.real(path)]

    def same(self, candidate: Path, chosen: str) -> bool:
        """Whether a file here is the toolkit's file there, by its sha256."""
        lines = super().read(self._folder / "hashes").splitlines()
        hashes = {path.strip(): value for value, _, path in (ln.partition(" ") for ln in lines)}
        return hashes.get(chosen) == sha256_file(candidate)

    @property
    def stub(self) -> Path | None:
        """The stub of the driver's library, under the driver's name."""
        path = self._folder / "stub" / "libcuda.so.1"
        return path if path.is_file() else None


HEADERS = ("cuda.h", "cuda_runtime_api.h")
LIBRARIES = ("cudart", "cublas", "cublasLt")
SYSTEM_LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")
"""Where a driver puts its own libcuda.so; CMake takes that where a toolkit has no stub."""


class NotAToolkit(Exception):
    """Why a folder is no working toolkit."""


def find_toolkits(
    ctx: Context, extra: Sequence[str] = (), *, system: Path = Path("/usr/local")
) -> Found:
    """Look in `extra` (a recipe's path), the environment, PATH and `/usr/local/cuda*`."""
    toolkits: dict[str, Toolkit] = {}
    broken: dict[str, Broken] = {}
    origins: dict[str, list[str]] = {}
    inspected: dict[str, Toolkit] = {}
    env = ctx.environment
    places = [(path, _compiler_in(Path(path))) for path in extra]
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT"):
        if value := env.get(name):
            places.append((f"{name}={value}", _compiler_in(Path(value))))
    for folder in filter(None, env.get("PATH", "").split(os.pathsep)):
        if (nvcc := Path(folder) / "nvcc").exists():
            places.append((f"PATH ({folder})", nvcc))
    for candidate in sorted(system.glob("cuda*")):
        if candidate.name == "cuda" or candidate.name.startswith("cuda-"):
            places.append((str(candidate), candidate / "bin" / "nvcc"))
    for origin, nvcc in places:
        key = os.path.realpath(nvcc)
        try:
            found = inspected.get(key) or inspect(HostView(ctx), nvcc)
        except NotAToolkit as error:
            broken.setdefault(str(nvcc), Broken(path=str(nvcc), origin=origin, why=str(error)))
            continue
        inspected[key] = toolkits.setdefault(found.root, found)
        origins.setdefault(found.root, []).append(origin)
    named = [
        toolkit.model_copy(update={"origins": tuple(dict.fromkeys(origins[root]))})
        for root, toolkit in toolkits.items()
    ]
    ordered = sorted(named, key=lambda t: (numbers(t.version), t.root), reverse=True)
    return Found(toolkits=tuple(ordered), broken=tuple(broken.values()))


def choose(found: Found, wanted: str, path: str | None = None) -> Toolkit:
    """Choose the toolkit that a recipe asks for. Raises HostError that lists all others."""
    fitting = [t for t in found.toolkits if satisfies(t.version, wanted)]
    if path is not None:
        real = os.path.realpath(path)
        fitting = [t for t in fitting if real in (t.root, t.nvcc)]
    sound = [t for t in fitting if not t.faults]
    if sound:
        return sound[0]
    others = [f"{t.version} in {t.root}" for t in found.toolkits if t not in fitting]
    others += [f"{t.version} in {t.root}: " + "; ".join(t.faults) for t in fitting]
    others += [f"{b.path} ({b.origin}): {b.why}" for b in found.broken]
    nowhere = "no nvcc in /usr/local/cuda*, CUDA_HOME, CUDA_PATH, CUDACXX, PATH"
    raise HostError(
        f"no complete CUDA toolkit {wanted} {f'in {path}' if path else 'on this machine'}",
        where="\n".join(others) or nowhere,
        hint="install that toolkit, or let Bakehouse provide it: "
        f'cuda: {{version: "{wanted}", provide: pypi}}',
        id="no-toolkit",
    )


def inspect(view: HostView, nvcc: Path) -> Toolkit:
    """Describe the toolkit of an nvcc. Raises NotAToolkit with the reason if it does not work."""
    if not view.exists(nvcc):
        raise NotAToolkit("a dangling link" if nvcc.is_symlink() else "nvcc not found")
    text = _ask(view, nvcc, "--version")
    version = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    if version is None:
        raise NotAToolkit("nvcc --version prints no version")
    build = re.search(r"^Build (\S+)", text, re.MULTILINE)
    dryrun = view.nvcc(nvcc, "--dryrun", "-c", "nothing.cu")
    # `#$ NAME=value` are the variables that nvcc would work with; the last of each wins.
    printed = re.findall(r"^#\$ (\w+)=(.*)$", f"{dryrun.out}\n{dryrun.err}", re.MULTILINE)
    variables = {name: value.strip() for name, value in printed}
    top = variables.get("TOP") or str(Path(view.real(nvcc)).parents[1])
    root = Path(view.real(top))
    target = variables.get("_TARGET_DIR_", "").removeprefix("targets/").strip("/")
    base = root / "targets" / target if target else root
    named = re.findall(r'-I"?([^"\s]+)', variables.get("INCLUDES", ""))
    folders = (base / "include", root / "include", *map(Path, named))
    with_headers = (f for f in folders if any(view.exists(f / name) for name in HEADERS))
    include = Path(view.real(next(with_headers, base / "include")))
    folders = (base / "lib64", base / "lib", root / "lib64", root / "lib")
    with_libraries = (f for f in folders if any(n.startswith("libcu") for n in view.names(f)))
    library = Path(view.real(next(with_libraries, root / "lib64")))
    inner = root / "bin" / "nvcc"
    compiler = view.real(inner if view.exists(inner) else nvcc)
    stubs = (folder / "stubs" for folder in (library, root / "lib64", root / "lib"))
    places = {name: [library / f"lib{name}.so"] for name in LIBRARIES}
    places["cuda"] = [f / "libcuda.so" for f in (*stubs, *map(Path, SYSTEM_LIBRARIES))]
    present = {name: next(filter(view.exists, paths), None) for name, paths in places.items()}
    libraries = {name: view.real(path) for name, path in present.items() if path}
    config = view.read(include / "crt" / "host_config.h")
    gcc = re.search(r"__GNUC__\s*>\s*(\d+)", config)
    clang = re.search(r"__clang_major__\s*>=\s*(\d+)", config)
    return Toolkit(
        root=str(root),
        version=version[1],
        build=build[1] if build else "",
        nvcc=compiler,
        include=str(include),
        headers=header_version(*(view.read(include / name) for name in HEADERS)),
        library=str(library),
        target=target,
        architectures=compiled_for(_ask(view, nvcc, "--help")),
        gcc_max=int(gcc[1]) if gcc else None,
        clang_max=int(clang[1]) - 1 if clang else None,
        libraries=libraries,
        sizes={
            name: view.size(path)
            for name, path in {"nvcc": compiler, **libraries}.items()
            if name != "cuda"
        },
    )


def compiled_for(help_text: str) -> tuple[str, ...]:
    """Architectures that `nvcc --help` allows, letters included.

    `--list-gpu-arch` and `--list-gpu-code` leave out every name with a letter (seen with 13.0 and
    13.2), so that 121a would look unknown; the list of allowed values has them all.
    """
    names = set(re.findall(r"'sm_(\d+[a-z]?)'", help_text))
    return tuple(sorted(names, key=lambda n: (int(re.sub(r"\D", "", n)), n)))


def header_version(*texts: str) -> str | None:
    """Give major and minor from `#define CUDA_VERSION 13000` or `CUDART_VERSION`."""
    for text in texts:
        if found := re.search(r"^\s*#\s*define\s+CUDA(?:RT)?_VERSION\s+(\d+)", text, re.MULTILINE):
            number = int(found[1])
            return f"{number // 1000}.{number % 1000 // 10}"
    return None


def _compiler_in(path: Path) -> Path:
    """Find nvcc: a variable or a recipe may name the root, its `bin`, or the compiler itself."""
    if path.name == "nvcc" and not path.is_dir():
        return path
    if path.name == "bin" and (path / "nvcc").exists():
        return path / "nvcc"
    return path / "bin" / "nvcc"


def _ask(view: HostView, nvcc: Path, *arguments: str) -> str:
    answer = view.nvcc(nvcc, *arguments)
    if not answer.ok:
        lines = (answer.err or answer.out).strip().splitlines()
        raise NotAToolkit(f"nvcc {arguments[0]} fails: {lines[0] if lines else answer.code}")
    return answer.out
