"""Find the CUDA toolkits of this machine.

`nvidia-smi` is no help: the "CUDA Version" that it shows is the newest that the driver can run,
not a toolkit. A toolkit is what its own nvcc reports; `nvcc --dryrun` prints the real folders
(`TOP` and the target folder), also for a wrapper script.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from bakehouse.context import Context
from bakehouse.errors import HostError
from bakehouse.toolkit.types import Broken, Found, Toolkit, numbers, satisfies
from bakehouse.toolkit.views import Here

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
    for origin, nvcc in _candidates(ctx, extra, system):
        key = os.path.realpath(nvcc)
        try:
            found = inspected.get(key) or inspect(Here(ctx), nvcc)
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
    seen = [f"{t.version} in {t.root}" for t in found.toolkits if t not in fitting]
    seen += [f"{t.version} in {t.root}: " + "; ".join(t.faults) for t in fitting]
    seen += [f"{b.path} ({b.origin}): {b.why}" for b in found.broken]
    raise HostError(
        f"no complete CUDA toolkit {wanted} {f'in {path}' if path else 'on this machine'}",
        where="\n".join(seen) or "no nvcc in /usr/local/cuda*, CUDA_HOME, CUDA_PATH, CUDACXX, PATH",
        hint="install that toolkit, or let Bakehouse provide it: "
        f'cuda: {{version: "{wanted}", provide: pypi}}',
        id="no-toolkit",
    )


def inspect(view: Here, nvcc: Path) -> Toolkit:
    """Describe the toolkit of an nvcc. Raises NotAToolkit with the reason if it does not work."""
    if not view.exists(nvcc):
        raise NotAToolkit("a dangling link" if nvcc.is_symlink() else "nvcc not found")
    said = _ask(view, nvcc, "--version")
    version = re.search(r"\bV(\d+\.\d+\.\d+)", said)
    if version is None:
        raise NotAToolkit("nvcc --version prints no version")
    build = re.search(r"^Build (\S+)", said, re.MULTILINE)
    variables = _dryrun(view, nvcc)
    top = variables.get("TOP") or str(Path(view.real(nvcc)).parents[1])
    root = Path(view.real(top))
    target = variables.get("_TARGET_DIR_", "").removeprefix("targets/").strip("/")
    base = root / "targets" / target if target else root
    include = _include(view, base, root, variables.get("INCLUDES", ""))
    library = _library(view, base, root)
    inner = root / "bin" / "nvcc"
    compiler = view.real(inner if view.exists(inner) else nvcc)
    libraries = _libraries(view, library, root)
    config = view.read(include / "crt" / "host_config.h")
    headers = (view.read(include / name) for name in ("cuda.h", "cuda_runtime_api.h"))
    return Toolkit(
        root=str(root),
        version=version[1],
        build=build[1] if build else "",
        nvcc=compiler,
        include=str(include),
        headers=header_version(*headers),
        library=str(library),
        target=target,
        architectures=compiled_for(_ask(view, nvcc, "--help")),
        gcc_max=_bound(config, r"__GNUC__\s*>\s*(\d+)", 0),
        clang_max=_bound(config, r"__clang_major__\s*>=\s*(\d+)", -1),
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


def _candidates(ctx: Context, extra: Sequence[str], system: Path) -> Iterable[tuple[str, Path]]:
    env = ctx.environment
    for path in extra:
        yield path, _compiler_in(Path(path))
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT"):
        if value := env.get(name):
            yield f"{name}={value}", _compiler_in(Path(value))
    for folder in env.get("PATH", "").split(os.pathsep):
        if folder and (nvcc := Path(folder) / "nvcc").exists():
            yield f"PATH ({folder})", nvcc
    for candidate in sorted(system.glob("cuda*")):
        if candidate.name == "cuda" or candidate.name.startswith("cuda-"):
            yield str(candidate), candidate / "bin" / "nvcc"


def _compiler_in(path: Path) -> Path:
    """Find nvcc: a variable or a recipe may name the root, its `bin`, or the compiler itself."""
    if path.name == "nvcc" and not path.is_dir():
        return path
    if path.name == "bin" and (path / "nvcc").exists():
        return path / "nvcc"
    return path / "bin" / "nvcc"


def _ask(view: Here, nvcc: Path, *arguments: str) -> str:
    asked = view.nvcc(nvcc, *arguments)
    if not asked.ok:
        said = (asked.err or asked.out).strip().splitlines()
        raise NotAToolkit(f"nvcc {arguments[0]} fails: {said[0] if said else asked.code}")
    return asked.out


def _dryrun(view: Here, nvcc: Path) -> dict[str, str]:
    """Variables that nvcc would work with, from `#$ NAME=value` lines; the last of each wins."""
    asked = view.nvcc(nvcc, "--dryrun", "-c", "nothing.cu")
    pairs = re.findall(r"^#\$ (\w+)=(.*)$", asked.out + "\n" + asked.err, re.MULTILINE)
    return {name: value.strip() for name, value in pairs}


def _include(view: Here, base: Path, root: Path, includes: str) -> Path:
    named = re.findall(r'-I"?([^"\s]+)', includes)
    for folder in (base / "include", root / "include", *map(Path, named)):
        if any(view.exists(folder / name) for name in ("cuda_runtime_api.h", "cuda.h")):
            return Path(view.real(folder))
    return Path(view.real(base / "include"))


def _library(view: Here, base: Path, root: Path) -> Path:
    for folder in (base / "lib64", base / "lib", root / "lib64", root / "lib"):
        if any(name.startswith("libcu") for name in view.names(folder)):
            return Path(view.real(folder))
    return Path(view.real(root / "lib64"))


def _libraries(view: Here, library: Path, root: Path) -> dict[str, str]:
    stubs = [folder / "stubs" for folder in (library, root / "lib64", root / "lib")]
    places = {name: [library / f"lib{name}.so"] for name in LIBRARIES}
    places["cuda"] = [f / "libcuda.so" for f in (*stubs, *map(Path, SYSTEM_LIBRARIES))]
    present = {name: next(filter(view.exists, paths), None) for name, paths in places.items()}
    return {name: view.real(path) for name, path in present.items() if path}


def _bound(text: str, pattern: str, offset: int) -> int | None:
    found = re.search(pattern, text)
    return int(found[1]) + offset if found else None
