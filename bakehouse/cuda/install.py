"""Install a CUDA toolkit from NVIDIA's wheels on the Python package index.

The wheels unpack below `nvidia/cu13/{bin,include,lib,nvvm}`. CMake needs more than they hold:
links such as `libcudart.so`, a `lib64` beside `lib`, and the driver's stub, `lib64/stubs/
libcuda.so`, which no wheel has. The stub is made here from the function names in `cuda.h`; each of
its functions returns CUDA_ERROR_STUB_LIBRARY, as NVIDIA's own does. At run time the driver's real
`libcuda.so.1` is loaded, so no run path may name the stub's folder.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import stat
import tempfile
import zipfile
from importlib import resources
from itertools import product
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from bakehouse.context import Context
from bakehouse.cuda.toolkit import HostView, NotAToolkit, Toolkit, inspect, satisfies
from bakehouse.errors import HostError, LockError, RecipeError
from bakehouse.lock import ToolkitPin, WheelPin
from bakehouse.models import digest
from bakehouse.paths import Places
from bakehouse.system.process import environment
from bakehouse.util.files import file_lock, sha256_file

if TYPE_CHECKING:
    from bakehouse.sources.pypi import RegistryFile

ARCHES = ("x86_64", "aarch64")
LAYOUT = 1
"""Version of how wheels are laid out; part of a provided toolkit's name."""
STUB_LIBRARY = 34
"""CUDA_ERROR_STUB_LIBRARY, from cuda.h."""
_INSIDE = re.compile(r"nvidia/cu\d+/((?:bin|include|lib|nvvm)/.+)")


def release_for(wanted: str) -> tuple[str, dict[str, str]]:
    """Choose the newest release whose nvcc satisfies `wanted`, with the version of every part.

    Raises RecipeError if none does.
    """
    # Deferred: reading YAML costs time that `plan` and `--list` need not spend.
    from ruamel.yaml import YAML

    text = resources.files("bakehouse.cuda").joinpath("sets.yaml").read_text()
    sets: dict[str, dict[str, str]] = YAML(typ="safe", pure=True).load(text)
    fitting = [r for r, parts in sets.items() if satisfies(parts["nvidia-cuda-nvcc"], wanted)]
    if not fitting:
        known = ", ".join(sorted({p["nvidia-cuda-nvcc"] for p in sets.values()}))
        raise RecipeError(
            f"CUDA {wanted} is not available from the package index",
            (),
            hint=f"available nvcc versions: {known}; "
            "for another, install the toolkit and leave `provide: pypi` out",
        )
    return fitting[-1], sets[fitting[-1]]


def pin_toolkit(ctx: Context, wanted: str) -> ToolkitPin:
    """Pin the wheels of both architectures, so that one lock serves both kinds of machine."""
    release, parts = release_for(wanted)
    wheels = []
    for package, arch in product(parts, ARCHES):
        requirement = f"{package}=={parts[package]}"
        found = _find(ctx, requirement, arch)
        if found.size is None:
            raise LockError(
                f"the package index does not give the size of {found.filename}",
                where=requirement,
                hint="use an index that publishes sizes, such as pypi.org",
            )
        name, size, sha256 = found.filename, found.size, found.sha256
        wheels.append(
            WheelPin(requirement=requirement, arch=arch, path=name, size=size, sha256=sha256)
        )
    return ToolkitPin(release=release, version=parts["nvidia-cuda-nvcc"], wheels=tuple(wheels))


def toolkit_folder(places: Places, pin: ToolkitPin, arch: str | None = None) -> Path:
    """Name the folder of this pin's toolkit on a machine of that architecture."""
    wheels = wheels_for(pin, arch)
    key = digest({"layout": LAYOUT, "wheels": sorted(w.sha256 for w in wheels)})
    return places.toolkits / f"{pin.version}-{key[:16]}"


def wheels_for(pin: ToolkitPin, arch: str | None = None) -> tuple[WheelPin, ...]:
    """Give the wheels for one architecture. Raises HostError if the pin has none."""
    arch = arch or platform.machine()
    wheels = tuple(w for w in pin.wheels if w.arch == arch)
    if not wheels:
        raise HostError(
            f"NVIDIA publishes no CUDA {pin.version} wheels for {arch}",
            hint="use an x86_64 or aarch64 machine, or a toolkit of the host",
            id="no-toolkit",
        )
    return wheels


def provide(ctx: Context, pin: ToolkitPin) -> Toolkit:
    """Install the pinned toolkit, if it is not yet, and inspect it.

    One rename at the end puts it in place, so that half a toolkit cannot exist; several processes
    may call this at once. Raises HostError, LockError.
    """
    target = toolkit_folder(ctx.places, pin)
    if not target.is_dir():
        lock = target.with_name(f"{target.name}.lock")
        with file_lock(lock, f"CUDA toolkit {pin.version}", ctx.progress.say):
            if not target.is_dir():
                _place(ctx, pin, target)
    what, hint = f"the installed CUDA toolkit {pin.version}", f"remove {target} and try again"
    try:
        made = inspect(HostView(ctx), target / "bin" / "nvcc")
    except NotAToolkit as error:
        raise HostError(f"{what} does not run: {error}", where=str(target), hint=hint) from error
    faults = [*made.faults]
    if made.version != pin.version:
        faults.append(f"nvcc is {made.version}, the lock has {pin.version}")
    if faults:
        message = f"{what} is not complete: {'; '.join(faults)}"
        raise LockError(message, where=str(target), hint=hint)
    return made.model_copy(update={"origins": (f"provided: PyPI, release {pin.release}",)})


def fetch(ctx: Context, pin: ToolkitPin) -> tuple[Path, ...]:
    """Fetch this machine's wheels, by sha256; without network where they are there already."""
    from bakehouse.sources.pypi import RegistryFile, fetch_file

    paths = []
    for wheel in wheels_for(pin):
        file = ctx.places.downloads / wheel.sha256 / wheel.path
        if not (file.is_file() and sha256_file(file) == wheel.sha256):
            found = _find(ctx, wheel.requirement, wheel.arch)
            if found.sha256 != wheel.sha256:
                raise LockError(
                    f"{wheel.requirement} on the index is not the locked file",
                    where=f"locked {wheel.sha256}, found {found.sha256} ({found.filename})",
                    hint="a published wheel never changes: find out why before updating the lock",
                )
            file = fetch_file(ctx, RegistryFile(wheel.path, found.url, wheel.size, wheel.sha256))
        paths.append(file)
    return tuple(paths)


def _find(ctx: Context, requirement: str, arch: str) -> RegistryFile:
    from bakehouse.sources.pypi import find_file, index_url

    tags = (f"py3-none-manylinux*_{arch}", "py3-none-any")
    index = index_url(ctx.environment)
    return find_file(ctx.http, requirement, want="wheel", tags=tags, index=index)


def _place(ctx: Context, pin: ToolkitPin, target: Path) -> None:
    wheels = fetch(ctx, pin)
    folder = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        ctx.progress.say(f"installing CUDA {pin.version} (release {pin.release})")
        for wheel in wheels:
            unpack(wheel, folder)
        finish_layout(ctx, folder)
        folder.chmod(0o755)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack a wheel's toolkit files without `nvidia/cuNN/`. Raises LockError for unsafe paths."""
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            found = _INSIDE.fullmatch(entry.filename)
            if not found or entry.is_dir() or entry.filename.endswith("/__init__.py"):
                continue
            inner = PurePosixPath(found[1])
            mode = entry.external_attr >> 16
            if ".." in inner.parts or stat.S_ISLNK(mode):
                raise LockError(
                    f"{wheel.name} holds an entry that leaves its folder: {entry.filename}",
                    where=str(wheel),
                    hint="this is not a wheel as NVIDIA publishes it; do not use it",
                )
            path = folder / inner
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(entry) as source, path.open("wb") as file:
                shutil.copyfileobj(source, file, 2**20)
            path.chmod(0o755 if mode & 0o111 else 0o644)


def finish_layout(ctx: Context, folder: Path) -> None:
    """Add the links and the driver's stub that CMake and the linker need. Raises as `provide`."""
    library = folder / "lib"
    if not library.is_dir():
        raise LockError("the wheels contain no libraries", where=str(folder))
    (folder / "lib64").symlink_to("lib")
    for versioned in sorted(library.glob("lib*.so.*")):
        plain = library / (versioned.name.split(".so.", 1)[0] + ".so")
        if not plain.exists():
            plain.symlink_to(versioned.name)
    _make_stub(ctx, folder / "include" / "cuda.h", library / "stubs")


def driver_functions(header: str) -> tuple[str, ...]:
    """Names of all driver functions that `cuda.h` declares, in every version of each."""
    declared = re.findall(r"\bCUresult\s+CUDAAPI\s+(cu\w+)\s*\(", header)
    renamed = re.findall(r"^\s*#\s*define\s+cu\w+\s+(cu\w+_v\d+)\s*$", header, re.MULTILINE)
    return tuple(sorted({*declared, *renamed}))


def _make_stub(ctx: Context, header: Path, folder: Path) -> None:
    names = driver_functions(header.read_text(errors="replace")) if header.is_file() else ()
    if "cuInit" not in names:
        raise LockError("cuda.h of the wheels declares no driver functions", where=str(header))
    compiler = next(
        (c for c in ("cc", "gcc", "clang") if shutil.which(c, path=ctx.environment.get("PATH"))),
        None,
    )
    if compiler is None:
        raise HostError(
            "no C compiler found to build the CUDA driver's stub library",
            hint="install one: apt-get install gcc g++",
            id="no-compiler",
        )
    folder.mkdir()
    source = folder / "libcuda.c"
    source.write_text("".join(f"int {n}(void) {{ return {STUB_LIBRARY}; }}\n" for n in names))
    argv = (
        compiler, "-shared", "-fPIC", "-O1", "-w", "-Wl,-soname,libcuda.so.1",
        "-o", str(folder / "libcuda.so"), str(source),
    )  # fmt: skip
    path = {"PATH": ctx.environment.get("PATH", os.defpath)}
    made = ctx.processes.capture(argv, env=environment(path), timeout=120)
    source.unlink()
    if not made.ok:
        raise HostError(
            "building the CUDA driver's stub library failed: "
            + (made.err.strip().splitlines() or ["no message"])[0],
            where=" ".join(argv),
            hint="check that the C compiler works",
        )
    (folder / "libcuda.so.1").symlink_to("libcuda.so")
