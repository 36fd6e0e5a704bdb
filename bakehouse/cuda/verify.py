"""Check which CUDA toolkit CMake took and what the library holds; `configure.py` forces it.

Evidence is CMake's own log and cache: a line that is missing fails, it does not pass. That CMake
ended with 0 proves nothing: it goes on with two toolkits, and without CUDA altogether.

Wordings of CMake 3.25, 3.31 and 4.1: newer ones append `with host compiler GNU 13.3.0` to the
compiler's line and may list several include paths, with `;` between them, on the toolkit's line.

On a machine with a GPU also that the built server sees it and has code for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bakehouse.cuda.configure import ARCHITECTURES, COMPILER, ROOT, unverified_flags
from bakehouse.cuda.elf import ElfFile, NotElf, read_cuda_file
from bakehouse.cuda.toolkit import (
    Requested,
    Toolkit,
    numbers,
    parse_architecture,
    satisfies,
    split_list,
)
from bakehouse.errors import BuildFailed
from bakehouse.host import Gpu
from bakehouse.models import Check, Verdict, check

UNVERIFIED = "cuda.host-compiler-checked"
"""Its verdict is unknown where nvcc's own check is switched off: such a build is unverified."""
Resolve = Callable[[str], str]

_LINES = {
    "compilers": re.compile(
        r"^-- The CUDA compiler identification is (?P<id>\S+)(?: (?P<version>[\d.]+))?"
        r"(?: with host compiler (?P<host>\S+) (?P<host_version>[\d.]+))?"
    ),
    "toolkits": re.compile(
        r"^-- Found CUDAToolkit: (?P<paths>.+?) "
        r"\(found (?:suitable )?version \"(?P<version>[\d.]+)\""
    ),
    "hosts": re.compile(r"^-- CUDA host compiler is (?P<host>\S+) (?P<host_version>[\d.]+)"),
    "using": re.compile(
        r"^-- Using (?:CMAKE_CUDA_ARCHITECTURES=|CUDA architectures: )(?P<list>\S*)"
    ),
    "included": re.compile(r"^-- Including CUDA backend"),
    "skipped": re.compile(r"Not building (?P<what>.+?) as no compatible archs"),
    "absent": re.compile(
        r"CUDA Toolkit not found|\bCUDA not found|Could not find nvcc|Could NOT find CUDAToolkit"
    ),
}


@dataclass(frozen=True)
class Line:
    """One line of a log; `number` counts from 1."""

    number: int
    text: str
    values: dict[str, str]

    def at(self, log: str) -> str:
        """Give file, line number and the line itself."""
        return f"{log}:{self.number}: {self.text.strip()}"


def read_configure(log: str) -> dict[str, tuple[Line, ...]]:
    """Sort the lines of a configure log about CUDA by what they report, in order."""
    lines = list(enumerate(log.splitlines(), start=1))
    return {
        kind: tuple(
            Line(number, text, {k: v for k, v in found.groupdict().items() if v})
            for number, text in lines
            if (found := pattern.search(text))
        )
        for kind, pattern in _LINES.items()
    }


def refuse(checks: tuple[Check, ...], log: str, toolkit: Toolkit, requested: Requested) -> None:
    """Raise BuildFailed (exit 6) with CMake's two lines, both paths and the fix, if any failed.

    Unknown checks do not forbid compiling: they leave a build that is marked unverified.
    """
    failed = [c for c in checks if c.verdict is Verdict.FAILED]
    if not failed:
        return
    found = read_configure(log)
    lines = [one for kind in ("toolkits", "compilers", "skipped", "absent") for one in found[kind]]
    where = [line.at(requested.log) for line in sorted(lines, key=lambda line: line.number)]
    where += [f"{c.id}: expected {c.expected}, observed {c.observed} ({c.where})" for c in failed]
    raise BuildFailed(
        f"configure does not prove the CUDA build: {failed[0].id}: {failed[0].observed}",
        where="\n".join(where),
        hint=_FIXES.get(failed[0].id, _FIX).format(
            root=toolkit.root, version=requested.version, gcc=toolkit.gcc_max or "an older"
        ),
        id="cuda-refused",
        checks=checks,
    )


_FIX = (
    f"start from an empty build folder with {ROOT}={{root}} and {COMPILER}={{root}}/bin/nvcc; "
    "in a recipe, leave both out and name the toolkit in build.cuda"
)
_FIXES = {
    "cuda.backend": "install a complete toolkit {version} (`invoke doctor` lists them), or "
    'let Bakehouse provide it: cuda: {{version: "{version}", provide: pypi}}',
    "cuda.architectures": f"name in {ARCHITECTURES} what this source and CMake can build",
    "cuda.compilable": "use a toolkit that supports these architectures, or other architectures; "
    "121 needs 12.9 or newer; names with 'f' need CMake 3.31.8 or 4.0.2",
    "cuda.skipped": "name an architecture that these kernels are written for",
    "cuda.host-compiler": "install gcc-{gcc} and g++-{gcc}, and set CC and CXX to them",
}


def specific(item: str) -> str:
    """Give the form that ggml compiles: 12X becomes 12Xa, all else stays."""
    found = parse_architecture(item)
    if found is None or found.letter or not 120 <= found.number <= 129:
        return item
    return item.replace(str(found.number), f"{found.number}a", 1)


def _words(items: Iterable[str]) -> str:
    return ", ".join(sorted(items)) or "none"


def accept_configure(
    log: str,
    cache: Mapping[str, str],
    toolkit: Toolkit,
    requested: Requested,
    resolve: Resolve = os.path.realpath,
) -> tuple[Check, ...]:
    """Check a finished configure: `log` is all that CMake printed, `cache` its variables."""
    lines = read_configure(log)
    compilers, toolkits, skipped = lines["compilers"], lines["toolkits"], lines["skipped"]
    included, absent = lines["included"], lines["absent"]
    places = (toolkit.root, toolkit.include, toolkit.library)

    def first(found: tuple[Line, ...]) -> str:
        return found[0].at(requested.log) if found else f"{requested.log}: no such line"

    def inside(path: str) -> bool:
        """Whether a path leads into the chosen toolkit."""
        real = resolve(path)
        return any(real == place or real.startswith(place.rstrip("/") + "/") for place in places)

    decisive = absent or included
    compiler_versions = {line.values.get("version", "none") for line in compilers}
    toolkit_versions = {line.values["version"] for line in toolkits}
    versions = compiler_versions | toolkit_versions
    pair = " | ".join(line.at(requested.log) for line in (*toolkits, *compilers))
    compiler = cache.get(COMPILER, "")
    found = [path for line in toolkits for path in split_list(line.values["paths"])]
    names = (ROOT, "CUDAToolkit_BIN_DIR", "CUDAToolkit_NVCC_EXECUTABLE")
    found += [cache[name] for name in names if cache.get(name)]
    outside = [path for path in found if not inside(path)]
    names = ("CUDA_CUDART", "CUDA_cublas_LIBRARY", "CUDA_cublasLt_LIBRARY")
    libraries = {name: cache.get(name, "") for name in names}
    wrong = {name: path for name, path in libraries.items() if not path or not inside(path)}
    driver = cache.get("CUDA_cuda_driver_LIBRARY", "")
    if driver.endswith("-NOTFOUND"):
        wrong["CUDA_cuda_driver_LIBRARY"] = driver
    value = cache.get(ARCHITECTURES, "")
    effective, where = split_list(value), f"CMakeCache.txt: {ARCHITECTURES}={value}"
    if using := lines["using"]:
        effective = split_list(using[-1].values.get("list", ""))
        where = using[-1].text.strip()
    wanted = requested.architectures
    flags = {n: v for n, v in cache.items() if n.startswith(("CMAKE_CUDA_FLAGS", "CUDA_"))}
    unverified = unverified_flags({**flags, **requested.definitions})
    checks = [
        check(
            "cuda.backend",
            "a line 'Including CUDA backend', a CUDA compiler, and no report of missing CUDA",
            decisive[0].text.strip() if decisive else "no such line: a build for the CPU alone",
            first(decisive),
            ok=bool(included and compilers and not absent),
        ),
        check(
            "cuda.pair",
            "one full version, for the compiler and for the toolkit that was found",
            f"compiler {_words(compiler_versions)}, toolkit {_words(toolkit_versions)}",
            pair or f"{requested.log}: neither line is there",
            ok=len(compiler_versions) == 1 and compiler_versions == toolkit_versions,
        ),
        check(
            "cuda.version",
            f"{requested.version}, from the recipe; the chosen toolkit is {toolkit.version}",
            _words(versions),
            first(compilers),
            ok=versions == {toolkit.version} and satisfies(toolkit.version, requested.version),
        ),
        check(
            "cuda.compiler-place",
            toolkit.nvcc,
            compiler or "not in the cache",
            f"CMakeCache.txt: {COMPILER}={compiler}",
            ok=bool(compiler) and resolve(compiler) == toolkit.nvcc,
        ),
        check(
            "cuda.toolkit-place",
            f"everything inside {toolkit.root}",
            ", ".join(dict.fromkeys(outside or found)) or "no toolkit was found",
            first(toolkits),
            ok=bool(toolkits) and bool(cache.get(ROOT)) and not outside,
        ),
        check(
            "cuda.libraries",
            f"cudart, cublas, cublasLt from {toolkit.library}, and a driver library to link",
            ", ".join(f"{name}={path or 'missing'}" for name, path in (wrong or libraries).items()),
            "CMakeCache.txt",
            ok=not wrong,
        ),
        check(
            "cuda.headers",
            f"headers of {toolkit.version}",
            toolkit.headers,
            f"{toolkit.include}/cuda.h",
            ok=toolkit.headers is not None and satisfies(toolkit.version, toolkit.headers),
        ),
        # ggml turns 12X into 12Xa by itself; that is a better form of the same.
        check(
            "cuda.architectures",
            ";".join(wanted),
            ";".join(effective) or "none",
            where,
            ok=bool(effective) and set(map(specific, effective)) == set(map(specific, wanted)),
        ),
        _compilable(cache, toolkit, wanted),
        check(
            "cuda.skipped",
            "no kernels skipped because of the architecture",
            ", ".join(line.values["what"] for line in skipped) or "none skipped",
            first(skipped) if skipped else requested.log,
            ok=not skipped,
        ),
    ]
    hosts = tuple(line for line in (*compilers, *lines["hosts"]) if "host" in line.values)
    named = [(line.values["host"], line.values["host_version"]) for line in hosts]
    newest = {"GNU": toolkit.gcc_max, "Clang": toolkit.clang_max}
    fits = [
        None if (bound := newest.get(name)) is None else int(version.split(".")[0]) <= bound
        for name, version in named
    ]
    checks.append(
        check(
            "cuda.host-compiler",
            f"GCC up to {toolkit.gcc_max}, Clang up to {toolkit.clang_max}",
            _words({f"{name} {version}" for name, version in named}) if named else None,
            first(hosts),
            ok=None if None in fits else all(fits),
        )
    )
    if unverified:
        checks.append(
            check(
                UNVERIFIED,
                "nvcc checks the host compiler itself",
                f"-allow-unsupported-compiler in {_words(unverified)}: this build is unverified",
                "the recipe's CMake definitions",
                ok=None,
            )
        )
    return tuple(checks)


def _compilable(cache: Mapping[str, str], toolkit: Toolkit, wanted: Sequence[str]) -> Check:
    parts = [cache.get(f"CMAKE_CACHE_{n}_VERSION", "") for n in ("MAJOR", "MINOR", "PATCH")]
    version = tuple(map(int, parts)) if all(map(str.isdigit, parts)) else ()
    takes_families = (3, 31, 8) <= version < (4, 0, 0) or version >= (4, 0, 2)
    wrong = []
    for item in wanted:
        found = parse_architecture(item)
        if found is None or found.name not in toolkit.architectures:
            wrong.append(f"{item}: this nvcc does not support it")
        elif found.letter == "f" and not takes_families:
            shown = ".".join(parts) if version else "of unknown version"
            wrong.append(f"{item}: CMake {shown} does not support names with 'f'")
    return check(
        "cuda.compilable",
        f"nvcc and CMake support each of {';'.join(wanted)}",
        "; ".join(wrong) or "all supported",
        f"{toolkit.nvcc} --help: {' '.join(toolkit.architectures) or 'no list'}",
        ok=bool(wanted) and not wrong,
    )


_DEVICE = re.compile(r"^\s+(?P<id>CUDA\d+): (?P<name>.+?) \(\d+ MiB, \d+ MiB free\)\s*$")

Same = Callable[[Path, str], bool]
"""Whether a file here is the toolkit's file of that name."""


def _same_here(candidate: Path, chosen: str) -> bool:
    return os.path.isfile(chosen) and candidate.read_bytes() == Path(chosen).read_bytes()


def accept_artifact(
    folder: Path, toolkit: Toolkit, requested: Requested, same: Same = _same_here
) -> tuple[Check, ...]:
    """Check the files of a build; `folder` is the artifact, or the build folder before it."""
    expected = "a library libggml-cuda.so, or a program with GPU code inside"
    path = find_cuda_file(folder)
    try:
        if path is None:
            raise NotElf("none: this build runs on the CPU alone")
        file = read_cuda_file(path)
    except NotElf as error:
        return (check("cuda.library", expected, str(error), str(path or folder), ok=False),)
    wanted = frozenset().union(
        *(a.embeds for i in requested.architectures if (a := parse_architecture(specific(i))))
    )
    stubs = [entry for entry in file.run_path if "stubs" in Path(entry).parts]
    return (
        check("cuda.library", expected, path.name, str(path), ok=True),
        _linked(path, file, toolkit, same),
        check(
            "cuda.no-stub",
            "a run path that does not lead to the driver's stub",
            ":".join(stubs or file.run_path) or "no run path",
            str(path),
            ok=not stubs,
        ),
        check(
            "cuda.embedded",
            " ".join(sorted(wanted)),
            " ".join(sorted(file.embedded)) or "no GPU code",
            f"{path} (.nv_fatbin)",
            ok=bool(wanted) and file.embedded == wanted,
        ),
    )


def find_cuda_file(folder: Path) -> Path | None:
    """Find the file with the GPU code: libggml-cuda.so, else a program that has it."""
    named = sorted(p for p in folder.rglob("libggml-cuda.so*") if p.is_file())
    for path in (*named, *sorted(p for p in folder.rglob("llama-*") if p.is_file())):
        try:
            if path in named or read_cuda_file(path).embedded:
                return Path(os.path.realpath(path))
        except NotElf:
            continue
    return None


def _linked(path: Path, file: ElfFile, toolkit: Toolkit, same: Same) -> Check:
    """Find libcudart as the loader would, by the run path, and compare it with the toolkit's."""
    wanted = f"libcudart.so.{numbers(toolkit.version)[0]}"
    expected = f"{wanted} from {toolkit.library}"
    needed = next((n for n in file.needed if n.startswith("libcudart.so.")), None)
    if needed is None:
        where = f"{path} needs {' '.join(file.needed)}"
        return check("cuda.linked", expected, None, where, ok=None)
    where = f"{path}: needs {needed}, run path {':'.join(file.run_path) or '(empty)'}"
    folders = (Path(entry.replace("$ORIGIN", str(path.parent))) for entry in file.run_path)
    found = next((folder / needed for folder in folders if (folder / needed).exists()), None)
    if found is None:
        return check("cuda.linked", expected, f"{needed} is not on the run path", where, ok=False)
    chosen = toolkit.libraries.get("cudart", "")
    ok = needed == wanted and same(found, chosen)
    return check("cuda.linked", expected, str(found), where, ok=ok)


def covers(embedded: frozenset[str], capability: str) -> str | None:
    """Give the best embedded code that a GPU of this compute capability can run, or None.

    Machine code runs on its own major version from its own minor one up; with `a` on exactly its
    own; with `f` like the plain form, within its family. PTX runs on anything newer, after the
    driver has compiled it; PTX with a letter only where its machine code would.
    """
    major, minor = numbers(capability)[:2]
    usable = []
    for name in embedded:
        kind, _, rest = name.partition("_")
        found = parse_architecture(rest)
        if found is None:
            continue
        its = divmod(found.number, 10)
        same_line = its[0] == major and its[1] <= minor
        if found.letter == "a":
            fits = its == (major, minor)
        else:
            fits = same_line or (kind == "compute" and not found.letter and its <= (major, minor))
        if fits:
            usable.append((kind == "sm", its, name))
    return max(usable)[2] if usable else None


def parse_devices(text: str) -> tuple[tuple[str, str], ...]:
    """Parse `--list-devices`: id and name of each CUDA device."""
    found = (_DEVICE.match(line) for line in text.splitlines())
    return tuple((f["id"], f["name"]) for f in found if f)


def accept_devices(listed: str, gpus: Sequence[Gpu], embedded: frozenset[str]) -> tuple[Check, ...]:
    """Compare the devices that the built server lists with what the driver reports."""
    devices = parse_devices(listed)
    names = sorted(gpu.name for gpu in gpus)
    checks = [
        check(
            "cuda.devices",
            "the GPUs that the driver reports: " + (", ".join(names) or "none"),
            ", ".join(f"{d}: {name}" for d, name in devices) or "(none)",
            "llama-server --list-devices",
            ok=bool(devices) and sorted(name for _, name in devices) == names if gpus else None,
        )
    ]
    for gpu in gpus:
        code = covers(embedded, gpu.compute_capability)
        checks.append(
            check(
                "cuda.device-code",
                f"code for {gpu.name}, compute capability {gpu.compute_capability}",
                code or f"only {' '.join(sorted(embedded)) or 'nothing'}",
                "the library's embedded architectures",
                ok=code is not None,
            )
        )
    return tuple(checks)
