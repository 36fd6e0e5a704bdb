"""Check a finished CUDA build: the library, its links, its GPU code.

On a machine with a GPU also that the built server sees it and has code for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from bakehouse.checks import Check, check
from bakehouse.host import Gpu
from bakehouse.toolkit.accept import specific
from bakehouse.toolkit.embedded import ElfFile, NotElf, read_cuda_file
from bakehouse.toolkit.types import Requested, Toolkit, numbers, parse_architecture

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
