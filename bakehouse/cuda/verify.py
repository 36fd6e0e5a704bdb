"""Check which CUDA toolkit CMake took and what the library holds.

Evidence is CMake's own log and cache: a line that is missing fails, it does not pass. That CMake
ended with 0 proves nothing: it goes on with two toolkits, and without CUDA altogether.

Wordings of CMake 3.25, 3.31 and 4.1: newer ones append `with host compiler GNU 13.3.0` to the
compiler's line and may list several include paths, with `;` between them, on the toolkit's line.

On a machine with a GPU also that the built server sees it and has code for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
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
_CACHE = re.compile(r"^(?P<name>[^#/\s][^:=]*):(?P<type>[A-Z]+)=(?P<value>.*)$", re.MULTILINE)


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


def accept_configure(
    log: str,
    cache_text: str,
    toolkit: Toolkit,
    requested: Requested,
    resolve: Resolve = os.path.realpath,
) -> tuple[Check, ...]:
    """Check a finished configure: `log` is all that CMake printed, `cache_text` its cache."""
    cache = {found["name"]: found["value"] for found in _CACHE.finditer(cache_text)}
    return _CudaChecks(read_configure(log), cache, toolkit, requested, resolve).all()


def refused(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Those that forbid compiling; unknown ones leave a build that is marked unverified."""
    return tuple(c for c in checks if c.verdict is Verdict.FAILED)


def refuse(checks: tuple[Check, ...], log: str, toolkit: Toolkit, requested: Requested) -> None:
    """Raise BuildFailed (exit 6) with CMake's two lines, both paths and the fix, if any failed."""
    failed = refused(checks)
    if not failed:
        return
    said = read_configure(log)
    lines = [line for kind in ("toolkits", "compilers", "skipped", "absent") for line in said[kind]]
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


@dataclass(frozen=True)
class _CudaChecks:
    """What CMake reported, what was asked for, and one method for each check."""

    lines: dict[str, tuple[Line, ...]]
    cache: dict[str, str]
    toolkit: Toolkit
    requested: Requested
    resolve: Resolve

    def all(self) -> tuple[Check, ...]:
        return (
            self.backend(), self.pair(), self.version(), self.compiler_place(),
            self.toolkit_place(), self.libraries(), self.headers(), self.architectures(),
            self.compilable(), self.skipped(), self.host_compiler(), *self.overridden(),
        )  # fmt: skip

    def first(self, lines: tuple[Line, ...]) -> str:
        """Name the first of these lines."""
        return lines[0].at(self.requested.log) if lines else f"{self.requested.log}: no such line"

    def inside(self, path: str) -> bool:
        """Whether a path leads into the chosen toolkit."""
        real = self.resolve(path)
        places = (self.toolkit.root, self.toolkit.include, self.toolkit.library)
        return any(real == place or real.startswith(place.rstrip("/") + "/") for place in places)

    def backend(self) -> Check:
        decisive = self.lines["absent"] or self.lines["included"]
        proof = self.lines["included"] and self.lines["compilers"] and not self.lines["absent"]
        return check(
            "cuda.backend",
            "a line 'Including CUDA backend', a CUDA compiler, and no report of missing CUDA",
            decisive[0].text.strip() if decisive else "no such line: a build for the CPU alone",
            self.first(decisive),
            ok=bool(proof),
        )

    def pair(self) -> Check:
        found, compilers = self.lines["toolkits"], self.lines["compilers"]
        versions = {line.values.get("version", "none") for line in compilers}
        toolkits = {line.values["version"] for line in found}
        where = " | ".join(line.at(self.requested.log) for line in (*found, *compilers))
        return check(
            "cuda.pair",
            "one full version, for the compiler and for the toolkit that was found",
            f"compiler {_words(versions)}, toolkit {_words(toolkits)}",
            where or f"{self.requested.log}: neither line is there",
            ok=len(versions) == 1 and versions == toolkits,
        )

    def version(self) -> Check:
        lines = (*self.lines["compilers"], *self.lines["toolkits"])
        versions = {line.values.get("version", "none") for line in lines}
        wanted, chosen = self.requested.version, self.toolkit.version
        return check(
            "cuda.version",
            f"{wanted}, from the recipe; the chosen toolkit is {chosen}",
            _words(versions),
            self.first(self.lines["compilers"]),
            ok=bool(versions) and all(satisfies(v, wanted) and v == chosen for v in versions),
        )

    def compiler_place(self) -> Check:
        compiler = self.cache.get(COMPILER, "")
        return check(
            "cuda.compiler-place",
            self.toolkit.nvcc,
            compiler or "not in the cache",
            f"CMakeCache.txt: {COMPILER}={compiler}",
            ok=bool(compiler) and self.resolve(compiler) == self.toolkit.nvcc,
        )

    def toolkit_place(self) -> Check:
        toolkits = self.lines["toolkits"]
        found = [path for line in toolkits for path in split_list(line.values["paths"])]
        names = (ROOT, "CUDAToolkit_BIN_DIR", "CUDAToolkit_NVCC_EXECUTABLE")
        found += [self.cache[name] for name in names if self.cache.get(name)]
        outside = [path for path in found if not self.inside(path)]
        return check(
            "cuda.toolkit-place",
            f"everything inside {self.toolkit.root}",
            ", ".join(dict.fromkeys(outside or found)) or "no toolkit was found",
            self.first(toolkits),
            ok=bool(toolkits) and bool(self.cache.get(ROOT)) and not outside,
        )

    def libraries(self) -> Check:
        names = ("CUDA_CUDART", "CUDA_cublas_LIBRARY", "CUDA_cublasLt_LIBRARY")
        values = {name: self.cache.get(name, "") for name in names}
        wrong = {name: path for name, path in values.items() if not path or not self.inside(path)}
        driver = self.cache.get("CUDA_cuda_driver_LIBRARY", "")
        if driver.endswith("-NOTFOUND"):
            wrong["CUDA_cuda_driver_LIBRARY"] = driver
        return check(
            "cuda.libraries",
            f"cudart, cublas, cublasLt from {self.toolkit.library}, and a driver library to link",
            ", ".join(f"{name}={path or 'missing'}" for name, path in (wrong or values).items()),
            "CMakeCache.txt",
            ok=not wrong,
        )

    def headers(self) -> Check:
        headers, version = self.toolkit.headers, self.toolkit.version
        return check(
            "cuda.headers",
            f"headers of {version}",
            headers,
            f"{self.toolkit.include}/cuda.h",
            ok=headers is not None and satisfies(version, headers),
        )

    def architectures(self) -> Check:
        """Compare what CMake will compile for with what was asked for.

        ggml turns 12X into 12Xa by itself; that is a better form of the same.
        """
        value = self.cache.get(ARCHITECTURES, "")
        effective, where = split_list(value), f"CMakeCache.txt: {ARCHITECTURES}={value}"
        if using := self.lines["using"]:
            effective = split_list(using[-1].values.get("list", ""))
            where = using[-1].text.strip()
        asked = self.requested.architectures
        return check(
            "cuda.architectures",
            ";".join(asked),
            ";".join(effective) or "none",
            where,
            ok=bool(effective) and set(map(specific, effective)) == set(map(specific, asked)),
        )

    def compilable(self) -> Check:
        asked, known = self.requested.architectures, self.toolkit.architectures
        parts = [
            self.cache.get(f"CMAKE_CACHE_{n}_VERSION", "") for n in ("MAJOR", "MINOR", "PATCH")
        ]
        version = tuple(map(int, parts)) if all(map(str.isdigit, parts)) else ()
        takes_families = (3, 31, 8) <= version < (4, 0, 0) or version >= (4, 0, 2)
        wrong = []
        for item in asked:
            found = parse_architecture(item)
            if found is None or found.name not in known:
                wrong.append(f"{item}: this nvcc does not support it")
            elif found.letter == "f" and not takes_families:
                shown = ".".join(parts) if version else "of unknown version"
                wrong.append(f"{item}: CMake {shown} does not support names with 'f'")
        return check(
            "cuda.compilable",
            f"nvcc and CMake support each of {';'.join(asked)}",
            "; ".join(wrong) or "all supported",
            f"{self.toolkit.nvcc} --help: {' '.join(known) or 'no list'}",
            ok=bool(asked) and not wrong,
        )

    def skipped(self) -> Check:
        skipped = self.lines["skipped"]
        return check(
            "cuda.skipped",
            "no kernels skipped because of the architecture",
            ", ".join(line.values["what"] for line in skipped) or "none skipped",
            self.first(skipped) if skipped else self.requested.log,
            ok=not skipped,
        )

    def host_compiler(self) -> Check:
        every = (*self.lines["compilers"], *self.lines["hosts"])
        lines = tuple(line for line in every if "host" in line.values)
        named = [(line.values["host"], line.values["host_version"]) for line in lines]
        newest = {"GNU": self.toolkit.gcc_max, "Clang": self.toolkit.clang_max}
        bounds = [(version, newest.get(name)) for name, version in named]
        ok: bool | None = None
        if bounds and all(bound is not None for _, bound in bounds):
            ok = all(int(version.split(".")[0]) <= (bound or 0) for version, bound in bounds)
        return check(
            "cuda.host-compiler",
            f"GCC up to {self.toolkit.gcc_max}, Clang up to {self.toolkit.clang_max}",
            _words({f"{name} {version}" for name, version in named}) if named else None,
            self.first(lines),
            ok=ok,
        )

    def overridden(self) -> tuple[Check, ...]:
        flags = {
            name: value
            for name, value in self.cache.items()
            if name.startswith(("CMAKE_CUDA_FLAGS", "CUDA_"))
        }
        named = unverified_flags({**flags, **self.requested.definitions})
        if not named:
            return ()
        return (
            check(
                UNVERIFIED,
                "nvcc checks the host compiler itself",
                f"-allow-unsupported-compiler in {_words(named)}: this build is unverified",
                "the recipe's CMake definitions",
                ok=None,
            ),
        )


_DEVICE = re.compile(r"^\s+(?P<id>CUDA\d+): (?P<name>.+?) \(\d+ MiB, \d+ MiB free\)\s*$")

Same = Callable[[Path, str], bool]
"""Whether a file here is the toolkit's file of that name."""


def _same_here(candidate: Path, chosen: str) -> bool:
    if os.path.realpath(candidate) == chosen:
        return True
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
    return (
        check("cuda.library", expected, path.name, str(path), ok=True),
        _linked(path, file, toolkit, same),
        _no_stub(path, file),
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


def _no_stub(path: Path, file: ElfFile) -> Check:
    stubs = [entry for entry in file.run_path if "stubs" in Path(entry).parts]
    return check(
        "cuda.no-stub",
        "a run path that does not lead to the driver's stub",
        ":".join(stubs or file.run_path) or "no run path",
        str(path),
        ok=not stubs,
    )


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
